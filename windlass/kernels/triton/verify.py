"""The two ends of a recorded verification on CUDA: its rows unpacked, and how much of each is kept.

Every row has the same number of places; those that a row has no guess for belong to the padding slot.
The last of them may be alternatives to the row's first guess, which were remembered by slot, with
the position of the row that they are for. Where one is what was sampled, it takes the guess's place:
its key and value are fetched from where attention left them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from windlass.kernels.triton import pdl

_HEAD = 3  # numbers of a row before its tokens: slot, position of the first, how many tokens


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
    """Unpack one row: slot, position, count, and its tokens (-1: the one sampled last)."""
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
    places,
    chosen,
    back,
    back_stride,
    WIDTH: tl.constexpr,
    SIBLINGS: tl.constexpr,
    PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """How many samples of a row are kept: up to the first that differs from the guess after it.

    Where the first guess is wrong, two if an alternative is right; `chosen` is its number, from 1.
    What the host is told of a row begins with its samples and that number.
    """
    pdl.begin(PDL)
    row = tl.program_id(0)
    own = inputs + row * (3 + WIDTH)
    slot = tl.load(own).to(tl.int64)
    count = tl.load(own + 2)
    at = tl.arange(0, PAD)
    base = row * (WIDTH + SIBLINGS)
    guessed = at + 1 < count
    said = tl.load(sampled + base + at, mask=at < WIDTH, other=-1)
    guess = tl.load(ids + base + at + 1, mask=guessed, other=-2)
    end = tl.min(tl.where(guessed & (said == guess), PAD, at), 0)
    place = base + end
    if SIBLINGS > 0:
        first = tl.sum(tl.where(at == 0, said, 0), 0)
        taken = 0
        for i in tl.static_range(SIBLINGS):
            its = base + WIDTH + i
            right = (tl.load(positions + its) > 0) & (tl.load(ids + its) == first)
            taken = tl.where((end == 0) & right & (taken == 0), 1 + i, taken)
        place = tl.where(taken > 0, base + WIDTH + taken - 1, place)
        end = tl.where(taken > 0, 1, end)
        said = tl.where((at == 1) & (taken > 0), tl.load(sampled + place), said)
        tl.store(chosen + row, taken)
    tl.store(kept + row, end + 1)
    tl.store(places + row, place)
    tl.store(back + row * back_stride + at, said, mask=at < WIDTH)
    tl.store(back + row * back_stride + WIDTH, end + 1)
    tl.store(last_tokens + slot, tl.sum(tl.where(at == end, said, 0), 0))


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
    """Move a chosen alternative's keys, or values, of one layer to the place behind the row's first."""
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
def follow_kernel(
    inputs,
    last_tokens,
    kept,
    guesses,
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
    """Write a row of the next verification down: after what is kept, the last token and guesses.

    The host is told of the guesses too. Alternatives to the first, behind them, are remembered.
    """
    pdl.begin(PDL)
    row = tl.program_id(0)
    own = inputs + row * (3 + WIDTH)
    slot = tl.load(own)
    start = tl.load(own + 1) + tl.load(kept + row)
    at = tl.arange(0, PAD)
    found = guesses + row * (DEPTH + SIBLINGS)
    guess = tl.load(found + at - 1, mask=(at > 0) & (at <= DEPTH), other=0)
    token = tl.where(at == 0, tl.load(last_tokens + slot.to(tl.int64)), guess)
    real = slot != padding
    tl.store(back + row * (WIDTH + 1 + DEPTH) + WIDTH + at, guess, mask=(at > 0) & (at <= DEPTH))
    if SIBLINGS > 0:
        known = siblings + slot.to(tl.int64) * (1 + SIBLINGS)
        tl.store(known, tl.where(real, start, -1))
        for i in tl.static_range(SIBLINGS):
            tl.store(known + 1 + i, tl.load(found + DEPTH + i))
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
    """(ids, positions, slots) of all places, [size * width] each, and tiles [size, 5].

    With `siblings` [slots, 1 + n]: the position of a row and n alternatives to its first guess by
    slot, of which each row has places behind its own.
    """
    device, num_siblings = inputs.device, _number(siblings)
    # Aligned rows, whatever the size: kernels are compiled anew for others.
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


def _number(siblings: Tensor | None) -> int:
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
    """(how many samples of each row are kept, the place of the last, which alternative was chosen).

    `back` [rows, width + 1 + …] gets the samples of each row, and how many are kept. The token of the
    last is remembered.
    """
    size = back.shape[0]
    kept, places, chosen = torch.empty((3, size), dtype=torch.int32, device=ids.device).unbind()
    keep_kernel[(size,)](
        *(inputs, ids, positions, sampled, last_tokens, kept, places, chosen),
        *(back, back.stride(0)),
        WIDTH=width,
        SIBLINGS=len(ids) // size - width,
        PAD=triton.next_power_of_2(width),
        num_warps=1,
        **pdl.options(),
    )
    return kept, places, chosen


def adopt(
    pages: Tensor, inputs: Tensor, chosen: Tensor, tables: Tensor, num_siblings: int, spare: int
) -> None:
    """Put the keys and values of chosen alternatives where those of first guesses are.

    `pages` are those of all layers, [layers, 2, blocks, kv heads, block size, dim].
    """
    layers, halves, _, num_kv, size, dim = pages.shape
    adopt_kernel[inputs.shape[0], layers * halves](
        *(pages, inputs, chosen, tables, tables.stride(0), pages.stride(1), spare),
        WIDTH=inputs.shape[1] - _HEAD,
        SIBLINGS=num_siblings,
        NUM_KV=num_kv,
        DIM=dim,
        DIM_PAD=triton.next_power_of_2(dim),
        SIZE=size,
        num_warps=1,
        **pdl.options(),
    )


def follow(
    inputs: Tensor,
    last_tokens: Tensor,
    kept: Tensor,
    guesses: Tensor,
    to: Tensor,
    back: Tensor,
    padding: int,
    siblings: Tensor | None,
) -> None:
    """Make `to` the inputs of the next verification; they may be the same as these.

    `back` [rows, tokens + 1 + guesses] gets the guesses; `siblings` what lies behind them.
    """
    width, num_siblings = to.shape[1] - _HEAD, _number(siblings)
    follow_kernel[(inputs.shape[0],)](
        *(inputs, last_tokens, kept, guesses.contiguous(), to, back, siblings, padding),
        WIDTH=inputs.shape[1] - _HEAD,
        NEXT=width,
        DEPTH=guesses.shape[1] - num_siblings,
        SIBLINGS=num_siblings,
        PAD=triton.next_power_of_2(width),
        num_warps=1,
        **pdl.options(),
    )
