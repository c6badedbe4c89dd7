"""Products with packed weights on the CPU, by the native library.

Inputs of int4, int8 and codebook weights are rounded to int8, with a scale for every 32 of them (16
where the weight's groups want that). With int8 weights what that lost is rounded and multiplied too;
with 4-bit weights, and in the int8 head of a model of 4-bit weights, an input that outweighs the others
is taken as it is. All other arithmetic is float32. fp8 is left to the plain version.

A 4-bit table of whole numbers (GGUF's IQ types, MXFP4) is a codebook; others (NF4) are multiplied as
floats.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor

from windlass.kernels.gemm_io import Inputs
from windlass.kernels.native.commands import Call, LinearFlag, Op, Step, Type
from windlass.kernels.native.pool import Pool, Workers, workers
from windlass.kernels.packed import Activation, Float8, Int4Group, Int8Group, Packed, Table4
from windlass.kernels.prepared import RowReader

_HEAD_OUTPUTS = 16  # times the inputs: a head, after which nothing multiplies what rounding lost
_HALF_EXPONENT = (
    15  # scales that are not halves are brought below 2 ** 15, the largest half's power
)


class _Kind(IntEnum):
    INT4 = 0
    INT8 = 1
    TABLE4 = 2
    HALF = 3
    FLOAT = 4
    BF16 = 5
    CODEBOOK4 = 6


class _Weight(ctypes.Structure):
    """WindlassWeight of src/weight.h."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("num_out", ctypes.c_int32),
        ("num_in", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("super_group", ctypes.c_int32),
        ("has_offsets", ctypes.c_int32),
        ("round_once", ctypes.c_int32),
        ("gain", ctypes.c_float),
        ("data", ctypes.c_void_p),
        ("perm", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("codebook", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a weight is packed from."""

    kind: _Kind
    codes: Tensor
    scales: Tensor | None = None
    offsets: Tensor | None = None
    gain: float = 1.0
    perm: Tensor | None = None
    table: Tensor | None = None  # float32 [16] of TABLE4, int8 [16] of CODEBOOK4
    group: int = 0  # 0: all inputs
    super_group: int = 0  # 0: no sub-scales
    sub_scales: Tensor | None = None
    round_once: bool = False


class NativeLinear:
    """The LinearKernel of CPUs. Compiles and starts threads when the first form asks for it.

    `own` workers instead of those of the process are for tests.
    """

    name = "native"
    batch_invariant = True  # sums go the same way for one row and for many
    reads_rows = True

    def __init__(self, own: Workers | None = None) -> None:
        self._own = own
        self._has_4_bits = False

    @property
    def _workers(self) -> Workers:
        return self._own or workers(torch.get_num_threads())

    def refuse(self, form: Packed, device: torch.device, dtype: torch.dtype) -> str | None:
        del dtype  # others than float32 are converted
        if device.type != "cpu":
            return f"made for CPUs, this is {device.type}"
        return _unsuited(form) or self._workers.refuse()

    def refuse_unquantised(self) -> str | None:
        """The same for a weight of plain numbers, of 16 bits or 32."""
        return self._workers.refuse()

    def prepare(self, form: Packed | Tensor) -> NativeGemm:
        """Repack once; a tensor (16-bit, or taken as float32) may be prepared as well."""
        pool = self._workers.pool
        if isinstance(form, Tensor) and not _takes_halves(pool, form):
            form = form.float()
        if isinstance(form, Int8Group) and form.activation != "none":
            return NativeGemm(pool, _parts(form), form.activation, form.input_scale)
        parts = _parts(form)
        self._has_4_bits |= parts.kind in (_Kind.INT4, _Kind.CODEBOOK4)
        # Where all other products round once, a head that rounds twice takes a tenth of the step.
        if self._has_4_bits and form.shape[0] >= _HEAD_OUTPUTS * form.shape[1]:
            parts = replace(parts, round_once=True)
        return NativeGemm(pool, parts)


class NativeGemm(RowReader):
    """A weight in the library's layout."""

    def __init__(
        self,
        pool: Pool,
        parts: _Parts,
        activation: Activation = "none",
        input_scale: Tensor | None = None,
    ) -> None:
        self._pool = pool
        self._activation: Activation = activation
        self._input_scale = None if input_scale is None else input_scale.float().contiguous()
        self._perm = parts.perm
        self._table = parts.table
        num_out = parts.codes.shape[0]
        per_entry = 2 if parts.kind in (_Kind.INT4, _Kind.TABLE4, _Kind.CODEBOOK4) else 1
        num_in = parts.codes.shape[1] * per_entry
        self.shape = (num_out, num_in)
        self._weight = _Weight(
            kind=parts.kind,
            num_out=num_out,
            num_in=num_in,
            group=parts.group or num_in,
            super_group=parts.super_group,
            has_offsets=parts.offsets is not None,
            round_once=parts.round_once,
            gain=parts.gain,
            perm=_pointer(parts.perm),
            table=_pointer(parts.table) if parts.kind == _Kind.TABLE4 else None,
            codebook=_pointer(parts.table) if parts.kind == _Kind.CODEBOOK4 else None,
        )
        self._reference = ctypes.byref(self._weight)
        num_bytes = pool.functions.windlass_packed_bytes(self._reference)
        self._data = torch.empty(num_bytes, dtype=torch.uint8, device=parts.codes.device)
        if parts.codes.is_meta:  # only the size matters
            return
        self._weight.data = self._data.data_ptr()
        pool.functions.windlass_pack(
            pool.handle,
            self._reference,
            parts.codes.data_ptr(),
            _pointer(parts.scales),
            _pointer(parts.offsets),
            _pointer(parts.sub_scales),
            self._data.data_ptr(),
        )

    @property
    def coarse_prompts(self) -> bool:
        is_int4 = self._weight.kind == _Kind.INT4
        return is_int4 and bool(self._pool.functions.windlass_prompts_apart())

    @property
    def num_bytes(self) -> int:
        kept = (self._data, self._perm, self._table)
        return sum(tensor.nbytes for tensor in kept if tensor is not None)

    @property
    def place(self) -> int:
        """Where the library finds the weight."""
        return ctypes.addressof(self._weight)

    def apply(self, x: Inputs) -> Tensor:
        """x [M, K] times the weight: [M, N] in x's type."""
        assert isinstance(x, Tensor)
        (rows, num_in), num_out = x.shape, self.shape[0]
        wide = x.float().contiguous()
        out = torch.empty(rows, num_out)
        scales = None
        flags = LinearFlag.OF_NETWORK if self._pool.is_in_network else LinearFlag(0)
        if self._activation != "none":
            codes, scales = torch.empty_like(wide), torch.empty(rows, 1)
            rounded = (wide, codes, scales)
            self._pool.run(Call(Op.ROUND, rows, rounded, (self._input_scale,), (num_in,)))
            wide, flags = codes, flags | LinearFlag.GIVEN_SCALES
        moving = (wide, out, None, None, scales)
        self._pool.run(Call(Op.LINEAR, rows, moving, (self.place,), (num_out, 0, flags)))
        return out.to(x.dtype)

    def rows(self, ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        out = torch.empty(len(ids), self.shape[1])
        given = ids.to(torch.int32).contiguous()
        step = Step(num_tokens=len(ids), ids=given.data_ptr())
        sizes = (self.shape[1], Type.PACKED)
        self._pool.run(Call(Op.EMBED, len(ids), (out,), (None, self.place), sizes), step)
        return out.to(dtype)


def _unsuited(form: Packed) -> str | None:
    if isinstance(form, Float8):
        return "no fp8 products on a CPU"
    if isinstance(form, Table4):
        return f"groups of {form.group} inputs, not of 4 n" if form.group % 4 else None
    if isinstance(form, Int8Group) and form.activation == "block":
        return "activations per block are for fp8"
    if form.group % 16 and form.group != form.shape[1]:
        return f"groups of {form.group} inputs, not of 16 n"
    return _not_finite("scales", form.scales) or _not_finite("minima", form.offsets)


def _not_finite(name: str, tensor: Tensor | None) -> str | None:
    """Scales and minima are held as float16, whose NaN and infinity not every CPU's loops show."""
    if tensor is None or tensor.is_meta or tensor.isfinite().all():
        return None
    return f"{int((~tensor.isfinite()).sum())} of {tensor.numel()} {name} are NaN or infinite"


def _takes_halves(pool: Pool, weight: Tensor) -> bool:
    """Whether the library can hold a plain weight in 16 bits, if it has 16 bits at all."""
    if weight.dtype != torch.float16 or weight.is_meta:
        return True
    if pool.functions.windlass_takes_nonfinite_halves():
        return True
    return all(bool(end.isfinite()) for end in weight.aminmax())


def _parts(form: Packed | Tensor) -> _Parts:
    match form:
        case Int4Group():
            scales, offsets, gain = _halves(form.scales, _uncentred(form))
            return _Parts(
                *(_Kind.INT4, form.codes.contiguous(), scales, offsets, gain),
                *(_indices(form.perm), None, form.group),
            )
        case Int8Group():
            scales, offsets, gain = _halves(form.scales, form.offsets)
            return _Parts(
                *(_Kind.INT8, form.codes.contiguous(), scales, offsets, gain),
                *(_indices(form.perm), None, form.group),
            )
        case Table4():
            return _codebook_parts(form) or _table_parts(form)
        case Tensor(dtype=torch.float16):
            return _Parts(_Kind.HALF, form.contiguous())
        case Tensor(dtype=torch.bfloat16):
            return _Parts(_Kind.BF16, form.contiguous())
        case Tensor():
            return _Parts(_Kind.FLOAT, form.float().contiguous())
    raise AssertionError(f"no native form of {type(form).__name__}: refuse must say so")


def _codebook_parts(form: Table4) -> _Parts | None:
    """As a codebook of int8 values, if it is one and nothing is lost."""
    per_scale = form.super_group // form.group
    if form.table.dtype != torch.int8 or (form.group % 16 and form.group != form.shape[1]):
        return None
    scales, _, gain = _halves(form.scales, None)
    exact = torch.equal(scales.float() * gain, form.scales.float())
    exact &= bool(scales.isfinite().all())  # the library may read others as numbers
    if not exact or per_scale & (per_scale - 1):  # the library finds a group's scale by a shift
        return None
    return _Parts(
        kind=_Kind.CODEBOOK4,
        codes=form.codes.contiguous(),
        scales=scales,
        gain=gain * form.unit,
        table=form.table.contiguous(),
        group=form.group,
        super_group=0 if form.sub_scales is None else form.super_group,
        sub_scales=None if form.sub_scales is None else form.sub_scales.contiguous(),
    )


def _table_parts(form: Table4) -> _Parts:
    """Values and scales as floats; a scale for each group."""
    scales = form.scales.float()
    if form.sub_scales is not None:
        scales = scales.repeat_interleave(form.super_group // form.group, 1) * form.sub_scales
    return _Parts(
        kind=_Kind.TABLE4,
        codes=form.codes.contiguous(),
        scales=scales.contiguous(),
        table=form.values.contiguous(),
        group=form.group,
    )


def _uncentred(form: Int4Group) -> Tensor | None:
    """The minima, or None where they only move the codes' centre to 8."""

    def centred(rows: slice) -> bool:
        return torch.equal(form.offsets[rows].float(), form.scales[rows].float() * -8)

    # Most that are not show it in the first row.
    return None if centred(slice(1)) and centred(slice(1, None)) else form.offsets


def _halves(scales: Tensor, offsets: Tensor | None) -> tuple[Tensor, Tensor | None, float]:
    """As float16 and divided by a power of two, the gain, so that the largest uses the range.

    What is float16 already stays as it is.
    """
    given = [scales] if offsets is None else [scales, offsets]
    gain = 1.0
    if any(tensor.dtype != torch.float16 for tensor in given):
        peak = max(float(tensor.abs().max()) for tensor in given)
        if peak > 0:
            gain = 2.0 ** (math.frexp(peak)[1] - _HALF_EXPONENT)
        given = [(tensor.float() / gain).half() for tensor in given]
    halves = [tensor.contiguous() for tensor in given]
    return halves[0], halves[1] if offsets is not None else None, gain


def _indices(perm: Tensor | None) -> Tensor | None:
    return None if perm is None else perm.to(torch.int32).contiguous()


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
