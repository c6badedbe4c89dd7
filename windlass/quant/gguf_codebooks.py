"""GGUF's IQ types and MXFP4: each block becomes 4-bit codes of a table of 16 values, without loss.

An IQ file stores an index into a grid of 4 or 8 magnitudes, and their signs. A grid entry here is the
4-bit codes of its magnitudes side by side in one integer, so that an index becomes 8 codes in one
lookup, and signs are set by one exclusive or with bit 3 of each code.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from windlass.errors import UnsupportedError
from windlass.quant.gguf_blocks import Block, Codebook, Kind, cut, half, paired_nibbles

_SIGN = 8  # the bit of a code that makes its value negative
_ALL_SIGNS = -0x77777778  # bit 3 of all eight codes, as an int32
_E8M0_NAN = 255


@functools.cache
def _grid(name: str, device: torch.device) -> Tensor:
    """The codes of each entry of a type's grid: int32 for 8 of them, int16 for 4."""
    try:
        from gguf import quants
    except ImportError as error:
        raise UnsupportedError(
            f"reading {name} weights needs the gguf package, which has the type's grid. "
            "Install it: pip install gguf"
        ) from error
    kind = getattr(quants, name)
    kind.init_grid()
    values = torch.from_numpy(kind.grid.reshape(kind.grid_shape))
    levels = torch.tensor(kind.grid_map, dtype=torch.float32, device="cpu")
    return _side_by_side(torch.bucketize(values, levels)).to(device)


@functools.cache
def _signs(device: torch.device) -> Tensor:
    """Bit 3 of each of eight codes for every byte of eight sign bits, int32 [256]."""
    signs = _fields(torch.arange(256, device="cpu"), 1, 8) * _SIGN
    return _side_by_side(signs).to(device)


@functools.cache
def _even_signs(device: torch.device) -> Tensor:
    """The same for 7 stored bits; the eighth makes the number of negative values even. [128]"""
    seven = torch.arange(128, device=device)
    parity = _fields(seven, 1, 7).sum(dim=1) & 1
    return _signs(device)[seven | parity << 7]


def _side_by_side(codes: Tensor) -> Tensor:
    """[entries, 8 or 4] codes to one integer for each entry, the first code in the lowest bits."""
    shifts = 4 * torch.arange(codes.shape[1], device=codes.device)
    joined = (codes.to(torch.int64) << shifts).sum(dim=1)
    return joined.to(torch.int32 if codes.shape[1] == 8 else torch.int16)


def _copied(raw: Tensor, first: int, last: int) -> Tensor:
    """A copy of some bytes of every block: a view as wider integers must begin at whole ones."""
    return raw[..., first:last].clone(memory_format=torch.contiguous_format)


def _look_up(table: Tensor, indices: Tensor) -> Tensor:
    """The same as table[indices], which takes four times as long."""
    return table.index_select(0, indices.flatten()).view(indices.shape)


def _words(raw: Tensor, first: int, last: int, dtype: torch.dtype) -> Tensor:
    """Bytes [first, last) of every block as little-endian integers, widened to int32."""
    return _copied(raw, first, last).view(dtype).to(torch.int32)


def _fields(values: Tensor, bits: int, count: int) -> Tensor:
    """Unsigned fields of integers, from the lowest bits up: one more axis of length `count`."""
    shifts = torch.arange(0, bits * count, bits, dtype=torch.int32, device=values.device)
    return values.unsqueeze(-1) >> shifts & (1 << bits) - 1


def _odd(values: Tensor) -> Tensor:
    """Stored n stands for a scale of 2 n + 1."""
    return (2 * values + 1).to(torch.int8)


def _bytes_of(codes: Tensor) -> Tensor:
    """[N, blocks, ...] integers of codes to [N, blocks, bytes]."""
    return codes.contiguous().flatten(2).view(torch.uint8)


def _coded(codes: Tensor, scales: Tensor, sub_scales: Tensor | None = None) -> Block:
    subs = None if sub_scales is None else sub_scales.flatten(2)
    return Block(_bytes_of(codes), scales, sub_scales=subs, packed=True)


def _iq2_xxs(raw: Tensor) -> Block:
    indices = cut(raw[..., 2:], 8, 8)[..., :4].to(torch.int32)
    signs_and_scale = cut(_words(raw, 2, 66, torch.int32), 8, 2)[..., 1]
    signs = _look_up(_even_signs(raw.device), _fields(signs_and_scale, 7, 4))
    codes = _look_up(_grid("IQ2_XXS", raw.device), indices) ^ signs
    return _coded(codes, half(raw, 0), _odd(signs_and_scale >> 28 & 15))


def _iq2_xs(raw: Tensor) -> Block:
    words = _words(raw, 2, 66, torch.int16)
    codes = _look_up(_grid("IQ2_XS", raw.device), words & 511)
    codes ^= _look_up(_even_signs(raw.device), words >> 9 & 127)
    return _coded(codes, half(raw, 0), _odd(_fields(_words(raw, 66, 74, torch.uint8), 4, 2)))


def _iq2_s(raw: Tensor) -> Block:
    high = _fields(_words(raw, 66, 74, torch.uint8), 2, 4).flatten(2)
    indices = _words(raw, 2, 34, torch.uint8) | high << 8
    codes = _look_up(_grid("IQ2_S", raw.device), indices)
    codes ^= _look_up(_signs(raw.device), _words(raw, 34, 66, torch.uint8))
    return _coded(codes, half(raw, 0), _odd(_fields(_words(raw, 74, 82, torch.uint8), 4, 2)))


