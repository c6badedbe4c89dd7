"""CPU GEMMs with packed weights by the native library.

Activations of int4, int8 and codebook weights are quantised to int8 in blocks of 32 inputs (16 where the
weight's groups are not multiples of 32). With int8 weights the residual is quantised and multiplied too.
int8 weights whose codes have 6 bits (GGUF's Q5 and Q6 types) are stored in 6, with the same results.
With 4-bit weights, and in the int8 LM head of a model with 4-bit weights, outliers stay in float32. All
other arithmetic is float32. The reference implementation handles fp8.

A 4-bit table of integers (GGUF's IQ types, MXFP4) is a codebook; other tables (NF4) are multiplied as
floats.
"""

from __future__ import annotations

import ctypes
import math
from copy import copy
from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor

from windlass.kernels.gemm_io import Inputs
from windlass.kernels.native.commands import Call, LinearFlag, Op, Step, Type
from windlass.kernels.native.pool import Pool, Workers
from windlass.kernels.packed import Activation, Float8, Int4Group, Int8Group, Packed, Table4
from windlass.kernels.prepared import RowReader

_HEAD_OUTPUTS = 16  # times the inputs: an LM head, whose quantisation error no layer amplifies
_F16_EXPONENT = 15  # other scales are divided until they are below 2 ** 15, inside float16's range


class _Kind(IntEnum):
    INT4 = 0
    INT8 = 1
    TABLE4 = 2
    F16 = 3
    F32 = 4
    BF16 = 5
    CODEBOOK4 = 6
    INT6 = 7


