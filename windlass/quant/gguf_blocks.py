"""The blocks of GGUF's storage types, taken apart: codes, scales and minima.

Types of up to four bits become int4 groups, those of five, six and eight int8 groups. Where a type
keeps its scales in two steps (a float16 times a small whole number), the product is rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from windlass.kernels.packed import Int4Group, Int8Group, Packed, pack_nibbles
from windlass.quant.rounding import as_half


class Block(NamedTuple):
    """A block's contents for all rows: weight = code * scale + min, a scale per group."""

    codes: Tensor  # uint8 or int8 [N, blocks, values]
    scales: Tensor  # float16 or float32 [N, blocks, groups]
    mins: Tensor | None = None
    packed: bool = False  # whether two codes are in a byte already, from 0 to 15


class Kind(NamedTuple):
    """A storage type: its size and how it is taken apart."""

    values: int
    num_bytes: int
    bits: int
    group: int
    parse: Callable[[Tensor], Block]


def pack(blocks: Tensor, kind: Kind) -> Packed:
    """uint8 [N, bytes of a row], as the file has it, to a form."""
    block = kind.parse(blocks.view(blocks.shape[0], -1, kind.num_bytes))
    codes, scales = block.codes.flatten(1), as_half(block.scales.flatten(1))
    if block.packed:
        lowest = as_half(block.mins.flatten(1)) if block.mins is not None else scales * -8
        return Int4Group(codes, scales, lowest)
    if kind.bits > 4:
        mins = None if block.mins is None else as_half(block.mins.flatten(1))
        return Int8Group(codes.to(torch.int8), scales, mins)
    if block.mins is None:
        # Codes around a centre: the minimum is a power of two times the scale, so it is exact.
        centre = 2 ** (kind.bits - 1)
        return Int4Group(pack_nibbles(codes + centre), scales, scales * -centre)
    return Int4Group(pack_nibbles(codes), scales, as_half(block.mins.flatten(1)))


def _cut(values: Tensor, *sizes: int) -> Tensor:
    """The last axis as several."""
    return values.reshape(*values.shape[:-1], *sizes)


def _half(raw: Tensor, at: int) -> Tensor:
    """The float16 at a byte of every block, [N, blocks, 1]."""
    return raw[..., at : at + 2].contiguous().view(torch.float16)


def _float(raw: Tensor, at: int) -> Tensor:
    """The same as float32, to be multiplied."""
    return _half(raw, at).float()


def _nibbles(raw: Tensor, at: int) -> Tensor:
    """32 values from 16 bytes: the low halves first."""
    packed = raw[..., at : at + 16]
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _paired(raw: Tensor, at: int) -> Tensor:
    """The same 32 values, as neighbours in a byte: the first of each pair in the low half.

    Two bytes at a time, as int16: times 0x110, both low halves come together in the upper byte.
    In place, since fresh memory would take longer than the arithmetic.
    """
    both = torch.empty((*raw.shape[:-1], 2, 8), dtype=torch.int16, device=raw.device)
    both[..., 0, :] = raw[..., at : at + 16].view(torch.int16)
    torch.bitwise_right_shift(both[..., 0, :], 4, out=both[..., 1, :])
    both &= 0x0F0F
    both *= 0x110
    return both.view(torch.uint8)[..., 1::2].flatten(-2)


def _fifth_bits(raw: Tensor, at: int) -> Tensor:
    """32 bits from 4 bytes, each worth 16."""
    places = torch.arange(8, dtype=torch.uint8, device=raw.device)
    return ((raw[..., at : at + 4, None] >> places & 1) << 4).flatten(-2)


def _q4_0(raw: Tensor) -> Block:
    return Block(_paired(raw, 2), _half(raw, 0), packed=True)


def _q4_1(raw: Tensor) -> Block:
    return Block(_paired(raw, 4), _half(raw, 0), _half(raw, 2), packed=True)


def _q5_0(raw: Tensor) -> Block:
    codes = _nibbles(raw, 6) | _fifth_bits(raw, 2)
    return Block(codes.to(torch.int8) - 16, _half(raw, 0))


def _q5_1(raw: Tensor) -> Block:
    codes = _nibbles(raw, 8) | _fifth_bits(raw, 4)
    return Block(codes, _half(raw, 0), _half(raw, 2))


