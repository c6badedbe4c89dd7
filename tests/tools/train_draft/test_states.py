"""Hidden states that are computed once: the same training as with those of every step."""

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
from windlass.tools.train_draft.states import Room, decide, remember
from windlass.tools.train_draft.target import States
from windlass.tools.train_draft.writing import Text

ONCE = "hidden states are computed once"
PER_STEP = "hidden states are computed in every step"


class Counts:
    """A target whose state of a token is the token, and which counts what it is asked for."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.num_tokens = 0

    def end_to_end(self, texts: list[Text]) -> States:
        tokens = torch.tensor([token for text in texts for token in text.tokens])
        self.num_tokens += len(tokens)
        return States(tokens[:, None].bfloat16(), -tokens[:, None].expand(-1, 3).bfloat16())


def test_a_batch_finds_its_texts_among_all() -> None:
    texts = [Text(list(range(10 * i, 10 * i + size)), 2) for i, size in enumerate((9, 4, 7, 5))]
    counts: Any = Counts()
    seen: list[tuple[str, int, int]] = []
    source = remember(counts, texts, 32, lambda *now: seen.append(now))
    assert seen == [("hidden states", 2, 4), ("hidden states", 4, 4)]
    for chosen in (texts, texts[::-1], texts[1:3]):
        batch = make_batch(chosen, source.firsts(chosen), counts.device)
        found = source.states(batch)
        assert found.last.dtype == torch.bfloat16
        assert found.aux_hidden_states is not None
        for row, text in enumerate(chosen):
            size = len(text.tokens)
            assert found.last[row, :size, 0].tolist() == text.tokens
            assert (-found.aux_hidden_states[row, :size, 2]).tolist() == text.tokens
    assert counts.num_tokens == 25 + 9  # all of them, and one text for its sizes


def test_all_states_need_what_one_text_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "free_bytes", lambda _device: 1000)
    counts: Any = Counts()
    assert Room.of(counts, [Text([1] * 4, 2), Text([1] * 6, 2)]) == Room(10 * (1 + 3) * 2, 250)


@pytest.mark.parametrize(
    ("needed", "again", "before", "remembered", "words"),
    [
        (80, True, None, True, f"{ONCE}: 0.08 GiB for all texts"),
        (80, True, True, True, ONCE),
        (80, False, None, False, "no text is seen twice"),
        (80, True, False, False, f"{PER_STEP}, as before the interruption"),
        (110, True, None, False, "0.11 GiB for all texts, and they may take 0.10 GiB"),
        (110, True, True, False, "Before the interruption there was room"),
    ],
)
def test_states_are_remembered_where_it_helps_and_they_fit(
    needed: int, again: bool, before: bool | None, remembered: bool, words: str
) -> None:
    unit = 2**30 // 1000
    found, line = decide(Room(needed * unit, 100 * unit), again, before)
    assert found is remembered
    assert words in line


@pytest.mark.parametrize("kind", [EAGLE, MEDUSA], ids=["eagle", "medusa"])
def test_remembered_states_train_the_same_head(
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


def test_a_run_that_goes_on_keeps_to_its_way_and_ends_the_same(
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
