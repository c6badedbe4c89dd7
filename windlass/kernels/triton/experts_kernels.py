"""The GEMMs of mixture-of-experts MLPs: tiles of one expert's pairs, and the sum over a token's experts.

The weight's rows are the long side of a tile, as in skinny.py, so one kernel serves one pair and many.
Every output is one sum over K, in order, so a row's result depends neither on other rows nor on the
tiling. The first GEMM has gate and up of a column in one tile, 8 rows apart, so that one thread holds
both sums and applies the activation (experts without a gate have up alone); the second one stores a row per pair, which `combine_kernel` adds
in the order of a token's experts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from windlass.kernels.triton import pdl
from windlass.kernels.triton.experts_inputs import e4m3_scale


@triton.jit
def _activated(gate, up, KIND: tl.constexpr, alpha, limit):
    """The expert's activation, in float32. Without a gate, KIND is relu2."""
    if KIND == "clamped":
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1
        return gate / (1 + tl.exp(-alpha * gate)) * up
    elif KIND == "gelu_tanh":
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return gate / (1 + tl.exp(-2 * inner)) * up
    else:
        return gate / (1 + tl.exp(-gate)) * up


@triton.jit
def _weight_rows(N: tl.constexpr, OUTPUTS: tl.constexpr, GATED: tl.constexpr, ORDER: tl.constexpr):
    """Rows of an expert's weight in this program's tile; rows past the end repeat the last one."""
    at = tl.arange(0, OUTPUTS)
    if GATED:
        is_up = at // 8 % 2
        column = tl.program_id(0) * (OUTPUTS // 2) + at // 16 * 8 + at % 8
        column = tl.minimum(column, N // 2 - 1)
        row = 2 * column + is_up if ORDER == "interleaved" else is_up * (N // 2) + column
    else:
        row = tl.minimum(tl.program_id(0) * OUTPUTS + at, N - 1)
    return row


@triton.jit
def _inputs(x_at, start, k, inside, K: tl.constexpr, BLOCK: tl.constexpr, REPEATED: tl.constexpr):
    """Inputs [inputs, rows] from `start` on; with REPEATED, rows that are not inside are read, too."""
    if K % BLOCK == 0:
        if REPEATED:
            return tl.load(x_at + start)
        else:
            return tl.load(x_at + start, mask=inside[None, :], other=0.0)
    else:
        return tl.load(x_at + start, mask=inside[None, :] & (start + k < K)[:, None], other=0.0)


@triton.jit
def _codes(w_at, start, k, K: tl.constexpr, BLOCK: tl.constexpr):
    """A tile of codes or of 16-bit weights from input `start` on."""
    if K % BLOCK == 0:
        return tl.load(w_at + start)
    else:
        return tl.load(w_at + start, mask=(start + k < K)[None, :], other=0.0)


@triton.jit
def _scan_wide(
    acc,
    x,
    weight,
    tokens,
    rows,
    inside,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Add weight[rows] @ x[tokens].T to acc [outputs, rows], with 16-bit weights."""
    k = tl.arange(0, BLOCK_K)
    x_at = x + tokens[None, :] * K + k[:, None]
    w_at = weight + rows[:, None] * K + k[None, :]
    repeated: tl.constexpr = acc.shape[1] > 16  # then repeated reads cost less than masks
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        x_tile = _inputs(x_at, start, k, inside, K, BLOCK_K, repeated)
        acc = tl.dot(_codes(w_at, start, k, K, BLOCK_K), x_tile, acc)
    return acc


@triton.jit
def _scan_fp8_rows(
    acc,
    x,
    x_scales,
    codes,
    scales,
    tokens,
    rows,
    inside,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The same in e4m3, with one scale per token and one per row of the weight.

    Without `x_scales` the inputs are one 16-bit row, which is quantised here, to the same codes.
    """
    k = tl.arange(0, BLOCK_K)
    x_at = x + tokens[None, :] * K + k[:, None]
    w_at = codes + rows[:, None] * K + k[None, :]
    repeated: tl.constexpr = acc.shape[1] > 16
    x_scale = tl.zeros([acc.shape[1]], dtype=tl.float32)
    if x_scales is None:
        at = tl.arange(0, triton.next_power_of_2(K))
        row = tl.load(x + tl.max(tokens, 0) * K + at, mask=at < K, other=0.0)
        x_scale += e4m3_scale(tl.max(tl.abs(row.to(tl.float32)), 0))
    else:
        x_scale = tl.load(x_scales + tokens)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        x_tile = _inputs(x_at, start, k, inside, K, BLOCK_K, repeated)
        if x_scales is None:
            x_tile = (x_tile.to(tl.float32) / x_scale[None, :]).to(tl.float8e4nv)
        acc = tl.dot(_codes(w_at, start, k, K, BLOCK_K), x_tile, acc)
    return acc * tl.load(scales + rows)[:, None] * x_scale[None, :]


@triton.jit
def _scan_fp8_blocks(
    acc,
    x,
    x_scales,
    codes,
    scales,
    tokens,
    rows,
    inside,
    M,
    K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The same with scales per token and 128 inputs, and per block of the weight.

    Without `x_scales` the inputs are 16-bit and are quantised here, to the same codes.
    """
    k = tl.arange(0, 128)
    x_at = x + tokens[None, :] * K + k[:, None]
    w_at = codes + rows[:, None] * K + k[None, :]
    repeated: tl.constexpr = acc.shape[1] > 16
    steps: tl.constexpr = (K + 127) // 128
    for step in tl.range(0, steps, num_stages=STAGES):
        w_tile = _codes(w_at, step * 128, k, K, 128)
        x_tile = _inputs(x_at, step * 128, k, inside, K, 128, repeated)
        if x_scales is None:
            wide = x_tile.to(tl.float32)
            x_scale = e4m3_scale(tl.max(tl.abs(wide), 0))
            x_tile = (wide / x_scale[None, :]).to(tl.float8e4nv)
        else:
            x_scale = tl.load(x_scales + step * M + tokens)
        scale = tl.load(scales + rows // 128 * steps + step)
        acc += tl.dot(w_tile, x_tile) * scale[:, None] * x_scale[None, :]
    return acc


@triton.jit
def _spread(values, COUNT: tl.constexpr):
    """Repeat the columns of [outputs, groups], so that they are COUNT."""
    groups: tl.constexpr = values.shape[1]
    wide = tl.broadcast_to(values[:, :, None], [values.shape[0], groups, COUNT // groups])
    return tl.reshape(wide, [values.shape[0], COUNT])


@triton.jit
def _by_group(
    scales,
    sub_scales,
    start,
    rows,
    stride,
    COUNT: tl.constexpr,
    GROUP: tl.constexpr,
    SUPER: tl.constexpr,
):
    """The scales [outputs, COUNT] of inputs [start, start + COUNT); scales are [groups, stride]."""
    groups: tl.constexpr = COUNT // GROUP if GROUP < COUNT else 1
    group = start // GROUP + tl.arange(0, groups)[None, :]
    scale = tl.load(scales + (group * GROUP // SUPER).to(tl.int64) * stride + rows[:, None])
    scale = scale.to(tl.float32)
    if sub_scales is not None:
        scale *= tl.load(sub_scales + group.to(tl.int64) * stride + rows[:, None]).to(tl.float32)
    return _spread(scale, COUNT)


@triton.jit
def _scan_eight(
    acc,
    x,
    codes,
    scales,
    offsets,
    tokens,
    rows,
    inside,
    stride,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The same with 8-bit codes, which are dequantised to the type of x."""
    k = tl.arange(0, 128)
    x_at = x + tokens[None, :] * K + k[:, None]
    w_at = codes + rows[:, None] * K + k[None, :]
    repeated: tl.constexpr = acc.shape[1] > 16
    for start in tl.range(0, K, 128, num_stages=STAGES):
        x_tile = _inputs(x_at, start, k, inside, K, 128, repeated)
        w_tile = _codes(w_at, start, k, K, 128).to(tl.float32)
        w_tile *= _by_group(scales, None, start, rows, stride, 128, GROUP, GROUP)
        if offsets is not None:
            w_tile += _by_group(offsets, None, start, rows, stride, 128, GROUP, GROUP)
        acc = tl.dot(w_tile.to(x_tile.dtype), x_tile, acc)
    return acc


@triton.jit
def _values(code, table, E2M1: tl.constexpr):
    """The values of 4-bit codes: of the table, of the bits of e2m1, or the codes themselves."""
    if E2M1:
        bits = ((code & 7) << 22) | ((code & 8) << 28)
        return bits.to(tl.float32, bitcast=True)  # times 2^126 is the value
    elif table is not None:
        return tl.load(table + code)
    else:
        return code.to(tl.float32)


@triton.jit
def _e2m1_halves(packed, low_scale, high_scale):
    """The values in bf16 of bytes of two e2m1 codes: (low halves, high halves).

    Four bytes at a time: two bytes fill the lower halves of two 16-bit floats, sign and magnitude are
    shifted to their places, and one multiplication scales both floats. GPUs before Hopper multiply
    bf16 only by adding a product, here to -0.
    """
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 first, second, part, sign, zero;
        mov.b32 zero, 0x80008000;
        prmt.b32 first, $4, 0, 0x4140;
        prmt.b32 second, $4, 0, 0x4342;
        shl.b32 part, first, 6;
        and.b32 part, part, 0x01c001c0;
        shl.b32 sign, first, 12;
        lop3.b32 part, sign, 0x80008000, part, 0xea;
        fma.rn.bf16x2 $0, part, $5, zero;
        shl.b32 part, second, 6;
        and.b32 part, part, 0x01c001c0;
        shl.b32 sign, second, 12;
        lop3.b32 part, sign, 0x80008000, part, 0xea;
        fma.rn.bf16x2 $1, part, $6, zero;
        shl.b32 part, first, 2;
        and.b32 part, part, 0x01c001c0;
        shl.b32 sign, first, 8;
        lop3.b32 part, sign, 0x80008000, part, 0xea;
        fma.rn.bf16x2 $2, part, $7, zero;
        shl.b32 part, second, 2;
        and.b32 part, part, 0x01c001c0;
        shl.b32 sign, second, 8;
        lop3.b32 part, sign, 0x80008000, part, 0xea;
        fma.rn.bf16x2 $3, part, $8, zero;
        }
        """,
        "=&r,=&r,=&r,=&r,r,r,r,r,r",
        [packed, low_scale.to(tl.bfloat16), high_scale.to(tl.bfloat16)],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def _e2m1_scales(exponents, HALF: tl.constexpr):
    """The scales [outputs, 64] of a half block, whose exponents are two bytes of int32 [outputs, 1]."""
    shift = 16 * HALF + 8 * tl.arange(0, 2)[None, :]
    scale = (((exponents >> shift) & 255) << 23).to(tl.float32, bitcast=True)
    return _spread(scale, 64)


@triton.jit
def _scan_e2m1(acc, x, codes, scales, tokens, rows, inside, K: tl.constexpr, STAGES: tl.constexpr):
    """_scan_four for e2m1 codes in bf16."""
    k = tl.arange(0, 64)
    x_at = x + tokens[None, :] * K + k[:, None]
    blocks: tl.constexpr = (K + 127) // 128
    w_at = codes + rows[:, None] * (64 * blocks) + k[None, :]
    scales_at = scales + rows[:, None] * blocks
    repeated: tl.constexpr = acc.shape[1] > 16
    for block in tl.range(0, blocks, num_stages=STAGES):
        start = block * 128
        exponents = tl.load(scales_at + block)
        packed = tl.load(w_at + block * 64)
        low, high = _e2m1_halves(packed, _e2m1_scales(exponents, 0), _e2m1_scales(exponents, 1))
        acc = tl.dot(low, _inputs(x_at, start, k, inside, K, 128, repeated), acc)
        acc = tl.dot(high, _inputs(x_at, start + 64, k, inside, K, 128, repeated), acc)
    return acc


@triton.jit
def _scan_four(
    acc,
    x,
    codes,
    scales,
    offsets,
    sub_scales,
    table,
    tokens,
    rows,
    inside,
    stride,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    SUPER: tl.constexpr,
    E2M1: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The same with 4-bit codes; byte j of a block of 128 inputs holds inputs j and 64 + j."""
    k = tl.arange(0, 64)
    x_at = x + tokens[None, :] * K + k[:, None]
    blocks: tl.constexpr = (K + 127) // 128
    w_at = codes + rows[:, None] * (64 * blocks) + k[None, :]
    repeated: tl.constexpr = acc.shape[1] > 16
    for block in tl.range(0, blocks, num_stages=STAGES):
        packed = tl.load(w_at + block * 64).to(tl.int32)
        for half in tl.static_range(2):
            start = block * 128 + half * 64
            value = _values((packed >> (4 * half)) & 15, table, E2M1)
            if E2M1:
                value *= _e2m1_scales(tl.load(scales + rows[:, None] * blocks + block), half)
            else:
                value *= _by_group(scales, sub_scales, start, rows, stride, 64, GROUP, SUPER)
            if offsets is not None:
                value += _by_group(offsets, None, start, rows, stride, 64, GROUP, GROUP)
            x_tile = _inputs(x_at, start, k, inside, K, 128, repeated)
            acc = tl.dot(value.to(x_tile.dtype), x_tile, acc)
    return acc


@triton.jit
def _store(
    acc,
    bias,
    out,
    pair,
    inside,
    alpha,
    limit,
    N: tl.constexpr,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
):
    """Add the bias [outputs], activate if GATED, and store the rows of the pairs."""
    OUTPUTS: tl.constexpr = acc.shape[0]
    if bias is not None:
        acc += bias.to(tl.float32)[:, None]
    if GATED and KIND == "relu2":
        positive = tl.maximum(acc, 0.0)
        acc = positive * positive
    elif GATED:
        both = tl.reshape(acc, [OUTPUTS // 16, 2, 8, acc.shape[1]])
        gate, up = tl.split(tl.permute(both, (0, 2, 3, 1)))
        active = _activated(gate, up, KIND, alpha, limit)
        acc = tl.reshape(active, [OUTPUTS // 2, acc.shape[1]])
    size: tl.constexpr = N // 2 if GATED and KIND != "relu2" else N
    column = tl.program_id(0) * acc.shape[0] + tl.arange(0, acc.shape[0])
    at = out + pair.to(tl.int64)[None, :] * size + column[:, None]
    mask = inside[None, :] & (column < size)[:, None]
    tl.store(at, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _multiply(
    x,
    x_scales,
    codes,
    scales,
    offsets,
    sub_scales,
    table,
    bias,
    out,
    pairs,
    rows,
    num_rows,
    alpha,
    limit,
    M,
    stride,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    SUPER: tl.constexpr,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Multiply `num_rows` pairs, at most ROWS, with weight[rows]; `pairs` may be one pair's number."""
    OUTPUTS: tl.constexpr = rows.shape[0]
    lane = tl.arange(0, ROWS)
    inside = lane < num_rows
    pair = pairs + lane * 0
    if pairs.dtype.is_ptr():
        pair = tl.load(pairs + lane, mask=inside, other=0)
    acc = tl.zeros([OUTPUTS, ROWS], dtype=tl.float32)
    tokens = (pair // TOP_K).to(tl.int64)
    if FORM == "wide":
        acc = _scan_wide(acc, x, codes, tokens, rows, inside, K, BLOCK_K, STAGES)
    elif FORM == "fp8" and GROUP == 128:
        acc = _scan_fp8_blocks(acc, x, x_scales, codes, scales, tokens, rows, inside, M, K, STAGES)
    elif FORM == "fp8":
        acc = _scan_fp8_rows(
            acc, x, x_scales, codes, scales, tokens, rows, inside, K, BLOCK_K, STAGES
        )
    elif FORM == "eight":
        acc = _scan_eight(
            acc, x, codes, scales, offsets, tokens, rows, inside, stride, K, GROUP, STAGES
        )
    elif FORM == "e2m1" and x.dtype.element_ty == tl.bfloat16:
        acc = _scan_e2m1(acc, x, codes, scales, tokens, rows, inside, K, STAGES)
    else:
        acc = _scan_four(
            acc, x, codes, scales, offsets, sub_scales, table, tokens, rows, inside, stride,
            K, GROUP, SUPER, FORM == "e2m1", STAGES,
        )  # fmt: skip
    if bias is not None:
        bias = tl.load(bias + rows)
    _store(acc, bias, out, pair, inside, alpha, limit, N, GATED, KIND)


@triton.jit(do_not_specialize=["M", "prefetched", "num_experts"])
def expert_gemm_kernel(
    x,
    x_scales,
    codes,
    scales,
    offsets,
    sub_scales,
    table,
    bias,
    out,
    tile_experts,
    tile_rows,
    pairs,
    counts,
    alpha,
    limit,
    M,
    stride,
    prefetched,
    num_experts,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    SUPER: tl.constexpr,
    GATED: tl.constexpr,
    ORDER: tl.constexpr,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    DIVIDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[pair] = x[pair // TOP_K] @ weight[expert].T + bias[expert], activated if GATED.

    The weight of an expert is [N, K]; x has M rows, and scales per group are [groups, stride]. The
    second GEMM of unsorted pairs prefetches `prefetched` bytes of each row of the weight. A tile that
    is at most half full is computed with fewer rows, 16 at least, and more stages. `counts` becomes
    zero, for the next routing.
    """
    # The kernel before the second GEMM has waited for the routing before it let this one start.
    if GATED:
        pdl.wait(PDL)
    tile = tl.program_id(1)
    if counts is not None:  # noqa: SIM102 (a constant)
        if (tile == 0) & (tl.program_id(0) == 0):
            each = tl.arange(0, 512)  # the most experts
            tl.store(counts + each, each * 0, mask=each < num_experts)
    num_rows = 1
    if tile_rows is not None:
        num_rows = tl.load(tile_rows + tile)
        if num_rows == 0:
            return
    expert = tl.load(tile_experts + tile).to(tl.int64)
    if DIVIDED:  # noqa: SIM102 (a constant): a tile is one pair, maybe of another rank
        if expert < 0:
            return
    rows = expert * N + _weight_rows(N, OUTPUTS, GATED and KIND != "relu2", ORDER)
    if not GATED:
        if tile_rows is None:
            # A row of 4-bit codes has whole blocks of 128 inputs in half as many bytes.
            width: tl.constexpr = (K + 127) // 128 * 64 if FORM == "four" or FORM == "e2m1" else K
            pdl.prefetch(codes + rows * width, (rows * 0 + prefetched).to(tl.int32), PDL)
        pdl.wait(PDL)
    pdl.release(PDL)
    own = tile
    if pairs is not None:
        own = pairs + tile * ROWS
    HALF: tl.constexpr = ROWS // 2
    QUARTER: tl.constexpr = ROWS // 4
    HALF_STAGES: tl.constexpr = STAGES * (OUTPUTS + ROWS) // (OUTPUTS + HALF)
    QUARTER_STAGES: tl.constexpr = STAGES * (OUTPUTS + ROWS) // (OUTPUTS + QUARTER)
    if HALF < 16 or num_rows > HALF:
        _multiply(
            x, x_scales, codes, scales, offsets, sub_scales, table, bias, out, own, rows, num_rows,
            alpha, limit, M, stride,
            N, K, TOP_K, FORM, GROUP, SUPER, GATED, KIND, ROWS, BLOCK_K, STAGES,
        )  # fmt: skip
    elif QUARTER < 16 or num_rows > QUARTER:
        _multiply(
            x, x_scales, codes, scales, offsets, sub_scales, table, bias, out, own, rows, num_rows,
            alpha, limit, M, stride,
            N, K, TOP_K, FORM, GROUP, SUPER, GATED, KIND, HALF, BLOCK_K, HALF_STAGES,
        )  # fmt: skip
    else:
        _multiply(
            x, x_scales, codes, scales, offsets, sub_scales, table, bias, out, own, rows, num_rows,
            alpha, limit, M, stride,
            N, K, TOP_K, FORM, GROUP, SUPER, GATED, KIND, QUARTER, BLOCK_K, QUARTER_STAGES,
        )  # fmt: skip


@triton.jit
def combine_kernel(
    rows,
    weights,
    local,
    out,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[token] = sum of the rows of its pairs times their weights.

    Pairs whose `local` expert is -1 have no row.
    """
    pdl.begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = at < SIZE
    total = tl.zeros([WIDTH], dtype=tl.float32)
    for i in tl.static_range(TOP_K):
        pair = token * TOP_K + i
        if local is not None:
            mask = (at < SIZE) & (tl.load(local + pair) >= 0)
        row = tl.load(rows + pair * SIZE + at, mask=mask, other=0.0)
        total += row.to(tl.float32) * tl.load(weights + pair)
    tl.store(out + token * SIZE + at, total.to(out.dtype.element_ty), mask=at < SIZE)
