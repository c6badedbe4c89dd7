"""Training steps padded to recurring shapes, and their CUDA graphs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from windlass.tools.train_draft.batches import Batch, Shape, make_batch, pack, text_offsets
from windlass.tools.train_draft.corpus import Text
from windlass.tools.train_draft.cuda_graphs import CapturedSteps
from windlass.tools.train_draft.head import StepMetrics
from windlass.tools.train_draft.medusa import MedusaHead
from windlass.tools.train_draft.target import States

CPU = torch.device("cpu")
TEXTS = [Text(list(range(1, 15)), 3), Text(list(range(20, 29)), 2)]


def make_head(device: torch.device) -> MedusaHead:
    matrix = torch.randn(50, 12, generator=torch.Generator().manual_seed(0)).to(device)
    target: Any = SimpleNamespace(
        device=device,
        hparams=SimpleNamespace(hidden_size=12, vocab_size=50),
        head=lambda: matrix,
        logits=lambda last: last @ matrix.T,
    )
    return MedusaHead(target, num_heads=2, share=False, draft_ids=None)


def make_rows(device: torch.device) -> Tensor:
    return torch.randn(64, 12, generator=torch.Generator().manual_seed(1)).to(device)


def test_padding_does_not_change_a_step() -> None:
    shape = Shape.padded(TEXTS, 128)
    assert shape == Shape(4, 32, 1024)
    packed = torch.from_numpy(pack(TEXTS, text_offsets(TEXTS), shape))
    padded, own = (
        Batch.from_packed(TEXTS, shape, packed),
        make_batch(TEXTS, text_offsets(TEXTS), CPU),
    )
    assert own.ids.shape == (2, 16)
    found = []
    for batch in (own, padded):
        head = make_head(CPU)
        metrics = head.backward(batch, States(make_rows(CPU)[batch.state_indices], None))
        grads = [value.grad for value in head.module.parameters()]
        found.append((metrics.loss, metrics.accuracy, grads))
    torch.testing.assert_close(*found)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_captured_steps_equal_eager_steps() -> None:
    """Two shapes in turns: the first step of each runs eagerly, the second is captured."""
    device = torch.device("cuda")
    rows, trained = make_rows(device), []
    for captured in (False, True):
        head = make_head(device)
        optimiser = torch.optim.AdamW(head.module.parameters(), 1e-2, fused=True, capturable=True)

        def update(batch: Batch, head: Any = head, optimiser: Any = optimiser) -> StepMetrics:
            metrics = head.backward(batch, States(rows[batch.state_indices], None))
            optimiser.step()
            optimiser.zero_grad()
            return metrics

        steps, losses = CapturedSteps(update, 64), []
        for at in range(8):
            texts = TEXTS[: 1 + at % 2]
            if captured:
                metrics = steps.run(texts, text_offsets(texts))
            else:
                metrics = update(make_batch(texts, text_offsets(texts), device))
            losses.append(metrics.loss.clone())
        trained.append([*losses, *head.module.parameters()])
    torch.testing.assert_close(*trained, atol=2e-3, rtol=2e-2)
