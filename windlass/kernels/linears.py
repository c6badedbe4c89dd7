"""Chooses how a packed weight is multiplied, once per weight, and keeps the reasons.

Candidates stand in order of preference per device; each says why it refuses a form. A new kernel is
one file and one line in `_CANDIDATES`. Whether a weight stays packed at all is decided here too.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from windlass.kernels.gemm import TorchGemm
from windlass.kernels.native.linear import NativeLinear
from windlass.kernels.packed import Float8, Int4Group, Int8Group, Packed, Table4
from windlass.kernels.plain_linear import PlainLinear, Unpacked
from windlass.kernels.prepared import Prepared

# "module:class" of a LinearKernel, imported only where its device is used.
_CANDIDATES: dict[str, tuple[str, ...]] = {
    "cpu": ("windlass.kernels.native.linear:NativeLinear",),
    "cuda": (
        "windlass.kernels.triton.fp8_linear:Fp8Linear",
        "windlass.kernels.triton.grouped_linear:GroupedLinear",
        "windlass.kernels.triton.eight_bit:EightBitLinear",
        "windlass.kernels.triton.table:TableLinear",
    ),
}
# Numbers of a weight up to which a GPU waits for launches, not for bytes: a decode step of the
# default model took 1.13 ms with its weights packed and 0.72 ms with them in 16 bits (H200).
_SMALL = 2 * 2**20
_FP8_CAPABILITY = (8, 9)  # the first CUDA devices that multiply fp8


_SMALL_REASON = f"unpacked: up to {_SMALL // 2**20} Mi numbers are read faster than unpacked"


class LinearKernel(Protocol):
    """One way to multiply with packed weights."""

    @property
    def name(self) -> str: ...

    @property
    def batch_invariant(self) -> bool:
        """Whether a row's result is the same to the bit whatever rows are beside it."""
        ...

    @property
    def reads_rows(self) -> bool:
        """Whether what it prepares is a RowReader."""
        ...

    def refuse(self, form: Packed, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why it does not take this form, or None. The tensors may lie on the meta device."""
        ...

    def prepare(self, form: Packed) -> Prepared:
        """Repack once. The form is not needed afterwards."""
        ...


@dataclass(frozen=True, slots=True)
class PackedGemm:
    """A weight ready to be multiplied with, and how it came to be held like this."""

    prepared: Prepared
    shape: tuple[int, int]
    form: str  # "int4, groups of 128"
    kernel: str
    reason: str
    refusals: dict[str, str] = field(default_factory=dict)
    batch_invariant: bool = True  # whether it can be multiplied with in a fixed order


@dataclass(frozen=True, slots=True)
class Decision:
    """How a form will be held. `unpacked` is the reason when not as it is."""

    kernel: LinearKernel
    refusals: dict[str, str]
    unpacked: str | None = None

    @property
    def reason(self) -> str:
        if self.unpacked is not None:
            return self.unpacked
        return "; ".join(f"{name}: {why}" for name, why in self.refusals.items()) or "first choice"


class Linears:
    """Holds weights for one device and arithmetic. Owns the kernels' instances.

    A form stays packed where a kernel takes it, unless it is so small that a GPU gains nothing by
    it. Where only the plain version is left, it depends:
    on a GPU memory is scarce, so it stays packed and is dequantised on each call; on a CPU that
    would be far slower than plain products, so it is unpacked once. `reference` unpacks always;
    with `round_int4` the activations of int4 weights may be rounded to 8 bits.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        gemm: TorchGemm | None = None,
        plain: bool = False,
        reference: bool = False,
        round_int4: bool = False,
    ) -> None:
        self.device = device
        self.dtype = dtype
        self.gemm = gemm or TorchGemm()
        self._plain = plain
        self._reference = reference
        self._round_int4 = round_int4
        self._kernels = [] if plain or reference else _kernels(device)

    def decide(self, form: Packed) -> Decision:
        """The first kernel that takes the form, or what happens without one."""
        refusals: dict[str, str] = {}
        if self._reference:
            return Decision(PlainLinear(), refusals, "unpacked: --dtype float32 is the reference")
        if self._kernels and _is_small(form, self.device):
            return Decision(PlainLinear(), refusals, _SMALL_REASON)
        for kernel in self._kernels:
            why = kernel.refuse(form, self.device, self.dtype)
            if why is None:
                return Decision(kernel, refusals)
            refusals[kernel.name] = why
        if self._plain:
            refusals["all others"] = "the plain versions were asked for"
            return Decision(PlainLinear(), refusals)
        if self.device.type == "cpu":
            return Decision(PlainLinear(), refusals, f"unpacked: {_no_kernel(refusals)}")
        refusals["others"] = _nothing_else(form, self.device)
        return Decision(PlainLinear(), refusals)

    def hold(self, weight: Packed | Tensor) -> PackedGemm:
        """Prepare a weight for its kernel. On the meta device only its shape and size matter."""
        if isinstance(weight, Tensor):
            return self._dense(weight)
        if self._round_int4 and isinstance(weight, Int4Group):
            weight = replace(weight, activation="token")
        decision = self.decide(weight)
        prepared: Prepared
        if decision.unpacked is not None:
            prepared, kernel = Unpacked(weight, self.dtype, self.gemm), "torch"
            batch_invariant = True
        else:
            on_meta = weight.codes.is_meta
            prepared = PlainLinear().prepare(weight) if on_meta else decision.kernel.prepare(weight)
            kernel, batch_invariant = decision.kernel.name, decision.kernel.batch_invariant
        return PackedGemm(
            prepared,
            weight.shape,
            describe(weight),
            kernel,
            decision.reason,
            decision.refusals,
            batch_invariant,
        )

    def refuse_plain(self) -> str | None:
        """Why plain numbers are not multiplied with in the file's own type; None: they are.

        A CPU computes in float32 whatever the type, and its kernels read 16 bits into that.
        """
        if self._reference:
            return "--dtype float32 is the reference"
        if self._plain:
            return "the plain versions were asked for"
        if self._native is None or self.dtype != torch.float32:
            return "not quantised"
        return self._native.refuse_plain()

    @property
    def _native(self) -> NativeLinear | None:
        return next((one for one in self._kernels if isinstance(one, NativeLinear)), None)

    def _dense(self, weight: Tensor) -> PackedGemm:
        shape = (weight.shape[0], weight.shape[1])
        why = self.refuse_plain()
        if why is None and self._native is not None:
            name = str(weight.dtype).removeprefix("torch.")
            held = self._native.prepare(weight)
            return PackedGemm(held, shape, name, "native", "not quantised; sums are float32")
        name = str(self.dtype).removeprefix("torch.")
        unpacked = Unpacked(weight.to(self.dtype), self.dtype, self.gemm)
        return PackedGemm(unpacked, shape, name, "torch", why or "not quantised")


