"""Sampling on CUDA without a sort and without host synchronisation.

Each row finds its threshold (top-k, top-p, min-p) by narrowing an interval of logits. The token is
the argmax of scaled logits plus noise that depends only on the request's seed and the position.
logits.py applies penalties, token lists and grammar masks before.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from windlass.kernels.triton import pdl

_SPLITS = 8  # of an argmax, so that one row uses more than one multiprocessor
_TILE = 2048


@triton.jit
def _narrow(
    row,
    size,
    inverse_temperature,
    low,
    high,
    floor,
    peak,
    target,
    BY_MASS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Find the highest t in [low, high) with enough logits >= max(t, floor), by count or by mass.

    Eight pivots per pass: each pass over the row reduces the interval to a ninth.
    """
    pivot = tl.arange(0, 8)
    for _ in range(0, 8):
        points = low + (high - low) * ((pivot + 1).to(tl.float32) / 9.0)
        found = tl.zeros([8], dtype=tl.float32)
        for start in range(0, size, TILE):
            at = start + tl.arange(0, TILE)
            x = (
                tl.load(row + at, mask=at < size, other=float("-inf")).to(tl.float32)
                * inverse_temperature
            )
            weight = tl.where(x >= floor, 1.0, 0.0)
            if BY_MASS:
                weight = weight * tl.exp(x - peak)
            found += tl.sum(tl.where(x[None, :] >= points[:, None], weight[None, :], 0.0), 1)
        enough = found >= target
        low = tl.maximum(low, tl.max(tl.where(enough, points, low), 0))
        high = tl.minimum(high, tl.min(tl.where(enough, high, points), 0))
    return low


@triton.jit
def sample_threshold_kernel(
    logits,
    sampling,
    slots,
    thresholds,
    size,
    stride,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """The lowest scaled logit of a row that may be sampled; -inf if all may."""
    pdl.begin(PDL)
    index = tl.program_id(0)
    slot = tl.load(slots + index).to(tl.int64)
    inverse_temperature = tl.load(sampling + slot * 4)
    top_k = tl.load(sampling + slot * 4 + 1)
    top_p = tl.load(sampling + slot * 4 + 2)
    min_p = tl.load(sampling + slot * 4 + 3)
    floor = float("-inf")
    if (inverse_temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0)):
        row = logits + index.to(tl.int64) * stride
        peak = float("-inf")
        bottom = float("inf")
        for start in range(0, size, TILE):
            at = start + tl.arange(0, TILE)
            x = (
                tl.load(row + at, mask=at < size, other=float("-inf")).to(tl.float32)
                * inverse_temperature
            )
            peak = tl.maximum(peak, tl.max(x, 0))
            finite = tl.where((at < size) & (x > float("-inf")), x, float("inf"))
            bottom = tl.minimum(bottom, tl.min(finite, 0))
        high = peak + 1e-3 * tl.maximum(1.0, tl.abs(peak))  # above every logit
        if min_p > 0:
            floor = peak + tl.log(min_p)
        if top_k > 0:
            floor = tl.maximum(
                floor,
                _narrow(
                    row, size, inverse_temperature, bottom, high, floor, peak, top_k, False, TILE
                ),
            )
        if top_p < 1:
            mass = 0.0
            for start in range(0, size, TILE):
                at = start + tl.arange(0, TILE)
                x = (
                    tl.load(row + at, mask=at < size, other=float("-inf")).to(tl.float32)
                    * inverse_temperature
                )
                mass += tl.sum(tl.where(x >= floor, tl.exp(x - peak), 0.0), 0)
            start_at = tl.maximum(bottom, floor)
            floor = tl.maximum(
                floor,
                _narrow(
                    row,
                    size,
                    inverse_temperature,
                    start_at,
                    high,
                    floor,
                    peak,
                    top_p * mass,
                    True,
                    TILE,
                ),
            )
        floor = tl.minimum(floor, peak)  # the highest logit may always be sampled
    tl.store(thresholds + index, floor)


