"""Attention of long prompt chunks on a GPU, against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.gpu.test_kernels import CUDA, DTYPES, close, make_batch, randn
from windlass.core.types import Row, SlotId
from windlass.kernels import reference
from windlass.kernels.attention_options import AttentionOptions, RopeOptions
from windlass.kernels.batch import Heads, LayerKV, StepBatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CHUNKS = [[(0, 400)], [(3000, 300), (40, 3), (0, 600), (500, 1), (17, 257)]]


def with_long_chunks(batch: StepBatch) -> StepBatch:
    """A batch whose rows have their places as slots."""
    from windlass.runner.cuda.metadata import long_chunks

    rows = [Row(str(i), SlotId(i), 0, 1, (), (), sample=False) for i in range(len(batch.spans))]
    assert batch.work is not None
    tile = max(int(batch.work.tiles[:, 1].max()), 1)
    chunks = long_chunks(rows, batch.spans, tile, CUDA)
    assert chunks is not None
    return replace(batch, work=replace(batch.work, long=chunks))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize(
    ("heads", "soft_cap"),
    [
        (Heads(32, 8, 128), None),
        (Heads(9, 3, 64), 20.0),
        (Heads(9, 3, 64), None),
        (Heads(8, 8, 96), None),
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [*CHUNKS, [(5000, 300)]], ids=str)  # the last one in three pieces
def test_long_chunks(
    rows: list[tuple[int, int]],
    heads: Heads,
    soft_cap: float | None,
    codes: bool,
    dtype: torch.dtype,
) -> None:
    from windlass.kernels.triton.attention import attend

    kv, batch = make_batch(rows, heads, dtype, 4)
    sinks = torch.randn(heads.num_q, device=CUDA) if heads.dim == 64 else None
    options = AttentionOptions(heads.dim**-0.5, soft_cap=soft_cap, sinks=sinks)
    qkv = randn(len(batch.positions), (heads.num_q + 2 * heads.num_kv) * heads.dim, dtype=dtype)
    ours = LayerKV(kv.keys.clone(), kv.values.clone())
    if codes:
        pages = [reference.encode(each, torch.float8_e4m3fn) for each in (kv.keys, kv.values)]
        (keys, key_scales), (values, value_scales) = pages
        ours = LayerKV(keys, values, key_scales, value_scales)
    queries = reference.rope_write(qkv, heads, RopeOptions(None), kv, batch)
    want = reference.attention(queries, kv, batch, options)
    got = attend(qkv, heads, RopeOptions(None), ours, with_long_chunks(batch), options)
    if codes:  # cached tokens are quantised
        assert (got.float() - want.float()).abs().max() <= 0.1 * want.float().abs().max()
    else:
        close(got, want, factor=2)


def test_no_number_of_another_chunk_is_read() -> None:
    from windlass.kernels.triton import chunk_attention

    lengths, heads = [200, 128], Heads(8, 2, 128)
    firsts = [0, 200]
    tiles = [
        (first + at, min(128, length - at), first, at)
        for first, length in zip(firsts, lengths, strict=True)
        for at in reversed(range(0, length, 128))
    ]
    queries = randn(328, heads.num_q, heads.dim, dtype=torch.bfloat16)
    keys, values = (randn(328, heads.num_kv, heads.dim, dtype=torch.bfloat16) for _ in range(2))
    values[200:] = float("nan")
    out = torch.empty_like(queries)
    chunk_attention.attend(
        chunk_attention.Queries(queries),
        chunk_attention.Keys(keys, values),
        out,
        torch.tensor(tiles, dtype=torch.int32, device=CUDA),
        AttentionOptions(heads.dim**-0.5),
        sums=None,
    )
    assert not out[:200].isnan().any()
    assert out[200:].isnan().all()


def test_hopper_agrees_with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """In several pieces of cached tokens, of which the last tile is not full."""
    from windlass.kernels.gpu import gpu_of
    from windlass.kernels.triton import chunk_attention, hopper_attention
    from windlass.kernels.triton.attention import attend

    if reason := gpu_of(CUDA).lacks_warpgroups():
        pytest.skip(reason)
    monkeypatch.setattr(chunk_attention, "_MIN_PIECE", 700)
    heads = Heads(32, 8, 128)
    kv, batch = make_batch([(3001, 513), (1, 300)], heads, torch.bfloat16, 4)
    options = AttentionOptions(heads.dim**-0.5)
    size = (heads.num_q + 2 * heads.num_kv) * heads.dim
    qkv = randn(len(batch.positions), size, dtype=torch.bfloat16)
    batch = with_long_chunks(batch)
    got = attend(qkv, heads, RopeOptions(None), kv, batch, options)
    monkeypatch.setattr(hopper_attention, "refuse", lambda *_: "a test compares the kernels")
    close(got, attend(qkv, heads, RopeOptions(None), kv, batch, options), factor=2)
