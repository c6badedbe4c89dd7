"""Kernels over a quantised KV cache in Triton's interpreter, against the reference.

Writes are tested in int8 only: the interpreter rounds to fp8 differently. The cases run in a separate
process, like those of test_interpreted.py.
"""

from __future__ import annotations

import pytest
import torch

from tests.kernels.conftest import Check
from tests.kernels.test_interpreted import INTERPRETED, inside, make_batch
from windlass.kernels import reference
from windlass.kernels.attention_options import AttentionOptions, QKNorms, RopeOptions
from windlass.kernels.batch import Heads, LayerKV, StepBatch

pytest.importorskip("triton")


@pytest.mark.skipif(INTERPRETED, reason="starts the interpreter's process")
def test_kernels_in_the_interpreter(interpreted: Check) -> None:
    interpreted(__file__)


def quantised_batch(
    heads: Heads, rows: list[tuple[int, int]], dtype: torch.dtype = torch.int8
) -> tuple[LayerKV, StepBatch]:
    kv, batch = make_batch(heads, rows)
    keys, key_scales = reference.encode(kv.keys, dtype)
    values, value_scales = reference.encode(kv.values * 1e-3, dtype)
    return LayerKV(keys, values, key_scales, value_scales), batch


def copy_of(kv: LayerKV) -> LayerKV:
    return LayerKV(
        kv.keys.clone(), kv.values.clone(), kv.key_scales.clone(), kv.value_scales.clone()
    )


def assert_same_pages(ours: LayerKV, want: LayerKV) -> None:
    """Compare pages: rotated keys may differ in the last bit, so codes by one; values are exact."""
    assert (ours.keys.int() - want.keys.int()).abs().max() <= 1
    torch.testing.assert_close(ours.key_scales, want.key_scales)
    assert torch.equal(ours.values, want.values)
    assert torch.equal(ours.value_scales, want.value_scales)


@inside
@pytest.mark.parametrize("normed", [False, True])
def test_rope_write(normed: bool) -> None:
    from windlass.kernels.triton.rope import rope_write

    heads = Heads(6, 2, 24)
    kv, batch = quantised_batch(heads, [(5, 1), (12, 9)])
    qkv = torch.randn(10, 10 * 24)
    qkv[3] = 0
    angle = torch.rand(64, 12) * 6
    table = torch.cat([angle.cos(), angle.sin()], -1)
    norms = QKNorms(torch.randn(24), torch.randn(24), 1e-6) if normed else None
    ours = copy_of(kv)
    want = reference.rope_write(qkv, heads, RopeOptions(table, norms=norms), kv, batch)
    torch.testing.assert_close(
        rope_write(qkv, heads, RopeOptions(table, norms=norms), ours, batch), want
    )
    assert_same_pages(ours, kv)


@inside
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(("window", "cap"), [(None, None), (20, 5.0)])
def test_attention(window: int | None, cap: float | None, dtype: torch.dtype) -> None:
    from windlass.kernels.triton.attention import attention

    heads = Heads(6, 2, 48)
    kv, batch = quantised_batch(heads, [(600, 1), (0, 1), (90, 40)], dtype)
    q = torch.randn(42, 6, 48)
    want = reference.attention(q, kv, batch, AttentionOptions(0.2, window, cap))
    got = attention(q, kv, batch, AttentionOptions(0.2, window, cap))
    # The kernel rounds queries and weights to float16.
    assert (got - want).abs().max() < 2e-3 * want.abs().max()
    assert not batch.work.counters.any()


@inside
@pytest.mark.parametrize("normed", [False, True])
def test_decode_with_fused_rope(normed: bool) -> None:
    from windlass.kernels.triton.attention import attend

    heads = Heads(6, 2, 24)
    kv, batch = quantised_batch(heads, [(600, 1), (0, 1), (15, 1), (128, 1)])
    qkv = torch.randn(4, 10 * 24)
    angle = torch.rand(640, 12) * 6
    table = torch.cat([angle.cos(), angle.sin()], -1)
    norms = QKNorms(torch.randn(24), torch.randn(24), 1e-6) if normed else None
    for window in (None, 20):
        ours = copy_of(kv)
        queries = reference.rope_write(qkv, heads, RopeOptions(table, norms=norms), kv, batch)
        want = reference.attention(queries, kv, batch, AttentionOptions(0.2, window))
        got = attend(
            qkv, heads, RopeOptions(table, norms=norms), ours, batch, AttentionOptions(0.2, window)
        )
        assert (got - want).abs().max() < 4e-3 * want.abs().max()
        assert_same_pages(ours, kv)


@inside
@pytest.mark.parametrize(("window", "chunked"), [(None, False), (20, False), (32, True)])
def test_chunk_attends_to_its_own_keys_before_quantisation(
    window: int | None, chunked: bool
) -> None:
    from windlass.kernels.triton.attention import attend

    heads = Heads(12, 2, 24)  # 16 tokens fill a tile
    kv, batch = quantised_batch(heads, [(90, 20), (0, 40), (15, 1)])
    qkv = torch.randn(61, 16 * 24)
    angle = torch.rand(160, 12) * 6
    table = torch.cat([angle.cos(), angle.sin()], -1)
    exact = LayerKV(
        kv.keys.float() * kv.key_scales[..., None], kv.values.float() * kv.value_scales[..., None]
    )
    queries = reference.rope_write(qkv, heads, RopeOptions(table), exact, batch)
    options = AttentionOptions(0.2, window, chunked=chunked)
    want = reference.attention(queries, exact, batch, options)
    got = attend(qkv, heads, RopeOptions(table), kv, batch, options)
    assert (got - want)[:60].abs().max() < 4e-3 * want.abs().max()
