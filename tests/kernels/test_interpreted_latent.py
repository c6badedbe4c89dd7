"""The kernels of MLA in Triton's interpreter, against the reference.

Writes of codes are tested in int8 only: the interpreter rounds to fp8 differently. The cases run in a
separate process, like those of test_interpreted.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.conftest import Check
from tests.kernels.test_interpreted import INTERPRETED, inside, make_batch
from tests.kernels.test_interpreted_chunks import chunks_of
from tests.kernels.test_latent import make_weights
from windlass.core.mla import LatentHeads
from windlass.kernels import latent, reference
from windlass.kernels.batch import Heads, LayerKV, StepBatch

pytest.importorskip("triton")

HEADS = LatentHeads(num_q=5, nope_dim=12, rope_dim=8, rank=20, value_dim=10)
LONG_HEADS = LatentHeads(num_q=5, nope_dim=16, rope_dim=16, rank=20, value_dim=32)
ROWS = [(300, 1), (0, 1), (30, 20)]


@pytest.mark.skipif(INTERPRETED, reason="starts the interpreter's process")
def test_kernels_in_the_interpreter(interpreted: Check) -> None:
    interpreted(__file__)


def latent_batch(
    heads: LatentHeads, rows: list[tuple[int, int]], dtype: torch.dtype = torch.float32
) -> tuple[LayerKV, StepBatch]:
    kv, batch = make_batch(Heads(heads.num_q, 1, heads.dim), rows)
    if dtype == torch.float32:
        return LayerKV(kv.keys, kv.keys), batch
    codes, scales = reference.encode(kv.keys, dtype)
    return LayerKV(codes, codes, scales, scales), batch


def copy_of(kv: LayerKV) -> LayerKV:
    keys = kv.keys.clone()
    scales = None if kv.key_scales is None else kv.key_scales.clone()
    return LayerKV(keys, keys, scales, scales)


@inside
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("interleaved", [True, False])
def test_latents_and_queries(interleaved: bool, dtype: torch.dtype) -> None:
    from windlass.kernels.triton.latent import latent_queries

    torch.manual_seed(1)
    heads, weights = replace(HEADS, interleaved=interleaved), make_weights(HEADS)
    kv, batch = latent_batch(heads, [(5, 1), (12, 9)], dtype)
    projected = torch.randn(10, heads.num_q * heads.query_dim + heads.dim)
    q, rows = projected.split([heads.num_q * heads.query_dim, heads.dim], dim=1)
    angle = torch.rand(64, heads.rope_dim // 2) * 6
    table = torch.cat([angle.cos(), angle.sin()], -1)
    ours = copy_of(kv)
    want = latent.latent_queries(rows, q, heads, weights, table, kv, batch)
    got = latent_queries(rows, q, heads, weights, table, ours, batch)
    torch.testing.assert_close(got, want)
    if dtype == torch.int8:
        # Rotated keys may differ in the last bit, so codes by one.
        assert (ours.keys.int() - kv.keys.int()).abs().max() <= 1
        torch.testing.assert_close(ours.key_scales, kv.key_scales)
    else:
        torch.testing.assert_close(ours.keys, kv.keys)


@inside
@pytest.mark.parametrize("batch_invariant", [True, False])
def test_outputs(batch_invariant: bool) -> None:
    from windlass.kernels.triton.latent import latent_outputs

    torch.manual_seed(2)
    weights = make_weights(HEADS)
    _, batch = latent_batch(HEADS, [(0, 1)])
    batch = replace(batch, batch_invariant=batch_invariant)
    for tokens in (1, 70):
        mixed = torch.randn(tokens, HEADS.num_q, HEADS.rank)
        want = latent.latent_outputs(mixed, weights, batch)
        torch.testing.assert_close(latent_outputs(mixed, weights, batch), want)


@inside
@pytest.mark.parametrize("num_q", [5, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.float8_e4m3fn])
def test_attention(num_q: int, dtype: torch.dtype) -> None:
    from windlass.kernels.triton.latent import decode_parts, latent_attention

    torch.manual_seed(3)
    heads = replace(HEADS, num_q=num_q)
    kv, batch = latent_batch(heads, ROWS if num_q == 5 else [(300, 1), (30, 3)], dtype)
    counters = torch.zeros(len(batch.spans) * decode_parts(num_q), dtype=torch.int32)
    batch = replace(batch, work=replace(batch.work, counters=counters))
    queries = torch.randn(len(batch.positions), num_q, heads.dim)
    want = latent.latent_attention(queries, kv, batch, 0.2, heads.rank)
    error = 1e-4 if dtype == torch.float32 else 4e-3
    got = latent_attention(queries, kv, batch, 0.2, heads.rank)
    torch.testing.assert_close(got, want, atol=error, rtol=10 * error)
    assert not counters.any()
    each = replace(batch, batch_invariant=True, work=replace(batch.work, singles=counters[:0]))
    got = latent_attention(queries, kv, each, 0.2, heads.rank)
    chunk = batch.spans[-1]
    torch.testing.assert_close(got[chunk.first :], want[chunk.first :], atol=error, rtol=10 * error)


@inside
@pytest.mark.parametrize("rows", [[(0, 40)], [(30, 5), (60, 25), (60, 1)]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("heads", [LONG_HEADS, HEADS], ids=["expanded", "absorbed"])
def test_long_chunks(
    heads: LatentHeads,
    rows: list[tuple[int, int]],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from windlass.kernels.triton import chunk_attention, latent_expanded
    from windlass.kernels.triton.latent import decode_parts
    from windlass.runner.cuda import metadata

    monkeypatch.setattr(metadata, "MIN_LONG", 20)
    monkeypatch.setattr(chunk_attention, "_MIN_PIECE", 16)  # several pieces of cached tokens
    torch.manual_seed(4)
    weights = make_weights(heads)
    if rows[0][0] == 0:
        weights = replace(weights, joint=torch.cat([weights.keys, weights.values], 1))
    kv, batch = latent_batch(heads, rows, dtype)
    work = batch.work
    assert work is not None
    counters = torch.zeros(len(rows) * decode_parts(heads.num_q), dtype=torch.int32)
    work = replace(work, counters=counters, long=chunks_of(batch.spans, tile=8))
    projected = torch.randn(len(batch.positions), heads.num_q * heads.query_dim + heads.dim)
    angle = torch.rand(900, heads.rope_dim // 2) * 6
    table = torch.cat([angle.cos(), angle.sin()], -1)
    ours = copy_of(kv)
    queries = latent.latent_queries(projected, projected, heads, weights, table, kv, batch)
    mixed = latent.latent_attention(queries, kv, batch, 0.2, heads.rank)
    want = latent.latent_outputs(mixed, weights, batch)
    got = latent_expanded.attend_latent(
        projected, projected, heads, weights, table, ours, replace(batch, work=work), 0.2
    )
    # With codes, a chunk reads its own keys before they are quantised.
    error = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got, want, atol=error, rtol=10 * error)
