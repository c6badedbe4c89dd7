"""fp8 weights and activations on CUDA: few rows in kernels of ours, many in torch's own.

All multiply e4m3 by e4m3 in float32. Torch's product is fastest with one scale for all, so it gets
that, and the scales of rows and outputs are multiplied in by the kernel that reads it (rounded.py).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
from torch import Tensor

from windlass.kernels.gemm import Norm
from windlass.kernels.packed import Float8, Packed
from windlass.kernels.prepared import Prepared
from windlass.kernels.rounded import Inputs, Outputs, Rounded, Rounding, Scaled
from windlass.kernels.triton import pdl
from windlass.kernels.triton.fp8_kernels import fp8_gated_kernel, fp8_linear_kernel
from windlass.kernels.triton.reduce import Space
from windlass.kernels.triton.rounding import room, round_rows

_FEW_ROWS = 16
_MOST_NORMED = 2  # rows; one program normalises them all
_MANY_ROWS = 512  # from here on torch is as fast with all scales, and reading them apart costs more
_NORMED_AT_ONCE = 4096  # values
_OUTPUTS, _BLOCK_K = 64, 128
_PROGRAMS = 128  # that a product is cut into at least, where K allows
_FETCHED = 8 * 2**20  # bytes of weights that a product fetches before it waits for its inputs
_CAPABILITY = (8, 9)  # the first devices that multiply fp8
_LIFT = 2.0**17  # unscaled sums are divided by this, so that float16 can hold them


class Fp8Linear:
    """Takes e4m3 weights with one scale, or one for each output, and activations rounded per token."""

    name = "triton fp8"
    batch_invariant = False
    reads_rows = False

    def __init__(self) -> None:
        self._space = Space()

    def refuse(self, form: Packed, device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type != "cuda":
            return f"Triton needs CUDA, this is {device.type}"
        if not isinstance(form, Float8):
            return "written for fp8"
        if form.block is not None or form.activation not in ("token", "tensor"):
            return "written for scales per tensor or output, and activations per token"
        if dtype not in (torch.bfloat16, torch.float16):
            return "written for 16-bit arithmetic"
        if form.shape[0] % 16 or form.shape[1] % 16:
            return f"a weight of {form.shape[0]} x {form.shape[1]} is not made of sixteens"
        if torch.cuda.get_device_capability(device) < _CAPABILITY:
            return "this GPU does not multiply fp8"
        return None

    def prepare(self, form: Packed) -> Fp8Gemm:
        assert isinstance(form, Float8)
        return Fp8Gemm(form, self._space)


class ScaledGemm:
    """Torch's product of many rows, with a scale for each row and each output."""

    def __init__(self, scales: Tensor) -> None:
        self.scales = scales
        self._lifted = scales * _LIFT
        self._lowered = torch.full((), 1 / _LIFT, device=scales.device)
        self._one = torch.ones((), device=scales.device)

    def whole(self, x: Rounded, codes: Tensor) -> Tensor:
        """The product with its scales."""
        return _gemm(x, codes, x.scales, self.scales[None, :])

    def raw(self, x: Rounded, codes: Tensor) -> Outputs:
        """The product for a reader that multiplies the scales in."""
        if x.shape[0] >= _MANY_ROWS:
            return self.whole(x, codes)
        values = _gemm(x, codes, self._lowered, self._one)
        return Scaled(values, x.scales, self._lifted)


def _gemm(x: Rounded, codes: Tensor, row_scales: Tensor, scales: Tensor) -> Tensor:
    return torch._scaled_mm(
        x.codes,
        codes.T,
        scale_a=row_scales,
        scale_b=scales,
        out_dtype=x.dtype,
        use_fast_accum=True,
    )


