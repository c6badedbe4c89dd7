"""Medusa heads that guess among some tokens: what they learn from, and that they are served alike."""

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
from windlass.runner.drafter import DrafterInputs
from windlass.speculative import governor
from windlass.speculative.medusa import MedusaDrafter
from windlass.tools.train_draft import medusa
from windlass.tools.train_draft.batches import end_to_end, make_batch
from windlass.tools.train_draft.head import DECAY
from windlass.tools.train_draft.medusa import MedusaHead
from windlass.tools.train_draft.medusa_module import MedusaModule
from windlass.tools.train_draft.target import States
from windlass.tools.train_draft.writing import Text

IDS = torch.arange(3, 33, 3)


def test_matrices_start_as_the_models_rows_of_these_tokens() -> None:
    matrix, x = torch.randn(50, 12), torch.randn(7, 12)
    module = MedusaModule(2, matrix, False, IDS)
    torch.testing.assert_close(module.logits(1, x), (x @ matrix.T)[:, IDS])
    assert torch.equal(module.tokens(module.logits(0, x)), IDS[(x @ matrix.T)[:, IDS].argmax(-1)])
    assert module.state_dict()["1.1.weight"].shape == (10, 12)
    assert (module.state_dict()["d2t"] + torch.arange(10)).tolist() == IDS.tolist()


def test_labels_are_the_models_probabilities_of_these_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In pieces of a few rows, against all at once by hand; `right` counts all of the tokens."""
    matrix = torch.randn(50, 12, generator=torch.Generator().manual_seed(0))
    target: Any = SimpleNamespace(
        device=torch.device("cpu"),
        hparams=SimpleNamespace(hidden_size=12, vocab_size=50),
        head=lambda: matrix,
        logits=lambda last: last @ matrix.T,
    )
    monkeypatch.setattr(medusa, "_NUMBERS", {"cpu": 50 * 4})
    head = MedusaHead(target, 2, False, IDS)
    texts = [Text([1] * 14, 3), Text([1] * 9, 2)]
    batch = make_batch(texts, end_to_end(texts), target.device)
    last = torch.randn(*batch.ids.shape, 12, generator=torch.Generator().manual_seed(1))
    figures = head.learn(batch, States(last, None))
    guessed = head.guess(batch, States(last, None))
    rows, loss, right = last.flatten(0, 1), torch.zeros(()), []
    for j in range(2):
        counted = batch.counts(j)
        wanted = rows[batch.labels[counted]] @ matrix.T
        scores = (rows[batch.roots(j)[counted]] @ matrix.T)[:, IDS]
        each = (wanted.softmax(-1)[:, IDS] * scores.log_softmax(-1)).sum(-1)
        assert torch.equal(guessed[j][counted], IDS[scores.argmax(-1)])
        loss -= DECAY**j * each.mean()
        right.append((IDS[scores.argmax(-1)] == wanted.argmax(-1)).float().mean())
    torch.testing.assert_close(figures.loss, loss)
    torch.testing.assert_close(figures.right, torch.stack(right))
    assert head.config()["draft_vocab_size"] == 10


def test_what_is_trained_is_served(
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

    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    draft = MedusaDrafter.draft

    def watched(self: MedusaDrafter, found: DrafterInputs, count: int) -> torch.Tensor:
        guesses = draft(self, found, count)
        seen.append((found.hidden[found.read].clone(), guesses))
        return guesses

    monkeypatch.setattr(MedusaDrafter, "draft", watched)
    monkeypatch.setattr(governor.Governor, "choose", lambda _self, slots, *_: [0] * len(slots))
    monkeypatch.setattr(governor.Governor, "draft_length", lambda *_: 2)
    llm = LLM(str(model), device="cpu", spec="medusa", spec_model=str(out))
    seen.clear()  # what was measured at the start
    wish = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    llm.generate([[1, 2, 3]], wish)
    hidden, served = (torch.cat(parts) for parts in zip(*seen, strict=True))

    ids = weights["d2t"] + torch.arange(64)
    module = MedusaModule(2, torch.zeros(256, 64), False, ids, num_blocks=2)
    module.load_state_dict(weights)
    with torch.no_grad():
        guesses = [module.tokens(module.logits(head, hidden.float())) for head in range(2)]
    assert len(served) == 24
    assert len(set(served.flatten().tolist())) > 2
    assert torch.equal(served, torch.stack(guesses, dim=1).int())
