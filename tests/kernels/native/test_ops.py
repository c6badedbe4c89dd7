"""Native operations against the reference, over odd sizes; the order of sums may differ."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.test_attention import hide_behind_window, make_batch
from tests.kernels.test_kv_codes import coded
from windlass.core.types import NO_BLOCK
from windlass.kernels import reference
from windlass.kernels.attention_options import AttentionOptions, QKNorms, RopeOptions
from windlass.kernels.batch import Heads, LayerKV, StepBatch
from windlass.kernels.native.compiler import find_compilers
from windlass.kernels.native.linear import NativeLinear
from windlass.kernels.native.ops import NativeOps
from windlass.kernels.ops import choose_ops
from windlass.kernels.packed import Int4Group, Int8Group, Table4
from windlass.kernels.select import Need

_COMPILERS, _ = find_compilers()
pytestmark = pytest.mark.skipif(not _COMPILERS, reason="no C++ compiler")

CLOSE = {"rtol": 1e-5, "atol": 1e-6}  # float32 in another order
SOFTMAX = {"rtol": 2e-5, "atol": 2e-6}  # an exponential and two sums
# float16 arithmetic: a few units of the last place (2^-11).
FLOAT16 = {"rtol": 2**-8, "atol": 2**-8}
ROWS = [(5, 1), (0, 9), (16, 16), (40, 1), (31, 2), (300, 1), (120, 40)]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("rows", "width"), [(1, 8), (3, 576), (17, 50), (65, 1), (2, 4099)])
def test_norms(ops: NativeOps, rows: int, width: int) -> None:
    x, residual, weight = normal(rows, width), normal(rows, width, seed=1), normal(width, seed=2)
    torch.testing.assert_close(
        ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), **CLOSE
    )
    want, total = reference.add_rms_norm(x, residual, weight, 1e-5)
    got, summed = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(summed, total)
    torch.testing.assert_close(got, want, **CLOSE)


@pytest.mark.parametrize(("rows", "width", "groups"), [(1, 96, 2), (17, 50, 5)])
def test_norm_of_groups(ops: NativeOps, rows: int, width: int, groups: int) -> None:
    x, weight = normal(rows, width), normal(width, seed=2)
    want = reference.rms_norm(x, weight, 1e-5, groups=groups)
    parts = zip(x.chunk(groups, -1), weight.chunk(groups), strict=True)
    alone = [torch.nn.functional.rms_norm(part, own.shape, own, 1e-5) for part, own in parts]
    torch.testing.assert_close(want, torch.cat(alone, -1))
    got = ops.rms_norm(x, weight, 1e-5, groups=groups)
    torch.testing.assert_close(got, want, **CLOSE)


@pytest.mark.parametrize(("rows", "width"), [(1, 8), (3, 1536), (17, 50), (65, 1)])
def test_silu_mul(ops: NativeOps, rows: int, width: int) -> None:
    x = normal(rows, 2 * width) * 30
    x[0, 0] = -200.0
    torch.testing.assert_close(ops.silu_mul(x), reference.silu_mul(x), **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [8, 50, 576])
def test_table_rows(ops: NativeOps, dtype: torch.dtype, width: int) -> None:
    table, ids = normal(40, width).to(dtype), torch.tensor([3, 39, 0, 3])
    assert torch.equal(ops.embedding(ids, table), table[ids].float())
    assert torch.equal(ops.gather(table.float(), ids), table[ids].float())


def test_rows_of_packed_weights() -> None:
    random = torch.Generator().manual_seed(5)
    nibbles = torch.randint(0, 256, (21, 48), generator=random, dtype=torch.uint8)
    scales = torch.rand(21, 3, generator=random).half()
    offsets, order = (
        torch.randn(21, 3, generator=random).half(),
        torch.randperm(96, generator=random),
    )
    forms = [
        Int4Group(nibbles, scales, offsets, order),
        Int4Group(nibbles, scales, scales * -8),
        Int8Group(torch.randint(-128, 128, (21, 96), dtype=torch.int8), scales, offsets),
        Int8Group(torch.randint(-32, 32, (21, 96), dtype=torch.int8), scales, offsets, bits=6),
        Table4(nibbles, torch.randn(16), scales.float()),
    ]
    ids = torch.tensor([20, 0, 7, 8])
    for form in forms:
        want = form.dequantise()[ids]
        torch.testing.assert_close(NativeLinear().prepare(form).rows(ids), want, **CLOSE)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        plain = normal(21, 50).to(dtype)
        assert torch.equal(NativeLinear().prepare(plain).rows(ids), plain[ids].float())


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 50), (2, 5000), (9, 513)])
def test_argmax(ops: NativeOps, rows: int, width: int) -> None:
    x = normal(rows, width)
    x[0, width // 2 :] = 7.0  # argmax returns the first of equals
    assert ops.argmax(x).tolist() == x.argmax(dim=-1).tolist()
    x[-1, width // 3] = float("nan")
    assert ops.argmax(x)[-1] == width // 3


def batch_of(
    rows: list[tuple[int, int]], heads: int, kv_heads: int, dim: int, size: int = 16
) -> tuple[Tensor, LayerKV, StepBatch]:
    """Return random queries, and pages full of noise."""
    kv, batch = make_batch(rows, kv_heads, dim, size)
    return normal(len(batch.positions), heads, dim, seed=9), kv, batch


def pages_of_type(kv: LayerKV, dtype: torch.dtype) -> LayerKV:
    return (
        coded(kv, dtype) if dtype == torch.int8 else LayerKV(kv.keys.to(dtype), kv.values.to(dtype))
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("rotated", [64, 32])
def test_rope_and_pages(ops: NativeOps, dtype: torch.dtype, rotated: int) -> None:
    heads = Heads(6, 2, 64)
    _, whole, batch = batch_of(ROWS, 6, 2, 64)
    cos_sin, qkv = normal(512, rotated), normal(len(batch.positions), 10 * 64, seed=3)
    for norms in (None, QKNorms(normal(64, seed=4), normal(64, seed=5), 1e-6)):
        ours, want = pages_of_type(whole, dtype), pages_of_type(whole, dtype)
        got = ops.rope_write(qkv, heads, RopeOptions(cos_sin, norms=norms), ours, batch)
        torch.testing.assert_close(
            got,
            reference.rope_write(qkv, heads, RopeOptions(cos_sin, norms=norms), want, batch),
            **CLOSE,
        )
        # The last bit of a product may decide how a value is rounded.
        step = {torch.float32: 0.0, torch.float16: 2**-10, torch.bfloat16: 2**-7}.get(dtype, 0.0)
        for a, b in ((ours.keys, want.keys), (ours.values, want.values)):
            atol = 1.0 if dtype == torch.int8 else 1e-6
            torch.testing.assert_close(a.float(), b.float(), rtol=step + 1e-5, atol=atol)
        if ours.key_scales is not None:
            torch.testing.assert_close(ours.key_scales, want.key_scales)
            torch.testing.assert_close(ours.value_scales, want.value_scales)


def test_qk_norm_is_in_place(ops: NativeOps) -> None:
    qkv, weights = normal(5, 4 * 24), (normal(48, seed=1), normal(24, seed=2))
    want = reference.qk_norm(qkv, *weights, 1e-5)
    got = ops.qk_norm(qkv, *weights, 1e-5)
    torch.testing.assert_close(got, want, **CLOSE)
    assert got is qkv


def norms_of(heads: Heads, per_head: bool, kind: Literal["rms", "layer"]) -> QKNorms:
    shapes = [(num, heads.dim) if per_head else (heads.dim,) for num in (heads.num_q, heads.num_kv)]
    q, k = (normal(*shape, seed=4 + i) for i, shape in enumerate(shapes))
    return QKNorms(q, k, 1e-5, kind)


@settings(max_examples=40, deadline=None)
@given(
    dim=st.sampled_from([8, 24, 64, 80, 96]),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 4),
    share=st.sampled_from([None, 0.25, 0.5, 1.0]),
    interleaved=st.booleans(),
    norm=st.none() | st.tuples(st.booleans(), st.sampled_from(["rms", "layer"])),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.int8]),
)
def test_rope_options(
    ops: NativeOps,
    dim: int,
    kv_heads: int,
    group: int,
    share: float | None,
    interleaved: bool,
    norm: tuple[bool, Literal["rms", "layer"]] | None,
    dtype: torch.dtype,
) -> None:
    heads = Heads(group * kv_heads, kv_heads, dim)
    _, whole, batch = batch_of(ROWS[:5], heads.num_q, kv_heads, dim)
    table = None if share is None else normal(512, round(share * dim / 2) * 2)
    norms = None if norm is None else norms_of(heads, *norm)
    options = RopeOptions(table, interleaved, norms)
    qkv = normal(len(batch.positions), (heads.num_q + 2 * kv_heads) * dim, seed=3) + 0.5
    ours, theirs = pages_of_type(whole, dtype), pages_of_type(whole, dtype)
    got = ops.rope_write(qkv, heads, options, ours, batch)
    torch.testing.assert_close(
        got, reference.rope_write(qkv, heads, options, theirs, batch), rtol=1e-5, atol=2e-6
    )
    rtol, atol = {torch.float32: (1e-5, 2e-6), torch.float16: (2**-10, 1e-5)}.get(dtype, (0, 1.0))
    for a, b in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
        torch.testing.assert_close(a.float(), b.float(), rtol=rtol, atol=atol)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 40)), min_size=1, max_size=4),
    group=st.integers(1, 4),
    dim=st.sampled_from([16, 80, 96, 256]),
    window=st.none() | st.integers(1, 200),
    chunked=st.booleans(),
    soft_cap=st.none() | st.sampled_from([0.3, 2.0, 50.0]),
    sinks=st.none() | st.sampled_from([-3.0, 0.0, 20.0]),
    scale=st.sampled_from([0.05, 0.3]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.int8]),
)
def test_attention_options(
    ops: NativeOps,
    rows: list[tuple[int, int]],
    group: int,
    dim: int,
    window: int | None,
    chunked: bool,
    soft_cap: float | None,
    sinks: float | None,
    scale: float,
    dtype: torch.dtype,
) -> None:
    queries, whole, batch = batch_of(rows, 2 * group, 2, dim)
    kv = pages_of_type(whole, dtype)
    logits = None if sinks is None else normal(2 * group, seed=6) + sinks
    options = AttentionOptions(scale, window, soft_cap, logits, chunked)
    got = ops.attention(queries * 0.3, kv, batch, options)
    want = reference.attention(queries * 0.3, kv, batch, options)
    torch.testing.assert_close(
        got, want, **(FLOAT16 if dtype == torch.float16 else {"rtol": 3e-5, "atol": 1e-5})
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("window", [None, 1, 7, 150])
def test_attention(ops: NativeOps, dtype: torch.dtype, window: int | None) -> None:
    for heads, kv_heads, dim in ((9, 3, 64), (4, 4, 8), (8, 1, 40)):
        queries, whole, batch = batch_of(ROWS, heads, kv_heads, dim)
        kv = pages_of_type(whole, dtype)
        got = ops.attention(queries, kv, batch, AttentionOptions(dim**-0.5, window))
        want = reference.attention(queries, kv, batch, AttentionOptions(dim**-0.5, window))
        if dtype == torch.float16:
            torch.testing.assert_close(got, want, **FLOAT16)
            assert (got - want).square().mean().sqrt() < 2**-11
        else:
            torch.testing.assert_close(got, want, **SOFTMAX)


@pytest.mark.parametrize("size", [1e-20, 1e-3, 1e3, 1e20])
def test_float16_of_any_size_stays_in_range(ops: NativeOps, size: float) -> None:
    """Queries over the range of float32, keys and values up to the largest float16."""
    queries, whole, batch = batch_of(ROWS, 4, 2, 64)
    kv = pages_of_type(whole, torch.float16)
    scale = 0.125 / size
    want = reference.attention(queries * size, kv, batch, AttentionOptions(scale))
    torch.testing.assert_close(
        ops.attention(queries * size, kv, batch, AttentionOptions(scale)), want, **FLOAT16
    )
    largest = replace(kv, keys=kv.keys.sign() * 65504, values=kv.values.sign() * 65504)
    got = ops.attention(queries * size, largest, batch, AttentionOptions(scale))
    assert got.isfinite().all()
    assert got.abs().max() <= 65504 * (1 + 2**-10)


def test_nan_in_a_query_stays_in_its_head(ops: NativeOps) -> None:
    queries, whole, batch = batch_of([(200, 1), (300, 1)], 4, 2, 64)
    kv = pages_of_type(whole, torch.float16)
    queries[0, 1, 5] = torch.nan
    got = ops.attention(queries, kv, batch, AttentionOptions(0.125))
    assert got[0, 1].isnan().all()
    assert got[0, 0].isfinite().all()
    assert got[1].isfinite().all()


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 200), st.integers(1, 70)), min_size=1, max_size=4),
    group=st.integers(1, 5),
    kv_heads=st.integers(1, 3),
    dim=st.sampled_from([8, 16, 24, 64, 128]),
    size=st.sampled_from([1, 8, 16, 256]),
    window=st.none() | st.integers(1, 300),
    dtype=st.sampled_from([torch.float32, torch.float16]),
)
def test_attention_of_any_shape(
    ops: NativeOps,
    rows: list[tuple[int, int]],
    group: int,
    kv_heads: int,
    dim: int,
    size: int,
    window: int | None,
    dtype: torch.dtype,
) -> None:
    queries, whole, batch = batch_of(rows, group * kv_heads, kv_heads, dim, size)
    kv = pages_of_type(whole, dtype)
    got = ops.attention(queries, kv, batch, AttentionOptions(dim**-0.5, window))
    want = reference.attention(queries, kv, batch, AttentionOptions(dim**-0.5, window))
    torch.testing.assert_close(got, want, **(SOFTMAX if dtype == torch.float32 else FLOAT16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("window", [1, 40, 130])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("rows", [[(300, 1), (150, 1)], [(260, 30)], [(290, 1)] * 9 + [(400, 20)]])
def test_attention_reads_nothing_behind_the_window(
    ops: NativeOps,
    rows: list[tuple[int, int]],
    chunked: bool,
    window: int,
    dtype: torch.dtype,
) -> None:
    queries, whole, batch = batch_of(rows, 6, 2, 64)
    kv = pages_of_type(whole, dtype)
    options = AttentionOptions(0.125, window, chunked=chunked)
    freed = hide_behind_window(kv, batch, options)
    want = ops.attention(queries, kv, batch, options)
    assert torch.equal(ops.attention(queries, *freed, options), want)


def test_a_layer_uses_the_tables_of_its_group(ops: NativeOps) -> None:
    queries, whole, batch = batch_of([(100, 3), (40, 1)], 6, 2, 64)
    qkv, cos_sin = normal(4, 10 * 64, seed=3), normal(512, 64)
    tables = torch.cat([torch.full_like(batch.tables, NO_BLOCK), batch.tables])
    of_second = replace(batch, tables=tables), replace(whole, group=1)
    ours = replace(of_second[1], keys=whole.keys.clone(), values=whole.values.clone())
    heads = Heads(6, 2, 64)
    ops.rope_write(qkv, heads, RopeOptions(cos_sin), ours, of_second[0])
    ops.rope_write(qkv, heads, RopeOptions(cos_sin), whole, batch)
    assert torch.equal(ours.keys, whole.keys)
    want = ops.attention(queries, whole, batch, AttentionOptions(0.125))
    assert torch.equal(ops.attention(queries, ours, of_second[0], AttentionOptions(0.125)), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_attention_is_batch_invariant(
    ops: NativeOps, window: int | None, soft_cap: float | None, dtype: torch.dtype
) -> None:
    """One chunk, two chunks, single tokens, alone or in a batch: bit-identical."""
    queries, whole, batch = batch_of([(100, 200)], 6, 2, 64)
    kv = pages_of_type(whole, dtype)

    def attend(parts: list[tuple[int, int]]) -> Tensor:
        spans = [type(batch.spans[0])(first, count, 100 + first) for first, count in parts]
        some = StepBatch(batch.positions, batch.token_slots, batch.tables, spans, [])
        sinks = None if soft_cap is None else normal(6)
        return ops.attention(queries, kv, some, AttentionOptions(0.125, window, soft_cap, sinks))

    whole = attend([(0, 200)])
    assert torch.equal(attend([(0, 77), (77, 123)]), whole)
    assert torch.equal(attend([(i, 1) for i in range(200)]), whole)
    alone = attend([(150, 1)])
    assert torch.equal(alone[150], whole[150])


def test_row_operations_are_batch_invariant(ops: NativeOps) -> None:
    x, weight = normal(200, 576), normal(576)
    many = ops.rms_norm(x, weight, 1e-5)
    assert torch.equal(ops.rms_norm(x[7:8], weight, 1e-5)[0], many[7])
    assert torch.equal(ops.silu_mul(x[9:10])[0], ops.silu_mul(x)[9])


def test_the_instruction_set_is_reported(ops: NativeOps) -> None:
    need = Need(torch.device("cpu"), torch.float32, Heads(4, 2, 16))
    reported = {choice.what: choice for choice in choose_ops(need).choices}
    assert reported["CPU instructions"].value == ops.pool.native.simd
    assert "CPU instructions" not in {c.what for c in choose_ops(replace(need, plain=True)).choices}
