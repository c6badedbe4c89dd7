"""Quantised KV cache: quantisation of keys and values, and attention over them without a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.test_attention import make_batch, make_cache, make_layout
from windlass.kernels import batch_invariant_attention, reference, torch_attention
from windlass.kernels.attention_options import AttentionOptions, RopeOptions
from windlass.kernels.batch import (
    MAX_CODE,
    Heads,
    KVCache,
    LayerKV,
    StepBatch,
)

CODES = [torch.int8, torch.float8_e4m3fn]
ROWS = [(5, 1), (0, 9), (16, 16), (40, 1), (31, 2)]


def coded(kv: LayerKV, dtype: torch.dtype) -> LayerKV:
    keys, key_scales = reference.encode(kv.keys, dtype)
    values, value_scales = reference.encode(kv.values, dtype)
    return LayerKV(keys, values, key_scales, value_scales)


@pytest.mark.parametrize("dtype", CODES)
def test_encode_rounds_to_the_nearest_code(dtype: torch.dtype) -> None:
    x = torch.randn(50, 3, 64) * torch.logspace(-12, 3, 50)[:, None, None]
    codes, scales = reference.encode(x, dtype)
    assert codes.dtype == dtype
    assert scales.dtype == torch.float32
    assert scales.shape == (50, 3)
    largest = x.abs().amax(-1)
    torch.testing.assert_close(scales, largest / MAX_CODE[dtype])
    assert codes.float().abs().amax(-1).eq(MAX_CODE[dtype]).all()
    error = (codes.float() * scales[..., None] - x).abs()
    step = scales[..., None] * torch.ones_like(x)
    if dtype != torch.int8:  # e4m3: 3 mantissa bits; subnormal steps of 2**-9 below 2**-6
        step = torch.maximum(x.abs() * 2**-3, scales[..., None] * 2**-9)
    assert (error <= 0.5001 * step).all()


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("value", [0.0, 1e-38])
def test_zero_heads_have_zero_codes_and_finite_scales(dtype: torch.dtype, value: float) -> None:
    x = torch.full((2, 1, 8), value)
    codes, scales = reference.encode(x, dtype)
    assert not codes.float().any()
    assert scales.isfinite().all()
    assert (scales > 0).all()


def write(dtype: torch.dtype, counts: list[int]) -> KVCache:
    """Write 24 tokens to a cache, `counts` tokens per step."""
    random = torch.Generator().manual_seed(1)
    qkv = torch.randn(24, 8 * 16, generator=random).bfloat16()
    table = torch.rand(24, 16, generator=random)
    cache = make_cache(1, (4, 2, 8, 16), dtype)
    start = 0
    for count in counts:
        positions = torch.arange(start, start + count)
        tables = torch.tensor([[[2, 0, 3]]])
        batch = StepBatch(positions, torch.zeros(count, dtype=torch.long), tables, [], cache.layers)
        part = qkv[start : start + count]
        reference.rope_write(part, Heads(4, 2, 16), RopeOptions(table), cache.layers[0], batch)
        start += count
    return cache


@pytest.mark.parametrize("dtype", CODES)
def test_codes_do_not_depend_on_the_step_that_writes_them(dtype: torch.dtype) -> None:
    whole, parts = write(dtype, [24]).layers[0], write(dtype, [1, 7, 12, 4]).layers[0]
    assert torch.equal(whole.keys.float(), parts.keys.float())
    assert torch.equal(whole.values.float(), parts.values.float())
    assert torch.equal(whole.key_scales, parts.key_scales)
    assert torch.equal(whole.value_scales, parts.value_scales)
    unquantised = write(torch.bfloat16, [24]).layers[0]
    for got, want in zip(
        reference.read_row(whole, torch.tensor([2, 0, 3]), 24),
        reference.read_row(unquantised, torch.tensor([2, 0, 3]), 24),
        strict=True,
    ):
        bound = 0.51 / MAX_CODE[dtype] if dtype == torch.int8 else 2**-4 * 1.01
        error = (got - want.float()).abs().amax(-1) / want.float().abs().amax(-1)
        assert error.max() < bound


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("window", [None, 5])
def test_all_attention_implementations_read_codes(dtype: torch.dtype, window: int | None) -> None:
    unquantised, batch = make_batch(ROWS, 2, 32, size=16)
    kv = coded(unquantised, dtype)
    random = torch.Generator().manual_seed(5)
    queries = torch.randn(sum(count for _, count in ROWS), 6, 32, generator=random)
    want = reference.attention(queries, kv, batch, AttentionOptions(0.2, window))
    exact = reference.attention(queries, unquantised, batch, AttentionOptions(0.2, window))
    # Over 150 seeds the error was 0.6 to 0.7 % in int8 and 2.8 to 3.2 % in fp8.
    error = (want - exact).norm() / exact.norm()
    assert 1e-3 < error < (0.01 if dtype == torch.int8 else 0.045)
    for other in (torch_attention, batch_invariant_attention):
        got = other.attention(queries, kv, batch, AttentionOptions(0.2, window))
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", CODES)
def test_copy_includes_the_scales(dtype: torch.dtype) -> None:
    cache = make_cache(2, (4, 1, 2, 3), dtype)
    for layer in cache.layers:
        for tensor in (layer.keys, layer.values, layer.key_scales, layer.value_scales):
            tensor[:] = torch.arange(4.0).view(4, *[1] * (tensor.ndim - 1)).to(tensor.dtype)
    cache.copy([(0, 1), (1, 2)])
    for layer in cache.layers:
        for tensor in (layer.keys, layer.values, layer.key_scales, layer.value_scales):
            assert tensor.flatten(1).float()[:, 0].tolist() == [0, 0, 1, 3]


@pytest.mark.parametrize("dtype", [*CODES, torch.bfloat16, torch.float32])
def test_the_bytes_of_the_layout_match_the_cache(dtype: torch.dtype) -> None:
    cache = make_cache(3, (5, 2, 8, 64), dtype)
    assert cache.num_bytes == 5 * make_layout(3, (2, 8, 64), dtype).block_bytes
    assert (cache.layers[0].key_scales is None) == (dtype not in CODES)
    if dtype in CODES:
        bf16, coded = (
            make_layout(3, (2, 8, 128), kind).token_bytes for kind in (torch.bfloat16, dtype)
        )
        assert bf16 / coded == pytest.approx(1.94, abs=0.005)
