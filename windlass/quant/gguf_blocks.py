"""The blocks of GGUF's storage types, taken apart: codes, scales and minima.

Q types of up to four bits and TQ types become int4 groups, Q types of five, six and eight bits int8
groups. K types store a scale as a float16 times a small integer; their product is rounded once to
float16. IQ types and MXFP4 are in gguf_codebooks.py; nothing is rounded there or in TQ types.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from windlass.kernels.packed import Int4Group, Int8Group, Packed, Table4, pack_nibbles
from windlass.quant.rounding import as_half

_AT_ONCE = 1 << 21  # weights that are taken apart together: bounds the memory of temporaries


class Block(NamedTuple):
    """The contents of blocks for some rows: weight = code * scale + min, a scale per group."""

    codes: Tensor  # uint8 or int8 [N, blocks, values]
    scales: Tensor  # float16 or float32 [N, blocks, groups]
    offsets: Tensor | None = None
    sub_scales: Tensor | None = None  # int8 [N, blocks, groups]: as Table4 has them
    packed: bool = False  # whether two codes are in a byte already, from 0 to 15


class Codebook(NamedTuple):
    """16 whole numbers of a unit."""

    values: tuple[int, ...]
    unit: float = 1.0


class Kind(NamedTuple):
    """A storage type: its size and how it is taken apart."""

    values: int
    num_bytes: int
    bits: int
    group: int
    parse: Callable[[Tensor], Block]
    codebook: Codebook | None = None  # the values of packed codes; None: the codes themselves
    lean: bool = False  # parsing needs no memory but for the result


def pack(blocks: Tensor, kind: Kind) -> Packed:
    """uint8 [N, bytes of a row], as the file has it, to a form."""
    block = _parse(blocks.view(blocks.shape[0], -1, kind.num_bytes), kind)
    if kind.codebook is not None:
        table = torch.tensor(kind.codebook.values, dtype=torch.int8, device=blocks.device)
        scales = _exact_half(block.scales)
        return Table4(
            codes=block.codes,
            table=table,
            scales=scales,
            sub_scales=block.sub_scales,
            unit=kind.codebook.unit,
        )
    scales = as_half(block.scales)
    offsets = None if block.offsets is None else as_half(block.offsets)
    if kind.bits > 4:
        return Int8Group(block.codes, scales, offsets, bits=8 if kind.bits == 8 else 6)
    # Codes around 8: the minimum is a power of two times the scale, so it is exact.
    return Int4Group(block.codes, scales, scales * -8 if offsets is None else offsets)


def _exact_half(scales: Tensor) -> Tensor:
    """As float16 if that has every value; else as they are."""
    if scales.dtype == torch.float16 or scales.is_meta:
        return scales
    halves = scales.half()
    return halves if torch.equal(halves.float(), scales) else scales


def _parse(raw: Tensor, kind: Kind) -> Block:
    """All rows, some at a time. Codes of up to four bits come out two a byte."""
    rows = max(1, _AT_ONCE // (raw.shape[1] * kind.values))
    if raw.is_meta or kind.lean or raw.shape[0] <= rows:
        return _parse_rows(raw, kind)
    whole: dict[str, Tensor] = {}
    for first in range(0, raw.shape[0], rows):
        part = _parse_rows(raw[first : first + rows], kind)
        for name, value in part._asdict().items():
            if isinstance(value, Tensor):
                if name not in whole:
                    whole[name] = value.new_empty((raw.shape[0], value.shape[1]))
                whole[name][first : first + rows] = value
    return Block(whole["codes"], whole["scales"], whole.get("offsets"), whole.get("sub_scales"))


def _parse_rows(raw: Tensor, kind: Kind) -> Block:
    block = kind.parse(raw)
    codes = block.codes.flatten(1)
    if kind.bits > 4:
        codes = codes.to(torch.int8)
    elif not block.packed:
        # Codes around zero are moved to lie around 8.
        codes = pack_nibbles(codes + 8 if block.offsets is None else codes)
    flat = {
        name: value.flatten(1)
        for name in ("scales", "offsets", "sub_scales")
        if (value := getattr(block, name)) is not None
    }
    return block._replace(codes=codes, **flat)


def cut(values: Tensor, *sizes: int) -> Tensor:
    """The last axis as several."""
    return values.reshape(*values.shape[:-1], *sizes)


def half(raw: Tensor, at: int) -> Tensor:
    """The float16 at a byte of every block, [N, blocks, 1]."""
    return raw[..., at : at + 2].contiguous().view(torch.float16)


def _float(raw: Tensor, at: int) -> Tensor:
    """The same as float32, to be multiplied."""
    return half(raw, at).float()


def _nibbles(raw: Tensor, at: int) -> Tensor:
    """32 values from 16 bytes: the low halves first."""
    packed = raw[..., at : at + 16]
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def paired_nibbles(raw: Tensor, at: int) -> Tensor:
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
    shifts = torch.arange(8, dtype=torch.uint8, device=raw.device)
    return ((raw[..., at : at + 4, None] >> shifts & 1) << 4).flatten(-2)


def _q4_0(raw: Tensor) -> Block:
    return Block(paired_nibbles(raw, 2), half(raw, 0), packed=True)


def _q4_1(raw: Tensor) -> Block:
    return Block(paired_nibbles(raw, 4), half(raw, 0), half(raw, 2), packed=True)


def _q5_0(raw: Tensor) -> Block:
    codes = _nibbles(raw, 6) | _fifth_bits(raw, 2)
    return Block(codes.to(torch.int8) - 16, half(raw, 0))


def _q5_1(raw: Tensor) -> Block:
    codes = _nibbles(raw, 8) | _fifth_bits(raw, 4)
    return Block(codes, half(raw, 0), half(raw, 2))


def _q8_0(raw: Tensor) -> Block:
    return Block(raw[..., 2:].contiguous().view(torch.int8), half(raw, 0))


def _pairs_of_bits(packed: Tensor) -> Tensor:
    """256 values of two bits: each half of the 64 bytes holds four runs of 32 values."""
    halves = cut(packed, 2, 1, 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=packed.device).view(4, 1)
    return (halves >> shifts & 3).flatten(-3)


def _q2_k(raw: Tensor) -> Block:
    both = raw[..., :16]
    scales, offsets = _float(raw, 80) * (both & 15), _float(raw, 82) * (both >> 4)
    return Block(_pairs_of_bits(raw[..., 16:80]), scales, -offsets)


def _q3_k(raw: Tensor) -> Block:
    shifts = torch.arange(8, dtype=torch.uint8, device=raw.device).view(8, 1)
    high = (raw[..., None, :32] >> shifts & 1).flatten(-2)
    codes = (_pairs_of_bits(raw[..., 32:96]) | high << 2).to(torch.int8) - 4
    low, top = raw[..., 96:104], raw[..., 104:108]
    lower = torch.cat((low & 15, low >> 4), dim=-1)
    upper = torch.cat([top >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1)
    small = (lower | upper << 4).to(torch.int8) - 32
    return Block(codes, _float(raw, 108) * small)


def _six_bits(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight minima of six bits from 12 bytes."""
    first, second, third = cut(raw, 3, 4).unbind(-2)
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), dim=-1)
    offsets = torch.cat((second & 63, third >> 4 | second >> 6 << 4), dim=-1)
    return scales, offsets


