"""GEMMs of 8-bit weights and 8-bit activations on CUDA that torch has no fast kernel for.

int8 with one scale per output and token (W8A8), and e4m3 with one scale per block of 128 x 128
weights and per 128 inputs of a token. One kernel serves any number of rows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from windlass.kernels.gemm_io import Inputs
from windlass.kernels.gpu import gpu_of
from windlass.kernels.packed import Float8, Int8Group, Packed
from windlass.kernels.prepared import Prepared
from windlass.kernels.storages import Held
from windlass.kernels.triton import pdl
from windlass.kernels.triton.fit import fit
from windlass.kernels.triton.reduce import SplitWorkspace, add_splits

_OUTPUTS, _BLOCK_K = 64, 128
_MIN_PROGRAMS = 256  # per GEMM, if K is large enough to split
_MAX_SPLITS = 8
_MAX_ROWS = 64  # per program
_FEW_ROWS = 16  # max rows for which K may be split
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit
def quantise_kernel(
    x,
    codes,
    scales,
    K,
    MAX_CODE: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Quantise WIDTH inputs of a row with one scale; the largest magnitude becomes MAX_CODE."""
    pdl.begin(PDL)
    row, block = tl.program_id(0), tl.program_id(1)
    at = block * WIDTH + tl.arange(0, WIDTH)
    mask = at < K
    value = tl.load(x + row.to(tl.int64) * K + at, mask=mask, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), 0) / MAX_CODE, 1.1754943508222875e-38)
    value = value / scale
    if codes.dtype.element_ty == tl.int8:
        # Adding 1.5 * 2^23 rounds a float32 to the nearest integer, ties to even.
        value = (value + 12582912.0) - 12582912.0
    target = codes + row.to(tl.int64) * K + at
    tl.store(target, value.to(codes.dtype.element_ty), mask=mask)
    tl.store(scales + block * tl.num_programs(0) + row, scale)


