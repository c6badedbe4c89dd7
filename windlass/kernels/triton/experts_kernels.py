"""The GEMMs of mixture-of-experts MLPs: tiles of one expert's pairs, and the sum over a token's experts.

The weight's rows are the long side of a tile, as in skinny.py, so one kernel serves one pair and many.
Every output is one sum over K, in order, so a row's result depends neither on other rows nor on the
tiling. The first GEMM reads gate and up of a column as adjacent rows of its tile and applies the
activation; the second one stores a row per pair, which `combine_kernel` adds in the order of a
token's experts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from windlass.kernels.triton import pdl


@triton.jit
def _activated(gate, up, KIND: tl.constexpr, alpha, limit):
    """The expert's activation, in float32."""
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
        column = tl.minimum(tl.program_id(0) * (OUTPUTS // 2) + at // 2, N // 2 - 1)
        row = 2 * column + at % 2 if ORDER == "interleaved" else at % 2 * (N // 2) + column
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
def _scan_wide(acc, x, weight, tokens, rows, inside, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Add weight[rows] @ x[tokens].T to acc [outputs, rows], with 16-bit weights."""
    k = tl.arange(0, BLOCK_K)
    x_at = x + tokens[None, :] * K + k[:, None]
    w_at = weight + rows[:, None] * K + k[None, :]
    repeated: tl.constexpr = acc.shape[1] > 16  # then repeated reads cost less than masks
    for start in range(0, K, BLOCK_K):
        x_tile = _inputs(x_at, start, k, inside, K, BLOCK_K, repeated)
        acc = tl.dot(_codes(w_at, start, k, K, BLOCK_K), x_tile, acc)
    return acc


@triton.jit
def _quantised(value, AXIS: tl.constexpr):
    """Quantise a tile to e4m3 with one scale per column (AXIS 0) or row (AXIS 1): (codes, scales)."""
    value = value.to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), AXIS) / 448.0, 1.1754943508222875e-38)
    return (value / tl.expand_dims(scale, AXIS)).to(tl.float8e4nv), scale


@triton.jit
def _scan_fp8(
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
    BLOCKS: tl.constexpr,
):
    """The same in e4m3; inputs have a scale per token and 128 inputs, weights per row or block.

    Without `x_scales` the inputs are 16-bit and are quantised here, to the same codes.
    """
    k = tl.arange(0, 128)
    x_at = x + tokens[None, :] * K + k[:, None]
    w_at = codes + rows[:, None] * K + k[None, :]
    repeated: tl.constexpr = acc.shape[1] > 16
    steps: tl.constexpr = (K + 127) // 128
    for step in range(0, steps):
        w_tile = _codes(w_at, step * 128, k, K, 128)
        x_tile = _inputs(x_at, step * 128, k, inside, K, 128, repeated)
        if x_scales is None:
            x_tile, x_scale = _quantised(x_tile, 0)
        else:
            x_scale = tl.load(x_scales + step * M + tokens)
        if BLOCKS:
            scale = tl.load(scales + rows // 128 * steps + step)
            acc += tl.dot(w_tile, x_tile) * scale[:, None] * x_scale[None, :]
        else:
            acc += tl.dot(w_tile, x_tile) * x_scale[None, :]
    if not BLOCKS:
        acc *= tl.load(scales + rows)[:, None]
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
    if scales.dtype.element_ty == tl.uint8:  # exponents
        scale = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
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
):
    """The same with 8-bit codes, which are dequantised to the type of x."""
    k = tl.arange(0, 128)
    x_at = x + tokens[None, :] * K + k[:, None]
    w_at = codes + rows[:, None] * K + k[None, :]
    repeated: tl.constexpr = acc.shape[1] > 16
    for start in range(0, K, 128):
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
    shifted to their places, and one multiplication scales both floats.
    """
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 first, second, part, sign;
        prmt.b32 first, $4, 0, 0x4140;
        prmt.b32 second, $4, 0, 0x4342;
        shl.b32 part, first, 6;
        and.b32 part, part, 0x01c001c0;
        shl.b32 sign, first, 12;
        lop3.b32 part, sign, 0x80008000, part, 0xea;
        mul.rn.bf16x2 $0, part, $5;
        shl.b32 part, second, 6;
        and.b32 part, part, 0x01c001c0;
        shl.b32 sign, second, 12;
        lop3.b32 part, sign, 0x80008000, part, 0xea;
        mul.rn.bf16x2 $1, part, $6;
        shl.b32 part, first, 2;
        and.b32 part, part, 0x01c001c0;
        shl.b32 sign, first, 8;
        lop3.b32 part, sign, 0x80008000, part, 0xea;
        mul.rn.bf16x2 $2, part, $7;
        shl.b32 part, second, 2;
        and.b32 part, part, 0x01c001c0;
        shl.b32 sign, second, 8;
        lop3.b32 part, sign, 0x80008000, part, 0xea;
        mul.rn.bf16x2 $3, part, $8;
        }
        """,
        "=&r,=&r,=&r,=&r,r,r,r,r,r",
        [packed, low_scale.to(tl.bfloat16), high_scale.to(tl.bfloat16)],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def _scan_e2m1(
    acc,
    x,
    codes,
    scales,
    tokens,
    rows,
    inside,
    stride,
    K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """_scan_four for e2m1 codes in bf16."""
    k = tl.arange(0, 64)
    x_at = x + tokens[None, :] * K + k[:, None]
    blocks: tl.constexpr = (K + 127) // 128
    w_at = codes + rows[:, None] * (64 * blocks) + k[None, :]
    repeated: tl.constexpr = acc.shape[1] > 16
    for block in range(0, blocks):
        start = block * 128
        low_scale = _by_group(scales, None, start, rows, stride, 64, GROUP, GROUP)
        high_scale = _by_group(scales, None, start + 64, rows, stride, 64, GROUP, GROUP)
        low, high = _e2m1_halves(tl.load(w_at + block * 64), low_scale, high_scale)
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
):
    """The same with 4-bit codes; byte j of a block of 128 inputs holds inputs j and 64 + j."""
    k = tl.arange(0, 64)
    x_at = x + tokens[None, :] * K + k[:, None]
    blocks: tl.constexpr = (K + 127) // 128
    w_at = codes + rows[:, None] * (64 * blocks) + k[None, :]
    repeated: tl.constexpr = acc.shape[1] > 16
    for block in range(0, blocks):
        packed = tl.load(w_at + block * 64).to(tl.int32)
        for half in tl.static_range(2):
            start = block * 128 + half * 64
            value = _values((packed >> (4 * half)) & 15, table, E2M1)
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
    if GATED:
        both = tl.reshape(acc, [OUTPUTS // 2, 2, acc.shape[1]])
        gate, up = tl.split(tl.permute(both, (0, 2, 1)))
        acc = _activated(gate, up, KIND, alpha, limit)
    size: tl.constexpr = N // 2 if GATED else N
    column = tl.program_id(0) * acc.shape[0] + tl.arange(0, acc.shape[0])
    at = out + pair.to(tl.int64)[None, :] * size + column[:, None]
    mask = inside[None, :] & (column < size)[:, None]
    tl.store(at, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M", "prefetched"])
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
    alpha,
    limit,
    M,
    stride,
    prefetched,
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
    DIVIDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[pair] = x[pair // TOP_K] @ weight[expert].T + bias[expert], activated if GATED.

    The weight of an expert is [N, K]; x has M rows, and scales per group are [groups, stride]. The
    second GEMM of unsorted pairs prefetches `prefetched` bytes of each row of the weight.
    """
    # The kernel before the second GEMM has waited for the routing before it let this one start.
    if GATED:
        pdl.wait(PDL)
    tile = tl.program_id(1)
    lane = tl.arange(0, ROWS)
    num_rows = 1
    if tile_rows is not None:
        num_rows = tl.load(tile_rows + tile)
        if num_rows == 0:
            return
    expert = tl.load(tile_experts + tile).to(tl.int64)
    if DIVIDED:  # noqa: SIM102 (a constant): a tile is one pair, maybe of another rank
        if expert < 0:
            return
    inside = lane < num_rows
    pair = tile + lane * 0
    if pairs is not None:
        pair = tl.load(pairs + tile * ROWS + lane, mask=inside, other=0)
    rows = expert * N + _weight_rows(N, OUTPUTS, GATED, ORDER)
    if not GATED:
        if tile_rows is None:
            # A row of 4-bit codes has whole blocks of 128 inputs in half as many bytes.
            width: tl.constexpr = (K + 127) // 128 * 64 if FORM == "four" or FORM == "e2m1" else K
            pdl.prefetch(codes + rows * width, (rows * 0 + prefetched).to(tl.int32), PDL)
        pdl.wait(PDL)
    pdl.release(PDL)
    acc = tl.zeros([OUTPUTS, ROWS], dtype=tl.float32)
    tokens = (pair // TOP_K).to(tl.int64)
    if FORM == "wide":
        acc = _scan_wide(acc, x, codes, tokens, rows, inside, K, BLOCK_K)
    elif FORM == "fp8":
        acc = _scan_fp8(acc, x, x_scales, codes, scales, tokens, rows, inside, M, K, GROUP == 128)
    elif FORM == "eight":
        acc = _scan_eight(acc, x, codes, scales, offsets, tokens, rows, inside, stride, K, GROUP)
    elif FORM == "e2m1" and x.dtype.element_ty == tl.bfloat16:
        acc = _scan_e2m1(acc, x, codes, scales, tokens, rows, inside, stride, K, GROUP)
    else:
        acc = _scan_four(
            acc, x, codes, scales, offsets, sub_scales, table, tokens, rows, inside, stride,
            K, GROUP, SUPER, FORM == "e2m1",
        )  # fmt: skip
    if bias is not None:
        bias = tl.load(bias + rows)
    _store(acc, bias, out, pair, inside, alpha, limit, N, GATED, KIND)


@triton.jit(do_not_specialize=["M"])
def quantise_inputs_kernel(
    x, codes, scales, M, K: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr
):
    """Quantise 128 inputs of ROWS rows to e4m3, each row with one scale; scales are [blocks, M]."""
    pdl.begin(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.program_id(1) * 128 + tl.arange(0, 128)
    mask = (row < M)[:, None] & (at < K)[None, :]
    place = row.to(tl.int64)[:, None] * K + at[None, :]
    code, scale = _quantised(tl.load(x + place, mask=mask, other=0.0), 1)
    tl.store(codes + place, code, mask=mask)
    tl.store(scales + tl.program_id(1).to(tl.int64) * M + row, scale, mask=row < M)


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
