"""Changes logits before sampling, for rows of one batch with different sampling params.

A slot's tables (bias, token counts) are tensors of their own, allocated only for requests that need
them; kernels get their addresses by slot, 0 for none.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from windlass.kernels.triton import pdl

_TILE = 1024


@triton.jit
def change_logits_kernel(
    logits,
    rows,
    slots,
    mask_rows,
    tables,
    penalties,
    masks,
    scores,
    size,
    stride,
    mask_stride,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add the bias, apply penalties and mask forbidden tokens of one row, in this order."""
    pdl.begin(PDL)
    index = tl.program_id(0)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = at < size
    row = tl.load(rows + index).to(tl.int64)
    slot = tl.load(slots + index).to(tl.int64)
    x = tl.load(logits + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(tables + slot * 2)
    if bias != 0:
        x += tl.load(bias.to(tl.pointer_type(tl.float32)) + at, mask=inside, other=0.0)
    counts = tl.load(tables + slot * 2 + 1)
    if counts != 0:
        repetition = tl.load(penalties + slot * 3)
        frequency = tl.load(penalties + slot * 3 + 1)
        presence = tl.load(penalties + slot * 3 + 2)
        # In one number: the lowest bit for the prompt, above it the count of generated tokens.
        known = tl.load(counts.to(tl.pointer_type(tl.int32)) + at, mask=inside, other=0)
        count = known >> 1
        penalised = tl.where(x > 0, x / repetition, x * repetition)
        x = tl.where(known > 0, penalised, x)
        x -= frequency * count.to(tl.float32) + presence * (count > 0).to(tl.float32)
    mask_row = tl.load(mask_rows + index).to(tl.int64)
    if mask_row >= 0:
        word = tl.load(masks + mask_row * mask_stride + at // 32, mask=inside, other=0)
        x = tl.where((word >> (at % 32)) & 1 != 0, x, float("-inf"))
    tl.store(scores + index.to(tl.int64) * size + at, x, mask=inside)


@triton.jit
def count_tokens_kernel(tokens, slots, tables, PDL: tl.constexpr):
    """Count each row's new token in the table of its slot, if it has one."""
    pdl.begin(PDL)
    index = tl.program_id(0)
    counts = tl.load(tables + tl.load(slots + index).to(tl.int64) * 2 + 1)
    if counts != 0:
        at = counts.to(tl.pointer_type(tl.int32)) + tl.load(tokens + index)
        tl.store(at, tl.load(at) + 2)


def change_logits(
    logits: Tensor,
    rows: Tensor,
    slots: Tensor,
    mask_rows: Tensor,
    tables: Tensor,
    penalties: Tensor,
    masks: Tensor,
) -> Tensor:
    """Scores [n, vocabulary], float32, of the logits at `rows` [n].

    `slots` [n]; `mask_rows` [n]: row of `masks` [m, words], one bit per allowed token, or -1;
    `tables` [slots, 2]: addresses of the bias and of the token counts; `penalties` [slots, 3].
    """
    count, size = len(rows), logits.shape[1]
    scores = torch.empty((count, size), dtype=torch.float32, device=logits.device)
    change_logits_kernel[count, triton.cdiv(size, _TILE)](
        logits,
        rows,
        slots,
        mask_rows,
        tables,
        penalties,
        masks,
        scores,
        size,
        logits.stride(0),
        masks.stride(0),
        TILE=_TILE,
        num_warps=4,
        **pdl.options(),
    )
    return scores


def count_tokens(tokens: Tensor, slots: Tensor, tables: Tensor) -> None:
    """Count new tokens, one per row, for the penalties of their slots."""
    count_tokens_kernel[(len(tokens),)](tokens, slots, tables, num_warps=1, **pdl.options())
