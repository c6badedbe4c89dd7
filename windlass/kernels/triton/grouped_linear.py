"""Group-wise int4 and int8 weights on CUDA: repacked once, few rows in one kernel, many unpacked.

Unpacking a weight for one product costs about as much as reading it in 16 bits, which many rows
share and few do not.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear, pad

from windlass.kernels.packed import Int4Group, Int8Group, Packed, pack_nibbles, unpack_nibbles
from windlass.kernels.prepared import Prepared
from windlass.kernels.rounded import Inputs
from windlass.kernels.triton import chain
from windlass.kernels.triton.grouped import grouped_linear_kernel
from windlass.kernels.triton.reduce import splits_for
from windlass.kernels.triton.rounding import round_blocks

_MOST_FUSED = 256  # rows; more share an unpacked weight
_WIDEST = 128  # inputs of half a block
_FETCHED = 8 * 2**20  # bytes of codes that a product fetches before it waits for its inputs
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit
def unpack_kernel(
    codes,
    scales,
    mins,
    out,
    N,
    K,
    K_PAD,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    HAS_MINS: tl.constexpr,
    ROWS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """The weight [N, K] in the arithmetic's type: one program some rows and half a block."""
    chain.begin(CHAINED)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    half = tl.program_id(1)
    at = tl.arange(0, HALF)
    inside = (row < N)[:, None]
    if BITS == 4:
        start = row[:, None].to(tl.int64) * (K_PAD // 2) + half // 2 * HALF
        code = tl.load(codes + start + at[None, :], mask=inside, other=0)
        code = (code >> (half % 2 * 4).to(tl.uint8)) & 15
    else:
        start = row[:, None].to(tl.int64) * K_PAD + half * HALF
        code = tl.load(codes + start + at[None, :], mask=inside, other=0)
    column = half * HALF + at
    group = half * HALF // GROUP
    scale = tl.load(scales + group * N + row, mask=row < N, other=0.0).to(tl.float32)
    value = code.to(tl.float32) * scale[:, None]
    if HAS_MINS:
        low = tl.load(mins + group * N + row, mask=row < N, other=0.0).to(tl.float32)
        value += low[:, None]
    mask = inside & (column < K)[None, :]
    target = out + row[:, None].to(tl.int64) * K + column[None, :]
    tl.store(target, value.to(out.dtype.element_ty), mask=mask)


class GroupedLinear:
    """Takes int4 and int8 weights with groups of 32 or more whose activations are not rounded."""

    name = "triton"
    fixed = False

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

    def prepare(self, form: Packed) -> GroupedProduct:
        assert isinstance(form, Int4Group | Int8Group)
        return GroupedProduct(form)


class GroupedProduct(Prepared):
    """Owns the codes in the kernel's order: each byte of int4 holds input j and input HALF + j."""

    def __init__(self, form: Int4Group | Int8Group) -> None:
        self._num_out, self._num_in = form.shape
        self._bits = 4 if isinstance(form, Int4Group) else 8
        self._half = min(_WIDEST, form.group)
        block = 2 * self._half
        self._group = form.group
        padding = -self._num_in % block
        codes = unpack_nibbles(form.codes) if isinstance(form, Int4Group) else form.codes
        codes = pad(codes, (0, padding))
        if isinstance(form, Int4Group):
            pairs = codes.view(self._num_out, -1, 2, self._half).transpose(2, 3)
            codes = pack_nibbles(pairs.reshape(self._num_out, -1))
        self._codes = codes.contiguous()
        self._scales = _by_group(form.scales)
        self._mins = None if form.mins is None else _by_group(form.mins)
        self._order = None if form.order is None else form.order.int()
        self._padded = self._num_in + padding
        if padding and form.group < self._num_in:
            missing = -(-self._padded // form.group) - self._scales.shape[0]
            self._scales = pad(self._scales, (0, 0, 0, missing))
            self._mins = None if self._mins is None else pad(self._mins, (0, 0, 0, missing))

    @property
    def num_bytes(self) -> int:
        held = (self._codes, self._scales, self._mins, self._order)
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    def apply(self, x: Inputs) -> Tensor:
        assert isinstance(x, Tensor)
        return self._fused(x) if x.shape[0] <= _MOST_FUSED else self._unpacked(x)

    def _fused(self, x: Tensor) -> Tensor:
        block = 2 * self._half
        rounded = round_blocks(x, block, min(self._group, block), self._order)
        rows, outputs = x.shape[0], self._num_out
        at_once = 8 if rows <= 8 else 32  # tokens, of two planes each
        width = 128 if outputs >= 8192 else 64
        tiles, heights = triton.cdiv(outputs, width), triton.cdiv(rows, at_once)
        splits = splits_for(tiles * heights, self._padded // block)
        out = x.new_empty((rows, outputs))
        parts = counters = out
        if splits > 1:
            parts = x.new_empty((splits, rows, outputs), dtype=torch.float32)
            counters = x.new_zeros(tiles * heights, dtype=torch.int32)
        grouped_linear_kernel[(tiles, splits, heights)](
            rounded.codes,
            rounded.scales,
            rounded.sums,
            self._codes,
            self._scales,
            self._scales if self._mins is None else self._mins,
            out,
            parts,
            counters,
            rows,
            outputs,
            self._padded,
            splits,
            max(64, _FETCHED // (outputs * splits) // 64 * 64),
            BITS=self._bits,
            GROUP=self._group,
            HALF=self._half,
            HAS_MINS=self._mins is not None,
            SPLIT=splits > 1,
            ROWS=at_once,
            OUTPUTS=width,
            INLINE=not _INTERPRETED,
            num_warps=4,
            num_stages=3,
            **chain.options(),
        )
        return out

    def _unpacked(self, x: Tensor) -> Tensor:
        weight = x.new_empty((self._num_out, self._num_in))
        unpack_kernel[(triton.cdiv(self._num_out, 16), self._padded // self._half)](
            self._codes,
            self._scales,
            self._scales if self._mins is None else self._mins,
            weight,
            self._num_out,
            self._num_in,
            self._padded,
            BITS=self._bits,
            GROUP=self._group,
            HALF=self._half,
            HAS_MINS=self._mins is not None,
            ROWS=16,
            num_warps=4,
            **chain.options(),
        )
        ordered = x if self._order is None else x[:, self._order]
        return linear(ordered, weight)


def _by_group(values: Tensor) -> Tensor:
    """[N, groups] to [groups, N]: neighbouring outputs lie together."""
    return values.T.contiguous()
