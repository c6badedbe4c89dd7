"""Typical acceptance on CUDA: a draft token that is likely enough replaces the sampled token.

runner/verify.py:keep_typical is the definition. Typical acceptance changes the output distribution,
so it runs only on request.
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
    drafts,
    sampled,
    size,
    stride,
    epsilon,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Accept the draft token of one row if p >= min(epsilon, sqrt(epsilon) * exp(-entropy))."""
    pdl.begin(PDL)
    index = tl.program_id(0)
    draft = tl.load(drafts + index)
    slot = tl.load(slots + index).to(tl.int64)
    inverse_temperature = tl.load(sampling + slot * 4)
    if (draft >= 0) & (inverse_temperature > 0):
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
            allowed = (x >= floor) & (x > float("-inf"))
            below = tl.where(allowed, x - peak, 0.0)
            weight = tl.where(allowed, tl.exp(below), 0.0)
            mass += tl.sum(weight, 0)
            moment += tl.sum(weight * below, 0)
        entropy = tl.log(mass) - moment / mass
        own = tl.load(row + draft).to(tl.float32) * inverse_temperature
        probability = tl.where(own >= floor, tl.exp(own - peak) / mass, 0.0)
        threshold = tl.minimum(epsilon, tl.sqrt(epsilon) * tl.exp(-entropy))
        tl.store(sampled + index, draft, mask=probability >= threshold)


def keep_typical(
    logits: Tensor, sampling: Tensor, slots: Tensor, drafts: Tensor, sampled: Tensor, epsilon: float
) -> None:
    """Replace sampled tokens by draft tokens that are accepted; greedy rows do not change.

    `sampling` is that of `sample`; slots, drafts (-1: none) and sampled are [rows], int32.
    """
    rows, size = logits.shape
    typical_kernel[(rows,)](
        *(logits, sampling, slots, thresholds(logits, sampling, slots), drafts, sampled),
        *(size, logits.stride(0), epsilon),
        TILE=_TILE,
        num_warps=8,
        **pdl.options(),
    )


def drafts_after(inputs: Tensor, ids: Tensor, width: int) -> Tensor:
    """The draft token after every token of a captured verification; -1 if there is none.

    `inputs` [rows, 3 + width] and `ids` are those of verify.py; siblings come after a row's tokens.
    """
    rows = ids.view(len(inputs), -1)
    drafts = torch.full_like(rows, -1)
    following = torch.arange(1, width, dtype=torch.int32, device=ids.device)
    drafts[:, : width - 1] = torch.where(following < inputs[:, 2:3], rows[:, 1:width], -1)
    return drafts.flatten()
