"""Rounding weights to the nearest code: what `--quantization` does to 16-bit weights at load time.

No calibration here; tools/quantize looks at activations before it rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from windlass.errors import UnsupportedError
from windlass.kernels.packed import (
    Activation,
    Float8,
    Int4Group,
    Int8Group,
    Packed,
    Table4,
    pack_nibbles,
)
from windlass.quant.join import join

# The normal distribution in 16 steps of equal probability, zero among them (the QLoRA paper's NF4).
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_FLOAT8_MOST = 448.0
_AT_ONCE = 2**24  # weights that are rounded together: bounds the float32 copies on the device


Kind = Literal["int4", "int8", "fp8", "table4"]


@dataclass(frozen=True, slots=True)
class Scheme:
    """A form in the abstract: codes of a kind, and how many weights share a scale."""

    name: str
    kind: Kind
    groups: tuple[int, ...] = ()  # the first that divides the inputs; none: see `per_row`
    per_row: bool = False  # whether one scale per row will do
    activation: Activation = "none"
    block: tuple[int, int] | None = None
    minima: bool = False  # whether groups of int8 codes have them; those of int4 always do

    def group(self, num_in: int, layer: str = "a layer") -> int:
        """The inputs that share a scale in rows of so many."""
        for size in self.groups:
            if num_in % size == 0:
                return size
        if self.per_row:
            return num_in
        raise UnsupportedError(
            f"{layer}: {self.name} needs groups of {', '.join(map(str, self.groups))} inputs, and "
            f"none of these divides {num_in}. Take int8 or fp8, which have scales per row."
        )


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme("fp8", "fp8", per_row=True, activation="token"),
        Scheme("fp8-block", "fp8", per_row=True, activation="block", block=(128, 128)),
        Scheme("int8", "int8", groups=(32,), per_row=True, minima=True),
        Scheme("w8a8", "int8", per_row=True, activation="token"),
        Scheme("int4", "int4", groups=(128, 64, 32)),
        Scheme("w4a8", "int4", groups=(128, 64, 32), activation="token"),
        Scheme("nf4", "table4", groups=(64, 32)),
    )
}


def quantise(weight: Tensor, scheme: Scheme) -> Packed:
    """Round [N, K] to the scheme's codes, some rows at a time."""
    rows = max(128, _AT_ONCE // weight.shape[1] // 128 * 128)
    forms = join(
        [_ROUND[scheme.kind](chunk.float(), scheme) for chunk in torch.split(weight, rows)]
    )
    assert len(forms) == 1
    assert not isinstance(forms[0], Tensor)
    return forms[0]


def as_half(values: Tensor) -> Tensor:
    """Rounded to float16, which has a finer grid than bfloat16; float32 where its range is short."""
    if values.is_meta:
        return values.half()
    most = values.abs().max() if values.numel() else values.new_zeros(())
    fits = bool((most == 0) | ((most <= 65504) & (most >= 2**-14)))
    return values.half() if fits else values.float()


def _int4(weight: Tensor, scheme: Scheme) -> Packed:
    codes, scales, offsets = _affine(_grouped(weight, scheme), 0, 15)
    return Int4Group(pack_nibbles(codes), scales, offsets)


def _int8(weight: Tensor, scheme: Scheme) -> Packed:
    groups = _grouped(weight, scheme)
    if scheme.minima and groups.shape[1] > 1:
        codes, scales, offsets = _affine(groups, -128, 127)
        return Int8Group(codes.to(torch.int8), scales, offsets)
    scales = groups.abs().amax(-1) / 127
    # One per row costs nothing in full.
    scales = _not_zero(as_half(scales) if groups.shape[1] > 1 else scales)
    codes = (groups / scales.float().unsqueeze(-1)).round().clamp(-127, 127)
    return Int8Group(codes.to(torch.int8).flatten(1), scales, activation=scheme.activation)


def _float8(weight: Tensor, scheme: Scheme) -> Packed:
    if scheme.block is None:
        scales = spread = _not_zero(weight.abs().amax(1, keepdim=True) / _FLOAT8_MOST)
    else:
        scales = _not_zero(_block_most(weight, scheme.block) / _FLOAT8_MOST)
        rows = scales.repeat_interleave(scheme.block[0], 0)[: weight.shape[0]]
        spread = rows.repeat_interleave(scheme.block[1], 1)[:, : weight.shape[1]]
    codes = (weight / spread).clamp(-_FLOAT8_MOST, _FLOAT8_MOST).to(torch.float8_e4m3fn)
    return Float8(codes, scales, scheme.activation, block=scheme.block)


def _block_most(weight: Tensor, block: tuple[int, int]) -> Tensor:
    (rows, columns), (num_out, num_in) = block, weight.shape
    padded = torch.nn.functional.pad(weight, (0, -num_in % columns, 0, -num_out % rows))
    cut = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
    return cut.abs().amax((1, 3))


def _table4(weight: Tensor, scheme: Scheme) -> Packed:
    groups = _grouped(weight, scheme)
    scales = _not_zero(as_half(groups.abs().amax(-1)))
    table = torch.tensor(NF4, device=weight.device)
    middles = (table[1:] + table[:-1]) / 2
    codes = torch.bucketize(groups / scales.float().unsqueeze(-1), middles)
    return Table4(pack_nibbles(codes.flatten(1)), table, scales)


def _affine(groups: Tensor, first: int, last: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [N, K] from first to last, scales and minima: between a group's ends, evenly."""
    low, high = groups.amin(-1), groups.amax(-1)
    scales = _not_zero(as_half((high - low) / (last - first)))
    offsets = as_half(low - first * scales.float())  # what code 0 means
    codes = (groups - offsets.float().unsqueeze(-1)) / scales.float().unsqueeze(-1)
    return codes.round().clamp(first, last).flatten(1), scales, offsets


def _grouped(weight: Tensor, scheme: Scheme) -> Tensor:
    num_out, num_in = weight.shape
    return weight.view(num_out, -1, scheme.group(num_in))


def _not_zero(scales: Tensor) -> Tensor:
    """A group of equal weights has no range; any scale will do for it, but not zero."""
    return torch.where(scales == 0, torch.ones_like(scales), scales)


_ROUND = {"int4": _int4, "int8": _int8, "fp8": _float8, "table4": _table4}
