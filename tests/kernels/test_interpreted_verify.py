"""The kernels around a recorded verification, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.conftest import Check
from tests.kernels.test_interpreted import INTERPRETED, inside
from windlass.core.sampling import SamplingParams
from windlass.core.types import SlotInit
from windlass.runner.sampler import Sampler
from windlass.runner.verify import SampleRequest
from windlass.runner.verify import keep as keep_plainly
from windlass.runner.verify import keep_typical as keep_typical_plainly

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

    ids, positions, slots, tiles = unpack(packed(width), LAST, len(ROWS), width, PADDING, None)
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
    ids, positions, *_ = unpack(inputs, last, len(ROWS), width, PADDING, None)
    sampled = torch.full((len(ROWS), width), 77, dtype=torch.int32)
    sampled[:, :-1] = ids.view(len(ROWS), width)[:, 1:]
    sampled[:, wrong] = 55
    back = torch.full((len(ROWS), width + 3), -9, dtype=torch.int32)
    kept, places, _ = keep(inputs, ids, positions, sampled.flatten(), last, back, width)
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
    follow(inputs, LAST, kept, guesses, to, back, PADDING, None)
    assert torch.equal(back[:, width + 1 :], guesses)
    assert set(back[:, : width + 1].flatten().tolist()) == {-9}
    for i, (slot, start, _) in enumerate(ROWS):
        tokens = [100 + slot, *guesses[i].tolist()]
        want = [slot, start + int(kept[i]), 1 + depth, *tokens, *[0] * (after - 1 - depth)]
        assert to[i].tolist() == (want if slot != PADDING else [PADDING, 0, 1, *[0] * after])


@inside
def test_alternatives_are_places_behind_a_row() -> None:
    """Where they were remembered for its position, and it has a guess to which they are others."""
    from windlass.kernels.triton.verify import unpack

    width, siblings = 4, torch.full((10, 3), -1, dtype=torch.int32)
    siblings[3] = torch.tensor([40, 60, 61])  # for the row of slot 3
    siblings[0] = torch.tensor([7, 62, 63])  # whose row has no guess
    siblings[2] = torch.tensor([15, 64, 65])  # for a row that is over
    siblings[PADDING] = torch.tensor([0, 66, 67])
    ids, positions, slots, tiles = unpack(packed(width), LAST, len(ROWS), width, PADDING, siblings)
    places = torch.stack((ids, positions, slots)).view(3, len(ROWS), width + 2)
    assert places[:, 0, width:].tolist() == [[60, 61], [41, 41], [3, 3]]
    for row in range(1, len(ROWS)):
        assert places[:, row, width:].tolist() == [[0, 0], [0, 0], [PADDING] * 2]
    plain = torch.stack(unpack(packed(width), LAST, len(ROWS), width, PADDING, None)[:3])
    assert torch.equal(places[:, :, :width], plain.view(3, len(ROWS), width))
    assert tiles[:, 0].tolist() == [i * (width + 2) for i in range(len(ROWS))]


@inside
@pytest.mark.parametrize(
    ("first", "kept", "chosen"),
    [(5, 2, 0), (60, 2, 1), (61, 2, 2), (77, 1, 0)],
    ids=["the guess is right", "the first other is", "the second other is", "none is"],
)
def test_an_alternative_takes_the_guess_s_place(first: int, kept: int, chosen: int) -> None:
    from windlass.kernels.triton.verify import adopt, keep, unpack

    width, last, siblings = 4, LAST.clone(), torch.full((10, 3), -1, dtype=torch.int32)
    siblings[3] = torch.tensor([40, 60, 61])
    inputs = packed(width)
    ids, positions, *_ = unpack(inputs, last, len(ROWS), width, PADDING, siblings)
    sampled = torch.arange(len(ROWS) * 6, dtype=torch.int32) + 200
    sampled[0] = first
    back = torch.full((len(ROWS), width + 1), -9, dtype=torch.int32)
    found, places, took = keep(inputs, ids, positions, sampled, last, back, width)
    assert found.tolist() == [kept, 1, 1, 1, 1]
    assert took.tolist() == [chosen, 0, 0, 0, 0]
    second = 200 + width - 1 + chosen if chosen else 201
    place = width - 1 + chosen if chosen else kept - 1
    assert places[0] == place
    assert back[0, :kept].tolist() == [first, second][:kept]
    assert last[3] == [first, second][kept - 1]
    pages = torch.randn(2, 2, 7, 3, 16, 24)
    before = pages.clone()
    tables = torch.arange(60, dtype=torch.int32).view(10, 6) % 7
    adopt(pages, inputs.view(len(ROWS), -1), took, tables, 2, spare=6)
    if chosen:
        block, at = int(tables[3, 41 // 16]), 41 % 16
        before[:, :, block, :, at] = before[:, :, 6, :, chosen - 1]
    assert torch.equal(pages, before)


@inside
def test_alternatives_are_remembered_with_their_position() -> None:
    from windlass.kernels.triton.verify import follow

    width, depth, rows = 5, 3, len(ROWS)
    inputs = packed(width).view(rows, 3 + width)
    kept = torch.tensor([2, 1, 3, 1, 1], dtype=torch.int32)
    guesses = torch.arange(rows * (depth + 2), dtype=torch.int32).view(rows, depth + 2)
    siblings = torch.full((10, 3), -7, dtype=torch.int32)
    to = torch.full((rows, 3 + 4), -9, dtype=torch.int32)
    back = torch.full((rows, width + 1 + depth), -9, dtype=torch.int32)
    follow(inputs, LAST, kept, guesses, to, back, PADDING, siblings)
    assert torch.equal(back[:, width + 1 :], guesses[:, :depth])
    for i, (slot, start, _) in enumerate(ROWS):
        position = start + int(kept[i]) if slot != PADDING else -1
        assert siblings[slot].tolist() == [position, *guesses[i, depth:].tolist()]
        assert slot == PADDING or to[i, 4 : 4 + depth].tolist() == guesses[i, :depth].tolist()


@inside
@pytest.mark.parametrize("epsilon", [1.0, 0.9, 0.09, 1e-4])
def test_typical_guesses_take_the_place_of_samples(epsilon: float) -> None:
    from windlass.kernels.triton.typical import keep_typical

    vocab, places = 3000, 48
    generator = torch.Generator().manual_seed(1)
    spread = torch.rand(places, 1, generator=generator) * 6
    logits = spread * torch.randn(places, vocab, generator=generator)
    # Likely guesses and unlikely ones; the last place of each pair has none.
    ranks = [0, 1, 2, 5, 20, 400] * (places // 12)
    guesses = torch.full((places,), -1, dtype=torch.int32)
    guesses[::2] = torch.stack(
        [row.argsort(descending=True)[rank] for row, rank in zip(logits[::2], ranks, strict=True)]
    ).int()
    params = [
        SamplingParams(),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.5, top_k=4),
        SamplingParams(temperature=1.5, top_p=0.8, min_p=0.01),
    ]
    plain = Sampler(vocab, torch.device("cpu"), epsilon)
    for slot, one in enumerate(params):
        plain.admit(SlotInit("", slot, [1], 1, one, frozenset(), 0))
    heats = [0.0 if one.greedy else 1 / one.temperature for one in params]
    wishes = torch.tensor(
        [
            (heat, max(0, one.top_k), one.top_p, one.min_p)
            for heat, one in zip(heats, params, strict=True)
        ]
    )
    slots = torch.arange(places, dtype=torch.int32) // 2 % len(params)
    sampled = torch.full((places,), 7, dtype=torch.int32)
    asked = [
        SampleRequest(i, slot, (guess,))
        for i, (slot, guess) in enumerate(
            zip(slots[::2].tolist(), guesses[::2].tolist(), strict=True)
        )
    ]
    expected = keep_typical_plainly(plain, epsilon, logits, sampled.tolist(), asked)
    keep_typical(logits, wishes, slots, guesses, sampled, epsilon)
    assert sampled.tolist() == expected
    assert 0 < sum(token != 7 for token in expected) < places // 2


@inside
def test_places_know_the_guess_behind_them() -> None:
    from windlass.kernels.triton.typical import drafts_after
    from windlass.kernels.triton.verify import unpack

    width = 5
    inputs = packed(width).view(len(ROWS), -1)
    ids, *_ = unpack(inputs, LAST, len(ROWS), width, PADDING, None)
    found = drafts_after(inputs, ids, width).view(len(ROWS), width)
    for row, (_, _, tokens) in zip(found.tolist(), ROWS, strict=True):
        assert row == [*tokens[1:], *[-1] * (width - len(tokens) + 1)]
