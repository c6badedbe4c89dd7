"""GEMMs with 4-bit codebook weights (NF4, GGUF's IQ types and MXFP4) on CUDA.

A lookup in the codebook, which stays in the L1 cache, turns codes into values, which are multiplied
in 16 bits. A fused kernel serves few rows; many rows share a weight that is dequantised per GEMM.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear

from windlass.kernels.gemm_io import Inputs
from windlass.kernels.packed import Packed, Table4, pack_nibbles, unpack_nibbles
from windlass.kernels.prepared import RowReader
from windlass.kernels.reference import shard_rows
from windlass.kernels.storages import Held
from windlass.kernels.triton import pdl
from windlass.kernels.triton.fit import fit
from windlass.kernels.triton.reduce import SplitWorkspace, add_splits

_MAX_FUSED_ROWS = 64  # more rows share a dequantised weight
_OUTPUTS = 64
_MIN_PROGRAMS = 256  # per GEMM, if K is large enough to split
_MAX_SPLITS = 8
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit
def _scale(scales, sub_scales, group, outputs, N, GROUP: tl.constexpr, SUPER: tl.constexpr):
    """The scales of one group: that of its super-group of SUPER inputs, times its sub-scale."""
    scale = tl.load(scales + group * GROUP // SUPER * N + outputs).to(tl.float32)
    if sub_scales is not None:
        scale *= tl.load(sub_scales + group * N + outputs).to(tl.float32)
    return scale


@triton.jit(do_not_specialize=["M", "splits"])
def table_linear_kernel(
    x,
    codes,
    table,
    scales,
    sub_scales,
    out,
    partial_sums,
    counters,
    M,
    N,
    K,
    splits,
    GROUP: tl.constexpr,
    SUPER: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[M, N] = x @ weight.T; a byte holds inputs j and GROUP + j of a block of two groups."""
    pdl.begin(PDL)
    tile, split = tl.program_id(0), tl.program_id(1)
    outputs = tl.minimum(tile * OUTPUTS + tl.arange(0, OUTPUTS), N - 1)
    rows = tl.arange(0, ROWS)
    blocks = K // (2 * GROUP)
    span = tl.cdiv(blocks, splits)
    at = tl.arange(0, GROUP)
    w_at = codes + outputs.to(tl.int64)[:, None] * (K // 2) + at[None, :]
    x_at = x + rows[None, :] * K + at[:, None]
    inside = (rows < M)[None, :]
    acc = tl.zeros([OUTPUTS, ROWS], dtype=tl.float32)
    for block in range(split * span, tl.minimum((split + 1) * span, blocks)):
        packed = tl.load(w_at + block * GROUP).to(tl.int32)
        low, high = tl.load(table + (packed & 15)), tl.load(table + (packed >> 4))
        first = tl.load(x_at + block * 2 * GROUP, mask=inside, other=0.0)
        second = tl.load(x_at + block * 2 * GROUP + GROUP, mask=inside, other=0.0)
        scale = _scale(scales, sub_scales, 2 * block, outputs, N, GROUP, SUPER)
        acc += tl.dot(low.to(first.dtype), first) * scale[:, None]
        scale = _scale(scales, sub_scales, 2 * block + 1, outputs, N, GROUP, SUPER)
        acc += tl.dot(high.to(second.dtype), second) * scale[:, None]
    outputs = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    target = rows[None, :] * N + outputs[:, None]
    mask = inside & (outputs < N)[:, None]
    complete = True
    if SPLIT:
        acc, complete = add_splits(
            acc, partial_sums, M * N, counters + tile, split, splits, target, mask
        )
    if complete:
        tl.store(out + target, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"], do_not_specialize_on_alignment=["ids"])
def dequantise_table_kernel(
    codes,
    table,
    scales,
    sub_scales,
    ids,
    out,
    M,
    N,
    K,
    GROUP: tl.constexpr,
    SUPER: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Dequantise ROWS rows of two groups; out[M, K] is the weight, or the rows of `ids`."""
    pdl.begin(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(1)
    safe = tl.minimum(row, M - 1)
    if ids is not None:
        safe = tl.load(ids + safe).to(tl.int32)
    at = tl.arange(0, GROUP)
    source = safe.to(tl.int64)[:, None] * (K // 2) + block * GROUP + at[None, :]
    packed = tl.load(codes + source).to(tl.int32)
    for half in tl.static_range(2):
        value = tl.load(table + ((packed >> (4 * half)) & 15))
        value *= _scale(scales, sub_scales, 2 * block + half, safe, N, GROUP, SUPER)[:, None]
        column = (2 * block + half) * GROUP + at
        target = out + row.to(tl.int64)[:, None] * K + column[None, :]
        tl.store(target, value.to(out.dtype.element_ty), mask=(row < M)[:, None])


class TableLinear:
    """Supports codebooks of 16 values with an even number of groups of 16 to 128 inputs."""

    name = "triton table"
    batch_invariant = False
    reads_rows = True

    def __init__(self) -> None:
        self._space = SplitWorkspace()

    def refuse(self, form: Packed, device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type != "cuda" and not _INTERPRETED:
            return f"Triton needs CUDA, this is {device.type}"
        if not isinstance(form, Table4):
            return "only 4-bit codebooks are supported"
        if dtype == torch.float32 and not _INTERPRETED:
            return "needs a 16-bit dtype, this is float32"
        if form.group not in (16, 32, 64, 128) or form.shape[1] % (2 * form.group):
            return f"{form.shape[1]} inputs are not an even number of groups of {form.group}"
        return None

    def prepare(self, form: Packed) -> CodebookGemm:
        assert isinstance(form, Table4)
        return CodebookGemm(form, self._space)


class CodebookGemm(RowReader):
    """Owns the repacked codes."""

    def __init__(self, form: Table4, space: SplitWorkspace) -> None:
        self._num_out, self._num_in = form.shape
        self._group = form.group
        codes = unpack_nibbles(form.codes).view(self._num_out, -1, 2, self._group)
        self._codes = pack_nibbles(codes.transpose(2, 3).reshape(self._num_out, -1)).contiguous()
        self._table = form.values.contiguous()
        self._scales = form.scales.T.contiguous()
        subs = form.sub_scales
        self._sub_scales = None if subs is None else subs.T.contiguous()
        self._super_group = form.super_group
        self._tiles = triton.cdiv(self._num_out, _OUTPUTS)
        splits = triton.next_power_of_2(triton.cdiv(_MIN_PROGRAMS, self._tiles))
        self._splits = max(1, min(_MAX_SPLITS, splits, self._num_in // (2 * self._group)))
        self._space = space
        values = self._splits * _MAX_FUSED_ROWS * self._num_out
        space.reserve(self._codes.device, values, self._tiles)

    def tensors(self) -> tuple[Tensor | None, ...]:
        return self._codes, self._table, self._scales, self._sub_scales

    def storages(self) -> Iterator[Held]:
        yield from super().storages()
        yield from self._space.storages()

    def apply(self, x: Inputs) -> Tensor:
        assert isinstance(x, Tensor)
        rows = x.shape[0]
        if rows > _MAX_FUSED_ROWS:
            return linear(x, self._dequantised(x.dtype))
        out = x.new_empty((rows, self._num_out))
        fit(table_linear_kernel)[(self._tiles, self._splits)](
            x,
            self._codes,
            self._table,
            self._scales,
            self._sub_scales,
            out,
            self._space.partial_sums,
            self._space.counters,
            rows,
            self._num_out,
            self._num_in,
            self._splits,
            GROUP=self._group,
            SUPER=self._super_group,
            SPLIT=self._splits > 1,
            ROWS=max(16, triton.next_power_of_2(rows)),
            OUTPUTS=_OUTPUTS,
            num_warps=4,
            num_stages=3,
            **pdl.options(),
        )
        return out

    def rows(self, ids: Tensor, dtype: torch.dtype, first: int | None = None) -> Tensor:
        if first is not None:
            return shard_rows(ids, first, self._num_out, lambda own: self._dequantised(dtype, own))
        return self._dequantised(dtype, ids)

    def _dequantised(self, dtype: torch.dtype, ids: Tensor | None = None) -> Tensor:
        """Dequantise the weight, or its rows `ids`."""
        count = self._num_out if ids is None else len(ids)
        weight = torch.empty((count, self._num_in), dtype=dtype, device=self._codes.device)
        rows_per_program = 32 if ids is None else 1
        blocks = self._num_in // (2 * self._group)
        dequantise_table_kernel[(triton.cdiv(count, rows_per_program), blocks)](
            self._codes,
            self._table,
            self._scales,
            self._sub_scales,
            ids,
            weight,
            count,
            self._num_out,
            self._num_in,
            GROUP=self._group,
            SUPER=self._super_group,
            ROWS=rows_per_program,
            num_warps=4,
            **pdl.options(),
        )
        return weight
