"""Mamba-2 on a GPU: the selective scan of rows of any length.

Rows of one token update the state by its definition, and so do all rows of batch-invariant steps. Other
rows compute tokens in pieces, as attention whose weights decay.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from windlass.core.recurrent import RecurrentHeads
from windlass.kernels.batch import LayerState, StepBatch
from windlass.kernels.mamba import ScanWeights
from windlass.kernels.triton import pdl
from windlass.kernels.triton.recurrent import first_token, launches, page, piece, silu, softplus

_PIECE = 32  # tokens that the scan computes together, at most
_LARGE_STATE = 256  # needs the registers of more warps, for fewer tokens
_FEATURES = 32  # of a head, at most, that a program of the scan computes


def features_of(dim: int) -> int:
    """The features of a head, a power of two, that a program computes."""
    return math.gcd(_FEATURES, dim)


def piece_and_warps(state_size: int) -> tuple[int, int]:
    """The tokens that a program computes together, and its warps."""
    return (_PIECE // 2, 8) if state_size >= _LARGE_STATE else (_PIECE, 4)


@triton.jit
def _update(state, x, b, c, dt, decay):
    """One token: the new state and its product with C."""
    state = state * tl.exp(dt * decay) + (x * dt)[:, None] * b[None, :]
    return state, tl.sum(state * c[None, :], 1)


@triton.jit(do_not_specialize=["num_tokens"])
def selective_scan_kernel(
    projected, mixed, decay, skip, dt_bias, out, pages, rows, positions, token_slots, tables,
    table_stride, page_stride, num_tokens, width,
    HEADS: tl.constexpr, DIM: tl.constexpr, GROUPS: tl.constexpr, STATE: tl.constexpr,
    SIZE: tl.constexpr, TOKENS: tl.constexpr, FEATURES: tl.constexpr, TILES: tl.constexpr,
    PIECES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row, one head and FEATURES of its features. PIECES: TOKENS tokens are computed together."""
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
    own = tl.load(skip + head)
    at_state = (head * DIM + d)[:, None] * STATE + n[None, :]
    old = page(pages, table, tl.maximum(start - 1, 0), page_stride, SIZE) + at_state
    state = tl.load(old, mask=(start > 0) & (at_state >= 0), other=0.0)
    group = head // (HEADS // GROUPS)
    x_at = head * DIM + d
    b_at = HEADS * DIM + group * STATE + n
    c_at = b_at + GROUPS * STATE
    i = tl.arange(0, TOKENS)
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
        if PIECES:
            at = (token + begin - start + i).to(tl.int64)
            used = i < end - begin
            mask = used[:, None]
            line = mixed + at[:, None] * channels
            x = tl.load(line + x_at[None, :], mask=mask, other=0.0).to(tl.float32)
            b = tl.load(line + b_at[None, :], mask=mask, other=0.0).to(tl.float32)
            c = tl.load(line + c_at[None, :], mask=mask, other=0.0).to(tl.float32)
            raw = tl.load(projected + at * width + width - HEADS + head, mask=used, other=0.0)
            dt = tl.where(used, softplus(raw.to(tl.float32) + extra), 0.0)
            logs = dt * rate
            total = tl.cumsum(logs, 0)
            last = tl.sum(logs, 0)
            distance = total[:, None] - total[None, :]
            weights = tl.where(i[:, None] >= i[None, :], tl.exp(distance), 0.0)
            scores = tl.dot(c, tl.trans(b)) * weights * dt[None, :]
            y = tl.dot(scores, x)
            y += tl.dot(c, tl.trans(state)) * tl.exp(total)[:, None]
            rest = x * (dt * tl.exp(last - total))[:, None]
            state = state * tl.exp(last) + tl.dot(tl.trans(rest), b)
            gate = tl.load(projected + at[:, None] * width + x_at[None, :], mask=mask, other=0.0)
            y = (y + x * own) * silu(gate.to(tl.float32))
            place = out + at[:, None] * (HEADS * DIM) + x_at[None, :]
            tl.store(place, y.to(out.dtype.element_ty), mask=mask)
        else:
            for position in range(begin, end):
                at_one = (token + position - start).to(tl.int64)
                line_one = mixed + at_one * channels
                x_one = tl.load(line_one + x_at).to(tl.float32)
                b_one = tl.load(line_one + b_at).to(tl.float32)
                c_one = tl.load(line_one + c_at).to(tl.float32)
                raw_one = tl.load(projected + at_one * width + width - HEADS + head)
                dt_one = softplus(raw_one.to(tl.float32) + extra)
                state, y_one = _update(state, x_one, b_one, c_one, dt_one, rate)
                gate_one = tl.load(projected + at_one * width + x_at).to(tl.float32)
                y_one = (y_one + x_one * own) * silu(gate_one)
                place_one = out + at_one * (HEADS * DIM) + x_at
                tl.store(place_one, y_one.to(out.dtype.element_ty))
        if (end % SIZE == 0) | (goes_on == 0):
            new = page(pages, table, end - 1, page_stride, SIZE) + at_state
            tl.store(new, state)
        begin = end


def selective_scan(
    projected: Tensor,
    mixed: Tensor,
    weights: ScanWeights,
    heads: RecurrentHeads,
    state: LayerState,
    batch: StepBatch,
) -> Tensor:
    """Same contract as `mamba.selective_scan`."""
    tokens, width = projected.shape
    out = projected.new_empty((tokens, heads.inner))
    features, (piece_tokens, warps) = features_of(heads.dim), piece_and_warps(heads.state_size)
    for rows, tiles in launches(batch):
        pieces = tiles and not batch.batch_invariant
        selective_scan_kernel[(rows.shape[0], heads.inner // features)](
            *(projected, mixed, weights.decay, weights.skip, weights.dt_bias, out),
            *(state.pages, rows, batch.positions, batch.token_slots, batch.table_of(state)),
            *(batch.tables.stride(1), state.pages.stride(0), tokens, width),
            HEADS=heads.num_heads,
            DIM=heads.dim,
            GROUPS=heads.num_groups,
            STATE=heads.state_size,
            SIZE=state.block_size,
            TOKENS=piece_tokens if tiles else 1,
            FEATURES=features,
            TILES=tiles,
            PIECES=pieces,
            num_warps=warps,
            **pdl.options(),
        )
    return out
