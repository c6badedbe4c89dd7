"""Attention of long prompt chunks in Triton's interpreter, against the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tests.kernels.conftest import Check
from tests.kernels.test_interpreted import INTERPRETED, inside, make_batch
from windlass.core.types import Row, SlotId
from windlass.kernels import reference
from windlass.kernels.attention_options import AttentionOptions, RopeOptions
from windlass.kernels.batch import Heads, LayerKV, LongChunks, Span, StepBatch

pytest.importorskip("triton")

HEADS = Heads(4, 2, 64)
FEW_ROWS = [(60, 25), (60, 1)]


@pytest.mark.skipif(INTERPRETED, reason="starts the interpreter's process")
def test_kernels_in_the_interpreter(interpreted: Check) -> None:
    interpreted(__file__)


def chunks_of(spans: Sequence[Span], tile: int) -> LongChunks:
    """The long chunks of rows whose slots are their places."""
    from windlass.runner.cuda.metadata import long_chunks

    rows = [Row(str(i), SlotId(i), 0, 1, (), (), sample=False) for i in range(len(spans))]
    found = long_chunks(rows, spans, tile, torch.device("cpu"))
    assert found is not None
    return found


def attended(
    qkv: torch.Tensor, kv: LayerKV, batch: StepBatch, options: AttentionOptions
) -> torch.Tensor:
    from windlass.kernels.triton.attention import attend

    return attend(qkv, HEADS, RopeOptions(None), kv, batch, options)


def random_batch(rows: list[tuple[int, int]]) -> tuple[torch.Tensor, LayerKV, StepBatch]:
    from windlass.kernels.triton.attention import tile_tokens

    torch.manual_seed(5)
    kv, batch = make_batch(HEADS, rows)
    assert batch.work is not None
    chunks = chunks_of(batch.spans, tile_tokens(HEADS.group))
    qkv = torch.randn(len(batch.positions), (HEADS.num_q + 2 * HEADS.num_kv) * HEADS.dim)
    return qkv, kv, replace(batch, work=replace(batch.work, long=chunks))


@inside
@pytest.mark.parametrize(
    ("options", "rows"),
    [
        (AttentionOptions(0.1), [(30, 5), (0, 130), (200, 25), (60, 1)]),
        (AttentionOptions(0.1, None, 2.0, torch.tensor([1.0, -2.0, 0.5, 9.0])), FEW_ROWS),
        (AttentionOptions(0.1, window=50), FEW_ROWS),
    ],
    ids=["plain", "cap and sinks", "window"],
)
def test_long_chunks(
    options: AttentionOptions, rows: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from windlass.kernels.triton import chunk_attention
    from windlass.runner.cuda import metadata

    monkeypatch.setattr(metadata, "MIN_LONG", 20)
    monkeypatch.setattr(chunk_attention, "_MIN_PIECE", 16)  # several pieces of cached tokens
    qkv, kv, batch = random_batch(rows)
    ours = LayerKV(kv.keys.clone(), kv.values.clone())
    queries = reference.rope_write(qkv, HEADS, RopeOptions(None), kv, batch)
    want = reference.attention(queries, kv, batch, options)
    torch.testing.assert_close(attended(qkv, ours, batch, options), want, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(ours.keys, kv.keys)


@inside
def test_padded_tiles_of_captured_steps_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from windlass.kernels.triton.attention import tile_tokens
    from windlass.runner.cuda import metadata, mixed

    for module in (metadata, mixed):
        monkeypatch.setattr(module, "MIN_LONG", 20)
    monkeypatch.setattr(mixed, "_SIZES", (8,))  # larger graphs are large
    monkeypatch.setattr(mixed, "_TOKENS_PER_CHUNK", 8)
    qkv, kv, batch = random_batch([(0, 40), (30, 25), (0, 3), (9, 1), (0, 1)])
    tile = tile_tokens(HEADS.group)
    rows = [Row("", SlotId(i), 0, 1, (), (), sample=False) for i in range(len(batch.spans))]
    shape = mixed.GraphShape(len(batch.positions), rows=8, tile=tile, adapted=False, drafting=0)
    arrays = shape.parts(torch.zeros(shape.numbers, dtype=torch.int32))
    tiles = metadata.chunk_tiles(rows, batch.spans, tile, with_cached=False)
    assert len(tiles.long) == 1
    all_tiles = metadata.attention_tiles(rows, batch.spans, tile)
    shape._put_tiles(arrays, all_tiles, tiles, padding=0)
    assert len(arrays.long_tiles) > 1
    assert batch.work is not None
    long = LongChunks(arrays.long_tiles, arrays.other_tiles)
    padded = replace(batch, work=replace(batch.work, tiles=arrays.tiles, long=long))
    options = AttentionOptions(0.1)
    queries = reference.rope_write(qkv, HEADS, RopeOptions(None), kv, batch)
    want = reference.attention(queries, kv, batch, options)
    torch.testing.assert_close(attended(qkv, kv, padded, options), want, atol=1e-4, rtol=1e-3)


@inside
def test_long_chunks_behind_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    from windlass.runner.cuda import metadata

    monkeypatch.setattr(metadata, "MIN_LONG", 20)
    qkv, kv, batch = random_batch(FEW_ROWS)
    options = AttentionOptions(0.1)
    keys, key_scales = reference.encode(kv.keys, torch.int8)
    values, value_scales = reference.encode(kv.values, torch.int8)
    coded = LayerKV(keys, values, key_scales, value_scales)
    queries = reference.rope_write(qkv, HEADS, RopeOptions(None), kv, batch)
    want = reference.attention(queries, kv, batch, options)
    torch.testing.assert_close(attended(qkv, coded, batch, options), want, atol=3e-2, rtol=0.1)


@inside
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinities
def test_numbers_of_one_request_do_not_reach_another(monkeypatch: pytest.MonkeyPatch) -> None:
    from windlass.runner.cuda import metadata

    monkeypatch.setattr(metadata, "MIN_LONG", 20)
    qkv, kv, batch = random_batch([(0, 40), (0, 30)])
    qkv[40:] = float("inf")
    with torch.no_grad():
        got = attended(qkv, kv, batch, AttentionOptions(0.1))
    assert torch.isfinite(got[:40]).all()
