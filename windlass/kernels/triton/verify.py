"""Kernels before and after the network in a captured verification: unpack rows, accept drafts.

Every row has the same number of tokens; unused tokens belong to the padding slot. The last tokens of a
row may be siblings: alternatives to its first draft token, stored by slot with the position of the
row that they belong to. If a sibling equals the sampled token, it replaces the draft token, and its
key and value are copied from the spare page.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from windlass.kernels.triton import pdl

_HEADER = 3  # numbers of a row before its tokens: slot, position of the first token, token count


@triton.jit
def verify_inputs_kernel(
    inputs,
    last_tokens,
    ids,
    positions,
    slots,
    tiles,
    siblings,
    padding,
    WIDTH: tl.constexpr,
    SIBLINGS: tl.constexpr,
    PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Unpack one row: slot, position, count, and its tokens (-1: the last sampled token)."""
    pdl.begin(PDL)
    row = tl.program_id(0)
    own = inputs + row * (3 + WIDTH)
    slot = tl.load(own)
    start = tl.load(own + 1)
    count = tl.load(own + 2)
    at = tl.arange(0, PAD)
    token = tl.load(own + 3 + at, mask=at < WIDTH, other=0)
    last = tl.load(last_tokens + slot.to(tl.int64))
    used = at < count
    token = tl.where(token < 0, last, token)
    out = row * (WIDTH + SIBLINGS) + at
    tl.store(ids + out, tl.where(used, token, 0), mask=at < WIDTH)
    tl.store(positions + out, tl.where(used, start + at, 0), mask=at < WIDTH)
    tl.store(slots + out, tl.where(used, slot, padding), mask=at < WIDTH)
    if SIBLINGS > 0:
        known = siblings + slot.to(tl.int64) * (1 + SIBLINGS)
        used = (count > 1) & (slot != padding) & (tl.load(known) == start)
        for i in tl.static_range(SIBLINGS):
            to = row * (WIDTH + SIBLINGS) + WIDTH + i
            tl.store(ids + to, tl.where(used, tl.load(known + 1 + i), 0))
            tl.store(positions + to, tl.where(used, start + 1, 0))
            tl.store(slots + to, tl.where(used, slot, padding))
    tl.store(tiles + row * 5, row * (WIDTH + SIBLINGS))
    tl.store(tiles + row * 5 + 1, count)
    tl.store(tiles + row * 5 + 2, slot)
    tl.store(tiles + row * 5 + 3, start)
    tl.store(tiles + row * 5 + 4, start)


