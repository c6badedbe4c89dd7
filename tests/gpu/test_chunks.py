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
    [(Heads(32, 8, 128), None), (Heads(9, 3, 64), 20.0), (Heads(8, 8, 96), None)],
    ids=str,
)
@pytest.mark.parametrize("rows", CHUNKS, ids=str)
def test_long_chunks(
    rows: list[tuple[int, int]],
    heads: Heads,
    soft_cap: float | None,
    codes: bool,
    dtype: torch.dtype,
) -> None:
    from windlass.kernels.triton.attention import attend

    kv, batch = make_batch(rows, heads, dtype, 4)
    sinks = torch.randn(heads.num_q, device=CUDA) if soft_cap else None
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
