"""Chooses the GEMM kernel of each packed weight, and keeps the reasons.

Candidates are listed per device in order of preference; each returns why it refuses a form. A new
kernel is one file and one line in `_CANDIDATES`. This file also decides which weights stay packed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from windlass.kernels.copied import MAX_PACKED_ROWS, CopiedGemm, why_not_copied
from windlass.kernels.gemm import TorchGemm
from windlass.kernels.gpu import gpu_of
from windlass.kernels.native.linear import NativeGemm, NativeLinear
from windlass.kernels.native.pool import Workers
from windlass.kernels.packed import Float8, Int4Group, Int8Group, Packed, Table4
from windlass.kernels.prepared import Prepared
from windlass.kernels.reference_linear import ReferenceLinear, Unpacked

# "module:class" of a LinearKernel, imported only if its device is used.
_CANDIDATES: dict[str, tuple[str, ...]] = {
    "cpu": ("windlass.kernels.native.linear:NativeLinear",),
    "cuda": (
        "windlass.kernels.triton.fp8_linear:Fp8Linear",
        "windlass.kernels.triton.grouped_linear:GroupedLinear",
        "windlass.kernels.triton.eight_bit:EightBitLinear",
        "windlass.kernels.triton.table:TableLinear",
    ),
}
# Elements of a weight up to which launches, not bytes, limit a GPU: a decode step of the default
# model took 1.13 ms with packed weights and 0.72 ms with 16-bit weights (H200).
_SMALL = 2 * 2**20
_SMALL_REASON = f"unpacked: faster for weights of up to {_SMALL // 2**20} Mi elements"


class LinearKernel(Protocol):
    """A GEMM kernel for packed weights."""

    @property
    def name(self) -> str: ...

    @property
    def batch_invariant(self) -> bool:
        """Whether a row's result is bitwise independent of the other rows."""
        ...

    @property
    def reads_rows(self) -> bool:
        """Whether `prepare` returns a RowReader."""
        ...

    def refuse(self, form: Packed, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why the kernel does not support this form, or None. Tensors may be on the meta device."""
        ...

    def prepare(self, form: Packed) -> Prepared:
        """Repack the weight. The form is not needed afterwards."""
        ...


@dataclass(frozen=True, slots=True)
class PackedGemm:
    """A weight prepared for its GEMM kernel, with the reason for the choice."""

    prepared: Prepared
    shape: tuple[int, int]
    form: str  # "int4, groups of 128"
    kernel: str
    reason: str
    refusals: dict[str, str] = field(default_factory=dict)
    batch_invariant: bool = True  # whether the kernel can be batch-invariant
    copy_bytes: int = 0  # that a dequantised copy takes, made or not; 0: it would be of no use


@dataclass(frozen=True, slots=True)
class Decision:
    """The kernel chosen for a form. `unpacked` is the reason if the weight is dequantised at load."""

    kernel: LinearKernel
    refusals: dict[str, str]
    unpacked: str | None = None

    @property
    def reason(self) -> str:
        if self.unpacked is not None:
            return self.unpacked
        return "; ".join(f"{name}: {why}" for name, why in self.refusals.items()) or "first choice"


class Linears:
    """Prepares weights for one device and dtype. Owns the kernel instances of one engine.

    A form stays packed if a kernel supports it, unless it is so small that a GPU gains nothing. If
    only the reference implementation is left, the device decides. GPU memory is scarce, so the weight
    stays packed and each call dequantises it. On a CPU that is far slower than an unquantised GEMM, so
    the weight is dequantised at load. `reference` always dequantises at load. With `w4a8` the
    activations of int4 weights may be quantised to 8 bits.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        gemm: TorchGemm | None = None,
        plain: bool = False,
        reference: bool = False,
        w4a8: bool = False,
        copies: bool = False,
        workers: Workers | None = None,
    ) -> None:
        """`copies`: packed weights also have a dequantised copy, where that is of use (copied.py).

        `workers`: the engine's; without them native GEMMs have a pool of their own.
        """
        self.device = device
        self.dtype = dtype
        self.gemm = gemm or TorchGemm()
        self._plain = plain
        self._reference = reference
        self._w4a8 = w4a8
        self.copies = copies  # may be set until the first weight is prepared
        self._kernels = [] if plain or reference else _kernels(device, workers or Workers())

    def decide(self, form: Packed) -> Decision:
        """Choose the first kernel that supports the form, or the fallback."""
        refusals: dict[str, str] = {}
        if self._reference:
            return Decision(
                ReferenceLinear(), refusals, "unpacked: --dtype float32 is the reference"
            )
        if self._kernels and _is_small(form, self.device):
            return Decision(ReferenceLinear(), refusals, _SMALL_REASON)
        for kernel in self._kernels:
            why = self._lacks() or kernel.refuse(form, self.device, self.dtype)
            if why is None:
                return Decision(kernel, refusals)
            refusals[kernel.name] = why
        if self._plain:
            refusals["all others"] = "plain kernels were requested"
            return Decision(ReferenceLinear(), refusals)
        if self.device.type == "cpu":
            return Decision(ReferenceLinear(), refusals, f"unpacked: {_no_kernel(refusals)}")
        refusals["others"] = _no_gpu_kernel(form, self.device)
        return Decision(ReferenceLinear(), refusals)

    def prepare(self, weight: Packed | Tensor, *, multiplied: bool = True) -> PackedGemm:
        """Choose a kernel and prepare the weight for it. Meta tensors get only a shape and a size.

        `multiplied`: whether GEMMs read the weight, and not only its single rows.
        """
        if isinstance(weight, Tensor):
            return self._dense(weight)
        if self._w4a8 and isinstance(weight, Int4Group):
            weight = replace(weight, activation="token")
        decision = self.decide(weight)
        prepared: Prepared
        copy_bytes = 0
        if decision.unpacked is not None:
            prepared, kernel = Unpacked(weight, self.dtype, self.gemm), "torch"
            batch_invariant = True
        else:
            if weight.codes.is_meta:
                prepared = ReferenceLinear().prepare(_outline(weight, decision.kernel))
            else:
                prepared = decision.kernel.prepare(weight)
            kernel, batch_invariant = decision.kernel.name, decision.kernel.batch_invariant
            if multiplied and why_not_copied(weight) is None:
                copy_bytes = math.prod(weight.shape) * self.dtype.itemsize
            if self.copies and copy_bytes:
                prepared = CopiedGemm(prepared, Unpacked(weight, self.dtype, self.gemm))
                kernel = f"{kernel}, and a 16-bit copy for more than {MAX_PACKED_ROWS} rows"
        return PackedGemm(
            prepared=prepared,
            shape=weight.shape,
            form=describe(weight),
            kernel=kernel,
            reason="; ".join(filter(None, (decision.reason, prepared.lacks))),
            refusals=decision.refusals,
            batch_invariant=batch_invariant,
            copy_bytes=copy_bytes,
        )

    def _lacks(self) -> str | None:
        """Why no kernel of a GPU runs on this device, or None."""
        return gpu_of(self.device).lacks_triton() if self.device.type == "cuda" else None

    def share(self, gemm: PackedGemm) -> PackedGemm:
        """The packed weight of another engine, multiplied on this engine's pool and TorchGemm.

        The kernels of a GPU are shared as they are: they run in the order of one stream.
        """
        prepared = gemm.prepared
        if isinstance(prepared, NativeGemm):
            assert self._native is not None, "engines that share weights choose the same kernels"
            prepared = self._native.share(prepared)
        elif isinstance(prepared, Unpacked | CopiedGemm):
            prepared = prepared.using(self.gemm)
        return replace(gemm, prepared=prepared)

    def refuse_unquantised(self) -> str | None:
        """Why unquantised weights do not keep the dtype of the file; None: they keep it.

        A CPU computes in float32 for any dtype, and its kernels convert 16-bit weights while reading.
        """
        if self._reference:
            return "--dtype float32 is the reference"
        if self._plain:
            return "plain kernels were requested"
        if self._native is None or self.dtype != torch.float32:
            return "not quantised"
        return self._native.refuse_unquantised()

    @property
    def _native(self) -> NativeLinear | None:
        return next((kernel for kernel in self._kernels if isinstance(kernel, NativeLinear)), None)

    def _dense(self, weight: Tensor) -> PackedGemm:
        shape = (weight.shape[0], weight.shape[1])
        why = self.refuse_unquantised()
        if why is None and self._native is not None:
            name = str(weight.dtype).removeprefix("torch.")
            return PackedGemm(
                prepared=self._native.prepare(weight),
                shape=shape,
                form=name,
                kernel="native",
                reason="not quantised; float32 accumulation",
            )
        name = str(self.dtype).removeprefix("torch.")
        unpacked = Unpacked(weight.to(self.dtype), self.dtype, self.gemm)
        return PackedGemm(
            prepared=unpacked,
            shape=shape,
            form=name,
            kernel="torch",
            reason=why or "not quantised",
        )