def describe(form: Packed) -> str:
    """A form in words: 'int8 per row, activations per token'."""
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
        text += ", inputs in another order"
    if not isinstance(form, Table4) and form.activation != "none":
        text += f", activations per {form.activation}"
    return text


def _is_small(form: Packed, device: torch.device) -> bool:
    """Whether a GPU reads it faster unpacked; forms that round activations mean their products."""
    if device.type != "cuda" or (not isinstance(form, Table4) and form.activation != "none"):
        return False
    return form.shape[0] * form.shape[1] <= _SMALL


def _no_kernel(refusals: dict[str, str]) -> str:
    said = "; ".join(f"{name}: {why}" for name, why in refusals.items())
    return f"no packed kernel takes it ({said})" if said else "no packed kernel for this CPU"


def _nothing_else(form: Packed, device: torch.device) -> str:
    """Why the plain version is what is left on a GPU."""
    if isinstance(form, Float8) and device.type == "cuda" and torch.cuda.is_available():
        found = torch.cuda.get_device_capability(device)
        if found < _FP8_CAPABILITY:
            return (
                f"this GPU (compute capability {found[0]}.{found[1]}) has no fp8 products, so the "
                "weights are dequantised on each call; int8 or int4 would be faster"
            )
    return f"no kernel for this form on {device.type}; dequantised on each call"


def _kernels(device: torch.device) -> list[LinearKernel]:
    """Those that can be had for a device; all of CUDA's are written in Triton."""
    if device.type == "cuda" and find_spec("triton") is None:
        return []
    return [_instance(where) for where in _CANDIDATES.get(device.type, ())]


def _instance(where: str) -> LinearKernel:
    module, name = where.split(":")
    made: LinearKernel = getattr(import_module(module), name)()
    return made
