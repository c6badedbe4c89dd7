"""The kernels of a captured verification in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.conftest import Check
from tests.kernels.test_interpreted import INTERPRETED, inside
from windlass.core.sampling import SamplingParams
from windlass.core.types import SlotInit
from windlass.runner.sampler import Sampler
from windlass.runner.verify import SampleRequest
from windlass.runner.verify import keep as reference_keep
from windlass.runner.verify import keep_typical as reference_keep_typical

pytest.importorskip("triton")

PADDING = 9  # the padding slot
# Slot, position of the first token, tokens (-1: the last sampled token).
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
def test_tokens_are_kept_up_to_the_first_mismatch(wrong: int) -> None:
    from windlass.kernels.triton.verify import keep, unpack

    width, last = 5, LAST.clone()
    inputs = packed(width)
    ids, positions, *_ = unpack(inputs, last, len(ROWS), width, PADDING, None)
    sampled = torch.full((len(ROWS), width), 77, dtype=torch.int32)
    sampled[:, :-1] = ids.view(len(ROWS), width)[:, 1:]
    sampled[:, wrong] = 55
    back = torch.full((len(ROWS), width + 3), -9, dtype=torch.int32)
    kept, last_kept, _ = keep(inputs, ids, positions, sampled.flatten(), last, back, width)
    assert torch.equal(back[:, :width], sampled)
    assert torch.equal(back[:, width], kept)
    assert set(back[:, width + 1 :].flatten().tolist()) == {-9}
    for i, (slot, _, tokens) in enumerate(ROWS):
        want = reference_keep(sampled[i, : len(tokens)].tolist(), tokens[1:])
        assert kept[i] == len(want)
        assert last_kept[i] == i * width + len(want) - 1
        assert last[slot] == want[-1]


@inside
@pytest.mark.parametrize(("depth", "after"), [(1, 2), (3, 4), (4, 5), (4, 7)])
def test_next_row_has_the_last_token_and_the_drafts(depth: int, after: int) -> None:
    from windlass.kernels.triton.verify import write_next

    width, rows = 5, len(ROWS)
    inputs = packed(width).view(rows, 3 + width)
    kept = torch.tensor([2, 1, 3, 1, 1], dtype=torch.int32)
    drafts = torch.arange(rows * depth, dtype=torch.int32).view(rows, depth)
    to = inputs if after == width else torch.full((rows, 3 + after), -9, dtype=torch.int32)
    back = torch.full((rows, width + 1 + depth), -9, dtype=torch.int32)
    write_next(inputs, LAST, kept, drafts, to, back, PADDING, None)
    assert torch.equal(back[:, width + 1 :], drafts)
    assert set(back[:, : width + 1].flatten().tolist()) == {-9}
    for i, (slot, start, _) in enumerate(ROWS):
        tokens = [100 + slot, *drafts[i].tolist()]
        want = [slot, start + int(kept[i]), 1 + depth, *tokens, *[0] * (after - 1 - depth)]
        assert to[i].tolist() == (want if slot != PADDING else [PADDING, 0, 1, *[0] * after])


@inside
def test_siblings_are_tokens_at_the_end_of_a_row() -> None:
    """Only if they were stored for the row's position and the row has a draft token."""
    from windlass.kernels.triton.verify import unpack

    width, siblings = 4, torch.full((10, 3), -1, dtype=torch.int32)
    siblings[3] = torch.tensor([40, 60, 61])  # for the row of slot 3
    siblings[0] = torch.tensor([7, 62, 63])  # its row has no draft token
    siblings[2] = torch.tensor([15, 64, 65])  # for a position that has passed
    siblings[PADDING] = torch.tensor([0, 66, 67])
    ids, positions, slots, tiles = unpack(packed(width), LAST, len(ROWS), width, PADDING, siblings)
    rows = torch.stack((ids, positions, slots)).view(3, len(ROWS), width + 2)
    assert rows[:, 0, width:].tolist() == [[60, 61], [41, 41], [3, 3]]
    for row in range(1, len(ROWS)):
        assert rows[:, row, width:].tolist() == [[0, 0], [0, 0], [PADDING] * 2]
    without = torch.stack(unpack(packed(width), LAST, len(ROWS), width, PADDING, None)[:3])
    assert torch.equal(rows[:, :, :width], without.view(3, len(ROWS), width))
    assert tiles[:, 0].tolist() == [i * (width + 2) for i in range(len(ROWS))]


