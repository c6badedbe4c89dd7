"""What kernels of recurrent layers share: rows that follow each other, and causal convolutions.

A program computes all tokens of a row, for some channels or for some of a head's features: it reads the
state at the row's start first, and writes states where blocks end and after the last token, so no other
program reads what it writes. No length is needed on the host: a row ends where the next token has another
slot or position.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from windlass.core.recurrent import RecurrentHeads
from windlass.kernels.batch import LayerState, StepBatch
from windlass.kernels.triton import pdl

_CHANNELS = 64  # of a convolution's program
_CONV_TOKENS = 32


@triton.jit
def first_token(rows, index, TILES: tl.constexpr):
    """The first token of a row; -1 for a tile that is not the first of its row."""
    if TILES:
        tile = rows + index * 5
        token = tl.load(tile)
        is_first = (tl.load(tile + 1) > 0) & (tl.load(tile + 3) == tl.load(tile + 4))
        return tl.where(is_first, token, -1)
    else:
        return tl.load(rows + index)


@triton.jit
def piece(positions, token_slots, token, slot, start, begin, num_tokens, i, SIZE: tl.constexpr):
    """The end of the piece at `begin`, whose tokens are in one block, and whether the row goes on."""
    at = token + begin - start + i
    inside = at < num_tokens
    same = tl.load(token_slots + at, mask=inside, other=-1) == slot
    same = same & (tl.load(positions + at, mask=inside, other=-1) == begin + i)
    end = tl.minimum(begin + tl.sum(same.to(tl.int32), 0), (begin // SIZE + 1) * SIZE)
    after = token + end - start
    goes_on = after < num_tokens
    goes_on = goes_on & (tl.load(token_slots + after, mask=goes_on, other=-1) == slot)
    goes_on = goes_on & (tl.load(positions + after, mask=goes_on, other=-1) == end)
    return end, goes_on


@triton.jit
def page(pages, table, position, page_stride, SIZE: tl.constexpr):
    block = tl.load(table + position // SIZE).to(tl.int64)
    return pages + block * page_stride


@triton.jit
def _inputs(source, mask, CHANNELS: tl.constexpr, GATED: tl.constexpr):
    """Inputs of the convolution; gated ones are multiplied by the columns two widths before."""
    x = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        x *= tl.load(source - 2 * CHANNELS, mask=mask, other=0.0).to(tl.float32)
    return x


@triton.jit(do_not_specialize=["num_tokens"])
def causal_conv_kernel(
    projected, weight, bias, out, pages, rows, positions, token_slots, tables,
    table_stride, page_stride, num_tokens, width,
    FIRST: tl.constexpr, CHANNELS: tl.constexpr, CONV: tl.constexpr, STATE_AT: tl.constexpr,
    SIZE: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
    GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row and BLOCK channels, which begin in column FIRST. GATED: as `recurrent.short_conv`."""
    pdl.begin(PDL)
    token = first_token(rows, tl.program_id(0), TILES)
    if token < 0:
        return
    slot = tl.load(token_slots + token)
    start = tl.load(positions + token).to(tl.int32)
    table = tables + slot.to(tl.int64) * table_stride
    i = tl.arange(0, TOKENS)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    c_mask = c < CHANNELS
    known: tl.constexpr = CONV - 1
    # Inputs before the row: the last ones before position `origin`.
    old = page(pages, table, tl.maximum(start - 1, 0), page_stride, SIZE) + STATE_AT + c * known
    origin = start
    source = projected + token.to(tl.int64) * width + FIRST + c
    target = out + token.to(tl.int64) * CHANNELS + c
    begin = start
    goes_on = begin >= 0
    while goes_on:
        if TILES:
            end, goes_on = piece(
                *(positions, token_slots, token, slot, start, begin, num_tokens, i, SIZE)
            )
        else:
            end, goes_on = begin + 1, begin < 0
        at = begin - start + i  # tokens after the row's first
        used = at < end - start
        total = tl.zeros([TOKENS, BLOCK], dtype=tl.float32)
        if bias is not None:
            total += tl.load(bias + c, mask=c_mask, other=0.0)[None, :]
        for k in tl.static_range(CONV):
            ago = at - (known - k)
            own = (used & (ago >= 0))[:, None] & c_mask[None, :]
            x = _inputs(source[None, :] + ago[:, None].to(tl.int64) * width, own, CHANNELS, GATED)
            before = (used & (ago < 0) & (start > 0))[:, None] & c_mask[None, :]
            kept = old[None, :] + (ago + start - origin + known)[:, None]
            x += tl.load(kept, mask=before, other=0.0)
            total += x * tl.load(weight + c * CONV + k, mask=c_mask, other=0.0)[None, :]
        mask = used[:, None] & c_mask[None, :]
        if GATED:
            gate = source[None, :] - CHANNELS + at[:, None].to(tl.int64) * width
            y = total * tl.load(gate, mask=mask, other=0.0).to(tl.float32)
        else:
            y = silu(total)
        place = target[None, :] + at[:, None].to(tl.int64) * CHANNELS
        tl.store(place, y.to(out.dtype.element_ty), mask=mask)
        if (end % SIZE == 0) | (goes_on == 0):
            new = page(pages, table, end - 1, page_stride, SIZE) + STATE_AT + c * known
            # It may be the old page: inputs move towards its start, and all were read before.
            tl.debug_barrier()
            for k in tl.static_range(CONV - 1):
                token_at = end - start - known + k
                is_own = c_mask & (token_at >= 0)
                last = _inputs(source + token_at.to(tl.int64) * width, is_own, CHANNELS, GATED)
                is_old = c_mask & (token_at < 0) & (start > 0)
                moved = tl.load(old + (end - origin + k), mask=is_old, other=0.0)
                tl.store(new + k, last + moved, mask=c_mask)
            tl.debug_barrier()
            old = new
            origin = end
        begin = end


