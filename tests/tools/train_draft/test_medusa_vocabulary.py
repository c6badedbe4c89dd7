"""Medusa heads with a draft vocabulary: their labels, and serving a trained head."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.tools.train_draft.conftest import MEDUSA, TrainDraft
from windlass import LLM, SamplingParams
from windlass.core.speculation import governor
from windlass.runner.drafter import DrafterInputs
from windlass.speculative.medusa import MedusaDrafter
from windlass.tools.train_draft import medusa
from windlass.tools.train_draft.batches import make_batch, text_offsets
from windlass.tools.train_draft.corpus import Text
from windlass.tools.train_draft.head import DECAY
from windlass.tools.train_draft.medusa import MedusaHead, MedusaModule
from windlass.tools.train_draft.target import States

IDS = torch.arange(3, 33, 3)


def test_matrices_are_initialised_with_the_models_rows() -> None:
    matrix, x = torch.randn(50, 12), torch.randn(7, 12)
    module = MedusaModule(2, matrix, share=False, draft_ids=IDS)
    torch.testing.assert_close(module.logits(1, x), (x @ matrix.T)[:, IDS])
    assert torch.equal(module.tokens(module.logits(0, x)), IDS[(x @ matrix.T)[:, IDS].argmax(-1)])
    assert module.state_dict()["1.1.weight"].shape == (10, 12)
    assert (module.state_dict()["d2t"] + torch.arange(10)).tolist() == IDS.tolist()


def test_labels_are_the_models_probabilities(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In chunks of a few rows, against a reference; `accuracy` counts all tokens."""
    matrix = torch.randn(50, 12, generator=torch.Generator().manual_seed(0))
    target: Any = SimpleNamespace(
        device=torch.device("cpu"),
        hparams=SimpleNamespace(hidden_size=12, vocab_size=50),
        head=lambda: matrix,
        logits=lambda last: last @ matrix.T,
    )
    monkeypatch.setattr(medusa, "_MAX_LOGITS", {"cpu": 50 * 4})
    head = MedusaHead(target, num_heads=2, share=False, draft_ids=IDS)
    texts = [Text([1] * 14, 3), Text([1] * 9, 2)]
    batch = make_batch(texts, text_offsets(texts), target.device)
    last = torch.randn(*batch.ids.shape, 12, generator=torch.Generator().manual_seed(1))
    metrics = head.backward(batch, States(last, None))
    drafted = head.draft(batch, States(last, None))
    rows, loss, accuracy = last.flatten(0, 1), torch.zeros(()), []
    for j in range(2):
        counted = batch.is_counted(j)
        target_logits = rows[batch.labels[counted]] @ matrix.T
        logits = (rows[batch.roots(j)[counted]] @ matrix.T)[:, IDS]
        each = (target_logits.softmax(-1)[:, IDS] * logits.log_softmax(-1)).sum(-1)
        assert torch.equal(drafted[j][counted], IDS[logits.argmax(-1)])
        loss -= DECAY**j * each.mean()
        equal = IDS[logits.argmax(-1)] == target_logits.argmax(-1)
        accuracy.append(equal.float().mean())
    torch.testing.assert_close(metrics.loss, loss)
    torch.testing.assert_close(metrics.accuracy, torch.stack(accuracy))
    assert head.config()["draft_vocab_size"] == 10


def test_a_trained_head_is_served(
    model: Path,
    tmp_path: Path,
    train_draft: TrainDraft,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "head"
    options = (*MEDUSA, "--no-share-head", "--draft-vocab", "64", "--blocks", "2")
    train_draft(out, *options)
    report = json.loads((out / "report.json").read_text())
    curve = report["training"]["curve"]
    assert curve[-1]["loss"] < 0.9 * curve[0]["loss"]
    assert json.loads((out / "config.json").read_text())["draft_vocab_size"] == 64
    weights = load_file(out / "model.safetensors")
    assert weights["d2t"].dtype == torch.int64
    assert weights["1.2.weight"].shape == (64, 64)

    calls: list[tuple[torch.Tensor, torch.Tensor]] = []
    draft = MedusaDrafter.draft

    def recorded(self: MedusaDrafter, inputs: DrafterInputs, count: int) -> torch.Tensor:
        drafted = draft(self, inputs, count)
        calls.append((inputs.hidden[inputs.read].clone(), drafted))
        return drafted

    monkeypatch.setattr(MedusaDrafter, "draft", recorded)
    monkeypatch.setattr(governor.Governor, "choose", lambda _self, slots, *_: [0] * len(slots))
    monkeypatch.setattr(governor.Governor, "draft_length", lambda *_: 2)
    llm = LLM(str(model), device="cpu", spec="medusa", spec_model=str(out))
    calls.clear()  # of the measurement at start
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    llm.generate([[1, 2, 3]], params)
    hidden, served = (torch.cat(parts) for parts in zip(*calls, strict=True))

    ids = weights["d2t"] + torch.arange(64)
    module = MedusaModule(2, torch.zeros(256, 64), share=False, draft_ids=ids, num_blocks=2)
    module.load_state_dict(weights)
    with torch.no_grad():
        expected = [module.tokens(module.logits(head, hidden.float())) for head in range(2)]
    assert len(served) == 24
    assert len(set(served.flatten().tolist())) > 2
    assert torch.equal(served, torch.stack(expected, dim=1).int())
