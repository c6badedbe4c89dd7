"""The inputs of a captured mixed step, compared with those of an eager step."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.steps import make_inputs
from windlass.core.sampling import SamplingParams
from windlass.core.types import BlockId, Row, SlotId, SlotInit, StepPlan
from windlass.runner.adapters import in_tiles
from windlass.runner.cuda.metadata import attention_tiles
from windlass.runner.cuda.mixed import GraphShape, mixed_sizes
from windlass.runner.eager import ReferenceMetadata, step_batch
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


def make_plan(rows: list[Row]) -> StepPlan:
    """A plan that admits its rows; the token at position p of slot i is 1000 i + p."""
    greedy = SamplingParams(temperature=0)
    admitted = [
        SlotInit(
            request_id="",
            slot=row.slot,
            tokens=[1000 * row.slot + at for at in range(400)],
            num_prompt=400,
            sampling=greedy,
            stop_ids=frozenset(),
            seed=0,
        )
        for row in rows
    ]
    return StepPlan(rows, admitted)


MAX_TOKENS = mixed_sizes(2048)[-1] - 1  # a captured step needs a token for padding
# At most 30 rows, with few enough tokens for the largest captured size.
COUNTS = st.lists(st.one_of(st.just(1), st.integers(1, 70)), min_size=1, max_size=30).filter(
    lambda counts: sum(counts) <= MAX_TOKENS
)


@given(COUNTS, st.booleans(), st.sampled_from([0, 3]))
def test_captured_inputs_equal_eager_inputs(
    counts: list[int], adapted: bool, drafting: int
) -> None:
    rows = make_rows(counts, [i % 3 if adapted else 0 for i in range(len(counts))])
    total = sum(counts)
    tokens = next(size for size in mixed_sizes(2048) if size > total)
    shape = GraphShape(tokens, min(tokens - 1, 40), TILE, adapted, drafting)
    inbox = torch.full((shape.numbers,), -7, dtype=torch.int32)
    after = [1000 * row.slot + row.start + row.num_tokens for row in rows if not row.sample]
    tables = SlotTables(40, 4, 16, CPU)
    tables.last[:] = torch.arange(41) + 5000
    inputs = make_inputs(make_plan(rows), tables)
    shape.fill(inbox, inputs, PADDING)
    found, last = shape.parts(inbox), tokens - 1
    ids, batch = step_batch(inputs, tables, [], ReferenceMetadata(tables))
    got = tables.fill_last(found.tokens[0], found.tokens[2])
    assert torch.equal(got[:total], ids)
    assert torch.equal(found.tokens[1, :total], batch.positions)
    assert torch.equal(found.tokens[2, :total], batch.token_slots)
    assert (found.tokens[:, total:] == torch.tensor([[0], [0], [PADDING]])).all()
    singles = [span.first for span in batch.spans if span.count == 1]
    assert found.singles.tolist() == singles + [last] * (shape.rows - len(singles))
    tiles = attention_tiles(rows, batch.spans, TILE)
    assert found.tiles[: len(tiles)].tolist() == [list(tile) for tile in tiles]
    assert (found.tiles[len(tiles) :, 1] == 0).all()
    ends = np.cumsum(counts) - 1
    sampled = [int(end) for row, end in zip(rows, ends, strict=True) if row.sample]
    assert found.logits_indices.tolist() == sampled + [last] * (shape.rows - len(sampled))
    if drafting:
        chunk_ends = [int(end) for row, end in zip(rows, ends, strict=True) if not row.sample]
        padded = shape.rows - len(chunk_ends)
        assert found.ends.tolist() == [chunk_ends + [last] * padded, after + [0] * padded]
    own, of_indices = shape.adapters(found)
    if not adapted:
        assert own is None
        assert of_indices is None
        return
    slots = np.repeat([row.adapter for row in rows], counts)
    chunks = np.repeat(counts, counts) > 1
    expected = in_tiles(slots * chunks, counts, CPU)
    assert own is not None
    assert of_indices is not None
    assert own.tiles is not None
    assert own.single_slots is not None
    assert expected.tiles is not None
    assert own.slots[:total].tolist() == slots.tolist()
    assert own.single_slots[:total].tolist() == (slots * ~chunks).tolist()
    assert not own.slots[total:].any()
    assert not own.single_slots[total:].any()
    assert torch.equal(own.tiles[: len(expected.tiles)], expected.tiles)
    assert not own.tiles[len(expected.tiles) :, 1].any()
    named = [row.adapter for row in rows if row.sample]
    assert of_indices.slots.tolist() == named + [0] * (shape.rows - len(named))


def test_sizes_cover_the_tokens_of_a_step() -> None:
    assert mixed_sizes(2048)[-1] == 1024
    assert mixed_sizes(200)[-2:] == [192, 256]
    assert mixed_sizes(16) == [32]