@triton.jit
def softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def silu(x):
    return x * tl.sigmoid(x)


def causal_conv(
    projected: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    heads: RecurrentHeads,
    state: LayerState,
    batch: StepBatch,
) -> Tensor:
    """Same contract as `recurrent.causal_conv`."""
    return _convolve(projected, weight, bias, heads, state, batch, first=heads.inner)


def short_conv(
    projected: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    heads: RecurrentHeads,
    state: LayerState,
    batch: StepBatch,
) -> Tensor:
    """Same contract as `recurrent.short_conv`."""
    first = 2 * heads.channels
    return _convolve(projected, weight, bias, heads, state, batch, first=first, gated=True)


def _convolve(
    projected: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    heads: RecurrentHeads,
    state: LayerState,
    batch: StepBatch,
    *,
    first: int,
    gated: bool = False,
) -> Tensor:
    """The convolution of the columns from `first` on."""
    tokens, width = projected.shape
    out = projected.new_empty((tokens, heads.channels))
    for rows, tiles in launches(batch):
        causal_conv_kernel[(rows.shape[0], triton.cdiv(heads.channels, _CHANNELS))](
            *(projected, weight, bias, out, state.pages, rows, batch.positions),
            *(batch.token_slots, batch.table_of(state), batch.tables.stride(1)),
            *(state.pages.stride(0), tokens, width),
            FIRST=first,
            CHANNELS=heads.channels,
            CONV=heads.conv_size,
            STATE_AT=heads.num_recurrent,
            SIZE=state.block_size,
            TOKENS=_CONV_TOKENS if tiles else 1,
            BLOCK=_CHANNELS,
            TILES=tiles,
            GATED=gated,
            num_warps=4 if tiles else 1,
            **pdl.options(),
        )
    return out


def launches(batch: StepBatch) -> list[tuple[Tensor, bool]]:
    """The rows of one token, and the tiles of longer ones (or of all), of which the first launches."""
    work = batch.work
    assert work is not None
    assert work.width == 1, "draft tokens are not verified over a state"
    found: list[tuple[Tensor, bool]] = [(work.singles, False), (work.tiles, True)]
    return [(rows, tiles) for rows, tiles in found if rows.shape[0]]