def _outline(form: Packed, kernel: LinearKernel) -> Packed:
    """A form on meta tensors with as many bytes as the kernel's layout has without padding."""
    if isinstance(form, Int8Group) and form.bits == 6 and isinstance(kernel, NativeLinear):
        return replace(form, codes=form.codes[:, : form.shape[1] * 3 // 4])
    return form


def describe(form: Packed) -> str:
    """Describe a form, e.g. 'int8 per row, activations per token'."""
    match form:
        case Int4Group():
            text = f"int4, groups of {form.group}"
        case Int8Group():
            per_row = form.group == form.shape[1]
            text = "int8 per row" if per_row else f"int8, groups of {form.group}"
        case Float8(block=(int(rows), int(columns))):
            text = f"fp8, blocks of {rows} x {columns}"
        case Float8():
            text = "fp8 per tensor" if form.scales.numel() == 1 else "fp8 per channel"
        case Table4():
            text = f"4-bit table, groups of {form.group}"
            if form.sub_scales is not None:
                text += f" in super-groups of {form.super_group}"
    if isinstance(form, Int4Group | Int8Group) and form.perm is not None:
        text += ", permuted inputs"
    if not isinstance(form, Table4) and form.activation != "none":
        text += f", activations per {form.activation}"
    return text


def _is_small(form: Packed, device: torch.device) -> bool:
    """Whether a GPU is faster with the dequantised weight and the form allows it.

    Forms that quantise activations define the result of their GEMM, so they stay packed.
    """
    if device.type != "cuda" or (not isinstance(form, Table4) and form.activation != "none"):
        return False
    return form.shape[0] * form.shape[1] <= _SMALL


def _no_kernel(refusals: dict[str, str]) -> str:
    reasons = "; ".join(f"{name}: {why}" for name, why in refusals.items())
    return f"no packed kernel takes it ({reasons})" if reasons else "no packed kernel for this CPU"


def _no_gpu_kernel(form: Packed, device: torch.device) -> str:
    """Why only the reference implementation is left on a GPU."""
    if isinstance(form, Float8) and device.type == "cuda":
        why = gpu_of(device).lacks_fp8()
        if why is not None:
            return (
                f"{why}, so the weights are dequantised on each call; int8 or int4 would be faster"
            )
    return f"no kernel for this form on {device.type}; dequantised on each call"


def _kernels(device: torch.device, workers: Workers) -> list[LinearKernel]:
    """The kernels available on a device; all CUDA kernels are written in Triton."""
    if device.type == "cuda" and find_spec("triton") is None:
        return []
    return [_instance(where, workers) for where in _CANDIDATES.get(device.type, ())]


def _instance(where: str, workers: Workers) -> LinearKernel:
    module, name = where.split(":")
    kind: Callable[..., LinearKernel] = getattr(import_module(module), name)
    return kind(workers) if kind is NativeLinear else kind()
