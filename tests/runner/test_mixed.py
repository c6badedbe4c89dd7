"""What a recorded step of prompts and decodes is sent, against what an eager step makes of its rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from windlass.core.types import BlockId, Row, SlotId, StepPlan
from windlass.runner.adapters import in_pieces
from windlass.runner.mixed import GraphShape, attention_tiles, mixed_sizes
from windlass.runner.slots import SlotTables

CPU = torch.device("cpu")
PADDING = SlotId(40)
TILE = 32


def make_rows(counts: list[int], adapters: list[int]) -> list[Row]:
    rows = []
    for i, (count, adapter) in enumerate(zip(counts, adapters, strict=True)):
        known = count > 1 or i % 2 == 0
        tokens = tuple(range(100 * i, 100 * i + count)) if known else ()
        sample = i % 3 != 0 or count == 1
        rows.append(Row("", SlotId(i), 7 * i, count, tokens, (BlockId(i),), sample, 0, adapter))
    return rows


COUNTS = st.lists(st.one_of(st.just(1), st.integers(1, 70)), min_size=1, max_size=30)


@given(COUNTS, st.booleans(), st.sampled_from([0, 3]))
def test_a_step_is_written_down_as_it_is(counts: list[int], adapted: bool, drafting: int) -> None:
    rows = make_rows(counts, [i % 3 if adapted else 0 for i in range(len(counts))])
    total = sum(counts)
    tokens = next((size for size in mixed_sizes(2048) if size > total), None)
    if tokens is None:
        return
    form = GraphShape(tokens, min(tokens - 1, 40), TILE, adapted, drafting)
    inbox = torch.full((form.numbers,), -7, dtype=torch.int32)
    after = [900 + i for i, row in enumerate(rows) if not row.sample]
    assert form.fill(inbox, rows, PADDING, after)
    found, last = form.parts(inbox), tokens - 1
    tables = SlotTables(40, 4, 16, CPU)
    tables.last[:] = torch.arange(41) + 5000
    ids, batch = tables.batch(StepPlan(rows), [])
    got = tables.fill_last(found.tokens[0], found.tokens[2])
    assert torch.equal(got[:total], ids)
    assert torch.equal(found.tokens[1, :total], batch.positions)
    assert torch.equal(found.tokens[2, :total], batch.token_slots)
    assert (found.tokens[:, total:] == torch.tensor([[0], [0], [PADDING]])).all()
    singles = [span.first for span in batch.spans if span.count == 1]
    assert found.singles.tolist() == singles + [last] * (form.rows - len(singles))
    tiles = attention_tiles(rows, batch.spans, TILE)
    assert found.tiles[: len(tiles)].tolist() == [list(tile) for tile in tiles]
    assert (found.tiles[len(tiles) :, 1] == 0).all()
    ends = np.cumsum(counts) - 1
    wanted = [int(end) for row, end in zip(rows, ends, strict=True) if row.sample]
    assert found.logits_indices.tolist() == wanted + [last] * (form.rows - len(wanted))
    if drafting:
        others = [int(end) for row, end in zip(rows, ends, strict=True) if not row.sample]
        padded = form.rows - len(others)
        assert found.ends.tolist() == [others + [last] * padded, after + [0] * padded]
    own, of_indices = form.adapters(found)
    if not adapted:
        assert own is None
        assert of_indices is None
        return
    slots = np.repeat([row.adapter for row in rows], counts)
    chunks = np.repeat(counts, counts) > 1
    want = in_pieces(slots * chunks, counts, CPU)
    assert own is not None
    assert of_indices is not None
    assert own.tiles is not None
    assert own.alone is not None
    assert want.tiles is not None
    assert own.slots[:total].tolist() == slots.tolist()
    assert own.alone[:total].tolist() == (slots * ~chunks).tolist()
    assert not own.slots[total:].any()
    assert not own.alone[total:].any()
    assert torch.equal(own.tiles[: len(want.tiles)], want.tiles)
    assert not own.tiles[len(want.tiles) :, 1].any()
    named = [row.adapter for row in rows if row.sample]
    assert of_indices.slots.tolist() == named + [0] * (form.rows - len(named))


@pytest.mark.parametrize(
    ("counts", "tokens"),
    [([64], 64), ([1] * 41, 128), ([2] * 40, 96)],
    ids=["no token is left for padding", "too many rows", "too many chunks"],
)
def test_what_has_no_room(counts: list[int], tokens: int) -> None:
    form = GraphShape(tokens, min(tokens, 40), TILE, False)
    inbox = torch.zeros(form.numbers, dtype=torch.int32)
    assert not form.fill(inbox, make_rows(counts, [0] * len(counts)), PADDING)


def test_sizes_end_with_what_a_step_may_have() -> None:
    assert mixed_sizes(2048)[-1] == 1024
    assert mixed_sizes(200)[-2:] == [192, 256]
    assert mixed_sizes(16) == [32]
