"""Steps that are filled up to a shape that recurs, and graphs of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from windlass.tools.train_draft.batches import Batch, Shape, end_to_end, lay_out, make_batch
from windlass.tools.train_draft.head import Figures
from windlass.tools.train_draft.medusa import MedusaHead
from windlass.tools.train_draft.recorded import RecordedSteps
from windlass.tools.train_draft.target import States
from windlass.tools.train_draft.writing import Text

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
    return MedusaHead(target, 2, False, None)


def make_rows(device: torch.device) -> Tensor:
    return torch.randn(64, 12, generator=torch.Generator().manual_seed(1)).to(device)


def test_what_fills_a_step_up_changes_nothing() -> None:
    shape = Shape.one_of_few(TEXTS, 128)
    assert shape == Shape(4, 32, 1024)
    numbers = torch.from_numpy(lay_out(TEXTS, end_to_end(TEXTS), shape))
    filled, own = Batch.over(TEXTS, shape, numbers), make_batch(TEXTS, end_to_end(TEXTS), CPU)
    assert own.ids.shape == (2, 16)
    found = []
    for batch in (own, filled):
        head = make_head(CPU)
        figures = head.learn(batch, States(make_rows(CPU)[batch.places], None))
        grads = [value.grad for value in head.module.parameters()]
        found.append((figures.loss, figures.right, grads))
    torch.testing.assert_close(*found)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_recorded_steps_train_as_others_do() -> None:
    """Two shapes in turns: the first step of each runs as it is, the second is recorded."""
    device = torch.device("cuda")
    rows, trained = make_rows(device), []
    for recorded in (False, True):
        head = make_head(device)
        optimiser = torch.optim.AdamW(head.module.parameters(), 1e-2, fused=True, capturable=True)

        def update(batch: Batch, head: Any = head, optimiser: Any = optimiser) -> Figures:
            figures = head.learn(batch, States(rows[batch.places], None))
            optimiser.step()
            optimiser.zero_grad()
            return figures

        steps, losses = RecordedSteps(update, 64), []
        for at in range(8):
            texts = TEXTS[: 1 + at % 2]
            if recorded:
                figures = steps.run(texts, end_to_end(texts))
            else:
                figures = update(make_batch(texts, end_to_end(texts), device))
            losses.append(figures.loss.clone())
        trained.append([*losses, *head.module.parameters()])
    torch.testing.assert_close(*trained, atol=2e-3, rtol=2e-2)