@inside
@pytest.mark.parametrize(
    ("first", "kept", "chosen"),
    [(5, 2, 0), (60, 2, 1), (61, 2, 2), (77, 1, 0)],
    ids=["draft accepted", "first sibling", "second sibling", "none"],
)
def test_sibling_replaces_a_rejected_draft(first: int, kept: int, chosen: int) -> None:
    from windlass.kernels.triton.verify import adopt, keep, unpack

    width, last, siblings = 4, LAST.clone(), torch.full((10, 3), -1, dtype=torch.int32)
    siblings[3] = torch.tensor([40, 60, 61])
    inputs = packed(width)
    ids, positions, *_ = unpack(inputs, last, len(ROWS), width, PADDING, siblings)
    sampled = torch.arange(len(ROWS) * 6, dtype=torch.int32) + 200
    sampled[0] = first
    back = torch.full((len(ROWS), width + 1), -9, dtype=torch.int32)
    num_kept, last_kept, taken = keep(inputs, ids, positions, sampled, last, back, width)
    assert num_kept.tolist() == [kept, 1, 1, 1, 1]
    assert taken.tolist() == [chosen, 0, 0, 0, 0]
    second = 200 + width - 1 + chosen if chosen else 201
    assert last_kept[0] == (width - 1 + chosen if chosen else kept - 1)
    assert back[0, :kept].tolist() == [first, second][:kept]
    assert last[3] == [first, second][kept - 1]
    pages = torch.randn(2, 2, 7, 3, 16, 24)
    before = pages.clone()
    tables = torch.arange(60, dtype=torch.int32).view(10, 6) % 7
    adopt(pages, inputs.view(len(ROWS), -1), taken, tables, 2, spare=6)
    if chosen:
        block, at = int(tables[3, 41 // 16]), 41 % 16
        before[:, :, block, :, at] = before[:, :, 6, :, chosen - 1]
    assert torch.equal(pages, before)


@inside
def test_siblings_are_stored_with_their_position() -> None:
    from windlass.kernels.triton.verify import write_next

    width, depth, rows = 5, 3, len(ROWS)
    inputs = packed(width).view(rows, 3 + width)
    kept = torch.tensor([2, 1, 3, 1, 1], dtype=torch.int32)
    drafts = torch.arange(rows * (depth + 2), dtype=torch.int32).view(rows, depth + 2)
    siblings = torch.full((10, 3), -7, dtype=torch.int32)
    to = torch.full((rows, 3 + 4), -9, dtype=torch.int32)
    back = torch.full((rows, width + 1 + depth), -9, dtype=torch.int32)
    write_next(inputs, LAST, kept, drafts, to, back, PADDING, siblings)
    assert torch.equal(back[:, width + 1 :], drafts[:, :depth])
    for i, (slot, start, _) in enumerate(ROWS):
        position = start + int(kept[i]) if slot != PADDING else -1
        assert siblings[slot].tolist() == [position, *drafts[i, depth:].tolist()]
        assert slot == PADDING or to[i, 4 : 4 + depth].tolist() == drafts[i, :depth].tolist()


@inside
@pytest.mark.parametrize("epsilon", [1.0, 0.9, 0.09, 1e-4])
def test_typical_drafts_replace_sampled_tokens(epsilon: float) -> None:
    from windlass.kernels.triton.typical import keep_typical

    vocab, rows = 3000, 48
    generator = torch.Generator().manual_seed(1)
    spread = torch.rand(rows, 1, generator=generator) * 6
    logits = spread * torch.randn(rows, vocab, generator=generator)
    # Likely and unlikely draft tokens; the second row of each pair has none.
    ranks = [0, 1, 2, 5, 20, 400] * (rows // 12)
    drafts = torch.full((rows,), -1, dtype=torch.int32)
    drafts[::2] = torch.stack(
        [row.argsort(descending=True)[rank] for row, rank in zip(logits[::2], ranks, strict=True)]
    ).int()
    params = [
        SamplingParams(),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.5, top_k=4),
        SamplingParams(temperature=1.5, top_p=0.8, min_p=0.01),
    ]
    sampler = Sampler(vocab, torch.device("cpu"), epsilon)
    for slot, each in enumerate(params):
        sampler.admit(
            SlotInit(
                request_id="",
                slot=slot,
                tokens=[1],
                num_prompt=1,
                sampling=each,
                stop_ids=frozenset(),
                seed=0,
            )
        )
    inverse = [0.0 if each.greedy else 1 / each.temperature for each in params]
    on_device = torch.tensor(
        [
            (inverse_temperature, max(0, each.top_k), each.top_p, each.min_p)
            for inverse_temperature, each in zip(inverse, params, strict=True)
        ]
    )
    slots = torch.arange(rows, dtype=torch.int32) // 2 % len(params)
    sampled = torch.full((rows,), 7, dtype=torch.int32)
    requests = [
        SampleRequest(i, slot, (draft,), 1)
        for i, (slot, draft) in enumerate(
            zip(slots[::2].tolist(), drafts[::2].tolist(), strict=True)
        )
    ]
    expected = reference_keep_typical(sampler, epsilon, logits, sampled.tolist(), requests)
    keep_typical(logits, on_device, slots, drafts, sampled, epsilon)
    assert sampled.tolist() == expected
    assert 0 < sum(token != 7 for token in expected) < rows // 2


@inside
def test_draft_after_each_token() -> None:
    from windlass.kernels.triton.typical import drafts_after
    from windlass.kernels.triton.verify import unpack

    width = 5
    inputs = packed(width).view(len(ROWS), -1)
    ids, *_ = unpack(inputs, LAST, len(ROWS), width, PADDING, None)
    found = drafts_after(inputs, ids, width).view(len(ROWS), width)
    for row, (_, _, tokens) in zip(found.tolist(), ROWS, strict=True):
        assert row == [*tokens[1:], *[-1] * (width - len(tokens) + 1)]
