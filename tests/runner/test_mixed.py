"""The inputs of a captured mixed step, compared with those of an eager step."""

from __future__ import annotations

from itertools import compress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.steps import make_inputs
from windlass.core.sampling import SamplingParams
from windlass.core.types import BlockId, Row, SlotId, SlotInit, StepPlan
from windlass.runner.adapters import in_tiles
from windlass.runner.cuda.graphs import StagedInputs
from windlass.runner.cuda.metadata import attention_tiles, long_chunks
from windlass.runner.cuda.mixed import GraphShape, MixedGraphs, mixed_sizes
from windlass.runner.eager import ReferenceMetadata, step_batch
from windlass.runner.inputs import StepShape
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
            tokens=[1000 * row.slot + at for at in range(1200)],
            num_prompt=1200,
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


@given(
    st.lists(st.one_of(st.just(1), st.integers(1, 900)), min_size=1, max_size=20).filter(
        lambda counts: 1024 <= sum(counts) < 2000
    )
)
def test_large_steps_have_tiles_of_their_long_chunks(counts: list[int]) -> None:
    rows = make_rows(counts, [0] * len(counts))
    shape = GraphShape(2064, 39, TILE, adapted=False, drafting=0)
    inbox = torch.full((shape.numbers,), -7, dtype=torch.int32)
    inputs = make_inputs(make_plan(rows), SlotTables(40, 200, 16, CPU))
    shape.fill(inbox, inputs, PADDING)
    found, last = shape.parts(inbox), shape.tokens - 1
    # Rows other than the first follow cached tokens, which long tiles do not read.
    is_long = [count >= 256 and row.start == 0 for count, row in zip(counts, rows, strict=True)]
    long = (
        long_chunks(list(compress(rows, is_long)), list(compress(inputs.spans, is_long)), TILE, CPU)
        if any(is_long)
        else None
    )
    others = [not each for each in is_long]
    tiles = attention_tiles(
        list(compress(rows, others)), list(compress(inputs.spans, others)), TILE
    )
    num_long = 0 if long is None else len(long.tiles)
    if long is not None:
        assert torch.equal(found.long_tiles[:num_long], long.tiles)
    assert found.long_tiles[num_long:].tolist() == [[last, 0, last, 1]] * (
        shape.num_long_tiles - num_long
    )
    assert found.other_tiles[: len(tiles)].tolist() == [list(tile) for tile in tiles]
    assert (found.other_tiles[len(tiles) :, 1] == 0).all()
    # Layers with windows read all chunks from their pages.
    all_tiles = attention_tiles(rows, inputs.spans, TILE)
    assert found.tiles[: len(all_tiles)].tolist() == [list(tile) for tile in all_tiles]


def test_sizes_cover_the_tokens_of_a_step() -> None:
    assert mixed_sizes(2048)[-1] == 1024
    assert mixed_sizes(200)[-2:] == [192, 256]
    assert mixed_sizes(16) == [32]


def test_large_sizes_end_where_launches_are_hidden() -> None:
    assert mixed_sizes(16384, 5000)[-4:] == [1552, 2064, 3088, 4112]
    assert mixed_sizes(16384, 1500)[-1] == 1024
    assert mixed_sizes(2048, 10**6)[-2:] == [1552, 2064]
    assert mixed_sizes(1800, 10**6)[-2:] == [1552, 2064]
    assert mixed_sizes(600, 10**6)[-1] == 640
    assert mixed_sizes(16384, 10**6)[-1] == 16400


class Stage:
    """A stage whose graphs compute nothing."""

    is_whole = is_last = True
    backend = None

    def staged_inputs(self, size: int) -> StagedInputs:
        backend: Any = SimpleNamespace(
            host_buffer=lambda size: torch.zeros(size, dtype=torch.int32)
        )
        return StagedInputs(backend, size, device=CPU, num_host=2)


def test_large_graphs_refuse_what_small_ones_take(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[GraphShape] = []
    monkeypatch.setattr(MixedGraphs, "_capture", lambda _, shape: captured.append(shape))
    graphs = MixedGraphs(
        forward=SimpleNamespace(attach=lambda _: None),  # type: ignore[arg-type]
        stage=Stage(),  # type: ignore[arg-type]
        slots=SlotTables(300, 200, 16, CPU),
        tile=TILE,
        sizes=mixed_sizes(4096, 4096),
        draft_length=3,
    )
    drafter: Any = None
    graphs.attach(drafter)
    assert max(shape.tokens for shape in captured) == 4112
    assert max(shape.tokens for shape in captured if shape.drafting) == 1024
    assert graphs.max_mixed_tokens == 1023

    def refuses(**fields: Any) -> str | None:
        return graphs.refuses(StepShape(**(dict.fromkeys(StepShape._fields, 0) | fields)))

    assert refuses(num_tokens=4096, num_rows=300, num_chunks=64) is None
    assert refuses(num_tokens=4112) == "more tokens than captured"
    assert refuses(num_tokens=4000, num_chunks=65) == "more chunks than captured"
    assert refuses(num_tokens=1500, max_chunk_start=2048) is None
    assert refuses(num_tokens=1500, max_chunk_start=2049) == "a chunk follows many cached tokens"
    assert refuses(num_tokens=900, max_chunk_start=2049) is None
    for kind in ("adapted", "draft_length"):
        assert refuses(num_tokens=1024, **{kind: 3}) == "more tokens than captured"
        assert refuses(num_tokens=1023, **{kind: 3}) is None
