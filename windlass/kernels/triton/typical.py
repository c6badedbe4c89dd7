"""Typical acceptance on CUDA: a guess that is likely enough takes the place of what was sampled.

The definition is runner/verify.py:keep_typical; this changes the distribution, and runs only where
that was asked for.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from windlass.kernels.triton import pdl
from windlass.kernels.triton.sample import thresholds

_TILE = 2048


@triton.jit
def typical_kernel(
    logits,
    sampling,
    slots,
    floors,
    guesses,
    sampled,
    size,
    stride,
    epsilon,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One place: its guess is kept if p >= min(epsilon, sqrt(epsilon) * exp(-entropy))."""
    pdl.begin(PDL)
    index = tl.program_id(0)
    guess = tl.load(guesses + index)
    slot = tl.load(slots + index).to(tl.int64)
    inverse_temperature = tl.load(sampling + slot * 4)
    if (guess >= 0) & (inverse_temperature > 0):
        row = logits + index.to(tl.int64) * stride
        floor = tl.load(floors + index)
        peak = float("-inf")
        for start in range(0, size, TILE):
            at = start + tl.arange(0, TILE)
            x = (
                tl.load(row + at, mask=at < size, other=float("-inf")).to(tl.float32)
                * inverse_temperature
            )
            peak = tl.maximum(peak, tl.max(x, 0))
        mass = 0.0
        moment = 0.0
        for start in range(0, size, TILE):
            at = start + tl.arange(0, TILE)
            x = (
                tl.load(row + at, mask=at < size, other=float("-inf")).to(tl.float32)
                * inverse_temperature
            )
            may = (x >= floor) & (x > float("-inf"))
            below = tl.where(may, x - peak, 0.0)
            weight = tl.where(may, tl.exp(below), 0.0)
            mass += tl.sum(weight, 0)
            moment += tl.sum(weight * below, 0)
        entropy = tl.log(mass) - moment / mass
        own = tl.load(row + guess).to(tl.float32) * inverse_temperature
        chance = tl.where(own >= floor, tl.exp(own - peak) / mass, 0.0)
        least = tl.minimum(epsilon, tl.sqrt(epsilon) * tl.exp(-entropy))
        tl.store(sampled + index, guess, mask=chance >= least)


def keep_typical(
    logits: Tensor,
    sampling: Tensor,
    slots: Tensor,
    guesses: Tensor,
    sampled: Tensor,
    epsilon: float,
) -> None:
    """Put typical guesses in the place of samples; a place without one has -1, and greedy rows stay.

    `sampling` as `sample` takes them; slots, guesses and samples [rows], int32.
    """
    rows, size = logits.shape
    typical_kernel[(rows,)](
        *(logits, sampling, slots, thresholds(logits, sampling, slots), guesses, sampled),
        *(size, logits.stride(0), epsilon),
        TILE=_TILE,
        num_warps=8,
        **pdl.options(),
    )


def drafts_after(inputs: Tensor, ids: Tensor, width: int) -> Tensor:
    """The guess behind every place of a recorded verification; -1 where there is none.

    `inputs` [rows, 3 + width] and `ids` are those of verify.py, alternatives behind a row's places.
    """
    rows = ids.view(len(inputs), -1)
    found = torch.full_like(rows, -1)
    behind = torch.arange(1, width, dtype=torch.int32, device=ids.device)
    found[:, : width - 1] = torch.where(behind < inputs[:, 2:3], rows[:, 1:width], -1)
    return found.flatten()