@triton.jit(do_not_specialize=["M", "splits"])
def eight_bit_kernel(
    x,
    x_scales,
    codes,
    scales,
    out,
    partial_sums,
    counters,
    M,
    N,
    K,
    splits,
    BLOCKS: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[M, N] = x @ weight.T, with scales per BLOCK_K inputs (BLOCKS) or per row."""
    pdl.begin(PDL)
    tile, split = tl.program_id(0), tl.program_id(1)
    outputs = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    steps = tl.cdiv(K, BLOCK_K)
    span = tl.cdiv(steps, splits)
    k = tl.arange(0, BLOCK_K)
    w_at = codes + outputs.to(tl.int64)[:, None] * K + k[None, :]
    x_at = x + rows.to(tl.int64)[None, :] * K + k[:, None]
    integers: tl.constexpr = codes.dtype.element_ty == tl.int8
    kind: tl.constexpr = tl.int32 if integers else tl.float32
    acc = tl.zeros([OUTPUTS, ROWS], dtype=kind)
    for step in range(split * span, tl.minimum((split + 1) * span, steps)):
        inside = step * BLOCK_K + k < K
        w_mask = (outputs < N)[:, None] & inside[None, :]
        x_mask = (rows < M)[None, :] & inside[:, None]
        w_tile = tl.load(w_at + step * BLOCK_K, mask=w_mask, other=0.0)
        x_tile = tl.load(x_at + step * BLOCK_K, mask=x_mask, other=0.0)
        if BLOCKS:
            scale = tl.load(x_scales + step * M + rows, mask=rows < M, other=0.0)
            scale *= tl.load(scales + tile * OUTPUTS // 128 * steps + step)
            acc += tl.dot(w_tile, x_tile) * scale[None, :]
        else:
            acc = tl.dot(w_tile, x_tile, acc, out_dtype=kind)
    total = acc.to(tl.float32)
    at = rows.to(tl.int64)[None, :] * N + outputs[:, None]
    mask = (rows < M)[None, :] & (outputs < N)[:, None]
    complete = True
    if SPLIT:
        total, complete = add_splits(
            total, partial_sums, M * N, counters + tile, split, splits, at, mask
        )
    if complete:
        if not BLOCKS:
            total *= tl.load(scales + outputs, mask=outputs < N, other=0.0)[:, None]
            total *= tl.load(x_scales + rows, mask=rows < M, other=0.0)[None, :]
        tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)


class EightBitLinear:
    """Supports W8A8 with one group per row, and fp8 in blocks of 128 x 128."""

    name = "triton 8-bit"
    batch_invariant = False
    reads_rows = False

    def __init__(self) -> None:
        self._space = SplitWorkspace()

    def refuse(self, form: Packed, device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type != "cuda" and not _INTERPRETED:
            return f"Triton needs CUDA, this is {device.type}"
        if dtype == torch.float32 and not _INTERPRETED:
            return "needs a 16-bit dtype, this is float32"
        if isinstance(form, Float8) and form.block == (128, 128) and form.activation == "block":
            return gpu_of(device).lacks_fp8()
        if isinstance(form, Int8Group) and form.activation in ("token", "tensor"):
            if form.offsets is not None or form.perm is not None:
                return "only weights without offsets and without a permutation are supported"
            return None
        return "only W8A8 and fp8 in blocks of 128 x 128 are supported"

    def prepare(self, form: Packed) -> Int8Gemm:
        assert isinstance(form, Float8 | Int8Group)
        return Int8Gemm(form, self._space)


class Int8Gemm(Prepared):
    """Owns the codes and scales, not repacked."""

    def __init__(self, form: Float8 | Int8Group, space: SplitWorkspace) -> None:
        self._codes = form.codes.contiguous()
        self._scales = form.scales.float().contiguous()
        self._num_out, self._num_in = form.shape
        self._in_blocks = isinstance(form, Float8)
        self._input_scale = form.input_scale
        self._tiles = triton.cdiv(self._num_out, _OUTPUTS)
        self._space = space
        values = self._splits(_FEW_ROWS) * _FEW_ROWS * self._num_out
        space.reserve(self._codes.device, values, self._tiles)

    def tensors(self) -> tuple[Tensor | None, ...]:
        return self._codes, self._scales, self._input_scale

    def storages(self) -> Iterator[Held]:
        yield from super().storages()
        yield from self._space.storages()

    def apply(self, x: Inputs) -> Tensor:
        assert isinstance(x, Tensor)
        codes, scales = self._quantised(x)
        rows = x.shape[0]
        rows_per_program = min(_MAX_ROWS, max(_FEW_ROWS, triton.next_power_of_2(rows)))
        splits = self._splits(rows)
        out = x.new_empty((rows, self._num_out))
        fit(eight_bit_kernel)[(self._tiles, splits, triton.cdiv(rows, rows_per_program))](
            codes,
            scales,
            self._codes,
            self._scales,
            out,
            self._space.partial_sums,
            self._space.counters,
            rows,
            self._num_out,
            self._num_in,
            splits,
            BLOCKS=self._in_blocks,
            SPLIT=splits > 1,
            ROWS=rows_per_program,
            OUTPUTS=_OUTPUTS,
            BLOCK_K=_BLOCK_K,
            num_warps=4,
            num_stages=4,
            **pdl.options(),
        )
        return out

    def _splits(self, rows: int) -> int:
        if rows > _FEW_ROWS:
            return 1
        splits = triton.next_power_of_2(triton.cdiv(_MIN_PROGRAMS, self._tiles))
        return max(1, min(_MAX_SPLITS, splits, self._num_in // _BLOCK_K))

    def _quantised(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Quantise activations: codes [M, K] and scales [blocks, M]."""
        kind = torch.float8_e4m3fn if self._in_blocks else torch.int8
        if self._input_scale is not None:
            scale = self._input_scale.float()
            codes = (x.float() / scale).round().clamp(-127, 127).to(kind)
            return codes, scale.expand(x.shape[0]).contiguous()
        rows, size = x.shape
        width = _BLOCK_K if self._in_blocks else triton.next_power_of_2(size)
        codes = torch.empty((rows, size), dtype=kind, device=x.device)
        blocks = triton.cdiv(size, width)
        scales = torch.empty((blocks, rows), dtype=torch.float32, device=x.device)
        quantise_kernel[(rows, blocks)](
            x,
            codes,
            scales,
            size,
            MAX_CODE=448.0 if self._in_blocks else 127.0,
            WIDTH=width,
            num_warps=min(16, max(1, width // 512)),
            **pdl.options(),
        )
        return codes, scales
