"""Reference GEMM with a packed weight: each call dequantises it. Kernels are tested against it.

This file also defines how activations are quantised, which is part of the meaning of some forms.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from copy import copy

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from windlass.kernels.gemm import Norm, TorchGemm
from windlass.kernels.gemm_io import Inputs, Outputs
from windlass.kernels.packed import Activation, Float8, Int4Group, Int8Group, Packed
from windlass.kernels.prepared import Prepared

INT8_MAX = 127.0
FLOAT8_MAX = 448.0  # largest e4m3 value
BLOCK = 128  # inputs that share a scale with activation "block"
_TINY = torch.finfo(torch.float32).tiny


class ReferenceLinear:
    """Supports every form on every device."""

    name = "plain"
    batch_invariant = False
    reads_rows = False

    def refuse(self, form: Packed, device: torch.device, dtype: torch.dtype) -> str | None:
        del form, device, dtype
        return None

    def prepare(self, form: Packed) -> ReferenceGemm:
        return ReferenceGemm(form)


class ReferenceGemm(Prepared):
    """The form, unchanged."""

    def __init__(self, form: Packed) -> None:
        self.form = form

    def tensors(self) -> list[Tensor]:
        return _form_tensors(self.form)

    def apply(self, x: Inputs) -> Tensor:
        assert isinstance(x, Tensor)
        form = self.form
        if isinstance(form, Int8Group) and form.activation != "none":
            return _integer_gemm(x, form)
        if isinstance(form, Float8 | Int4Group) and form.activation != "none":
            scale = form.input_scale if isinstance(form, Float8) else None
            quantised = float8_activations(x, form.activation, scale)
            return linear(quantised, form.dequantise()).to(x.dtype)
        return linear(x, form.dequantise().to(x.dtype))


class Unpacked(Prepared):
    """A weight that was dequantised at load; activations are quantised as its form requires."""

    def __init__(self, weight: Packed | Tensor, dtype: torch.dtype, gemm: TorchGemm) -> None:
        self._activation: Activation = "none"
        self._input_scale: Tensor | None = None
        self._quantise = float8_activations
        if isinstance(weight, Int8Group | Float8):
            self._activation, self._input_scale = weight.activation, weight.input_scale
            if isinstance(weight, Int8Group):
                self._quantise = int8_activations
        if isinstance(weight, Int4Group):
            self._activation = weight.activation
        self._gemm = gemm
        self.weight = weight if isinstance(weight, Tensor) else weight.dequantise().to(dtype)

    def using(self, gemm: TorchGemm) -> Unpacked:
        """Return the same weight, multiplied by another engine's TorchGemm."""
        twin = copy(self)
        twin._gemm = gemm
        return twin

    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.weight, self._input_scale

    def apply(self, x: Inputs) -> Tensor:
        assert isinstance(x, Tensor)
        if self._activation != "none":
            x = self._quantise(x, self._activation, self._input_scale).to(x.dtype)
        return self._gemm.linear(x, self.weight)

    def then(self, x: Inputs, residual: Tensor, norm: Norm) -> tuple[Inputs, Tensor]:
        if self._activation != "none":
            return super().then(x, residual, norm)
        assert isinstance(x, Tensor)
        return self._gemm.linear_norm(x, self.weight, residual, norm)

    def gated(self, x: Inputs, silu_mul: Callable[[Outputs], Inputs]) -> Inputs:
        if self._activation != "none":
            return super().gated(x, silu_mul)
        assert isinstance(x, Tensor)
        return self._gemm.gated(x, self.weight, silu_mul)


def form_bytes(form: Packed) -> int:
    """Bytes of a form's tensors."""
    return sum(tensor.nbytes for tensor in _form_tensors(form))


def _form_tensors(form: Packed) -> list[Tensor]:
    values = (getattr(form, item.name) for item in dataclasses.fields(form))
    return [value for value in values if isinstance(value, Tensor)]


def float8_activations(x: Tensor, activation: Activation, scale: Tensor | None) -> Tensor:
    """x quantised to e4m3 and dequantised to float32."""
    if activation == "block":
        return _float8_blocks(x)
    scales = _scales(x.float(), activation, scale, FLOAT8_MAX)
    return _float8(x.float() / scales) * scales


def int8_activations(x: Tensor, activation: Activation, scale: Tensor | None) -> Tensor:
    """x quantised to int8 and dequantised to float32."""
    codes, scales = int8_codes(x, activation, scale)
    return codes * scales


def int8_codes(x: Tensor, activation: Activation, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """int8 codes from -127 to 127 as float32 [M, K], and their scales [M, 1] or [1]."""
    scales = _scales(x.float(), activation, scale, INT8_MAX)
    return (x.float() / scales).round().clamp(-INT8_MAX, INT8_MAX), scales


def _scales(x: Tensor, activation: Activation, scale: Tensor | None, max_code: float) -> Tensor:
    if activation == "token":
        return (x.abs().amax(dim=-1, keepdim=True) / max_code).clamp_min(_TINY)
    if activation == "tensor":
        assert scale is not None, "a form with activation 'tensor' has an input_scale"
        return scale.float()
    raise ValueError(f"activations cannot be quantised per {activation!r} here")


def _float8(x: Tensor) -> Tensor:
    return x.clamp(-FLOAT8_MAX, FLOAT8_MAX).to(torch.float8_e4m3fn).float()


def _float8_blocks(x: Tensor) -> Tensor:
    rows, num_in = x.shape
    blocks = pad(x.float(), (0, -num_in % BLOCK)).view(rows, -1, BLOCK)
    scales = (blocks.abs().amax(dim=-1, keepdim=True) / FLOAT8_MAX).clamp_min(_TINY)
    return (_float8(blocks / scales) * scales).flatten(1)[:, :num_in]


def _integer_gemm(x: Tensor, form: Int8Group) -> Tensor:
    """Integer GEMM, exact because float64 holds every sum, then scaled."""
    if form.group != form.shape[1]:
        raise ValueError("an integer GEMM needs one group per row")
    if form.perm is not None:
        x = x[:, form.perm.long()]
    codes, scales = int8_codes(x, form.activation, form.input_scale)
    sums = codes.double() @ form.codes.double().T
    outputs = sums * form.scales.double().T
    if form.offsets is not None:
        outputs += codes.double().sum(dim=1, keepdim=True) * form.offsets.double().T
    return (outputs * scales).to(x.dtype)