class Fp8Gemm(Prepared):
    """Owns the codes as they came, and one scale for each output."""

    def __init__(self, form: Float8, space: Space) -> None:
        self._codes = form.codes.contiguous()
        self._num_out, self._num_in = form.shape
        self._scales = form.scales.float().flatten().expand(self._num_out).contiguous()
        self._many = ScaledGemm(self._scales)
        self._input_scale = form.input_scale
        self._even = self._num_out % _OUTPUTS == 0 and self._num_in % _BLOCK_K == 0
        self._tiles = triton.cdiv(self._num_out, _OUTPUTS)
        self._space = space
        most = max(self._splits(True), self._splits(False)) * _FEW_ROWS * self._num_out
        space.reserve(self._codes.device, most, self._tiles + 1)

    @property
    def num_bytes(self) -> int:
        return self._codes.nbytes + self._scales.nbytes

    def rounding(self, num_rows: int) -> Rounding | None:
        del num_rows
        return Rounding("rows") if self._input_scale is None else None

    def apply(self, x: Inputs) -> Tensor:
        if x.shape[0] <= _FEW_ROWS:
            return self._few(x, None)[0]
        return self._many.whole(self._rounded(x), self._codes)

    def raw(self, x: Inputs) -> Outputs:
        if x.shape[0] <= _FEW_ROWS:
            return self._few(x, None)[0]
        return self._many.raw(self._rounded(x), self._codes)

    def then(self, x: Inputs, residual: Tensor, norm: Norm) -> tuple[Inputs, Tensor]:
        if x.shape[0] > _MOST_NORMED:
            return super().then(x, residual, norm)
        return self._few(x, (residual, norm))[1], residual

    def gated(self, x: Inputs, silu_mul: Callable[[Outputs], Inputs]) -> Inputs:
        if x.shape[0] > _FEW_ROWS:
            return super().gated(x, silu_mul)
        values, scales = self._inputs(x)
        rows, width = x.shape[0], self._num_out // 2
        out = torch.empty((rows, width), dtype=x.dtype, device=values.device)
        fp8_gated_kernel[(triton.cdiv(width, _OUTPUTS),)](
            values,
            scales,
            self._codes,
            self._scales,
            out,
            rows,
            width,
            self._num_in,
            _ahead(self._num_out),
            ROWS=_FEW_ROWS,
            OUTPUTS=_OUTPUTS,
            BLOCK_K=_BLOCK_K,
            EVEN=self._even and width % _OUTPUTS == 0,
            num_warps=4,
            num_stages=4 if scales is None else 3,
            **pdl.options(),
        )
        return out

    def _rounded(self, x: Inputs) -> Rounded:
        if isinstance(x, Rounded):
            return x
        assert isinstance(x, Tensor)
        if self._input_scale is None:
            return round_rows(x)
        scale = self._input_scale.float()
        codes = (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        return Rounded(codes, scale.reshape(1, 1).expand(x.shape[0], 1).contiguous(), x.dtype)

    def _inputs(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        """Codes and scales, or what the kernels round themselves."""
        if isinstance(x, Tensor) and self._input_scale is None:
            return x, None
        rounded = self._rounded(x)
        return rounded.codes, rounded.scales

    def _splits(self, rounds: bool) -> int:
        """Parts of K; rounding inputs makes a program slower, so there are more of them."""
        wanted = triton.cdiv(_PROGRAMS * (4 if rounds else 1), self._tiles)
        return max(1, min(8, triton.next_power_of_2(wanted), self._num_in // _BLOCK_K))

    def _few(self, x: Inputs, then: tuple[Tensor, Norm] | None) -> tuple[Tensor, Inputs]:
        """The product, and what the norm behind it makes of it, if one is given."""
        values, scales = self._inputs(x)
        rows, outputs = x.shape[0], self._num_out
        splits = self._splits(scales is None)
        out = torch.empty((rows, outputs), dtype=x.dtype, device=values.device)
        normed: Inputs = out
        into: tuple[Tensor | float | None, ...] = (out, out, out, None, 0.0)
        width, at_once = 1, 0
        if then is not None:
            residual, norm = then
            normed, codes, code_scales = room(rows, outputs, out, norm.rounding(rows))
            into = (residual, norm.weight, codes, code_scales, norm.eps)
            width = triton.next_power_of_2(outputs)
            at_once = min(triton.next_power_of_2(rows), max(1, _NORMED_AT_ONCE // width))
        fp8_linear_kernel[(self._tiles, splits)](
            values,
            scales,
            self._codes,
            self._scales,
            out,
            self._space.parts,
            self._space.counters,
            *into,
            rows,
            outputs,
            self._num_in,
            splits,
            _ahead(outputs * splits),
            AT_ONCE=at_once,
            WIDTH=width,
            SPLIT=splits > 1,
            ROWS=_FEW_ROWS,
            OUTPUTS=_OUTPUTS,
            BLOCK_K=_BLOCK_K,
            EVEN=self._even,
            num_warps=4,
            num_stages=_stages(splits, scales is None),
            **pdl.options(),
        )
        return out, normed


def _stages(splits: int, rounds: bool) -> int:
    """Loads under way at once: few where many programs share a processor's memory."""
    if rounds:
        return 4
    return 6 if splits > 1 else 3


def _ahead(num_rows: int) -> int:
    """How many bytes of each of so many rows (or parts of rows) are fetched before the wait."""
    return max(64, _FETCHED // num_rows // 64 * 64)
