"""Copies KV blocks between the pages of a cache and contiguous records; any dtype, as words."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from windlass.kernels.triton import pdl

_TILE = 1024


@triton.jit
def copy_blocks_kernel(
    pages,
    ids,
    records,
    num_blocks,
    words,
    stride,
    SCATTER: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copy a tile of one plane of one block into its record, or back."""
    pdl.begin(PDL)
    row, plane = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    at = tl.program_id(2) * TILE + tl.arange(0, TILE)
    inside = at < words
    block = tl.load(ids + row)
    page = pages + (plane * num_blocks + block) * words + at
    record = records + row * stride + plane * words + at
    if SCATTER:
        tl.store(page, tl.load(record, mask=inside), mask=inside)
    else:
        tl.store(record, tl.load(page, mask=inside), mask=inside)


def gather_blocks(pages: Tensor, ids: Tensor, records: Tensor) -> None:
    """Copy blocks of pages [planes, blocks, words] into records [ids, planes, words]."""
    _copy(pages, ids, records, scatter=False)


def scatter_blocks(pages: Tensor, ids: Tensor, records: Tensor) -> None:
    """Copy records [ids, planes, words] into blocks of pages [planes, blocks, words]."""
    _copy(pages, ids, records, scatter=True)


def _copy(pages: Tensor, ids: Tensor, records: Tensor, *, scatter: bool) -> None:
    planes, num_blocks, words = pages.shape
    copy_blocks_kernel[len(ids), planes, triton.cdiv(words, _TILE)](
        pages,
        ids,
        records,
        num_blocks,
        words,
        records.stride(0),
        SCATTER=scatter,
        TILE=_TILE,
        **pdl.options(),
    )