@triton.jit
def sample_split_kernel(
    logits,
    sampling,
    seeds,
    slots,
    positions,
    thresholds,
    best,
    best_at,
    size,
    stride,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """The best token of one split of a row, with noise."""
    pdl.begin(PDL)
    index = tl.program_id(0)
    split = tl.program_id(1)
    slot = tl.load(slots + index).to(tl.int64)
    inverse_temperature = tl.load(sampling + slot * 4)
    floor = tl.load(thresholds + index)
    position = tl.load(positions + index).to(tl.int64)
    seed = tl.load(seeds + slot) + position * 0x9E3779B97F4A7C1
    row = logits + index.to(tl.int64) * stride
    width = tl.cdiv(tl.cdiv(size, SPLITS), TILE) * TILE
    top = tl.full([TILE], float("-inf"), dtype=tl.float32)
    top_at = tl.zeros([TILE], dtype=tl.int32)
    begin = split * width
    for start in range(begin, tl.minimum(begin + width, size), TILE):
        at = start + tl.arange(0, TILE)
        x = tl.load(row + at, mask=at < size, other=float("-inf")).to(tl.float32)
        if inverse_temperature > 0:
            x = x * inverse_temperature
            chance = tl.minimum(tl.rand(seed, at), 0.99999994)
            x = tl.where(x >= floor, x - tl.log(-tl.log(chance)), float("-inf"))
        better = x > top
        top = tl.where(better, x, top)
        top_at = tl.where(better, at, top_at)
    value = tl.max(top, 0)
    # Ties go to the lowest token, as in torch's argmax on most devices.
    token = tl.min(tl.where(top == value, top_at, 2147483647), 0)
    tl.store(best + index * SPLITS + split, value)
    tl.store(best_at + index * SPLITS + split, token)


@triton.jit
def sample_join_kernel(
    best, best_at, slots, tokens, last_tokens, SPLITS: tl.constexpr, PDL: tl.constexpr
):
    """The best token over a row's splits; also stored as the last token of its slot."""
    pdl.begin(PDL)
    index = tl.program_id(0)
    split = tl.arange(0, SPLITS)
    value = tl.load(best + index * SPLITS + split)
    token = tl.load(best_at + index * SPLITS + split)
    chosen = tl.min(tl.where(value == tl.max(value, 0), token, 2147483647), 0)
    slot = tl.load(slots + index).to(tl.int64)
    tl.store(tokens + index, chosen)
    tl.store(last_tokens + slot, chosen)


@triton.jit(do_not_specialize=["width"])
def decode_inputs_kernel(
    inputs,
    last_tokens,
    tables,
    ids,
    positions,
    slots,
    width,
    table_stride,
    SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Unpack the host's inputs of one row: token (-1: last sampled), position, slot, new block."""
    pdl.begin(PDL)
    index = tl.program_id(0)
    token = tl.load(inputs + index)
    position = tl.load(inputs + width + index)
    slot = tl.load(inputs + 2 * width + index)
    block = tl.load(inputs + 3 * width + index)
    if token < 0:
        token = tl.load(last_tokens + slot.to(tl.int64))
    if block >= 0:
        tl.store(tables + slot.to(tl.int64) * table_stride + position // SIZE, block)
    tl.store(ids + index, token)
    tl.store(positions + index, position)
    tl.store(slots + index, slot)


def thresholds(logits: Tensor, sampling: Tensor, slots: Tensor) -> Tensor:
    """The lowest scaled logit of each row that may be sampled."""
    rows, size = logits.shape
    floors = torch.empty(rows, dtype=torch.float32, device=logits.device)
    sample_threshold_kernel[(rows,)](
        *(logits, sampling, slots, floors, size, logits.stride(0)),
        TILE=_TILE,
        num_warps=8,
        **pdl.options(),
    )
    return floors


def sample(
    logits: Tensor,
    sampling: Tensor,
    seeds: Tensor,
    slots: Tensor,
    positions: Tensor,
    last_tokens: Tensor,
) -> Tensor:
    """Sample one token per row of logits; also written to `last_tokens` at the row's slot.

    sampling [slots, 4]: 1 / temperature (0: greedy), top_k, top_p, min_p; positions: of the last token.
    """
    rows, size = logits.shape
    device = logits.device
    floors = thresholds(logits, sampling, slots)
    best = torch.empty((rows, _SPLITS), dtype=torch.float32, device=device)
    best_at = torch.empty((rows, _SPLITS), dtype=torch.int32, device=device)
    tokens = torch.empty(rows, dtype=torch.int32, device=device)
    sample_split_kernel[(rows, _SPLITS)](
        logits,
        sampling,
        seeds,
        slots,
        positions,
        floors,
        best,
        best_at,
        size,
        logits.stride(0),
        SPLITS=_SPLITS,
        TILE=_TILE,
        num_warps=4,
        **pdl.options(),
    )
    sample_join_kernel[(rows,)](
        best,
        best_at,
        slots,
        tokens,
        last_tokens,
        SPLITS=_SPLITS,
        num_warps=1,
        **pdl.options(),
    )
    return tokens
