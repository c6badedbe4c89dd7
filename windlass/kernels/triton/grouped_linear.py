"""Group-wise int4 and int8 weights on CUDA: fused kernels for few rows, dequantisation for many.

Weights are repacked at load. Dequantising a weight for one GEMM costs about as much as reading it,
which pays off for many rows; Hopper GPUs unpack int4 in registers for up to hundreds of rows
(int4_hopper.py). If the format quantises activations to 8 bits, GEMMs of many rows run in fp8.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear, pad

from windlass.kernels.gemm_io import InputQuant, Inputs, Outputs, PlaneInputs, QuantisedInputs
from windlass.kernels.gpu import gpu_of
from windlass.kernels.packed import Int4Group, Int8Group, Packed, pack_nibbles, unpack_nibbles
from windlass.kernels.prepared import RowReader
from windlass.kernels.reference import shard_rows
from windlass.kernels.storages import Held
from windlass.kernels.triton import pdl
from windlass.kernels.triton.fit import fit
from windlass.kernels.triton.fp8_linear import ScaledGemm
from windlass.kernels.triton.grouped import grouped_linear_kernel
from windlass.kernels.triton.grouped_row import grouped_row_kernel
from windlass.kernels.triton.int4_hopper import Int4HopperGemm
from windlass.kernels.triton.int4_wide import Int4Weight
from windlass.kernels.triton.quantise import quantise_blocks, quantise_rows
from windlass.kernels.triton.reduce import SplitWorkspace

_MAX_FUSED_ROWS = 64  # more rows share a dequantised weight
# Max rows for which 8-bit activations also have two planes: weight bandwidth is the limit there.
_MAX_FINE_ROWS = 16
_MAX_HALF = 128  # inputs of half a block
_OUTPUTS = 64
# Min programs per GEMM, if K is large enough to split; with more rows, splits cost more.
_MIN_PROGRAMS, _MIN_PROGRAMS_MANY_ROWS = 384, 160
_MAX_SPLITS = 8
_PREFETCH_BYTES = 8 * 2**20  # bytes of codes that a GEMM prefetches before it waits for its inputs
_FP8 = torch.float8_e4m3fn
# One row of inputs is multiplied by whole rows of weights of up to so many values. Larger weights fill the
# GPU, and its tensor cores multiply faster there. Measured on an H200.
_MAX_ROW_VALUES, _MAX_ROW_SIZE, _MAX_ROW_OUTPUTS = 2**25, 8192, 16
_MIN_ROW_PROGRAMS = 256
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit(do_not_specialize=["M"], do_not_specialize_on_alignment=["ids"])
def dequantise_kernel(
    codes,
    scales,
    offsets,
    ids,
    out,
    out_scales,
    M,
    N,
    K,
    K_PAD,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Dequantise ROWS rows of one block; out[M, K] is the weight, or the rows of `ids`.

    With `out_scales` each output is divided by its scale.
    """
    pdl.begin(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(1)
    at = tl.arange(0, HALF)
    safe = tl.minimum(row, M - 1)
    if ids is not None:
        safe = tl.load(ids + safe).to(tl.int32)
    if BITS == 4:
        start = safe[:, None].to(tl.int64) * (K_PAD // 2) + block * HALF
        packed = tl.load(codes + start + at[None, :])
        halves = (packed & 15, packed >> 4)
    else:
        start = safe[:, None].to(tl.int64) * K_PAD + block * 2 * HALF
        halves = (tl.load(codes + start + at[None, :]), tl.load(codes + start + HALF + at[None, :]))
    for half in tl.static_range(2):
        first = (2 * block + half) * HALF
        group = first // GROUP
        scale = tl.load(scales + group * N + safe).to(tl.float32)
        value = halves[half].to(tl.float32) * scale[:, None]
        if offsets is not None:
            value += tl.load(offsets + group * N + safe).to(tl.float32)[:, None]
        if out_scales is not None:
            value /= tl.load(out_scales + safe)[:, None]
        column = first + at
        mask = (row < M)[:, None] & (column < K)[None, :]
        target = out + row[:, None].to(tl.int64) * K + column[None, :]
        tl.store(target, value.to(out.dtype.element_ty), mask=mask)


class GroupedLinear:
    """Supports int4 and int8 weights with a group size of 32 or more."""

    name = "triton groups"
    batch_invariant = False
    reads_rows = True

    def __init__(self) -> None:
        self._space = SplitWorkspace()

    def refuse(self, form: Packed, device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type != "cuda" and not _INTERPRETED:
            return f"Triton needs CUDA, this is {device.type}"
        if not isinstance(form, Int4Group | Int8Group):
            return "only group-wise int4 and int8 are supported"
        if isinstance(form, Int8Group) and form.activation != "none":
            return "quantises activations per block, not as this format requires"
        if form.group < 32 or (form.group & (form.group - 1) and form.group != form.shape[1]):
            return f"group size {form.group} is not a power of two of at least 32"
        if dtype == torch.float32 and not _INTERPRETED:
            return "needs a 16-bit dtype, this is float32"
        return None

    def prepare(self, form: Packed) -> GroupQuantGemm:
        assert isinstance(form, Int4Group | Int8Group)
        return GroupQuantGemm(form, self._space)


class GroupQuantGemm(RowReader):
    """Owns the repacked codes: each byte of int4 holds input j and input HALF + j of a block."""

    def __init__(self, form: Int4Group | Int8Group, space: SplitWorkspace) -> None:
        self._num_out, self._num_in = form.shape
        self._bits = 4 if isinstance(form, Int4Group) else 8
        self._half = min(_MAX_HALF, form.group)
        self._block = 2 * self._half
        self._group = form.group
        self._planes = InputQuant("planes", self._block, min(self._group, self._block))
        padding = -self._num_in % self._block
        codes = unpack_nibbles(form.codes) if isinstance(form, Int4Group) else form.codes
        codes = pad(codes, (0, padding))
        if isinstance(form, Int4Group):
            pairs = codes.view(self._num_out, -1, 2, self._half).transpose(2, 3)
            codes = pack_nibbles(pairs.reshape(self._num_out, -1))
        self._codes = codes.contiguous()
        self._scales = _by_group(form.scales)
        self._offsets = None if form.offsets is None else _by_group(form.offsets)
        self._perm = None if form.perm is None else form.perm.int()
        self._padded = self._num_in + padding
        missing = -(-self._padded // form.group) - self._scales.shape[0]
        if missing:
            self._scales = pad(self._scales, (0, 0, 0, missing))
            self._offsets = (
                None if self._offsets is None else pad(self._offsets, (0, 0, 0, missing))
            )
        gpu = gpu_of(self._codes.device)
        # Whether the format quantises activations.
        self._coarse = isinstance(form, Int4Group) and form.activation != "none"
        self._inline = gpu.lacks_ptx() is None and not _INTERPRETED
        self._no_fp8 = gpu.lacks_fp8() if self._coarse else None
        self._in_fp8 = None if self._no_fp8 is not None else _in_fp8(form)
        self._no_hopper: str | None = None
        self._hopper = self._make_hopper(space)
        self._tiles = triton.cdiv(self._num_out, _OUTPUTS)
        self._space = space
        values = (
            max(self._splits(rows) * rows for rows in (_MAX_FINE_ROWS, _MAX_FUSED_ROWS))
            * self._num_out
        )
        space.reserve(self._codes.device, values, self._tiles)

    def _make_hopper(self, space: SplitWorkspace) -> Int4HopperGemm | None:
        """The GEMM of int4 weights and 16-bit activations for rows that do not fit the fused one."""
        if self._bits != 4 or self._coarse or self._offsets is None:
            return None
        self._no_hopper = Int4HopperGemm.refuse(
            self._codes.device, self._num_in, self._num_out, self._half
        )
        if self._no_hopper is not None:
            return None
        weight = Int4Weight(
            self._codes, self._scales, self._offsets, group=self._group, half=self._half
        )
        return Int4HopperGemm(weight, space)

    @property
    def lacks(self) -> str | None:
        if self._no_fp8 is not None:
            return f"16-bit activations for more than {_MAX_FUSED_ROWS} rows: {self._no_fp8}"
        if self._no_hopper is not None:
            return (
                f"weights are dequantised for more than {_MAX_FUSED_ROWS} rows: {self._no_hopper}"
            )
        return None

    def tensors(self) -> tuple[Tensor | None, ...]:
        scales = () if self._in_fp8 is None else self._in_fp8.tensors()
        return self._codes, self._scales, self._offsets, self._perm, *scales

    def storages(self) -> Iterator[Held]:
        yield from super().storages()
        yield from self._space.storages()

    def _uses_hopper(self, num_rows: int) -> bool:
        """Whether the GEMM of so many rows has 16-bit activations and unpacks int4 in registers."""
        return (
            num_rows > _MAX_FINE_ROWS
            and self._hopper is not None
            and bool(self._hopper.plan(num_rows))
        )

    def input_quant(self, num_rows: int) -> InputQuant | None:
        if self._perm is not None or self._uses_hopper(num_rows):
            return None
        if num_rows <= _MAX_FUSED_ROWS:
            return self._planes
        return None if self._in_fp8 is None else InputQuant("rows")

    def apply(self, x: Inputs) -> Tensor:
        num_rows = x.shape[0]
        if self._uses_hopper(num_rows):
            assert self._hopper is not None
            return self._hopper.apply(self._permuted(x).contiguous())
        if num_rows <= _MAX_FUSED_ROWS:
            return self._fused(self._in_planes(x))
        if self._in_fp8 is not None:
            return self._in_fp8.apply(self._quantised(x), self._dequantised(_FP8))
        return linear(self._permuted(x), self._dequantised(x.dtype))

    def raw(self, x: Inputs) -> Outputs:
        if x.shape[0] <= _MAX_FUSED_ROWS or self._in_fp8 is None:
            return self.apply(x)
        return self._in_fp8.raw(self._quantised(x), self._dequantised(_FP8))

    def _quantised(self, x: Inputs) -> QuantisedInputs:
        return x if isinstance(x, QuantisedInputs) else quantise_rows(self._permuted(x))

    def _in_planes(self, x: Inputs) -> PlaneInputs:
        if isinstance(x, PlaneInputs):
            assert x.codes.shape[1] == self._padded
            return x
        assert isinstance(x, Tensor)
        return quantise_blocks(x, self._planes.block, self._planes.group, self._perm)

    def _permuted(self, x: Inputs) -> Tensor:
        """Unquantised inputs in the order of the weight's."""
        assert isinstance(x, Tensor)
        return x if self._perm is None else x[:, self._perm]

    def _splits(self, rows: int) -> int:
        programs = _MIN_PROGRAMS if rows <= _MAX_FINE_ROWS else _MIN_PROGRAMS_MANY_ROWS
        splits = triton.next_power_of_2(triton.cdiv(programs, self._tiles))
        return max(1, min(_MAX_SPLITS, splits, self._padded // self._block))

    def _fused(self, planes: PlaneInputs) -> Tensor:
        rows, outputs = planes.shape[0], self._num_out
        if rows == 1 and self._fits_row:
            return self._one_row(planes)
        padded_rows = min(_MAX_FUSED_ROWS, max(8, triton.next_power_of_2(rows)))
        num_planes = 1 if self._coarse and rows > _MAX_FINE_ROWS else 2
        splits = self._splits(rows)
        out = planes.scales.new_empty((rows, outputs), dtype=planes.dtype)
        fit(grouped_linear_kernel)[(self._tiles, splits)](
            planes.codes,
            planes.scales,
            planes.sums,
            self._codes,
            self._scales,
            self._offsets,
            out,
            self._space.partial_sums,
            self._space.counters,
            rows,
            outputs,
            self._padded,
            splits,
            max(64, _PREFETCH_BYTES // (outputs * splits) // 64 * 64),
            BITS=self._bits,
            GROUP=self._group,
            HALF=self._half,
            PLANES=num_planes,
            SPLIT=splits > 1,
            ROWS=padded_rows,
            OUTPUTS=_OUTPUTS,
            EVEN=self._num_out % _OUTPUTS == 0,
            INLINE=self._inline,
            num_warps=4,
            num_stages=3,
            **pdl.options(),
        )
        return out

    @property
    def _fits_row(self) -> bool:
        """Whether a GEMM of one row reads whole rows of the weight (grouped_row.py)."""
        whole_groups = self._group & (self._group - 1) == 0 or self._group >= self._block
        small = self._padded <= _MAX_ROW_SIZE and self._num_out * self._padded <= _MAX_ROW_VALUES
        return whole_groups and small

    def _one_row(self, planes: PlaneInputs) -> Tensor:
        codes, inputs = self._codes.view(torch.int32), planes.codes.view(torch.int32)
        blocks = triton.next_power_of_2(self._padded // self._block)
        many = max(1, self._num_out // _MIN_ROW_PROGRAMS)
        outputs = min(_MAX_ROW_OUTPUTS, 1 << (many.bit_length() - 1))
        out = planes.scales.new_empty((1, self._num_out), dtype=planes.dtype)
        grouped_row_kernel[(triton.cdiv(self._num_out, outputs),)](
            inputs,
            planes.scales,
            planes.sums,
            codes,
            self._scales,
            self._offsets,
            out,
            self._num_out,
            codes.shape[1],
            inputs.shape[1],
            BITS=self._bits,
            GROUP=self._group,
            HALF=self._half,
            BLOCKS=blocks,
            OUTPUTS=outputs,
            INLINE=self._inline,
            num_warps=max(1, min(8, blocks * self._half // 512)),
            **pdl.options(),
        )
        return out

    def rows(self, ids: Tensor, dtype: torch.dtype, first: int | None = None) -> Tensor:
        assert self._perm is None
        if first is not None:
            return shard_rows(ids, first, self._num_out, lambda own: self._dequantised(dtype, own))
        return self._dequantised(dtype, ids)

    def _dequantised(self, dtype: torch.dtype, ids: Tensor | None = None) -> Tensor:
        """Dequantise the weight, or its rows `ids`; fp8 values are divided by the outputs' scales."""
        count = self._num_out if ids is None else len(ids)
        weight = torch.empty((count, self._num_in), dtype=dtype, device=self._codes.device)
        rows_per_program = 32 if ids is None else 1
        dequantise_kernel[(triton.cdiv(count, rows_per_program), self._padded // self._block)](
            self._codes,
            self._scales,
            self._offsets,
            ids,
            weight,
            self._in_fp8.scales if self._in_fp8 is not None and dtype == _FP8 else None,
            count,
            self._num_out,
            self._num_in,
            self._padded,
            BITS=self._bits,
            GROUP=self._group,
            HALF=self._half,
            ROWS=rows_per_program,
            num_warps=4,
            **pdl.options(),
        )
        return weight


def _by_group(values: Tensor) -> Tensor:
    """Transpose [N, groups] to [groups, N], so that adjacent outputs are contiguous."""
    return values.T.contiguous()


def _in_fp8(form: Int4Group | Int8Group) -> ScaledGemm | None:
    """The fp8 GEMM for many rows, if the format quantises activations."""
    if isinstance(form, Int8Group) or form.activation == "none":
        return None
    scales, offsets = form.scales.float(), form.offsets.float()
    largest = torch.maximum(offsets.abs(), (15 * scales + offsets).abs()).amax(dim=1)
    return ScaledGemm((largest / 448.0).clamp_min(torch.finfo(torch.float32).tiny))
