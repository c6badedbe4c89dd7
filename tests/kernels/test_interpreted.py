"""Triton kernels in Triton's interpreter on the CPU, in float32, against the reference.

An environment variable enables the interpreter when kernels are defined, so the cases of this file
run in a separate process.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from tests.kernels.conftest import Check
from tests.kernels.test_attention import hide_behind_window
from windlass.kernels import reference
from windlass.kernels.attention_options import AttentionOptions, QKNorms, RopeOptions
from windlass.kernels.batch import AttentionWork, Heads, LayerKV, Span, StepBatch
from windlass.kernels.packed import Activation
from windlass.kernels.reference_linear import ReferenceLinear
from windlass.quant.rounding import SCHEMES, Scheme, quantise

pytest.importorskip("triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
inside = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter's own process")


@pytest.mark.skipif(INTERPRETED, reason="starts the interpreter's process")
def test_kernels_in_the_interpreter(interpreted: Check) -> None:
    interpreted(__file__)


def make_batch(heads: Heads, rows: list[tuple[int, int]]) -> tuple[LayerKV, StepBatch]:
    from windlass.kernels.triton.attention import tile_tokens

    tile = tile_tokens(heads.group)
    max_blocks = max(-(-(start + count) // 16) for start, count in rows)
    tables = torch.randperm(len(rows) * max_blocks).view(len(rows), max_blocks).int()
    spans, tiles, first = [], [], 0
    for i, (start, count) in enumerate(rows):
        spans.append(Span(first, count, start))
        if count > 1:
            tiles += [
                (first + k, min(tile, count - k), i, start + k, start)
                for k in range(0, count, tile)
            ]
        first += count
    shape = (len(rows) * max_blocks, heads.num_kv, 16, heads.dim)
    kv = LayerKV(torch.randn(shape), torch.randn(shape))
    positions = torch.cat([torch.arange(s, s + c) for s, c in rows]).int()
    counts = torch.tensor([c for _, c in rows])
    slots = torch.repeat_interleave(torch.arange(len(rows)), counts).int()
    singles = torch.tensor([s.first for s in spans if s.count == 1], dtype=torch.int32)
    on_device = torch.tensor(tiles, dtype=torch.int32).reshape(-1, 5)
    counters = torch.zeros(len(rows) * heads.num_kv, dtype=torch.int32)
    work = AttentionWork(singles=singles, tiles=on_device, splits=4, counters=counters)
    return kv, StepBatch(
        positions=positions, token_slots=slots, tables=tables[None], spans=spans, kv=[kv], work=work
    )


@inside
def test_norms_and_activation() -> None:
    from windlass.kernels.triton import norm

    x, residual, weight = torch.randn(3, 80), torch.randn(3, 80), torch.randn(80)
    torch.testing.assert_close(norm.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    want = reference.rms_norm(x, weight, 1e-5, groups=5)
    torch.testing.assert_close(norm.rms_norm(x, weight, 1e-5, groups=5), want)
    want = reference.add_rms_norm(x, residual.clone(), weight, 1e-5)
    torch.testing.assert_close(norm.add_rms_norm(x, residual, weight, 1e-5), want)
    torch.testing.assert_close(norm.silu_mul(x), reference.silu_mul(x))


@inside
@pytest.mark.parametrize("normed", [False, True])
def test_rope_write(normed: bool) -> None:
    from windlass.kernels.triton.rope import rope_write

    heads = Heads(6, 2, 24)
    kv, batch = make_batch(heads, [(5, 1), (12, 9)])
    qkv = torch.randn(10, 10 * 24)
    angle = torch.rand(64, 12) * 6
    table = torch.cat([angle.cos(), angle.sin()], -1)
    norms = QKNorms(torch.randn(24), torch.randn(24), 1e-6) if normed else None
    ours = LayerKV(kv.keys.clone(), kv.values.clone())
    want = reference.rope_write(qkv, heads, RopeOptions(table, norms=norms), kv, batch)
    torch.testing.assert_close(
        rope_write(qkv, heads, RopeOptions(table, norms=norms), ours, batch), want
    )
    torch.testing.assert_close(ours.keys, kv.keys)
    torch.testing.assert_close(ours.values, kv.values)


@inside
@pytest.mark.parametrize(
    "options",
    [
        AttentionOptions(0.2),
        AttentionOptions(0.2, 20, 5.0),
        AttentionOptions(0.2, 50, chunked=True),
    ],
)
def test_attention(options: AttentionOptions) -> None:
    from windlass.kernels.triton.attention import attention

    heads = Heads(6, 2, 48)
    kv, batch = make_batch(heads, [(600, 1), (0, 1), (30, 40)])
    q = torch.randn(42, 6, 48)
    want = reference.attention(q, kv, batch, options)
    got = attention(q, kv, batch, options)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-3)
    assert not batch.work.counters.any()


@inside
@pytest.mark.parametrize("window", [None, 20])
def test_attention_of_heads_whose_tiles_are_divided(window: int | None) -> None:
    from windlass.kernels.triton.attention import attention

    heads = Heads(6, 2, 260)  # padded to 512
    kv, batch = make_batch(heads, [(90, 1), (30, 40), (3, 33)])
    q, options = torch.randn(74, 6, 260), AttentionOptions(0.1, window)
    want = reference.attention(q, kv, batch, options)
    torch.testing.assert_close(attention(q, kv, batch, options), want, atol=1e-4, rtol=1e-3)


@inside
@pytest.mark.parametrize("with_sinks", [False, True])
def test_long_contexts_are_merged_from_many_splits(with_sinks: bool) -> None:
    from windlass.kernels.triton.attention import attention

    heads = Heads(6, 2, 48)
    kv, batch = make_batch(heads, [(900, 1), (0, 1), (257, 1)])
    work = replace(batch.work, splits=32, long_contexts=True)
    options = AttentionOptions(0.2, sinks=torch.randn(6) if with_sinks else None)
    q = torch.randn(3, 6, 48)
    got = attention(q, kv, replace(batch, work=work), options)
    torch.testing.assert_close(
        got, reference.attention(q, kv, batch, options), atol=1e-4, rtol=1e-3
    )
    assert not work.counters.any()


@inside
@pytest.mark.parametrize(
    ("window", "chunked"), [(1, False), (20, False), (70, False), (20, True), (97, True)]
)
def test_attention_reads_nothing_behind_the_window(window: int, chunked: bool) -> None:
    from windlass.kernels.triton.attention import attention

    heads = Heads(6, 2, 48)
    kv, batch = make_batch(heads, [(600, 1), (97, 1), (130, 40)])
    q = torch.randn(42, 6, 48)
    options = AttentionOptions(0.2, window, chunked=chunked)
    want = reference.attention(q, kv, batch, options)
    for batch_invariant in (False, True):
        each = replace(batch, batch_invariant=batch_invariant)
        freed = hide_behind_window(kv, each, options)
        got = attention(q, *freed, options)
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-3)


@inside
def test_a_layer_uses_the_tables_of_its_group() -> None:
    from windlass.kernels.triton.attention import attend

    heads = Heads(6, 2, 24)
    kv, batch = make_batch(heads, [(60, 1), (5, 3)])
    qkv, table = torch.randn(4, 10 * 24), torch.rand(640, 24)
    ours = LayerKV(kv.keys.clone(), kv.values.clone(), group=1)
    tables = torch.cat([torch.full_like(batch.tables, -1), batch.tables])
    want = attend(qkv, heads, RopeOptions(table), kv, batch, AttentionOptions(0.2))
    got = attend(
        qkv, heads, RopeOptions(table), ours, replace(batch, tables=tables), AttentionOptions(0.2)
    )
    assert torch.equal(got, want)
    assert torch.equal(ours.keys, kv.keys)


@inside
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("window", [None, 20])
def test_decode_with_fused_rope(normed: bool, window: int | None) -> None:
    from windlass.kernels.triton.attention import attend

    heads = Heads(6, 2, 24)
    kv, batch = make_batch(heads, [(600, 1), (0, 1), (15, 1), (128, 1)])
    qkv = torch.randn(4, 10 * 24)
    angle = torch.rand(640, 12) * 6
    table = torch.cat([angle.cos(), angle.sin()], -1)
    norms = QKNorms(torch.randn(24), torch.randn(24), 1e-6) if normed else None
    ours = LayerKV(kv.keys.clone(), kv.values.clone())
    queries = reference.rope_write(qkv, heads, RopeOptions(table, norms=norms), kv, batch)
    want = reference.attention(queries, kv, batch, AttentionOptions(0.2, window))
    got = attend(
        qkv, heads, RopeOptions(table, norms=norms), ours, batch, AttentionOptions(0.2, window)
    )
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(ours.keys, kv.keys)
    torch.testing.assert_close(ours.values, kv.values)


@inside
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("window", "chunked"), [(None, False), (20, False), (64, True)])
def test_adjacent_tokens_of_a_row_attend_to_each_other(
    normed: bool, window: int | None, chunked: bool
) -> None:
    """Rows of 4 adjacent single tokens, the last of which may be unused."""
    from windlass.kernels.triton.attention import attend

    options = AttentionOptions(0.2, window, chunked=chunked)
    heads, width = Heads(6, 2, 24), 4
    padding = 4  # the slot of unused tokens
    rows = [(600, 4), (0, 4), (14, 2), (126, 4)]
    kv, rows_batch = make_batch(heads, [*rows, (0, 1)])
    tokens = [(row, i) for row in range(len(rows)) for i in range(width)]
    used = [at for at, (row, i) in enumerate(tokens) if i < rows[row][1]]
    positions = torch.tensor([rows[r][0] + i if i < rows[r][1] else 0 for r, i in tokens]).int()
    slots = torch.tensor([r if i < rows[r][1] else padding for r, i in tokens]).int()
    count = len(tokens)
    counters = torch.zeros(count * heads.num_kv, dtype=torch.int32)
    singles, tiles = torch.arange(count, dtype=torch.int32), torch.empty((0, 5), dtype=torch.int32)
    work = AttentionWork(singles=singles, tiles=tiles, splits=4, counters=counters, width=width)
    batch = StepBatch(
        positions=positions,
        token_slots=slots,
        tables=rows_batch.tables,
        spans=[],
        kv=[kv],
        work=work,
    )
    qkv = torch.randn(count, 10 * 24)
    angle = torch.rand(640, 12) * 6
    table = torch.cat([angle.cos(), angle.sin()], -1)
    norms = QKNorms(torch.randn(24), torch.randn(24), 1e-6) if normed else None
    ours = LayerKV(kv.keys.clone(), kv.values.clone())
    own = torch.cat([qkv[used], torch.zeros(1, 10 * 24)])
    queries = reference.rope_write(own, heads, RopeOptions(table, norms=norms), kv, rows_batch)
    want = reference.attention(queries, kv, rows_batch, options)[:-1]
    got = attend(qkv, heads, RopeOptions(table, norms=norms), ours, batch, options)[used]
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-3)
    real = rows_batch.tables[0, :padding].flatten().long()
    torch.testing.assert_close(ours.keys[real], kv.keys[real])
    torch.testing.assert_close(ours.values[real], kv.values[real])
    assert not counters.any()


@inside
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("window", "chunked"), [(None, False), (20, False), (64, True)])
def test_siblings_attend_to_the_first_token_and_themselves(
    normed: bool, window: int | None, chunked: bool
) -> None:
    """Two siblings per row of three tokens; they do not change its pages. The last is unused."""
    from windlass.kernels.triton.attention import attend

    options = AttentionOptions(0.2, window, chunked=chunked)
    heads, length, siblings = Heads(6, 2, 24), 3, 2
    starts, width = [600, 0, 14, 63, 127], length + siblings
    kv, rows_batch = make_batch(heads, [(start, length) for start in starts] + [(0, 1)] * 2)
    padding, spare_slot = 5, 6
    spare = int(rows_batch.tables[0, spare_slot, 0])
    positions, slots, alternatives = [], [], []
    for row, start in enumerate(starts):
        positions += [*range(start, start + length), start + 1, start + 1]
        slots += [row] * width
        alternatives += [(row, len(slots) - 2 + j, j) for j in range(siblings)]
    positions[-1], slots[-1] = 0, padding
    del alternatives[-1]
    count = len(slots)
    counters = torch.zeros(count * heads.num_kv, dtype=torch.int32)
    singles, tiles = torch.arange(count, dtype=torch.int32), torch.empty((0, 5), dtype=torch.int32)
    work = AttentionWork(
        singles=singles,
        tiles=tiles,
        splits=4,
        counters=counters,
        width=width,
        siblings=siblings,
        spare=spare,
    )
    batch = StepBatch(
        positions=torch.tensor(positions).int(),
        token_slots=torch.tensor(slots).int(),
        tables=rows_batch.tables,
        spans=[],
        kv=[kv],
        work=work,
    )
    qkv = torch.randn(count, 10 * 24)
    angle = torch.rand(640, 12) * 6
    table = torch.cat([angle.cos(), angle.sin()], -1)
    norms = QKNorms(torch.randn(24), torch.randn(24), 1e-6) if normed else None
    ours = LayerKV(kv.keys.clone(), kv.values.clone())
    got = attend(qkv, heads, RopeOptions(table, norms=norms), ours, batch, options)
    used = [row * width + i for row in range(len(starts)) for i in range(length)]
    own = torch.cat([qkv[used], torch.zeros(2, 10 * 24)])
    queries = reference.rope_write(own, heads, RopeOptions(table, norms=norms), kv, rows_batch)
    want = reference.attention(queries, kv, rows_batch, options)[:-2]
    torch.testing.assert_close(got[used], want, atol=1e-4, rtol=1e-3)
    real = rows_batch.tables[0, : len(starts)].flatten().long()
    torch.testing.assert_close(ours.keys[real], kv.keys[real])
    for row, at, j in alternatives:
        start = starts[row]
        separate = LayerKV(kv.keys.clone(), kv.values.clone())
        two = torch.tensor([start, start + 1]).int()
        batch = StepBatch(
            two, torch.tensor([row, row]).int(), rows_batch.tables, [Span(0, 2, start)], []
        )
        queries = reference.rope_write(
            qkv[[row * width, at]], heads, RopeOptions(table, norms=norms), separate, batch
        )
        alone = reference.attention(queries, separate, batch, options)[1]
        torch.testing.assert_close(got[at], alone, atol=1e-4, rtol=1e-3)
        block, offset = int(rows_batch.tables[0, row, (start + 1) // 16]), (start + 1) % 16
        for pages, own in ((ours.keys, separate.keys), (ours.values, separate.values)):
            torch.testing.assert_close(pages[spare, :, siblings * row + j], own[block, :, offset])
    assert not counters.any()


@inside
@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("splits", [1, 3])
def test_skinny_gemm(rows: int, splits: int) -> None:
    from windlass.kernels.triton import skinny

    x, weight = torch.randn(rows, 192), torch.randn(80, 192)
    tiling = skinny.Tiling(32, splits)
    space = skinny.Workspace(torch.device("cpu"), 80, [tiling], [tiling])
    want = x @ weight.T
    for _ in "ab":
        got = skinny.linear(x, weight, tiling, space)
        torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-3)
    gated = skinny.gated(x, weight, skinny.Tiling(32))
    torch.testing.assert_close(gated, reference.silu_mul(want), atol=1e-2, rtol=1e-2)
    assert not space.counters.any()


@inside
@pytest.mark.parametrize("outputs", [2, 8])
def test_gemms_of_one_row(outputs: int) -> None:
    from windlass.kernels.triton import gemv

    x, weight, scales = torch.randn(1, 192), torch.randn(100, 192), torch.rand(100) + 0.5
    for of_outputs, want in ((None, x @ weight.T), (scales, x @ weight.T * scales)):
        got = gemv.linear(x, weight, outputs, of_outputs)
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
        active = gemv.gated(x, weight, outputs, of_outputs)
        torch.testing.assert_close(active, reference.silu_mul(want), atol=1e-3, rtol=1e-3)


@inside
@pytest.mark.parametrize("outputs", [2, 8])
def test_gemms_of_one_row_with_deferred_norms(outputs: int) -> None:
    """Three GEMMs in a row: each but the first takes a norm, and each but the last leaves one."""
    from windlass.kernels.triton import deferred_norm, gemv

    first, second, last = torch.randn(130, 192), torch.randn(130, 130), torch.randn(100, 130)
    x, residual, gains = torch.randn(1, 192), torch.randn(1, 130), torch.randn(2, 130)
    normed, total = reference.add_rms_norm(x @ first.T, residual, gains[0], 1e-5)
    want, final = reference.add_rms_norm(normed @ second.T, total, gains[1], 1e-5)

    stream = residual.clone()
    left = deferred_norm.allocate(stream, outputs, gains[0], 1e-5)
    gemv.linear_residual(x, first, outputs, left)
    torch.testing.assert_close(left.normalised(), normed, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(stream, total, atol=1e-3, rtol=1e-3)

    following = deferred_norm.allocate(stream.clone(), outputs, gains[1], 1e-5)
    gemv.linear_residual(left, second, outputs, following)
    torch.testing.assert_close(following.residual, final, atol=1e-3, rtol=1e-3)
    got = gemv.linear(following, last, outputs)
    torch.testing.assert_close(got, want @ last.T, atol=1e-2, rtol=1e-2)
    active = gemv.gated(following, last, outputs)
    torch.testing.assert_close(active, reference.silu_mul(want @ last.T), atol=1e-2, rtol=1e-2)


GROUPED = [(4, 32, 3, 40, 160), (4, 64, 18, 70, 192), (4, 128, 1, 64, 512), (4, 128, 70, 40, 576)]
GROUPED += [(8, 32, 5, 33, 96), (8, 128, 2, 64, 384)]
GROUPED += [(4, 32, 1, 5, 160), (4, 256, 1, 37, 768), (8, 64, 1, 19, 640), (8, 384, 1, 6, 384)]
GROUPED += [(4, 64, 1, 1030, 192)]


@inside
@pytest.mark.parametrize(("bits", "group", "rows", "outputs", "size"), GROUPED)
@pytest.mark.parametrize("permuted", [False, True])
def test_group_wise_gemm(
    bits: int, group: int, rows: int, outputs: int, size: int, permuted: bool
) -> None:
    from windlass.kernels.packed import Int4Group, Int8Group, pack_nibbles
    from windlass.kernels.triton.grouped_linear import GroupedLinear

    size = -(-size // group) * group
    scales = torch.rand(outputs, size // group) + 0.5
    perm = torch.randperm(size) if permuted else None
    if bits == 4:
        codes = pack_nibbles(torch.randint(0, 16, (outputs, size)))
        form = Int4Group(codes, scales, -8 * scales + torch.randn_like(scales), perm)
    else:
        codes = torch.randint(-127, 128, (outputs, size), dtype=torch.int8)
        form = Int8Group(codes, scales / 16, perm=perm)
    x = torch.randn(rows, size)
    kernel = GroupedLinear()
    assert kernel.refuse(form, torch.device("cpu"), torch.float32) is None
    gemm = kernel.prepare(form)
    want = x @ form.dequantise().T
    weight = gemm._dequantised(x.dtype)
    inputs = x if perm is None else x[:, perm]
    assert inputs @ weight.T == pytest.approx(want, rel=1e-3, abs=1e-3)
    error = (gemm.apply(x) - want).norm() / want.norm()
    assert error < 1e-4  # quantisation of the inputs to two int8 planes


@inside
@pytest.mark.parametrize(("rows", "outputs", "size"), [(1, 40, 384), (5, 70, 96), (70, 130, 256)])
@pytest.mark.parametrize("activation", ["token", "tensor"])
def test_int8_gemm(rows: int, outputs: int, size: int, activation: Activation) -> None:
    from windlass.kernels.packed import Int8Group
    from windlass.kernels.triton.eight_bit import EightBitLinear

    codes = torch.randint(-127, 128, (outputs, size), dtype=torch.int8)
    input_scale = torch.tensor([0.03]) if activation == "tensor" else None
    form = Int8Group(
        codes, torch.rand(outputs, 1) + 0.5, activation=activation, input_scale=input_scale
    )
    kernel = EightBitLinear()
    assert kernel.refuse(form, torch.device("cpu"), torch.float32) is None
    x = torch.randn(rows, size)
    want = ReferenceLinear().prepare(form).apply(x)
    gemm = kernel.prepare(form)
    for _ in "ab":
        torch.testing.assert_close(gemm.apply(x), want, rtol=1e-5, atol=1e-2)


@inside
@pytest.mark.parametrize(("rows", "outputs", "size"), [(1, 40, 384), (5, 70, 256), (70, 130, 256)])
@pytest.mark.parametrize("group", [32, 64])
def test_codebook_gemm(rows: int, outputs: int, size: int, group: int) -> None:
    from windlass.kernels.triton.table import TableLinear

    form = quantise(torch.randn(outputs, size), Scheme("nf4", "table4", groups=(group,)))
    kernel = TableLinear()
    assert kernel.refuse(form, torch.device("cpu"), torch.float32) is None
    gemm = kernel.prepare(form)
    x = torch.randn(rows, size)
    want = x @ form.dequantise().T
    torch.testing.assert_close(gemm._dequantised(torch.float32), form.dequantise())
    for _ in "ab":
        torch.testing.assert_close(gemm.apply(x), want, rtol=1e-3, atol=1e-3)


@inside
@pytest.mark.parametrize(("rows", "outputs"), [(1, 40), (5, 70), (70, 130)])
@pytest.mark.parametrize("group", [16, 32])
def test_codebook_gemm_with_sub_scales(rows: int, outputs: int, group: int) -> None:
    from windlass.kernels.packed import Table4
    from windlass.kernels.triton.table import TableLinear

    codes = torch.randint(0, 256, (outputs, 256), dtype=torch.uint8)
    subs = torch.randint(-32, 32, (outputs, 512 // group), dtype=torch.int8)
    table = torch.randint(-127, 128, (16,), dtype=torch.int8)
    form = Table4(codes, table, (0.01 * torch.rand(outputs, 2)).half(), subs, 1 / 8)
    kernel = TableLinear()
    assert kernel.refuse(form, torch.device("cpu"), torch.float32) is None
    gemm = kernel.prepare(form)
    x = torch.randn(rows, 512)
    torch.testing.assert_close(gemm._dequantised(torch.float32), form.dequantise())
    want = x @ form.dequantise().T
    for _ in "ab":
        torch.testing.assert_close(gemm.apply(x), want, rtol=1e-3, atol=1e-3)


@inside
@pytest.mark.parametrize("scheme", ["int4", "int8", "nf4"])
def test_rows_of_a_packed_weight(scheme: str) -> None:
    from windlass.kernels.triton.grouped_linear import GroupedLinear
    from windlass.kernels.triton.table import TableLinear

    form = quantise(torch.randn(70, 256), SCHEMES[scheme])
    kernel = TableLinear() if scheme == "nf4" else GroupedLinear()
    ids = torch.tensor([3, 69, 3, 0, 41], dtype=torch.int32)
    got = kernel.prepare(form).rows(ids, torch.float32)
    torch.testing.assert_close(got, form.dequantise()[ids.long()], rtol=1e-6, atol=1e-6)


@inside
def test_sampling() -> None:
    from windlass.kernels.triton.sample import sample

    logits = torch.randn(3, 3000) * 3
    slots, positions = torch.arange(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    last, seeds = torch.zeros(3, dtype=torch.int32), torch.arange(3)
    greedy = torch.tensor([[0.0, 0.0, 1.0, 0.0]] * 3)
    tokens = sample(logits, greedy, seeds, slots, positions, last)
    assert tokens.tolist() == logits.argmax(-1).tolist() == last.tolist()
    one_token = torch.tensor([[1.0, 1.0, 1.0, 0.0], [1.0, 0.0, 1e-6, 0.0], [1.0, 0.0, 1.0, 1.0]])
    assert sample(logits, one_token, seeds, slots, positions, last).tolist() == tokens.tolist()
