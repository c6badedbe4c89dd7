"""Group-wise int4 and int8 weights on CUDA: repacked once, few rows in one kernel, many unpacked.

Unpacking a weight for one product costs about as much as reading it, which many rows share and few
do not. Where a format has its activations rounded to 8 bits, many rows are multiplied in fp8.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear, pad

from windlass.kernels.packed import Int4Group, Int8Group, Packed, pack_nibbles, unpack_nibbles
from windlass.kernels.prepared import RowReader
from windlass.kernels.rounded import Inputs, Outputs, Rounded, Rounding
from windlass.kernels.triton import pdl
from windlass.kernels.triton.fp8_linear import ScaledGemm
from windlass.kernels.triton.grouped import grouped_linear_kernel
from windlass.kernels.triton.reduce import Space
from windlass.kernels.triton.rounding import round_blocks, round_rows

_MOST_FUSED = 64  # rows; more share an unpacked weight
_FINE = 16  # rows up to which 8-bit activations have two planes too: reading the weight costs more
_WIDEST = 128  # inputs of half a block
_OUTPUTS = 64
# Programs that a product is cut into at least, where K allows; with more rows parts cost more.
_PROGRAMS, _PROGRAMS_OF_MANY = 384, 160
_MOST_SPLITS = 8
_FETCHED = 8 * 2**20  # bytes of codes that a product fetches before it waits for its inputs
_FP8 = torch.float8_e4m3fn
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit(do_not_specialize=["M"], do_not_specialize_on_alignment=["ids"])
def unpack_kernel(
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
    """out[M, K]: the weight, or those of its N rows that `ids` names; some rows, a block.

    Divided by a scale for each output, if there are any.
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
    """Takes int4 and int8 weights with groups of 32 or more."""

    name = "triton groups"
    batch_invariant = False
    reads_rows = True

    def __init__(self) -> None:
        self._space = Space()

    def refuse(self, form: Packed, device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type != "cuda" and not _INTERPRETED:
            return f"Triton needs CUDA, this is {device.type}"
        if not isinstance(form, Int4Group | Int8Group):
            return "written for groups of whole numbers"
        if isinstance(form, Int8Group) and form.activation != "none":
            return "rounds activations by blocks, not as this format asks"
        if form.group < 32 or (form.group & (form.group - 1) and form.group != form.shape[1]):
            return f"groups of {form.group} are no power of two from 32 on"
        if dtype == torch.float32 and not _INTERPRETED:
            return "written for 16-bit arithmetic, this is float32"
        return None

    def prepare(self, form: Packed) -> GroupQuantGemm:
        assert isinstance(form, Int4Group | Int8Group)
        return GroupQuantGemm(form, self._space)


class GroupQuantGemm(RowReader):
    """Owns the codes in the kernel's order: each byte of int4 holds input j and input HALF + j."""

    def __init__(self, form: Int4Group | Int8Group, space: Space) -> None:
        self._num_out, self._num_in = form.shape
        self._bits = 4 if isinstance(form, Int4Group) else 8
        self._half = min(_WIDEST, form.group)
        self._block = 2 * self._half
        self._group = form.group
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
        if padding and form.group < self._num_in:
            missing = -(-self._padded // form.group) - self._scales.shape[0]
            self._scales = pad(self._scales, (0, 0, 0, missing))
            self._offsets = (
                None if self._offsets is None else pad(self._offsets, (0, 0, 0, missing))
            )
        self._in_fp8 = _in_fp8(form)
        self._tiles = triton.cdiv(self._num_out, _OUTPUTS)
        self._space = space
        values = max(self._splits(rows) * rows for rows in (_FINE, _MOST_FUSED)) * self._num_out
        space.reserve(self._codes.device, values, self._tiles)

    @property
    def num_bytes(self) -> int:
        held = (self._codes, self._scales, self._offsets, self._perm)
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    def rounding(self, num_rows: int) -> Rounding | None:
        if num_rows <= _MOST_FUSED or self._in_fp8 is None or self._perm is not None:
            return None
        return Rounding("rows")

    def apply(self, x: Inputs) -> Tensor:
        if x.shape[0] <= _MOST_FUSED:
            assert isinstance(x, Tensor)
            return self._fused(x)
        if self._in_fp8 is not None:
            return self._in_fp8.whole(self._rows(x), self._unpacked(_FP8))
        assert isinstance(x, Tensor)
        ordered = x if self._perm is None else x[:, self._perm]
        return linear(ordered, self._unpacked(x.dtype))

    def raw(self, x: Inputs) -> Outputs:
        if x.shape[0] <= _MOST_FUSED or self._in_fp8 is None:
            return self.apply(x)
        return self._in_fp8.raw(self._rows(x), self._unpacked(_FP8))

    def _rows(self, x: Inputs) -> Rounded:
        if isinstance(x, Rounded):
            return x
        assert isinstance(x, Tensor)
        return round_rows(x if self._perm is None else x[:, self._perm])

    def _splits(self, rows: int) -> int:
        programs = _PROGRAMS if rows <= _FINE else _PROGRAMS_OF_MANY
        wanted = triton.next_power_of_2(triton.cdiv(programs, self._tiles))
        return max(1, min(_MOST_SPLITS, wanted, self._padded // self._block))

    def _fused(self, x: Tensor) -> Tensor:
        rounded = round_blocks(x, self._block, min(self._group, self._block), self._perm)
        rows, outputs = x.shape[0], self._num_out
        at_once = min(_MOST_FUSED, max(8, triton.next_power_of_2(rows)))
        planes = 1 if self._in_fp8 is not None and rows > _FINE else 2
        splits = self._splits(rows)
        out = x.new_empty((rows, outputs))
        grouped_linear_kernel[(self._tiles, splits)](
            rounded.codes,
            rounded.scales,
            rounded.sums,
            self._codes,
            self._scales,
            self._offsets,
            out,
            self._space.parts,
            self._space.counters,
            rows,
            outputs,
            self._padded,
            splits,
            max(64, _FETCHED // (outputs * splits) // 64 * 64),
            BITS=self._bits,
            GROUP=self._group,
            HALF=self._half,
            PLANES=planes,
            SPLIT=splits > 1,
            ROWS=at_once,
            OUTPUTS=_OUTPUTS,
            EVEN=self._num_out % _OUTPUTS == 0,
            INLINE=not _INTERPRETED,
            num_warps=4,
            num_stages=3,
            **pdl.options(),
        )
        return out

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        assert self._perm is None
        return self._unpacked(dtype, ids)

    def _unpacked(self, dtype: torch.dtype, ids: Tensor | None = None) -> Tensor:
        """The weight in a type that torch multiplies, in fp8 divided by its outputs' scales.

        With `ids` only those rows of it.
        """
        count = self._num_out if ids is None else len(ids)
        weight = torch.empty((count, self._num_in), dtype=dtype, device=self._codes.device)
        at_once = 32 if ids is None else 1
        unpack_kernel[(triton.cdiv(count, at_once), self._padded // self._block)](
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
            ROWS=at_once,
            num_warps=4,
            **pdl.options(),
        )
        return weight


def _by_group(values: Tensor) -> Tensor:
    """[N, groups] to [groups, N]: neighbouring outputs lie together."""
    return values.T.contiguous()


def _in_fp8(form: Int4Group | Int8Group) -> ScaledGemm | None:
    """How many rows are multiplied if the format has its activations rounded."""
    if isinstance(form, Int8Group) or form.activation == "none":
        return None
    scales, offsets = form.scales.float(), form.offsets.float()
    largest = torch.maximum(offsets.abs(), (15 * scales + offsets).abs()).amax(dim=1)
    return ScaledGemm((largest / 448.0).clamp_min(torch.finfo(torch.float32).tiny))
