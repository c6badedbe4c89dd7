"""Native MLA operations against the reference, over odd batches and all types of pages."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.test_attention import make_batch
from tests.kernels.test_latent import make_weights
from windlass.core.mla import LatentHeads
from windlass.kernels import latent, reference
from windlass.kernels.batch import LayerKV
from windlass.kernels.native.compiler import find_compilers
from windlass.kernels.native.ops import NativeOps

_COMPILERS, _ = find_compilers()
pytestmark = pytest.mark.skipif(not _COMPILERS, reason="no C++ compiler")

SMALL = LatentHeads(num_q=3, nope_dim=16, rope_dim=8, rank=24, value_dim=20)
LITE = LatentHeads(num_q=16, nope_dim=128, rope_dim=64, rank=512, value_dim=128)
ROWS = [(5, 1), (0, 9), (300, 1), (120, 40)]
# float32 in another order; float16 arithmetic; one code.
ERRORS = {torch.float32: 2e-5, torch.float16: 2**-8, torch.bfloat16: 2e-5, torch.int8: 2e-5}


def pages_of(kv: LayerKV, dtype: torch.dtype) -> LayerKV:
    if dtype == torch.int8:
        codes, scales = reference.encode(kv.keys, dtype)
        return LayerKV(codes, codes, scales, scales)
    keys = kv.keys.to(dtype)
    return LayerKV(keys, keys)


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("heads", [SMALL, LITE], ids=["small", "lite"])
def test_mla(ops: NativeOps, heads: LatentHeads, interleaved: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    heads = replace(heads, interleaved=interleaved)
    kv, batch = make_batch(ROWS, 1, heads.dim, size=8)
    ours, theirs = pages_of(kv, dtype), pages_of(kv, dtype)
    weights = make_weights(heads)
    if interleaved:  # as llama.cpp stores them: transposed
        weights = replace(weights, keys=weights.keys.mT.contiguous().mT)
    weights = replace(weights, values=weights.values.contiguous())
    angle = torch.rand(512, heads.rope_dim // 2) * 6
    table = torch.cat([angle.cos(), angle.sin()], -1)
    width = heads.num_q * heads.query_dim
    projected = torch.randn(len(batch.positions), width + heads.dim)
    for q in (projected, projected[:, :width].contiguous()):
        want = latent.latent_queries(projected, q, heads, weights, table, theirs, batch)
        got = ops.latent_queries(projected, q, heads, weights, table, ours, batch)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            ours.keys.float(),
            theirs.keys.float(),
            rtol=0.01,
            atol=1.0 if dtype == torch.int8 else 1e-5,
        )
    mean = latent.latent_attention(want, theirs, batch, 0.1, heads.rank)
    mixed = ops.latent_attention(want, theirs, batch, 0.1, heads.rank)
    error = ERRORS[dtype] * float(mean.abs().max())
    torch.testing.assert_close(mixed[..., : heads.rank], mean, rtol=0, atol=4 * error)
    out = ops.latent_outputs(mixed, weights, batch)
    want_out = latent.latent_outputs(mixed, weights, batch)
    torch.testing.assert_close(out, want_out, rtol=1e-4, atol=1e-4)


def test_rows_do_not_depend_on_others(ops: NativeOps) -> None:
    torch.manual_seed(1)
    weights = make_weights(LITE)
    kv, batch = make_batch([(0, 9)], 1, LITE.dim, size=8)
    table = torch.rand(64, LITE.rope_dim)
    projected = torch.randn(9, LITE.num_q * LITE.query_dim + LITE.dim)
    whole = ops.latent_queries(projected, projected, LITE, weights, table, kv, batch)
    mixed = torch.randn(9, LITE.num_q, LITE.dim)
    outputs = ops.latent_outputs(mixed, weights, batch)
    for first, count in ((0, 1), (2, 3), (5, 4)):
        part = mixed[first : first + count].contiguous()
        alone = ops.latent_outputs(part, weights, batch)
        assert torch.equal(alone, outputs[first : first + count])
        some = replace(
            batch,
            positions=batch.positions[first : first + count],
            token_slots=batch.token_slots[first : first + count],
            spans=[replace(batch.spans[0], count=count, start=first)],
        )
        rows = projected[first : first + count].contiguous()
        alone = ops.latent_queries(rows, rows, LITE, weights, table, kv, some)
        assert torch.equal(alone, whole[first : first + count])
