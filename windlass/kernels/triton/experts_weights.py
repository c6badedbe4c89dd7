"""Weights of all experts of a layer as the grouped GEMM of experts_kernels.py reads them.

16-bit weights, 8-bit codes and their scales stay as they are, except that scales per group are
transposed; 4-bit codes are repacked, so that a byte holds two inputs 64 apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from windlass.kernels.packed import (
    Float8,
    Int4Group,
    Int8Group,
    Packed,
    Table4,
    pack_nibbles,
    unpack_nibbles,
)
from windlass.kernels.triton.experts_inputs import BLOCK

_CHUNK_ROWS = 2**14  # rows repacked at a time
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_BIAS = 126
_E2M1_GROUP = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One weight of all experts, prepared.

    wide: 16-bit weights. fp8: e4m3 codes that multiply e4m3 inputs. eight, four, e2m1: codes that are
    dequantised, with scales [groups, rows]. Scales of e2m1 are exponents, int32 [rows, blocks]: four
    of 32 inputs each.
    """

    kind: Literal["wide", "fp8", "eight", "four", "e2m1"]
    codes: Tensor
    num_in: int
    scales: Tensor | None = None
    offsets: Tensor | None = None
    sub_scales: Tensor | None = None
    table: Tensor | None = None  # float32 [16]
    group: int = 1  # inputs per scale; fp8: 128, or 1 with a scale per row
    super_group: int = 1

    @property
    def blocks(self) -> bool:
        """Whether fp8 codes have scales per block."""
        return self.group == BLOCK

    @property
    def num_rows(self) -> int:
        return self.codes.shape[0]

    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.codes, self.scales, self.offsets, self.sub_scales, self.table


def refuse(form: Packed | Tensor, num_experts: int) -> str | None:
    """Why a form cannot be prepared, or None."""
    num_out, num_in = form.shape[0] // num_experts, form.shape[1]
    if num_in % 16:
        return f"{num_in} inputs are not a multiple of 16"
    if isinstance(form, Tensor):
        return None
    if isinstance(form, Float8):
        if form.block is not None and (form.block != (BLOCK, BLOCK) or num_out % BLOCK):
            return (
                f"fp8 scales per block of {form.block[0]} x {form.block[1]} with {num_out} rows per "
                f"expert; only blocks of {BLOCK} x {BLOCK} that do not span experts are supported"
            )
        return None
    if not isinstance(form, Table4) and form.perm is not None:
        return "permuted inputs (act-order) are not supported"
    if form.group != num_in and (form.group < 16 or form.group & (form.group - 1)):
        return f"group size {form.group} is not a power of two of at least 16"
    return None


def prepare(form: Packed | Tensor, dtype: torch.dtype) -> Stack:
    """Prepare the weight of all experts."""
    num_in = form.shape[1]
    match form:
        case Tensor():
            return Stack(kind="wide", codes=form.to(dtype).contiguous(), num_in=num_in)
        case Float8():
            return _float8(form)
        case Int8Group():
            return Stack(
                kind="eight",
                codes=form.codes.contiguous(),
                num_in=num_in,
                scales=_by_group(form.scales, form.group, num_in),
                offsets=_by_group(form.offsets, form.group, num_in),
                group=form.group,
                super_group=form.group,
            )
        case Int4Group():
            return Stack(
                kind="four",
                codes=_repacked(form.codes),
                num_in=num_in,
                scales=_by_group(form.scales, form.group, num_in),
                offsets=_by_group(form.offsets, form.group, num_in),
                group=form.group,
                super_group=form.group,
            )
        case Table4():
            return _table(form)


def _float8(form: Float8) -> Stack:
    codes, scales = form.codes.contiguous(), form.scales.float()
    num_rows, num_in = form.shape
    if form.activation == "none":
        if form.block is not None:
            scales = scales.repeat_interleave(BLOCK, 0)[:num_rows]
        else:
            scales = scales.expand(num_rows, 1)
        group = num_in if form.block is None else BLOCK
        return Stack(
            kind="eight",
            codes=codes,
            num_in=num_in,
            scales=_by_group(scales, group, num_in),
            group=group,
            super_group=group,
        )
    if form.block is not None:
        return Stack(
            kind="fp8", codes=codes, num_in=num_in, scales=scales.contiguous(), group=BLOCK
        )
    rows = scales.flatten().expand(num_rows).contiguous()
    return Stack(kind="fp8", codes=codes, num_in=num_in, scales=rows)


def _table(form: Table4) -> Stack:
    num_in = form.shape[1]
    exponents = _e2m1_exponents(form)
    if exponents is not None:
        return Stack(
            kind="e2m1",
            codes=_repacked(form.codes),
            num_in=num_in,
            scales=exponents,
            group=_E2M1_GROUP,
        )
    return Stack(
        kind="four",
        codes=_repacked(form.codes),
        num_in=num_in,
        scales=_by_group(form.scales, form.super_group, num_in),
        sub_scales=_by_group(form.sub_scales, form.group, num_in),
        table=form.values.contiguous(),
        group=form.group,
        super_group=form.super_group,
    )


def _e2m1_exponents(form: Table4) -> Tensor | None:
    """Exponents of float32, four per int32 [rows, blocks], that scale e2m1 codes; None: not MXFP4.

    Exponent and mantissa of a code become the lowest exponent and highest mantissa bits of a 16- or
    32-bit float, which is 2^126 times too small. The scales have this factor.
    """
    values = form.values
    levels = torch.tensor(_E2M1, device=values.device) * values[2]
    if form.sub_scales is not None or form.group != _E2M1_GROUP:
        return None
    if not torch.equal(values, torch.cat([levels, -levels])):
        return None
    bits = (form.scales.float() * values[2]).contiguous().view(torch.int32)
    exponents = torch.where(bits > 0, (bits >> 23) + _E2M1_BIAS, 0)
    exact = (bits >= 0) & (bits & 0x7FFFFF == 0) & (exponents <= 254)
    if not bool(exact.all()):
        return None
    per_block = BLOCK // _E2M1_GROUP
    padded = pad(exponents.to(torch.uint8), (0, -exponents.shape[1] % per_block))
    return padded.contiguous().view(torch.int32)


def _by_group(values: Tensor | None, group: int, num_in: int) -> Tensor | None:
    """Transpose [rows, groups] to [groups, rows], with zeros for the inputs that fill the last block."""
    if values is None:
        return None
    missing = -(-(num_in + -num_in % BLOCK) // group) - values.shape[1]
    return pad(values.T, (0, 0, 0, max(0, missing))).contiguous()


def _repacked(codes: Tensor) -> Tensor:
    """Byte j of a block of 128 inputs gets inputs j and 64 + j; the last block is filled with zeros."""
    num_rows, num_in = codes.shape[0], 2 * codes.shape[1]
    padding = -num_in % BLOCK
    out = codes.new_empty((num_rows, (num_in + padding) // 2))
    for first in range(0, num_rows, _CHUNK_ROWS):
        rows = slice(first, first + _CHUNK_ROWS)
        wide = pad(unpack_nibbles(codes[rows]), (0, padding))
        pairs = wide.view(len(wide), -1, 2, BLOCK // 2).transpose(2, 3)
        out[rows] = pack_nibbles(pairs.reshape(len(wide), -1))
    return out
