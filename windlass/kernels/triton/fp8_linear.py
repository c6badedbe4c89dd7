"""fp8 GEMMs on CUDA: Triton kernels for few rows, torch._scaled_mm for many.

All multiply e4m3 by e4m3 with float32 accumulation. torch._scaled_mm is fastest with one scale per
tensor. So it gets such a scale, and the kernel that reads its outputs applies the scales of rows and
outputs (gemm_io.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeGuard

import torch
import triton
from torch import Tensor

from windlass.kernels.gemm_io import InputQuant, Inputs, Outputs, QuantisedInputs, UnscaledOutputs
from windlass.kernels.gpu import gpu_of
from windlass.kernels.packed import Float8, Packed
from windlass.kernels.prepared import Prepared
from windlass.kernels.storages import Held
from windlass.kernels.triton import gemv, pdl
from windlass.kernels.triton.fit import fit
from windlass.kernels.triton.fp8_kernels import fp8_gated_kernel, fp8_linear_kernel
from windlass.kernels.triton.quantise import quantise_rows
from windlass.kernels.triton.reduce import SplitWorkspace

_FEW_ROWS = 16
_MANY_ROWS = 512  # from here on torch is as fast with all scales, and applying them later is slower
_OUTPUTS, _BLOCK_K = 64, 128
# A weight of so many values is read in whole rows for one row of inputs; larger ones are limited by
# their conversion there. Measured on an H200.
_MAX_WHOLE, _MAX_WHOLE_SIZE, _WHOLE_OUTPUTS = 2**25, 8192, 4
_MIN_PROGRAMS = 128  # per GEMM, if K is large enough to split
_MIN_SPAN = 2048  # inputs per split of a GEMM that does not quantise them
_MANY_OUTPUTS = 16384  # such a weight fills the GPU with small tiles
# Bytes of weights that a GEMM prefetches before it waits for its inputs. Measured on an H200: twice as many
# delay the kernel that runs.
_PREFETCH_BYTES = 4 * 2**20
_SUM_SCALE = 2.0**17  # divisor of unscaled sums, so that they fit in float16


class Fp8Linear:
    """Supports e4m3 weights with scales per tensor or output, and activations quantised per token."""

    name = "triton fp8"
    batch_invariant = False
    reads_rows = False

    def __init__(self) -> None:
        self._space = SplitWorkspace()

    def refuse(self, form: Packed, device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type != "cuda":
            return f"Triton needs CUDA, this is {device.type}"
        if not isinstance(form, Float8):
            return "only fp8 is supported"
        if form.block is not None or form.activation not in ("token", "tensor"):
            return "only scales per tensor or output and activations per token are supported"
        if dtype not in (torch.bfloat16, torch.float16):
            return "needs a 16-bit dtype"
        if form.shape[0] % 16 or form.shape[1] % 16:
            return f"a weight of {form.shape[0]} x {form.shape[1]} is not a multiple of 16 x 16"
        return gpu_of(device).lacks_fp8()

    def prepare(self, form: Packed) -> Fp8Gemm:
        assert isinstance(form, Float8)
        return Fp8Gemm(form, self._space)


class ScaledGemm:
    """torch._scaled_mm for many rows, with one scale per row and per output."""

    def __init__(self, scales: Tensor) -> None:
        self.scales = scales
        self._raw_scales = scales * _SUM_SCALE
        self._sum_divisor = torch.full((), 1 / _SUM_SCALE, device=scales.device)
        self._one = torch.ones((), device=scales.device)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.scales, self._raw_scales, self._sum_divisor, self._one

    def apply(self, x: QuantisedInputs, codes: Tensor) -> Tensor:
        """The GEMM with its scales."""
        return _gemm(x, codes, x.scales, self.scales[None, :])

    def raw(self, x: QuantisedInputs, codes: Tensor) -> Outputs:
        """The GEMM for a reader that applies the scales."""
        if x.shape[0] >= _MANY_ROWS:
            return self.apply(x, codes)
        values = _gemm(x, codes, self._sum_divisor, self._one)
        return UnscaledOutputs(values, x.scales, self._raw_scales)


def _gemm(x: QuantisedInputs, codes: Tensor, row_scales: Tensor, scales: Tensor) -> Tensor:
    return torch._scaled_mm(
        x.codes,
        codes.T,
        scale_a=row_scales,
        scale_b=scales,
        out_dtype=x.dtype,
        use_fast_accum=True,
    )


@dataclass(frozen=True, slots=True)
class _Tiling:
    """Outputs and inputs per tile, and launch options of a GEMM of few rows; measured on an H200."""

    outputs: int
    inputs: int
    splits: int
    num_stages: int
    num_warps: int

    @classmethod
    def of(cls, num_out: int, num_in: int, quantises: bool) -> _Tiling:
        """`quantises`: the kernel quantises the inputs, which makes a program slower."""
        if not quantises:
            inputs = 2 * _BLOCK_K if num_in % (2 * _BLOCK_K) == 0 else _BLOCK_K
            splits = min(_splits(num_out, _OUTPUTS, _MIN_PROGRAMS), num_in // _MIN_SPAN)
            stages = 3 if splits > 1 else 6
            return cls(_OUTPUTS, inputs, max(1, splits), stages, 4)
        outputs, num_warps = (_OUTPUTS, 4) if num_out >= _MANY_OUTPUTS else (2 * _OUTPUTS, 8)
        splits = min(_splits(num_out, outputs, 4 * _MIN_PROGRAMS), num_in // _BLOCK_K)
        return cls(outputs, _BLOCK_K, max(1, splits), 4, num_warps)


def _splits(num_out: int, outputs: int, programs: int) -> int:
    """Splits of K for at least so many programs."""
    return min(8, triton.next_power_of_2(triton.cdiv(programs, triton.cdiv(num_out, outputs))))


class Fp8Gemm(Prepared):
    """Owns the codes, not repacked, and one scale per output."""

    def __init__(self, form: Float8, space: SplitWorkspace) -> None:
        self._codes = form.codes.contiguous()
        self._num_out, self._num_in = form.shape
        self._scales = form.scales.float().flatten().expand(self._num_out).contiguous()
        self._many = ScaledGemm(self._scales)
        self._input_scale = form.input_scale
        self._tilings = {
            quantises: _Tiling.of(self._num_out, self._num_in, quantises)
            for quantises in (False, True)
        }
        self._space = space
        splits = max(tiling.splits for tiling in self._tilings.values())
        tiles = triton.cdiv(self._num_out, _OUTPUTS)
        space.reserve(self._codes.device, splits * _FEW_ROWS * self._num_out, tiles)

    def tensors(self) -> tuple[Tensor | None, ...]:
        return self._codes, self._input_scale, *self._many.tensors()

    def storages(self) -> Iterator[Held]:
        yield from super().storages()
        yield from self._space.storages()

    def input_quant(self, num_rows: int) -> InputQuant | None:
        if self._input_scale is not None or self._reads_whole_rows(num_rows):
            return None
        return InputQuant("rows")

    def _reads_whole_rows(self, num_rows: int) -> bool:
        """Whether the GEMM reads whole rows of the weight, if its inputs are not quantised."""
        small = self._num_in <= _MAX_WHOLE_SIZE and self._codes.numel() <= _MAX_WHOLE
        return num_rows == 1 and small and self._input_scale is None

    def _in_whole_rows(self, x: Inputs) -> TypeGuard[Tensor]:
        return self._reads_whole_rows(x.shape[0]) and isinstance(x, Tensor)

    def apply(self, x: Inputs) -> Tensor:
        if x.shape[0] <= _FEW_ROWS:
            return self._few(x)
        return self._many.apply(self._quantised(x), self._codes)

    def raw(self, x: Inputs) -> Outputs:
        if x.shape[0] <= _FEW_ROWS:
            return self._few(x)
        return self._many.raw(self._quantised(x), self._codes)

    def gated(self, x: Inputs, silu_mul: Callable[[Outputs], Inputs]) -> Inputs:
        if x.shape[0] > _FEW_ROWS:
            return super().gated(x, silu_mul)
        if self._in_whole_rows(x):
            return gemv.gated(x, self._codes, _WHOLE_OUTPUTS, self._scales)
        rows, width = x.shape[0], self._num_out // 2
        out = torch.empty((rows, width), dtype=x.dtype, device=self._codes.device)
        values, scales = self._inputs(x)
        fit(fp8_gated_kernel)[(triton.cdiv(width, _OUTPUTS),)](
            values,
            scales,
            self._codes,
            self._scales,
            out,
            rows,
            width,
            self._num_in,
            _prefetched(self._num_out),
            ROWS=_FEW_ROWS,
            OUTPUTS=_OUTPUTS,
            BLOCK_K=_BLOCK_K,
            EVEN=width % _OUTPUTS == 0 and self._num_in % _BLOCK_K == 0,
            num_warps=4,
            num_stages=4 if scales is None else 3,
            **pdl.options(),
        )
        return out

    def _quantised(self, x: Inputs) -> QuantisedInputs:
        if isinstance(x, QuantisedInputs):
            return x
        assert isinstance(x, Tensor)
        if self._input_scale is None:
            return quantise_rows(x)
        scale = self._input_scale.float()
        codes = (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        return QuantisedInputs(
            codes, scale.reshape(1, 1).expand(x.shape[0], 1).contiguous(), x.dtype
        )

    def _inputs(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        """Codes and scales, or 16-bit inputs without scales, which the kernels quantise."""
        if self._quantises(x):
            return x, None
        quantised = self._quantised(x)
        return quantised.codes, quantised.scales

    def _quantises(self, x: Inputs) -> TypeGuard[Tensor]:
        """Whether the kernel for few rows quantises these inputs."""
        return isinstance(x, Tensor) and self._input_scale is None

    def _few(self, x: Inputs) -> Tensor:
        """The GEMM for few rows."""
        if self._in_whole_rows(x):
            return gemv.linear(x, self._codes, _WHOLE_OUTPUTS, self._scales)
        rows, outputs = x.shape[0], self._num_out
        out = torch.empty((rows, outputs), dtype=x.dtype, device=self._codes.device)
        tiling = self._tilings[self._quantises(x)]
        fit(fp8_linear_kernel)[(triton.cdiv(outputs, tiling.outputs), tiling.splits)](
            *self._inputs(x),
            self._codes,
            self._scales,
            out,
            self._space.partial_sums,
            self._space.counters,
            rows,
            outputs,
            self._num_in,
            tiling.splits,
            _prefetched(outputs * tiling.splits),
            SPLIT=tiling.splits > 1,
            ROWS=_FEW_ROWS,
            OUTPUTS=tiling.outputs,
            BLOCK_K=tiling.inputs,
            EVEN=outputs % tiling.outputs == 0 and self._num_in % tiling.inputs == 0,
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
            **pdl.options(),
        )
        return out


def _prefetched(num_rows: int) -> int:
    """Bytes that are prefetched of each of `num_rows` rows (or splits of rows)."""
    return max(64, _PREFETCH_BYTES // num_rows // 64 * 64)