@triton.jit
def keep_kernel(
    inputs,
    ids,
    positions,
    sampled,
    last_tokens,
    kept,
    last,
    chosen,
    back,
    back_stride,
    WIDTH: tl.constexpr,
    SIBLINGS: tl.constexpr,
    PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Count the sampled tokens of a row that are kept: up to the first that differs from its draft.

    If the first draft token is rejected and a sibling matches, two are kept; `chosen` is the sibling's
    number, from 1. The row of `back` for the host starts with the sampled tokens and the count.
    """
    pdl.begin(PDL)
    row = tl.program_id(0)
    own = inputs + row * (3 + WIDTH)
    slot = tl.load(own).to(tl.int64)
    count = tl.load(own + 2)
    at = tl.arange(0, PAD)
    base = row * (WIDTH + SIBLINGS)
    has_draft = at + 1 < count
    target = tl.load(sampled + base + at, mask=at < WIDTH, other=-1)
    draft = tl.load(ids + base + at + 1, mask=has_draft, other=-2)
    end = tl.min(tl.where(has_draft & (target == draft), PAD, at), 0)
    index = base + end
    if SIBLINGS > 0:
        first = tl.sum(tl.where(at == 0, target, 0), 0)
        taken = 0
        for i in tl.static_range(SIBLINGS):
            sibling = base + WIDTH + i
            match = (tl.load(positions + sibling) > 0) & (tl.load(ids + sibling) == first)
            taken = tl.where((end == 0) & match & (taken == 0), 1 + i, taken)
        index = tl.where(taken > 0, base + WIDTH + taken - 1, index)
        end = tl.where(taken > 0, 1, end)
        target = tl.where((at == 1) & (taken > 0), tl.load(sampled + index), target)
        tl.store(chosen + row, taken)
    tl.store(kept + row, end + 1)
    tl.store(last + row, index)
    tl.store(back + row * back_stride + at, target, mask=at < WIDTH)
    tl.store(back + row * back_stride + WIDTH, end + 1)
    tl.store(last_tokens + slot, tl.sum(tl.where(at == end, target, 0), 0))


@triton.jit(do_not_specialize=["spare"])
def adopt_kernel(
    pages,
    inputs,
    chosen,
    tables,
    table_stride,
    half_stride,
    spare,
    WIDTH: tl.constexpr,
    SIBLINGS: tl.constexpr,
    NUM_KV: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copy a chosen sibling's keys or values of one layer to the position after the row's first."""
    pdl.begin(PDL)
    row = tl.program_id(0)
    taken = tl.load(chosen + row)
    if taken == 0:
        return
    half = pages + tl.program_id(1).to(tl.int64) * half_stride
    slot = tl.load(inputs + row * (3 + WIDTH)).to(tl.int64)
    position = tl.load(inputs + row * (3 + WIDTH) + 1) + 1
    block = tl.load(tables + slot * table_stride + position // SIZE).to(tl.int64)
    d = tl.arange(0, DIM_PAD)
    for head in range(NUM_KV):
        source = (spare.to(tl.int64) * NUM_KV + head) * SIZE + row * SIBLINGS + taken - 1
        target = (block * NUM_KV + head) * SIZE + position % SIZE
        value = tl.load(half + source * DIM + d, mask=d < DIM)
        tl.store(half + target * DIM + d, value, mask=d < DIM)


@triton.jit
def write_next_kernel(
    inputs,
    last_tokens,
    kept,
    drafts,
    to,
    back,
    siblings,
    padding,
    WIDTH: tl.constexpr,
    NEXT: tl.constexpr,
    DEPTH: tl.constexpr,
    SIBLINGS: tl.constexpr,
    PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write a row of the next verification: the last kept token and the new draft tokens.

    The draft tokens also go to `back` for the host. Siblings of the first are stored by slot.
    """
    pdl.begin(PDL)
    row = tl.program_id(0)
    own = inputs + row * (3 + WIDTH)
    slot = tl.load(own)
    start = tl.load(own + 1) + tl.load(kept + row)
    at = tl.arange(0, PAD)
    drafts_row = drafts + row * (DEPTH + SIBLINGS)
    draft = tl.load(drafts_row + at - 1, mask=(at > 0) & (at <= DEPTH), other=0)
    token = tl.where(at == 0, tl.load(last_tokens + slot.to(tl.int64)), draft)
    real = slot != padding
    tl.store(back + row * (WIDTH + 1 + DEPTH) + WIDTH + at, draft, mask=(at > 0) & (at <= DEPTH))
    if SIBLINGS > 0:
        known = siblings + slot.to(tl.int64) * (1 + SIBLINGS)
        tl.store(known, tl.where(real, start, -1))
        for i in tl.static_range(SIBLINGS):
            tl.store(known + 1 + i, tl.load(drafts_row + DEPTH + i))
    out = to + row * (3 + NEXT)
    tl.store(out, slot)
    tl.store(out + 1, tl.where(real, start, 0))
    tl.store(out + 2, tl.where(real, 1 + DEPTH, 1))
    tl.store(out + 3 + at, tl.where(real, token, 0), mask=at < NEXT)


def unpack(
    inputs: Tensor,
    last_tokens: Tensor,
    size: int,
    width: int,
    padding: int,
    siblings: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Unpack rows: (ids, positions, slots) of all tokens, [size * width] each, and tiles [size, 5].

    `siblings` [slots, 1 + n] has by slot the position of a row and n alternatives to its first draft
    token. They become n more tokens at the end of each row.
    """
    device, num_siblings = inputs.device, _num_siblings(siblings)
    # Rows are aligned for any size: Triton would compile kernels again for unaligned pointers.
    total = size * (width + num_siblings)
    rows = torch.empty((3, -(-total // 4) * 4), dtype=torch.int32, device=device)[:, :total]
    ids, positions, slots = rows.unbind()
    tiles = torch.empty((size, 5), dtype=torch.int32, device=device)
    verify_inputs_kernel[(size,)](
        *(inputs, last_tokens, ids, positions, slots, tiles, siblings, padding),
        WIDTH=width,
        SIBLINGS=num_siblings,
        PAD=triton.next_power_of_2(width),
        num_warps=1,
        **pdl.options(),
    )
    return ids, positions, slots, tiles


def _num_siblings(siblings: Tensor | None) -> int:
    return 0 if siblings is None else siblings.shape[1] - 1


def keep(
    inputs: Tensor,
    ids: Tensor,
    positions: Tensor,
    sampled: Tensor,
    last_tokens: Tensor,
    back: Tensor,
    width: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Per row: (number of kept tokens, index of the last kept token, number of the chosen sibling).

    `back` [rows, width + 1 + ...] receives the sampled tokens of each row and the number of kept tokens.
    `last_tokens` receives the last kept token by slot.
    """
    size = back.shape[0]
    kept, last, chosen = torch.empty((3, size), dtype=torch.int32, device=ids.device).unbind()
    keep_kernel[(size,)](
        *(inputs, ids, positions, sampled, last_tokens, kept, last, chosen),
        *(back, back.stride(0)),
        WIDTH=width,
        SIBLINGS=len(ids) // size - width,
        PAD=triton.next_power_of_2(width),
        num_warps=1,
        **pdl.options(),
    )
    return kept, last, chosen


def adopt(
    pages: Tensor, inputs: Tensor, chosen: Tensor, tables: Tensor, num_siblings: int, spare: int
) -> None:
    """Replace the keys and values of first draft tokens by those of chosen siblings.

    `pages` are the pages of all layers, [layers, 2, blocks, kv heads, block size, dim].
    """
    layers, halves, _, num_kv, size, dim = pages.shape
    adopt_kernel[inputs.shape[0], layers * halves](
        *(pages, inputs, chosen, tables, tables.stride(0), pages.stride(1), spare),
        WIDTH=inputs.shape[1] - _HEADER,
        SIBLINGS=num_siblings,
        NUM_KV=num_kv,
        DIM=dim,
        DIM_PAD=triton.next_power_of_2(dim),
        SIZE=size,
        num_warps=1,
        **pdl.options(),
    )


def write_next(
    inputs: Tensor,
    last_tokens: Tensor,
    kept: Tensor,
    drafts: Tensor,
    to: Tensor,
    back: Tensor,
    padding: int,
    siblings: Tensor | None,
) -> None:
    """Write the inputs of the next verification to `to`, which may be `inputs`.

    `back` [rows, tokens + 1 + drafts] receives the draft tokens; `siblings` those after them.
    """
    width, num_siblings = to.shape[1] - _HEADER, _num_siblings(siblings)
    write_next_kernel[(inputs.shape[0],)](
        *(inputs, last_tokens, kept, drafts.contiguous(), to, back, siblings, padding),
        WIDTH=inputs.shape[1] - _HEADER,
        NEXT=width,
        DEPTH=drafts.shape[1] - num_siblings,
        SIBLINGS=num_siblings,
        PAD=triton.next_power_of_2(width),
        num_warps=1,
        **pdl.options(),
    )