class _Weight(ctypes.Structure):
    """Mirrors WindlassWeight of src/weight.h."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("num_out", ctypes.c_int32),
        ("num_in", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("super_group", ctypes.c_int32),
        ("has_offsets", ctypes.c_int32),
        ("quantise_once", ctypes.c_int32),
        ("gain", ctypes.c_float),
        ("data", ctypes.c_void_p),
        ("perm", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("codebook", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True)
class _Source:
    """The tensors that a weight is packed from."""

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
    quantise_once: bool = False


class NativeLinear:
    """The LinearKernel of CPUs. Compiles the library and starts threads at first use."""

    name = "native"
    batch_invariant = True  # the order of sums does not depend on the number of rows
    reads_rows = True

    def __init__(self, workers: Workers | None = None) -> None:
        """Without `workers` the GEMMs have a pool of their own."""
        self._workers = workers or Workers()
        self._has_4_bits = False

    def refuse(self, form: Packed, device: torch.device, dtype: torch.dtype) -> str | None:
        del dtype  # inputs are converted to float32
        if device.type != "cpu":
            return f"made for CPUs, this is {device.type}"
        return _refuse_form(form) or self._workers.refuse()

    def refuse_unquantised(self) -> str | None:
        """Return why an unquantised weight cannot be used."""
        return self._workers.refuse()

    def share(self, gemm: NativeGemm) -> NativeGemm:
        """Return another engine's weight, multiplied on this kernel's pool."""
        return gemm.on(self._workers.pool)

    def prepare(self, form: Packed | Tensor, num_stacked: int = 1) -> NativeGemm:
        """Pack a form, or an unquantised weight (16-bit, else float32).

        `num_stacked` weights are stacked along the outputs.
        """
        pool = self._workers.pool
        if isinstance(form, Tensor) and not _keeps_16_bits(pool, form):
            form = form.float()
        if isinstance(form, Int8Group) and form.activation != "none":
            return NativeGemm(
                pool, _source(form), activation=form.activation, input_scale=form.input_scale
            )
        source = _source(form)
        self._has_4_bits |= source.kind in (_Kind.INT4, _Kind.CODEBOOK4)
        # Where all other GEMMs quantise once, a head that quantises twice takes a tenth of the step.
        head_outputs = _HEAD_OUTPUTS * form.shape[1] * num_stacked
        if self._has_4_bits and form.shape[0] >= head_outputs:
            source = replace(source, quantise_once=True)
        return NativeGemm(pool, source)


class NativeGemm(RowReader):
    """A weight in the library's packed layout."""

    def __init__(
        self,
        pool: Pool,
        source: _Source,
        activation: Activation = "none",
        input_scale: Tensor | None = None,
    ) -> None:
        self._pool = pool
        self.activation: Activation = activation
        self.input_scale = None if input_scale is None else input_scale.float().contiguous()
        self._perm = source.perm
        self._table = source.table
        num_out = source.codes.shape[0]
        per_entry = 2 if source.kind in (_Kind.INT4, _Kind.TABLE4, _Kind.CODEBOOK4) else 1
        num_in = source.codes.shape[1] * per_entry
        self.shape = (num_out, num_in)
        self._weight = _Weight(
            kind=source.kind,
            num_out=num_out,
            num_in=num_in,
            group=source.group or num_in,
            super_group=source.super_group,
            has_offsets=source.offsets is not None,
            quantise_once=source.quantise_once,
            gain=source.gain,
            perm=_pointer(source.perm),
            table=_pointer(source.table) if source.kind == _Kind.TABLE4 else None,
            codebook=_pointer(source.table) if source.kind == _Kind.CODEBOOK4 else None,
        )
        self._reference = ctypes.byref(self._weight)
        num_bytes = pool.functions.windlass_packed_bytes(self._reference)
        self._data = torch.empty(num_bytes, dtype=torch.uint8, device=source.codes.device)
        if source.codes.is_meta:  # only the size is needed
            return
        self._weight.data = self._data.data_ptr()
        pool.functions.windlass_pack(
            pool.handle,
            self._reference,
            source.codes.data_ptr(),
            _pointer(source.scales),
            _pointer(source.offsets),
            _pointer(source.sub_scales),
            self._data.data_ptr(),
        )

    def on(self, pool: Pool) -> NativeGemm:
        """Return the same packed weight, multiplied on another pool."""
        twin = copy(self)
        twin._pool = pool
        return twin

    @property
    def coarse_prompts(self) -> bool:
        if self.activation != "none":  # the format defines how activations are quantised
            return False
        return bool(self._pool.functions.windlass_has_prompt_gemm(self._reference))

    def tensors(self) -> tuple[Tensor | None, ...]:
        return self._data, self._perm, self._table, self.input_scale

    @property
    def address(self) -> int:
        """The address of the C struct."""
        return ctypes.addressof(self._weight)

    def apply(self, x: Inputs) -> Tensor:
        """Multiply x [M, K] by the weight; return [M, N] in x's dtype."""
        assert isinstance(x, Tensor)
        (rows, num_in), num_out = x.shape, self.shape[0]
        x32 = x.float().contiguous()
        out = torch.empty(rows, num_out)
        scales = None
        flags = LinearFlag.STEP_ROWS if self._pool.has_step else LinearFlag(0)
        if self.activation != "none":
            codes, scales = torch.empty_like(x32), torch.empty(rows, 1)
            quantise = Call(
                Op.QUANTISE,
                rows,
                step_tensors=(x32, codes, scales),
                model_tensors=(self.input_scale,),
                sizes=(num_in,),
            )
            self._pool.run(quantise)
            x32, flags = codes, flags | LinearFlag.QUANTISED_INPUTS
        linear = Call(
            Op.LINEAR,
            rows,
            step_tensors=(x32, out, None, None, scales),
            model_tensors=(self.address,),
            sizes=(num_out, 0, flags),
        )
        self._pool.run(linear)
        return out.to(x.dtype)

    def rows(
        self, ids: Tensor, dtype: torch.dtype = torch.float32, first: int | None = None
    ) -> Tensor:
        out = torch.empty(len(ids), self.shape[1])
        ids32 = ids.to(torch.int32).contiguous()
        call = Call(
            Op.EMBED,
            len(ids),
            step_tensors=(out,),
            model_tensors=(None, self.address),
            sizes=(self.shape[1], Type.PACKED, *(() if first is None else (first, self.shape[0]))),
        )
        self._pool.run(call, Step(num_tokens=len(ids), ids=ids32.data_ptr()))
        return out.to(dtype)


def _refuse_form(form: Packed) -> str | None:
    if isinstance(form, Float8):
        return "no fp8 GEMM on a CPU"
    if isinstance(form, Table4):
        return f"groups of {form.group} inputs, not a multiple of 4" if form.group % 4 else None
    if isinstance(form, Int8Group) and form.activation == "block":
        return "activations per block are for fp8"
    if form.group % 16 and form.group != form.shape[1]:
        return f"groups of {form.group} inputs, not a multiple of 16"
    return _not_finite("scales", form.scales) or _not_finite("offsets", form.offsets)


def _not_finite(name: str, tensor: Tensor | None) -> str | None:
    """Refuse NaN and infinity: scales and offsets are float16, which NEON reads as finite values."""
    if tensor is None or tensor.is_meta or tensor.isfinite().all():
        return None
    return f"{int((~tensor.isfinite()).sum())} of {tensor.numel()} {name} are NaN or infinite"


