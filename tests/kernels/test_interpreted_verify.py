"""The kernels around a recorded verification, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.conftest import Check
from tests.kernels.test_interpreted import INTERPRETED, inside
from windlass.runner.verify import keep as keep_plainly

pytest.importorskip("triton")

PADDING = 9  # the slot that nobody has
# Slot, position of the first token, tokens (-1: the one sampled last).
ROWS = [(3, 40, [-1, 5, 6, 7]), (0, 7, [-1]), (5, 0, [8, 5, 6]), (2, 16, [4, 4]), (PADDING, 0, [0])]
LAST = torch.arange(100, 110, dtype=torch.int32)


@pytest.mark.skipif(INTERPRETED, reason="starts the interpreter's process")
def test_kernels_in_the_interpreter(interpreted: Check) -> None:
    interpreted(__file__)


def packed(width: int) -> torch.Tensor:
    rows = []
    for slot, start, tokens in ROWS:
        rows.append([slot, start, len(tokens), *tokens, *[0] * (width - len(tokens))])
    return torch.tensor(rows, dtype=torch.int32).flatten()


@inside
@pytest.mark.parametrize("width", [4, 5, 9])
def test_rows_are_unpacked(width: int) -> None:
    from windlass.kernels.triton.verify import unpack

    ids, positions, slots, tiles = unpack(packed(width), LAST, len(ROWS), width, PADDING)
    for i, (slot, start, tokens) in enumerate(ROWS):
        at = slice(i * width, i * width + len(tokens))
        rest = slice(at.stop, (i + 1) * width)
        assert ids[at].tolist() == [100 + slot if t < 0 else t for t in tokens]
        assert positions[at].tolist() == list(range(start, start + len(tokens)))
        assert set(slots[at].tolist()) == {slot}
        assert set(slots[rest].tolist()) <= {PADDING}
        assert set(positions[rest].tolist()) <= {0}
        assert tiles[i].tolist() == [i * width, len(tokens), slot, start, start]


@inside
@pytest.mark.parametrize("wrong", range(5))
def test_samples_are_kept_while_they_are_right(wrong: int) -> None:
    from windlass.kernels.triton.verify import keep, unpack

    width, last = 5, LAST.clone()
    inputs = packed(width)
    ids, *_ = unpack(inputs, last, len(ROWS), width, PADDING)
    sampled = torch.full((len(ROWS), width), 77, dtype=torch.int32)
    sampled[:, :-1] = ids.view(len(ROWS), width)[:, 1:]
    sampled[:, wrong] = 55
    back = torch.full((len(ROWS), width + 3), -9, dtype=torch.int32)
    kept, places = keep(inputs, ids, sampled.flatten(), last, back, width)
    assert torch.equal(back[:, :width], sampled)
    assert torch.equal(back[:, width], kept)
    assert set(back[:, width + 1 :].flatten().tolist()) == {-9}
    for i, (slot, _, tokens) in enumerate(ROWS):
        want = keep_plainly(sampled[i, : len(tokens)].tolist(), tokens[1:])
        assert kept[i] == len(want)
        assert places[i] == i * width + len(want) - 1
        assert last[slot] == want[-1]


@inside
@pytest.mark.parametrize(("depth", "after"), [(1, 2), (3, 4), (4, 5), (4, 7)])
def test_what_is_kept_and_guessed_is_the_next_row(depth: int, after: int) -> None:
    from windlass.kernels.triton.verify import follow

    width, rows = 5, len(ROWS)
    inputs = packed(width).view(rows, 3 + width)
    kept = torch.tensor([2, 1, 3, 1, 1], dtype=torch.int32)
    guesses = torch.arange(rows * depth, dtype=torch.int32).view(rows, depth)
    to = inputs if after == width else torch.full((rows, 3 + after), -9, dtype=torch.int32)
    back = torch.full((rows, width + 1 + depth), -9, dtype=torch.int32)
    follow(inputs, LAST, kept, guesses, to, back, PADDING)
    assert torch.equal(back[:, width + 1 :], guesses)
    assert set(back[:, : width + 1].flatten().tolist()) == {-9}
    for i, (slot, start, _) in enumerate(ROWS):
        tokens = [100 + slot, *guesses[i].tolist()]
        want = [slot, start + int(kept[i]), 1 + depth, *tokens, *[0] * (after - 1 - depth)]
        assert to[i].tolist() == (want if slot != PADDING else [PADDING, 0, 1, *[0] * after])
