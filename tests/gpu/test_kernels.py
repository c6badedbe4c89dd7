"""Triton kernels against the reference on a GPU: size 1, odd sizes and large ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from windlass.kernels import reference
from windlass.kernels.attention_options import AttentionOptions, QKNorms, RopeOptions
from windlass.kernels.batch import AttentionWork, Heads, LayerKV, Span, StepBatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda")
DTYPES = [torch.bfloat16, torch.float16]
# Relative to the largest value: two roundings of the dtype.
TOLERANCE = {torch.bfloat16: 2 * 2**-8, torch.float16: 2 * 2**-11}


def close(got: torch.Tensor, want: torch.Tensor, factor: float = 1.0) -> None:
    assert got.shape == want.shape
    error = (got.float() - want.float()).abs().max() / want.float().abs().max().clamp_min(1e-6)
    assert error <= factor * TOLERANCE[want.dtype], float(error)


def randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device=CUDA).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (3, 576), (257, 1024), (16, 4096), (2, 8192)])
def test_norms(rows: int, size: int, dtype: torch.dtype) -> None:
    from windlass.kernels.triton import norm

    x, residual, weight = (
        randn(rows, size, dtype=dtype),
        randn(rows, size, dtype=dtype),
        randn(size, dtype=dtype),
    )
    close(norm.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    want, total = reference.add_rms_norm(x, residual.clone(), weight, 1e-5)
    got, in_place = norm.add_rms_norm(x, residual, weight, 1e-5)
    close(in_place, total)
    close(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (5, 1536), (300, 14336)])
def test_silu_mul(rows: int, size: int, dtype: torch.dtype) -> None:
    from windlass.kernels.triton import norm

    x = randn(rows, 2 * size, dtype=dtype)
    close(norm.silu_mul(x), reference.silu_mul(x))


def make_batch(
    rows: list[tuple[int, int]], heads: Heads, dtype: torch.dtype, splits: int
) -> tuple[LayerKV, StepBatch]:
    from windlass.kernels.triton.attention import tile_tokens

    size = 16
    needed = [-(-(start + count) // size) for start, count in rows]
    order = torch.randperm(sum(needed) + 3, device=CUDA).int()
    tables = torch.zeros(len(rows), max(needed), dtype=torch.int32, device=CUDA)
    spans, at, first, tiles = [], 0, 0, []
    tile = tile_tokens(heads.group)
    for i, ((start, count), blocks) in enumerate(zip(rows, needed, strict=True)):
        tables[i, :blocks] = order[at : at + blocks]
        spans.append(Span(first, count, start))
        if count > 1:
            tiles += [
                (first + k, min(tile, count - k), i, start + k, start)
                for k in range(0, count, tile)
            ]
        at += blocks
        first += count
    shape = (len(order), heads.num_kv, size, heads.dim)
    kv = LayerKV(randn(*shape, dtype=dtype), randn(*shape, dtype=dtype))
    positions = torch.cat([torch.arange(s, s + c) for s, c in rows]).int().to(CUDA)
    counts = torch.tensor([c for _, c in rows])
    slots = torch.repeat_interleave(torch.arange(len(rows)), counts).int().to(CUDA)
    singles = torch.tensor([s.first for s in spans if s.count == 1], dtype=torch.int32, device=CUDA)
    on_device = torch.tensor(tiles, dtype=torch.int32, device=CUDA).reshape(-1, 5)
    counters = torch.zeros(len(rows) * heads.num_kv, dtype=torch.int32, device=CUDA)
    work = AttentionWork(singles=singles, tiles=on_device, splits=splits, counters=counters)
    return kv, StepBatch(
        positions=positions, token_slots=slots, tables=tables[None], spans=spans, kv=[kv], work=work
    )


ROWS = [
    [(0, 1)],
    [(1023, 1), (0, 1), (62, 1), (63, 1), (64, 1)],
    [(0, 2), (0, 129), (17, 300)],
    [(500, 1), (0, 33), (2000, 1), (96, 64), (31, 2)],
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 4, 32])
@pytest.mark.parametrize(
    "heads", [Heads(32, 8, 128), Heads(9, 3, 64), Heads(8, 8, 96), Heads(8, 4, 256)], ids=str
)
@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_attention(rows, heads: Heads, splits: int, dtype: torch.dtype) -> None:
    from windlass.kernels.triton.attention import attention

    kv, batch = make_batch(rows, heads, dtype, splits)
    q = randn(sum(c for _, c in rows), heads.num_q, heads.dim, dtype=dtype)
    for window, cap in [(None, None), (50, None), (None, 20.0), (1, 5.0)]:
        want = reference.attention(q, kv, batch, AttentionOptions(heads.dim**-0.5, window, cap))
        close(
            attention(q, kv, batch, AttentionOptions(heads.dim**-0.5, window, cap)),
            want,
            factor=1.5,
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("heads", [Heads(32, 8, 128), Heads(9, 3, 64), Heads(4, 4, 96)], ids=str)
def test_rope_write(heads: Heads, normed: bool, dtype: torch.dtype) -> None:
    from windlass.kernels.triton.rope import rope_write

    kv, batch = make_batch([(5, 1), (0, 20), (30, 3)], heads, dtype, 1)
    qkv = randn(24, (heads.num_q + 2 * heads.num_kv) * heads.dim, dtype=dtype)
    angle = torch.rand(64, heads.dim // 2, device=CUDA) * 6
    table = torch.cat([angle.cos(), angle.sin()], -1)
    norms = None
    if normed:
        norms = QKNorms(randn(heads.dim, dtype=dtype), randn(heads.dim, dtype=dtype), 1e-6)
    ours = LayerKV(kv.keys.clone(), kv.values.clone())
    want = reference.rope_write(qkv, heads, RopeOptions(table, norms=norms), kv, batch)
    got = rope_write(qkv, heads, RopeOptions(table, norms=norms), ours, batch)
    close(got, want)
    close(ours.keys, kv.keys)
    assert torch.equal(ours.values, kv.values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("splits", [1, 2, 16])
@pytest.mark.parametrize("heads", [Heads(32, 8, 128), Heads(9, 3, 64), Heads(4, 4, 96)], ids=str)
def test_decode_with_fused_rope(
    heads: Heads, splits: int, normed: bool, dtype: torch.dtype
) -> None:
    from windlass.kernels.triton.attention import attend

    rows = [(1023, 1), (0, 1), (62, 1), (63, 1), (64, 1), (2000, 1)]
    kv, batch = make_batch(rows, heads, dtype, splits)
    qkv = randn(len(rows), (heads.num_q + 2 * heads.num_kv) * heads.dim, dtype=dtype)
    angle = torch.rand(2048, heads.dim // 2, device=CUDA) * 6
    table = torch.cat([angle.cos(), angle.sin()], -1)
    norms = None
    if normed:
        norms = QKNorms(randn(heads.dim, dtype=dtype), randn(heads.dim, dtype=dtype), 1e-6)
    for window in (None, 50):
        ours = LayerKV(kv.keys.clone(), kv.values.clone())
        queries = reference.rope_write(qkv, heads, RopeOptions(table, norms=norms), kv, batch)
        want = reference.attention(queries, kv, batch, AttentionOptions(heads.dim**-0.5, window))
        scale = heads.dim**-0.5
        got = attend(
            qkv,
            heads,
            RopeOptions(table, norms=norms),
            ours,
            batch,
            AttentionOptions(scale, window),
        )
        close(got, want, factor=2)
        close(ours.keys, kv.keys)
        assert torch.equal(ours.values, kv.values)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("splits", [1, 2, 16])
@pytest.mark.parametrize("width", [2, 5, 16])
def test_adjacent_tokens_of_a_row_attend_to_each_other(
    width: int, splits: int, normed: bool
) -> None:
    """Rows of adjacent single tokens; each token writes the keys of the tokens before it."""
    from windlass.kernels.triton.attention import attend

    heads, dtype = Heads(9, 3, 64), torch.bfloat16
    rows = [(start, width) for start in (1023, 0, 62, 63, 2000 - width, 128 - width)]
    kv, rows_batch = make_batch(rows, heads, dtype, splits)
    count = width * len(rows)
    singles = torch.arange(count, dtype=torch.int32, device=CUDA)
    counters = torch.zeros(count * heads.num_kv, dtype=torch.int32, device=CUDA)
    assert rows_batch.work is not None
    work = AttentionWork(
        singles=singles,
        tiles=rows_batch.work.tiles[:0],
        splits=splits,
        counters=counters,
        width=width,
    )
    batch = replace(rows_batch, work=work)
    qkv = randn(count, (heads.num_q + 2 * heads.num_kv) * heads.dim, dtype=dtype)
    angle = torch.rand(2048, heads.dim // 2, device=CUDA) * 6
    table = torch.cat([angle.cos(), angle.sin()], -1)
    norms = None
    if normed:
        norms = QKNorms(randn(heads.dim, dtype=dtype), randn(heads.dim, dtype=dtype), 1e-6)
    scale = heads.dim**-0.5
    for window in (None, 50):
        ours = LayerKV(kv.keys.clone(), kv.values.clone())
        queries = reference.rope_write(qkv, heads, RopeOptions(table, norms=norms), kv, rows_batch)
        want = reference.attention(queries, kv, rows_batch, AttentionOptions(scale, window))
        got = attend(
            qkv,
            heads,
            RopeOptions(table, norms=norms),
            ours,
            batch,
            AttentionOptions(scale, window),
        )
        close(got, want, factor=2)
        close(ours.keys, kv.keys)
        assert torch.equal(ours.values, kv.values)
        again = attend(
            qkv,
            heads,
            RopeOptions(table, norms=norms),
            ours,
            batch,
            AttentionOptions(scale, window),
        )
        assert torch.equal(got, again), "not deterministic"


@pytest.mark.parametrize("rows", [1, 3, 16, 64])
@pytest.mark.parametrize(("outputs", "size"), [(64, 64), (960, 576), (4096, 14336), (49152, 576)])
def test_skinny_gemm(rows: int, outputs: int, size: int) -> None:
    from windlass.kernels.triton import skinny

    x, weight = randn(rows, size, dtype=torch.bfloat16), randn(outputs, size, dtype=torch.bfloat16)
    tilings = [skinny.Tiling(32, 1), skinny.Tiling(64, 4), skinny.Tiling(16, stages=8)]
    space = skinny.Workspace(CUDA, outputs, tilings, tilings)
    want = (x.double() @ weight.double().T).bfloat16()
    for tiling in tilings:
        got = skinny.linear(x, weight, tiling, space)
        close(got, want)
        again = skinny.linear(x, weight, tiling, space)
        assert torch.equal(got, again), "not deterministic"
    gated = reference.silu_mul((x.double() @ weight.double().T).bfloat16())
    close(skinny.gated(x, weight, skinny.Tiling(32)), gated, factor=2)


@pytest.mark.parametrize("each", [2, 4])
@pytest.mark.parametrize(("outputs", "size"), [(64, 64), (576, 1536), (4096, 14336)])
def test_gemms_of_one_row_with_a_deferred_norm(each: int, outputs: int, size: int) -> None:
    """`each`: outputs of a program."""
    from windlass.kernels.triton import deferred_norm, gemv

    dtype = torch.bfloat16
    x, weight = randn(1, size, dtype=dtype), randn(outputs, size, dtype=dtype)
    following = randn(960, outputs, dtype=dtype)
    residual, gains = randn(1, outputs, dtype=dtype), randn(outputs, dtype=dtype)
    outputs_16 = (x.double() @ weight.double().T).bfloat16()
    normed, total = reference.add_rms_norm(outputs_16, residual, gains, 1e-5)
    want = (normed.double() @ following.double().T).bfloat16()
    close(gemv.linear(x, weight, each), outputs_16)
    for _ in "ab":
        left = deferred_norm.allocate(residual.clone(), each, gains, 1e-5)
        gemv.linear_residual(x, weight, each, left)
        close(left.residual, total)
        close(left.normalised(), normed, factor=2)
        close(gemv.linear(left, following, each), want, factor=2)
        close(gemv.gated(left, following, each), reference.silu_mul(want), factor=4)


@pytest.mark.parametrize("rows", [1, 17, 64, 65, 300, 2048])
def test_batch_invariant_gemm(rows: int) -> None:
    """A row is bitwise equal in any batch."""
    from windlass.kernels.triton.gemm import TunedGemm

    weight, x = randn(960, 576, dtype=torch.bfloat16), randn(2048, 576, dtype=torch.bfloat16)
    gemm = TunedGemm()
    gemm.tune([weight])
    with gemm.batch_invariant():
        whole = gemm.linear(x, weight)
        assert torch.equal(gemm.linear(x[:rows], weight), whole[:rows])
        assert torch.equal(gemm.linear(x[5:6].contiguous(), weight), whole[5:6])
    close(whole, (x.double() @ weight.double().T).bfloat16())


def draw(
    logits: torch.Tensor, params: tuple[float, float, float, float], seed: int = 1, at: int = 0
) -> torch.Tensor:
    """Sample with params (1 / temperature, top_k, top_p, min_p) at position `at`."""
    from windlass.kernels.triton.sample import sample

    rows = logits.shape[0]
    by_slot = torch.tensor([params] * rows, device=CUDA)
    seeds = torch.arange(rows, device=CUDA) * 1_000_003 + seed
    slots = torch.arange(rows, dtype=torch.int32, device=CUDA)
    positions = torch.full((rows,), at, dtype=torch.int32, device=CUDA)
    last = torch.zeros(rows, dtype=torch.int32, device=CUDA)
    tokens = sample(logits, by_slot, seeds, slots, positions, last)
    assert torch.equal(tokens, last)
    return tokens


@pytest.mark.parametrize("size", [5, 2048, 49152, 128256])
def test_greedy_is_argmax(size: int) -> None:
    logits = torch.randn(9, size, device=CUDA)
    assert torch.equal(draw(logits, (0.0, 0.0, 1.0, 0.0)).long(), logits.argmax(-1))


def test_drawn_tokens_follow_the_distribution() -> None:
    row = torch.tensor([2.0, 1.0, 0.0, -1.0, -30.0], device=CUDA)
    draws = 20_000
    tokens = draw(row.expand(draws, -1).contiguous(), (1.0, 0.0, 1.0, 0.0))
    counts = torch.bincount(tokens.long(), minlength=5)[:4].float()
    want = draws * row[:4].softmax(0)
    assert ((counts - want) ** 2 / want).sum() < 16.3  # 3 degrees of freedom, p = 0.001
    again = draw(row.expand(draws, -1).contiguous(), (1.0, 0.0, 1.0, 0.0))
    assert torch.equal(tokens, again)
    other = draw(row.expand(draws, -1).contiguous(), (1.0, 0.0, 1.0, 0.0), at=1)
    assert not torch.equal(tokens, other)


@pytest.mark.parametrize(
    "params", [(1.0, 7, 1.0, 0.0), (0.5, 0, 0.8, 0.0), (2.0, 0, 1.0, 0.1), (1.25, 20, 0.7, 0.02)]
)
def test_truncation_allows_the_tokens_of_the_reference(params) -> None:
    from windlass.runner.filters import truncate

    logits = torch.randn(6, 3000, device=CUDA) * 4
    inverse_temperature, top_k, top_p, min_p = params
    full = [torch.full((6,), value, device=CUDA) for value in (top_k, top_p, min_p)]
    allowed = truncate(logits * inverse_temperature, full[0].int(), full[1], full[2]).isfinite()
    drawn = torch.stack([draw(logits, params, seed=s) for s in range(300)]).long()
    assert allowed.gather(1, drawn.T).all()
    for row in range(6):
        seen = set(drawn[:, row].tolist())
        best = logits[row].argmax().item()
        assert best in seen
        scaled = logits[row] * inverse_temperature
        likely = scaled.masked_fill(~allowed[row], float("-inf")).softmax(0) > 0.05
        assert set(likely.nonzero()[:, 0].tolist()) <= seen
