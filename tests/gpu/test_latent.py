"""The kernels of MLA against the reference on a GPU, with the sizes of DeepSeek models."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.gpu.test_chunks import CHUNKS, with_long_chunks
from tests.gpu.test_kernels import CUDA, DTYPES, ROWS, close, make_batch, randn
from windlass.core.mla import LatentHeads
from windlass.kernels import latent, reference
from windlass.kernels.batch import Heads, LayerKV, StepBatch
from windlass.kernels.latent import LatentWeights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LITE = LatentHeads(num_q=16, nope_dim=128, rope_dim=64, rank=512, value_dim=128)
NUM_HEADS = [16, 40, 128]


def latent_batch(
    rows: list[tuple[int, int]], heads: LatentHeads, dtype: torch.dtype, splits: int
) -> tuple[LayerKV, StepBatch]:
    from windlass.kernels.triton.latent import decode_parts

    kv, batch = make_batch(rows, Heads(heads.num_q, 1, heads.dim), dtype, splits)
    assert batch.work is not None
    parts = len(rows) * decode_parts(heads.num_q)
    counters = torch.zeros(parts, dtype=torch.int32, device=CUDA)
    batch = replace(batch, work=replace(batch.work, counters=counters))
    return LayerKV(kv.keys, kv.keys), batch


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 8])
@pytest.mark.parametrize("num_q", NUM_HEADS)
@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_attention(rows, num_q: int, splits: int, dtype: torch.dtype) -> None:
    from windlass.kernels.triton.latent import latent_attention

    heads = replace(LITE, num_q=num_q)
    kv, batch = latent_batch(rows, heads, dtype, splits)
    queries = randn(len(batch.positions), num_q, heads.dim, dtype=dtype)
    want = latent.latent_attention(queries, kv, batch, heads.query_dim**-0.5, heads.rank)
    got = latent_attention(queries, kv, batch, heads.query_dim**-0.5, heads.rank)
    close(got, want, factor=2)
    assert not batch.work.counters.any()
    codes, scales = reference.encode(kv.keys, torch.float8_e4m3fn)
    coded = LayerKV(codes, codes, scales, scales)
    want = latent.latent_attention(queries, coded, batch, heads.query_dim**-0.5, heads.rank)
    got = latent_attention(queries, coded, batch, heads.query_dim**-0.5, heads.rank)
    close(got, want, factor=4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_q", NUM_HEADS)
def test_queries_and_outputs(num_q: int, dtype: torch.dtype) -> None:
    from windlass.kernels.triton.latent import latent_outputs, latent_queries

    heads = replace(LITE, num_q=num_q)
    kv, batch = latent_batch([(5, 1), (0, 40), (30, 3)], heads, dtype, 1)
    up = randn(num_q, heads.nope_dim + heads.value_dim, heads.rank, dtype=dtype) / 16
    keys, values = up.split([heads.nope_dim, heads.value_dim], dim=1)
    weights = LatentWeights(randn(heads.rank, dtype=dtype), 1e-6, keys, values)
    angle = torch.rand(64, heads.rope_dim // 2, device=CUDA) * 6
    table = torch.cat([angle.cos(), angle.sin()], -1)
    projected = randn(44, num_q * heads.query_dim + heads.dim, dtype=dtype)
    ours = LayerKV(kv.keys.clone(), kv.keys)
    args = (projected, projected, heads, weights, table)
    want = latent.latent_queries(*args, kv, batch)
    close(latent_queries(*args, ours, batch), want, factor=2)
    close(ours.keys, kv.keys, factor=2)
    mixed = randn(44, num_q, heads.rank, dtype=dtype)
    want = latent.latent_outputs(mixed, weights, batch)
    close(latent_outputs(mixed, weights, batch), want, factor=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize("rows", CHUNKS, ids=str)
def test_long_chunks(rows: list[tuple[int, int]], codes: bool, dtype: torch.dtype) -> None:
    from windlass.kernels.triton.latent_expanded import attend_latent

    heads = LITE
    kv, batch = latent_batch(rows, heads, dtype, 4)
    if codes:
        coded, scales = reference.encode(kv.keys, torch.float8_e4m3fn)
        kv = LayerKV(coded, coded, scales, scales)
    joint = randn(heads.num_q, heads.nope_dim + heads.value_dim, heads.rank, dtype=dtype) / 20
    keys, values = joint.split([heads.nope_dim, heads.value_dim], 1)
    norm = torch.ones(heads.rank, dtype=dtype, device=CUDA)
    weights = LatentWeights(norm=norm, eps=1e-6, keys=keys, values=values, joint=joint)
    width = heads.num_q * heads.query_dim + heads.dim
    projected = randn(len(batch.positions), width, dtype=dtype)
    angle = torch.rand(4000, heads.rope_dim // 2, device=CUDA) * 6
    table = torch.cat([angle.cos(), angle.sin()], -1)
    args, scale = (projected, projected, heads, weights, table), heads.query_dim**-0.5
    ours = replace(kv, keys=kv.keys.clone())
    queries = latent.latent_queries(*args, kv, batch)
    mixed = latent.latent_attention(queries, kv, batch, scale, heads.rank)
    want = latent.latent_outputs(mixed, weights, batch)
    got = attend_latent(*args, ours, with_long_chunks(batch), scale)
    # A chunk reads its own keys before they are quantised, which changes them by up to 1/16.
    if codes:
        assert (got.float() - want.float()).abs().max() <= want.float().abs().max() / 16
    else:
        close(got, want, factor=3)
