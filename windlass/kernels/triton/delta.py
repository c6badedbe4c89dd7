"""The gated delta rule on a GPU, over rows of any length, and the gated norm of its outputs.

Tokens are computed in order by the definition, so results do not depend on how a prompt is cut into steps. A
program reads the inputs of the next token before it computes one.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from windlass.core.recurrent import RecurrentHeads
from windlass.kernels.batch import LayerState, StepBatch
from windlass.kernels.delta import UNIT_EPS, DeltaWeights
from windlass.kernels.triton import pdl
from windlass.kernels.triton.recurrent import first_token, launches, page, piece, silu, softplus

_TOKENS = 64  # whose positions are read together
_FEATURES = 32  # of a head, that a program computes
_HEADS = 8  # that a program normalises


@triton.jit
def _inputs(mixed, numbers, at, mask, k_at, q_at, v_at, CHANNELS: tl.constexpr, HEADS: tl.constexpr, width):  # fmt: skip
    """Key, query, value, beta and dt of token `at`; zeros if it is masked."""
    line = mixed + at.to(tl.int64) * CHANNELS
    own = numbers + at.to(tl.int64) * width
    k = tl.load(line + k_at, mask=mask, other=0.0)
    q = tl.load(line + q_at, mask=mask, other=0.0)
    v = tl.load(line + v_at, mask=mask, other=0.0)
    beta = tl.load(own, mask=mask, other=0.0)
    dt = tl.load(own + HEADS, mask=mask, other=0.0)
    return k, q, v, beta, dt


@triton.jit
def _unit(x, eps):
    x = x.to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, 0) + eps)


@triton.jit(do_not_specialize=["num_tokens"])
def delta_rule_kernel(
    projected, mixed, decay, dt_bias, out, pages, rows, positions, token_slots, tables,
    table_stride, page_stride, num_tokens, width, scale, unit_eps,
    HEADS: tl.constexpr, DIM: tl.constexpr, GROUPS: tl.constexpr, STATE: tl.constexpr,
    SIZE: tl.constexpr, TOKENS: tl.constexpr, FEATURES: tl.constexpr, TILED: tl.constexpr,
    TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row, one head and FEATURES of its features."""
    pdl.begin(PDL)
    token = first_token(rows, tl.program_id(0), TILES)
    if token < 0:
        return
    parts: tl.constexpr = DIM // FEATURES
    channels: tl.constexpr = HEADS * DIM + 2 * GROUPS * STATE
    head = tl.program_id(1) // parts
    d = (tl.program_id(1) % parts) * FEATURES + tl.arange(0, FEATURES)
    n = tl.arange(0, STATE)
    slot = tl.load(token_slots + token)
    start = tl.load(positions + token).to(tl.int32)
    table = tables + slot.to(tl.int64) * table_stride
    rate = tl.load(decay + head)
    extra = tl.load(dt_bias + head)
    at_state = (head * DIM + d)[:, None] * STATE + n[None, :]
    old = page(pages, table, tl.maximum(start - 1, 0), page_stride, SIZE) + at_state
    state = tl.load(old, mask=(start > 0) & (at_state >= 0), other=0.0)
    group = head % GROUPS if TILED else head // (HEADS // GROUPS)
    v_at = head * DIM + d
    k_at = HEADS * DIM + group * STATE + n
    q_at = k_at + GROUPS * STATE
    numbers = projected + width - 2 * HEADS + head
    i = tl.arange(0, TOKENS)
    k, q, v, beta, dt = _inputs(
        *(mixed, numbers, token, token >= 0, k_at, q_at, v_at, channels, HEADS, width)
    )
    tl.debug_barrier()  # the page may be written below, by other threads
    begin = start
    goes_on = begin >= 0
    while goes_on:
        if TILES:
            end, goes_on = piece(
                *(positions, token_slots, token, slot, start, begin, num_tokens, i, SIZE)
            )
        else:
            end, goes_on = begin + 1, begin < 0
        for position in range(begin, end):
            at = token + position - start
            next_k, next_q, next_v, next_beta, next_dt = _inputs(
                *(mixed, numbers, at + 1, at + 1 < num_tokens),
                *(k_at, q_at, v_at, channels, HEADS, width),
            )
            key = _unit(k, unit_eps)
            state = state * tl.exp(softplus(dt.to(tl.float32) + extra) * rate)
            known = tl.sum(state * key[None, :], 1)
            added = tl.sigmoid(beta.to(tl.float32)) * (v.to(tl.float32) - known)
            state += added[:, None] * key[None, :]
            y = tl.sum(state * (_unit(q, unit_eps) * scale)[None, :], 1)
            place = out + at.to(tl.int64) * (HEADS * DIM) + v_at
            tl.store(place, y.to(out.dtype.element_ty))
            k, q, v, beta, dt = next_k, next_q, next_v, next_beta, next_dt
        if (end % SIZE == 0) | (goes_on == 0):
            new = page(pages, table, end - 1, page_stride, SIZE) + at_state
            tl.store(new, state)
        begin = end


@triton.jit
def gated_norm_kernel(
    y, projected, weight, width, eps, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """In place: the outputs of one token and BLOCK heads, normalised, times silu(gate)."""
    pdl.begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, DIM)
    at = (heads * DIM)[:, None] + d[None, :]
    mask = (heads < HEADS)[:, None] & (at >= 0)
    x = tl.load(y + token * (HEADS * DIM) + at, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(projected + token * width + at, mask=mask, other=0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None] * tl.load(weight + d)[None, :]
    tl.store(y + token * (HEADS * DIM) + at, (x * silu(gate)).to(y.dtype.element_ty), mask=mask)


def delta_rule(
    projected: Tensor,
    mixed: Tensor,
    weights: DeltaWeights,
    heads: RecurrentHeads,
    state: LayerState,
    batch: StepBatch,
) -> Tensor:
    """Same contract as `delta.delta_rule`."""
    tokens, width = projected.shape
    out = projected.new_empty((tokens, heads.inner))
    features = min(_FEATURES, heads.dim)
    for rows, tiles in launches(batch):
        delta_rule_kernel[(rows.shape[0], heads.inner // features)](
            *(projected, mixed, weights.decay, weights.dt_bias, out, state.pages, rows),
            *(batch.positions, batch.token_slots, batch.table_of(state), batch.tables.stride(1)),
            *(state.pages.stride(0), tokens, width, heads.state_size**-0.5, UNIT_EPS),
            HEADS=heads.num_heads,
            DIM=heads.dim,
            GROUPS=heads.num_groups,
            STATE=heads.state_size,
            SIZE=state.block_size,
            TOKENS=_TOKENS if tiles else 1,
            FEATURES=features,
            TILED=heads.tiled,
            TILES=tiles,
            num_warps=4,
            **pdl.options(),
        )
    gated_norm_kernel[(tokens, triton.cdiv(heads.num_heads, _HEADS))](
        *(out, projected, weights.norm, width, weights.eps),
        HEADS=heads.num_heads,
        DIM=heads.dim,
        BLOCK=_HEADS,
        num_warps=4,
        **pdl.options(),
    )
    return out