def _q8_0(raw: Tensor) -> Block:
    return Block(raw[..., 2:].contiguous().view(torch.int8), _half(raw, 0))


def _pairs_of_bits(packed: Tensor) -> Tensor:
    """256 values of two bits: each half of the 64 bytes holds four runs of 32 values."""
    halves = _cut(packed, 2, 1, 32)
    places = torch.arange(0, 8, 2, dtype=torch.uint8, device=packed.device).view(4, 1)
    return (halves >> places & 3).flatten(-3)


def _q2_k(raw: Tensor) -> Block:
    both = raw[..., :16]
    scales, mins = _float(raw, 80) * (both & 15), _float(raw, 82) * (both >> 4)
    return Block(_pairs_of_bits(raw[..., 16:80]), scales, -mins)


def _q3_k(raw: Tensor) -> Block:
    places = torch.arange(8, dtype=torch.uint8, device=raw.device).view(8, 1)
    high = (raw[..., None, :32] >> places & 1).flatten(-2)
    codes = (_pairs_of_bits(raw[..., 32:96]) | high << 2).to(torch.int8) - 4
    low, top = raw[..., 96:104], raw[..., 104:108]
    lower = torch.cat((low & 15, low >> 4), dim=-1)
    upper = torch.cat([top >> place & 3 for place in (0, 2, 4, 6)], dim=-1)
    small = (lower | upper << 4).to(torch.int8) - 32
    return Block(codes, _float(raw, 108) * small)


def _six_bits(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight minima of six bits from 12 bytes."""
    first, second, third = _cut(raw, 3, 4).unbind(-2)
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), dim=-1)
    mins = torch.cat((second & 63, third >> 4 | second >> 6 << 4), dim=-1)
    return scales, mins


def _runs_of_nibbles(packed: Tensor) -> Tensor:
    """256 values from 128 bytes: every 32 bytes hold 32 values low, then 32 high."""
    runs = _cut(packed, 4, 32)
    return torch.stack((runs & 15, runs >> 4), dim=-2).flatten(-3)


def _q4_k(raw: Tensor) -> Block:
    scales, mins = _six_bits(raw[..., 4:16])
    codes = _runs_of_nibbles(raw[..., 16:144])
    return Block(codes, _float(raw, 0) * scales, -_float(raw, 2) * mins)


def _q5_k(raw: Tensor) -> Block:
    scales, mins = _six_bits(raw[..., 4:16])
    places = torch.arange(8, dtype=torch.uint8, device=raw.device).view(8, 1)
    high = (raw[..., None, 16:48] >> places & 1).flatten(-2)
    codes = _runs_of_nibbles(raw[..., 48:176]) | high << 4
    return Block(codes, _float(raw, 0) * scales, -_float(raw, 2) * mins)


def _q6_k(raw: Tensor) -> Block:
    low = _cut(raw[..., :128], 2, 1, 64)
    lower = torch.cat((low & 15, low >> 4), dim=-2).flatten(-3)
    places = torch.arange(0, 8, 2, dtype=torch.uint8, device=raw.device).view(4, 1)
    upper = (_cut(raw[..., 128:192], 2, 1, 32) >> places & 3).flatten(-3)
    scales = raw[..., 192:208].contiguous().view(torch.int8)
    return Block((lower | upper << 4).to(torch.int8) - 32, _float(raw, 208) * scales)


KINDS = {
    "Q4_0": Kind(32, 18, 4, 32, _q4_0),
    "Q4_1": Kind(32, 20, 4, 32, _q4_1),
    "Q5_0": Kind(32, 22, 5, 32, _q5_0),
    "Q5_1": Kind(32, 24, 5, 32, _q5_1),
    "Q8_0": Kind(32, 34, 8, 32, _q8_0),
    "Q2_K": Kind(256, 84, 2, 16, _q2_k),
    "Q3_K": Kind(256, 110, 3, 16, _q3_k),
    "Q4_K": Kind(256, 144, 4, 32, _q4_k),
    "Q5_K": Kind(256, 176, 5, 32, _q5_k),
    "Q6_K": Kind(256, 210, 6, 16, _q6_k),
}
