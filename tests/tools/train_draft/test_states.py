"""Cached hidden states: the same training as with states computed in every step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tools.train_draft.conftest import EAGLE, MEDUSA, TrainDraft, full_disk
from tests.tools.train_draft.test_program import report_of, same_tensors
from windlass.tools import resumable
from windlass.tools.train_draft import states
from windlass.tools.train_draft.batches import make_batch
from windlass.tools.train_draft.corpus import Text
from windlass.tools.train_draft.states import CachedStates, memory_need, should_cache
from windlass.tools.train_draft.target import States

ONCE = "hidden states are computed once"
PER_STEP = "hidden states are computed in every step"


class CountingTarget:
    """A target whose state of a token is the token, and which counts the tokens it computes."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.num_tokens = 0

    def packed_states(self, texts: list[Text]) -> States:
        tokens = torch.tensor([token for text in texts for token in text.tokens])
        self.num_tokens += len(tokens)
        return States(tokens[:, None].bfloat16(), -tokens[:, None].expand(-1, 3).bfloat16())


def test_a_batch_reads_its_texts_from_the_cache() -> None:
    texts = [Text(list(range(10 * i, 10 * i + size)), 2) for i, size in enumerate((9, 4, 7, 5))]
    target: Any = CountingTarget()
    progress: list[tuple[str, int, int]] = []
    source = CachedStates(target, texts, 32, lambda *now: progress.append(now))
    assert progress == [("hidden states", 2, 4), ("hidden states", 4, 4)]
    for chosen in (texts, texts[::-1], texts[1:3]):
        batch = make_batch(chosen, source.offsets(chosen), target.device)
        found = source.states(batch)
        assert found.last.dtype == torch.bfloat16
        assert found.aux_hidden_states is not None
        for row, text in enumerate(chosen):
            size = len(text.tokens)
            assert found.last[row, :size, 0].tolist() == text.tokens
            assert (-found.aux_hidden_states[row, :size, 2]).tolist() == text.tokens
    assert target.num_tokens == 25 + 9  # all texts, and the first once more for its sizes


def test_the_memory_need_is_extrapolated_from_one_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "free_bytes", lambda _device: 1000)
    target: Any = CountingTarget()
    texts = [Text([1] * 4, 2), Text([1] * 6, 2)]
    assert memory_need(target, texts) == (10 * (1 + 3) * 2, 250)


@pytest.mark.parametrize(
    ("needed", "reused", "before", "cached", "words"),
    [
        (80, True, None, True, f"{ONCE}: 0.08 GiB for all texts"),
        (80, True, True, True, ONCE),
        (80, False, None, False, "no text is seen twice"),
        (80, True, False, False, f"{PER_STEP}, as before the interruption"),
        (110, True, None, False, "0.11 GiB for all texts, and they may use 0.10 GiB"),
        (110, True, True, False, "Before the interruption they fitted"),
    ],
)
def test_states_are_cached_if_they_are_reused_and_fit(
    needed: int, reused: bool, before: bool | None, cached: bool, words: str
) -> None:
    unit = 2**30 // 1000
    found, line = should_cache(needed * unit, 100 * unit, reused, before)
    assert found is cached
    assert words in line


@pytest.mark.parametrize("kind", [EAGLE, MEDUSA], ids=["eagle", "medusa"])
def test_cached_states_train_the_same_head(
    kind: tuple[str, ...],
    tmp_path: Path,
    train_draft: TrainDraft,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    once, per_step = tmp_path / "once", tmp_path / "per_step"
    options = (*kind, "--texts", tmp_path / "texts.jsonl", "--max-steps", "9")
    assert ONCE in train_draft(once, *options)
    monkeypatch.setattr(states, "free_bytes", lambda _device: 0)
    assert f"{PER_STEP}: 0.00 GiB" in train_draft(per_step, *options)
    assert same_tensors(once, per_step)
    assert report_of(once)["seconds"].keys() >= {"writing", "states", "training"}


def test_a_resumed_run_keeps_its_decision_and_ends_the_same(
    tmp_path: Path,
    train_draft: TrainDraft,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out"
    options = (*MEDUSA, "--max-steps", "9", "--save-every", "3")
    full = full_disk([], lambda writes: writes.count("state.safetensors") == 2)
    with monkeypatch.context() as patch:
        patch.setattr(states, "free_bytes", lambda _device: 0)
        patch.setattr(resumable, "write_durably", full)
        assert "up to step 3 are kept" in train_draft(out, *options, code=1)
    assert f"{PER_STEP}, as before the interruption" in train_draft(out, *options)
    train_draft(tmp_path / "whole", *options)
    assert same_tensors(tmp_path / "whole", out)
