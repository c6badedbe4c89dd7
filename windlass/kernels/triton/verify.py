"""The two ends of a recorded verification on CUDA: its rows unpacked, and how much of each is kept.

Every row has the same number of places; those that a row has no guess for belong to the padding slot.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from windlass.kernels.triton import chain

_HEAD = 3  # numbers of a row before its tokens: slot, position of the first, how many tokens


@triton.jit
def verify_inputs_kernel(
    inputs,
    last_tokens,
    ids,
    positions,
    slots,
    tiles,
    padding,
    WIDTH: tl.constexpr,
    PAD: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Unpack one row: slot, position, count, and its tokens (-1: the one sampled last)."""
    chain.begin(CHAINED)
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
    out = row * WIDTH + at
    tl.store(ids + out, tl.where(used, token, 0), mask=at < WIDTH)
    tl.store(positions + out, tl.where(used, start + at, 0), mask=at < WIDTH)
    tl.store(slots + out, tl.where(used, slot, padding), mask=at < WIDTH)
    tl.store(tiles + row * 5, row * WIDTH)
    tl.store(tiles + row * 5 + 1, count)
    tl.store(tiles + row * 5 + 2, slot)
    tl.store(tiles + row * 5 + 3, start)
    tl.store(tiles + row * 5 + 4, start)


@triton.jit
def keep_kernel(
    inputs,
    ids,
    sampled,
    last_tokens,
    kept,
    places,
    back,
    back_stride,
    WIDTH: tl.constexpr,
    PAD: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """How many samples of a row are kept: up to the first that differs from the guess after it.

    What the host is told of a row begins with its samples and that number.
    """
    chain.begin(CHAINED)
    row = tl.program_id(0)
    own = inputs + row * (3 + WIDTH)
    slot = tl.load(own).to(tl.int64)
    count = tl.load(own + 2)
    at = tl.arange(0, PAD)
    out = row * WIDTH + at
    guessed = at + 1 < count
    said = tl.load(sampled + out, mask=at < WIDTH, other=-1)
    guess = tl.load(ids + out + 1, mask=guessed, other=-2)
    end = tl.min(tl.where(guessed & (said == guess), PAD, at), 0)
    tl.store(kept + row, end + 1)
    tl.store(places + row, row * WIDTH + end)
    tl.store(back + row * back_stride + at, said, mask=at < WIDTH)
    tl.store(back + row * back_stride + WIDTH, end + 1)
    tl.store(last_tokens + slot, tl.sum(tl.where(at == end, said, 0), 0))


@triton.jit
def follow_kernel(
    inputs,
    last_tokens,
    kept,
    guesses,
    to,
    back,
    padding,
    WIDTH: tl.constexpr,
    NEXT: tl.constexpr,
    DEPTH: tl.constexpr,
    PAD: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Write a row of the next verification down: after what is kept, the last token and guesses.

    The host is told of the guesses too.
    """
    chain.begin(CHAINED)
    row = tl.program_id(0)
    own = inputs + row * (3 + WIDTH)
    slot = tl.load(own)
    start = tl.load(own + 1) + tl.load(kept + row)
    at = tl.arange(0, PAD)
    guess = tl.load(guesses + row * DEPTH + at - 1, mask=(at > 0) & (at <= DEPTH), other=0)
    token = tl.where(at == 0, tl.load(last_tokens + slot.to(tl.int64)), guess)
    real = slot != padding
    tl.store(back + row * (WIDTH + 1 + DEPTH) + WIDTH + at, guess, mask=(at > 0) & (at <= DEPTH))
    out = to + row * (3 + NEXT)
    tl.store(out, slot)
    tl.store(out + 1, tl.where(real, start, 0))
    tl.store(out + 2, tl.where(real, 1 + DEPTH, 1))
    tl.store(out + 3 + at, tl.where(real, token, 0), mask=at < NEXT)


def unpack(
    inputs: Tensor, last_tokens: Tensor, size: int, width: int, padding: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(ids, positions, slots) of all places, [size * width] each, and tiles [size, 5]."""
    device = inputs.device
    # Aligned rows, whatever the size: kernels are compiled anew for others.
    total = size * width
    rows = torch.empty((3, -(-total // 4) * 4), dtype=torch.int32, device=device)[:, :total]
    ids, positions, slots = rows.unbind()
    tiles = torch.empty((size, 5), dtype=torch.int32, device=device)
    verify_inputs_kernel[(size,)](
        inputs,
        last_tokens,
        ids,
        positions,
        slots,
        tiles,
        padding,
        WIDTH=width,
        PAD=triton.next_power_of_2(width),
        num_warps=1,
        **chain.options(),
    )
    return ids, positions, slots, tiles


def keep(
    inputs: Tensor, ids: Tensor, sampled: Tensor, last_tokens: Tensor, back: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """(how many samples of each row are kept, the place of the last); remembers that one's token.

    `back` [rows, width + 1 + …] gets the samples of each row, and how many are kept.
    """
    size = back.shape[0]
    kept = torch.empty(size, dtype=torch.int32, device=ids.device)
    places = torch.empty_like(kept)
    keep_kernel[(size,)](
        inputs,
        ids,
        sampled,
        last_tokens,
        kept,
        places,
        back,
        back.stride(0),
        WIDTH=width,
        PAD=triton.next_power_of_2(width),
        num_warps=1,
        **chain.options(),
    )
    return kept, places


def follow(
    inputs: Tensor,
    last_tokens: Tensor,
    kept: Tensor,
    guesses: Tensor,
    to: Tensor,
    back: Tensor,
    padding: int,
) -> None:
    """Make `to` the inputs of the next verification; they may be the same as these.

    `back` [rows, tokens + 1 + guesses] gets the guesses.
    """
    width = to.shape[1] - _HEAD
    follow_kernel[(inputs.shape[0],)](
        inputs,
        last_tokens,
        kept,
        guesses.contiguous(),
        to,
        back,
        padding,
        WIDTH=inputs.shape[1] - _HEAD,
        NEXT=width,
        DEPTH=guesses.shape[1],
        PAD=triton.next_power_of_2(width),
        num_warps=1,
        **chain.options(),
    )