def _pairs(codes: Tensor) -> Tensor:
    """int16 entries of 4 codes to int32 of 8."""
    return codes.contiguous().view(torch.int32)


def _iq3_xxs(raw: Tensor) -> Block:
    codes = _pairs(_look_up(_grid("IQ3_XXS", raw.device), _words(raw, 2, 66, torch.uint8)))
    signs_and_scale = _words(raw, 66, 98, torch.int32)
    codes ^= _look_up(_even_signs(raw.device), _fields(signs_and_scale, 7, 4)).flatten(2)
    return _coded(codes, half(raw, 0), _odd(signs_and_scale >> 28 & 15))


def _iq3_s(raw: Tensor) -> Block:
    high = _fields(_words(raw, 66, 74, torch.uint8), 1, 8).flatten(2)
    indices = _words(raw, 2, 66, torch.uint8) | high << 8
    codes = _pairs(_look_up(_grid("IQ3_S", raw.device), indices))
    codes ^= _look_up(_signs(raw.device), _words(raw, 74, 106, torch.uint8))
    return _coded(codes, half(raw, 0), _odd(_fields(_words(raw, 106, 110, torch.uint8), 4, 2)))


def _iq1_s(raw: Tensor) -> Block:
    words = _words(raw, 34, 50, torch.int16)
    indices = cut(_words(raw, 2, 34, torch.uint8), 8, 4) | _fields(words, 3, 4) << 8
    below = (words >> 15 & 1).unsqueeze(-1) * _ALL_SIGNS
    codes = _look_up(_grid("IQ1_S", raw.device), indices) ^ below
    return _coded(codes, half(raw, 0), _odd(words >> 12 & 7))


def _iq1_m(raw: Tensor) -> Block:
    nibbles = _fields(_words(raw, 32, 48, torch.uint8), 4, 2).flatten(2)
    indices = _words(raw, 0, 32, torch.uint8) | (nibbles & 7) << 8
    codes = _look_up(_grid("IQ1_M", raw.device), indices) ^ (nibbles >> 3) * _ALL_SIGNS
    words = _words(raw, 48, 56, torch.int16)
    # The block's float16 is cut into the highest four bits of four words.
    shifts = torch.arange(0, 16, 4, dtype=torch.int32, device=raw.device)
    bits = ((words >> 12 & 15) << shifts).sum(dim=-1, keepdim=True).to(torch.int16)
    return _coded(codes, bits.view(torch.float16), _odd(_fields(words, 3, 4)))


def _iq4_nl(raw: Tensor) -> Block:
    return _coded(paired_nibbles(raw, 2), half(raw, 0))


def _iq4_xs(raw: Tensor) -> Block:
    low = _fields(_words(raw, 4, 8, torch.uint8), 4, 2).flatten(2)
    high = _fields(_words(raw, 2, 4, torch.int16), 2, 8).flatten(2)
    codes = paired_nibbles(cut(raw[..., 8:], 8, 16), 0)
    return _coded(codes, half(raw, 0), ((low | high << 4) - 32).to(torch.int8))


def _mxfp4(raw: Tensor) -> Block:
    codes = paired_nibbles(_copied(raw, 1, 17), 0)
    powers = [2.0 ** (exponent - 128) for exponent in range(_E8M0_NAN)] + [torch.nan]
    scales = _look_up(torch.tensor(powers, device=raw.device), raw[..., :1].to(torch.int32))
    # A block of zeros has the lowest exponent, which float16 lacks; any scale is right for it.
    zeros = (codes & 0x77).amax(dim=-1, keepdim=True) == 0
    return _coded(codes, torch.where(zeros, 0.0, scales))


def _signed(magnitudes: tuple[int, ...], unit: float = 1.0) -> Codebook:
    """Magnitudes at codes 0 to 7, and the same below zero at 8 to 15."""
    eight = (*magnitudes, *[0] * (8 - len(magnitudes)))
    return Codebook((*eight, *(-value for value in eight)), unit)


_IQ2 = _signed((8, 25, 43), 1 / 8)
_IQ3_XXS = _signed((4, 12, 20, 28, 36, 44, 52, 62), 1 / 4)
_IQ3_S = _signed((1, 3, 5, 7, 9, 11, 13, 15))
# -1, 0 and 1 are moved by an eighth: up, and down where the sign bit is set.
_IQ1 = Codebook((-7, 1, 9, 0, 0, 0, 0, 0, -9, -1, 7, 0, 0, 0, 0, 0), 1 / 8)
_IQ4 = Codebook((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))
_E2M1_DOUBLED = _signed((0, 1, 2, 3, 4, 6, 8, 12))

CODEBOOK_KINDS = {
    "IQ2_XXS": Kind(256, 66, 4, 32, _iq2_xxs, _IQ2),
    "IQ2_XS": Kind(256, 74, 4, 16, _iq2_xs, _IQ2),
    "IQ2_S": Kind(256, 82, 4, 16, _iq2_s, _IQ2),
    "IQ3_XXS": Kind(256, 98, 4, 32, _iq3_xxs, _IQ3_XXS),
    "IQ3_S": Kind(256, 110, 4, 32, _iq3_s, _IQ3_S),
    "IQ1_S": Kind(256, 50, 4, 32, _iq1_s, _IQ1),
    "IQ1_M": Kind(256, 56, 4, 16, _iq1_m, _IQ1),
    "IQ4_NL": Kind(32, 18, 4, 32, _iq4_nl, _IQ4),
    "IQ4_XS": Kind(256, 136, 4, 32, _iq4_xs, _IQ4),
    "MXFP4": Kind(32, 17, 4, 32, _mxfp4, _E2M1_DOUBLED),
}