def _runs_of_nibbles(packed: Tensor) -> Tensor:
    """256 values from 128 bytes: every 32 bytes hold 32 values low, then 32 high."""
    runs = cut(packed, 4, 32)
    return torch.stack((runs & 15, runs >> 4), dim=-2).flatten(-3)


def _q4_k(raw: Tensor) -> Block:
    scales, offsets = _six_bits(raw[..., 4:16])
    codes = _runs_of_nibbles(raw[..., 16:144])
    return Block(codes, _float(raw, 0) * scales, -_float(raw, 2) * offsets)


def _q5_k(raw: Tensor) -> Block:
    scales, offsets = _six_bits(raw[..., 4:16])
    shifts = torch.arange(8, dtype=torch.uint8, device=raw.device).view(8, 1)
    high = (raw[..., None, 16:48] >> shifts & 1).flatten(-2)
    codes = _runs_of_nibbles(raw[..., 48:176]) | high << 4
    return Block(codes, _float(raw, 0) * scales, -_float(raw, 2) * offsets)


def _q6_k(raw: Tensor) -> Block:
    low = cut(raw[..., :128], 2, 1, 64)
    lower = torch.cat((low & 15, low >> 4), dim=-2).flatten(-3)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=raw.device).view(4, 1)
    upper = (cut(raw[..., 128:192], 2, 1, 32) >> shifts & 3).flatten(-3)
    scales = raw[..., 192:208].contiguous().view(torch.int8)
    return Block((lower | upper << 4).to(torch.int8) - 32, _float(raw, 208) * scales)


def _tq1_0(raw: Tensor) -> Block:
    """Five digits of base 3 in a byte, as a fraction of 256; the last bytes hold four."""

    def digits(first: int, last: int, count: int) -> Tensor:
        powers = torch.tensor([3**i for i in range(count)], dtype=torch.uint8, device=raw.device)
        # The product wraps: what is left below 256 is the fraction without the leading digits.
        return (raw[..., None, first:last] * powers.view(-1, 1)).flatten(-2)

    fractions = torch.cat((digits(0, 32, 5), digits(32, 48, 5), digits(48, 52, 4)), dim=-1)
    return _ternary(fractions.to(torch.int16) * 3 >> 8, raw, 52)


def _tq2_0(raw: Tensor) -> Block:
    return _ternary(_pairs_of_bits(raw[..., :64]), raw, 64)


def _ternary(digits: Tensor, raw: Tensor, scale_at: int) -> Block:
    """Digit 1 stands for zero."""
    return Block(digits.to(torch.int8) - 1, half(raw, scale_at))


BLOCK_KINDS = {
    "Q4_0": Kind(32, 18, 4, 32, _q4_0, lean=True),
    "Q4_1": Kind(32, 20, 4, 32, _q4_1, lean=True),
    "Q5_0": Kind(32, 22, 5, 32, _q5_0),
    "Q5_1": Kind(32, 24, 5, 32, _q5_1),
    "Q8_0": Kind(32, 34, 8, 32, _q8_0, lean=True),
    "Q2_K": Kind(256, 84, 2, 16, _q2_k),
    "Q3_K": Kind(256, 110, 3, 16, _q3_k),
    "Q4_K": Kind(256, 144, 4, 32, _q4_k),
    "Q5_K": Kind(256, 176, 5, 32, _q5_k),
    "Q6_K": Kind(256, 210, 6, 16, _q6_k),
    "TQ1_0": Kind(256, 54, 2, 256, _tq1_0),
    "TQ2_0": Kind(256, 66, 2, 256, _tq2_0),
}