def _keeps_16_bits(pool: Pool, weight: Tensor) -> bool:
    """Whether the library can keep an unquantised weight in its dtype."""
    kind = {torch.float16: _Kind.F16, torch.bfloat16: _Kind.BF16}.get(weight.dtype)
    if kind is None or weight.is_meta or pool.functions.windlass_reads_nonfinite(kind):
        return True
    return all(bool(extreme.isfinite()) for extreme in weight.aminmax())


def _source(form: Packed | Tensor) -> _Source:
    match form:
        case Int4Group():
            return _grouped_source(_Kind.INT4, form, _offsets_unless_centred(form))
        case Int8Group():
            return _grouped_source(_Kind.INT6 if form.bits == 6 else _Kind.INT8, form, form.offsets)
        case Table4():
            return _codebook_source(form) or _table_source(form)
        case Tensor(dtype=torch.float16):
            return _Source(_Kind.F16, form.contiguous())
        case Tensor(dtype=torch.bfloat16):
            return _Source(_Kind.BF16, form.contiguous())
        case Tensor():
            return _Source(_Kind.F32, form.float().contiguous())
    raise AssertionError(f"refuse() must reject {type(form).__name__}")


def _grouped_source(kind: _Kind, form: Int4Group | Int8Group, offsets: Tensor | None) -> _Source:
    scales, offsets, gain = _to_f16(form.scales, offsets)
    return _Source(
        kind=kind,
        codes=form.codes.contiguous(),
        scales=scales,
        offsets=offsets,
        gain=gain,
        perm=None if form.perm is None else form.perm.to(torch.int32).contiguous(),
        group=form.group,
    )


def _codebook_source(form: Table4) -> _Source | None:
    """Return the form as a codebook of int8 values, if that is exact."""
    per_scale = form.super_group // form.group
    if form.table.dtype != torch.int8 or (form.group % 16 and form.group != form.shape[1]):
        return None
    scales, _, gain = _to_f16(form.scales, None)
    exact = torch.equal(scales.float() * gain, form.scales.float())
    exact &= bool(scales.isfinite().all())  # NEON reads others as finite values
    if not exact or per_scale & (per_scale - 1):  # the library indexes scales by a shift
        return None
    return _Source(
        kind=_Kind.CODEBOOK4,
        codes=form.codes.contiguous(),
        scales=scales,
        gain=gain * form.unit,
        table=form.table.contiguous(),
        group=form.group,
        super_group=0 if form.sub_scales is None else form.super_group,
        sub_scales=None if form.sub_scales is None else form.sub_scales.contiguous(),
    )


def _table_source(form: Table4) -> _Source:
    """Return values and scales in float32, with a scale for each group."""
    scales = form.scales.float()
    if form.sub_scales is not None:
        scales = scales.repeat_interleave(form.super_group // form.group, 1) * form.sub_scales
    return _Source(
        kind=_Kind.TABLE4,
        codes=form.codes.contiguous(),
        scales=scales.contiguous(),
        table=form.values.contiguous(),
        group=form.group,
    )


def _offsets_unless_centred(form: Int4Group) -> Tensor | None:
    """Return the offsets, or None if all are -8 * scale (symmetric quantisation)."""

    def is_centred(rows: slice) -> bool:
        return torch.equal(form.offsets[rows].float(), form.scales[rows].float() * -8)

    # Most asymmetric weights show it in the first row.
    return None if is_centred(slice(1)) and is_centred(slice(1, None)) else form.offsets


def _to_f16(scales: Tensor, offsets: Tensor | None) -> tuple[Tensor, Tensor | None, float]:
    """Convert to float16, divided by a power of two, the gain, so that the largest uses the range.

    float16 tensors are unchanged.
    """
    tensors = [scales] if offsets is None else [scales, offsets]
    gain = 1.0
    if any(tensor.dtype != torch.float16 for tensor in tensors):
        peak = max(float(tensor.abs().max()) for tensor in tensors)
        if peak > 0:
            gain = 2.0 ** (math.frexp(peak)[1] - _F16_EXPONENT)
        tensors = [(tensor.float() / gain).half() for tensor in tensors]
    tensors = [tensor.contiguous() for tensor in tensors]
    return tensors[0], tensors[1] if offsets is not None else None, gain


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
