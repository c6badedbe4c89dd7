"""Round-to-nearest quantisation of 16-bit weights while loading (`--quantization`).

There is no calibration; tools/quantize calibrates with activations.
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

# NF4 of the QLoRA paper: 16 levels of equal probability under a normal distribution, with zero.
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
DOUBLED_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12)  # magnitudes of the codes of MXFP4, times two
_FLOAT8_MAX = 448.0
_CHUNK_WEIGHTS = 2**24  # weights quantised at a time; bounds the float32 copies on the device


Kind = Literal["int4", "int8", "fp8", "table4", "mxfp4"]


@dataclass(frozen=True, slots=True)
class Scheme:
    """A quantisation scheme: the type of the codes and the group size."""

    name: str
    kind: Kind
    groups: tuple[int, ...] = ()  # group sizes; the first that divides the inputs is used
    per_row: bool = False  # whether a scale per row is allowed if no group size fits
    activation: Activation = "none"
    block: tuple[int, int] | None = None
    offsets: bool = (
        False  # whether groups of int8 codes have offsets; groups of int4 codes always do
    )

    def group(self, num_in: int, layer: str = "a layer") -> int:
        """The group size for rows of `num_in` inputs."""
        for size in self.groups:
            if num_in % size == 0:
                return size
        if self.per_row:
            return num_in
        raise UnsupportedError(
            f"{layer}: {self.name} needs a group size of {', '.join(map(str, self.groups))}, and "
            f"none of these divides {num_in} inputs. Use int8 or fp8, which have scales per row."
        )


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme("fp8", "fp8", per_row=True, activation="token"),
        Scheme("fp8-block", "fp8", per_row=True, activation="block", block=(128, 128)),
        Scheme("int8", "int8", groups=(32,), per_row=True, offsets=True),
        Scheme("w8a8", "int8", per_row=True, activation="token"),
        Scheme("int4", "int4", groups=(128, 64, 32)),
        Scheme("w4a8", "int4", groups=(128, 64, 32), activation="token"),
        Scheme("nf4", "table4", groups=(64, 32)),
    )
}


def quantise(weight: Tensor, scheme: Scheme) -> Packed:
    """Quantise a weight [N, K] to a scheme, in chunks of rows."""
    rows = max(128, _CHUNK_WEIGHTS // weight.shape[1] // 128 * 128)
    forms = join(
        [_QUANTISE[scheme.kind](chunk.float(), scheme) for chunk in torch.split(weight, rows)]
    )
    assert len(forms) == 1
    assert not isinstance(forms[0], Tensor)
    return forms[0]


def as_half(values: Tensor) -> Tensor:
    """float16, which is more precise than bfloat16; float32 if the values exceed its range."""
    if values.is_meta:
        return values.half()
    absmax = values.abs().max() if values.numel() else values.new_zeros(())
    fits = bool((absmax == 0) | ((absmax <= 65504) & (absmax >= 2**-14)))
    return values.half() if fits else values.float()


def _int4(weight: Tensor, scheme: Scheme) -> Packed:
    codes, scales, offsets = _affine(_grouped(weight, scheme), 0, 15)
    return Int4Group(pack_nibbles(codes), scales, offsets)


def _int8(weight: Tensor, scheme: Scheme) -> Packed:
    groups = _grouped(weight, scheme)
    if scheme.offsets and groups.shape[1] > 1:
        codes, scales, offsets = _affine(groups, -128, 127)
        return Int8Group(codes.to(torch.int8), scales, offsets)
    scales = groups.abs().amax(-1) / 127
    # A scale per row costs nothing in float32.
    scales = _nonzero(as_half(scales) if groups.shape[1] > 1 else scales)
    codes = (groups / scales.float().unsqueeze(-1)).round().clamp(-127, 127)
    return Int8Group(codes.to(torch.int8).flatten(1), scales, activation=scheme.activation)


def _float8(weight: Tensor, scheme: Scheme) -> Packed:
    if scheme.block is None:
        scales = spread = _nonzero(weight.abs().amax(1, keepdim=True) / _FLOAT8_MAX)
    else:
        scales = _nonzero(_block_absmax(weight, scheme.block) / _FLOAT8_MAX)
        rows = scales.repeat_interleave(scheme.block[0], 0)[: weight.shape[0]]
        spread = rows.repeat_interleave(scheme.block[1], 1)[:, : weight.shape[1]]
    codes = (weight / spread).clamp(-_FLOAT8_MAX, _FLOAT8_MAX).to(torch.float8_e4m3fn)
    return Float8(codes, scales, scheme.activation, block=scheme.block)


def _block_absmax(weight: Tensor, block: tuple[int, int]) -> Tensor:
    (rows, columns), (num_out, num_in) = block, weight.shape
    padded = torch.nn.functional.pad(weight, (0, -num_in % columns, 0, -num_out % rows))
    cut = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
    return cut.abs().amax((1, 3))


def _table4(weight: Tensor, scheme: Scheme) -> Packed:
    groups = _grouped(weight, scheme)
    scales = _nonzero(as_half(groups.abs().amax(-1)))
    table = torch.tensor(NF4, device=weight.device)
    midpoints = (table[1:] + table[:-1]) / 2
    codes = torch.bucketize(groups / scales.float().unsqueeze(-1), midpoints)
    return Table4(pack_nibbles(codes.flatten(1)), table, scales)


def _mxfp4(weight: Tensor, scheme: Scheme) -> Packed:
    """e2m1 codes with a power of two per group: the largest magnitude becomes 4 to 6."""
    groups = _grouped(weight, scheme)
    largest = groups.abs().amax(-1)
    scales = _nonzero(torch.where(largest > 0, torch.exp2(largest.log2().floor() - 2), 0.0))
    levels = torch.tensor(DOUBLED_E2M1, device=weight.device)
    midpoints = (levels[1:] + levels[:-1]) / 4
    codes = torch.bucketize((groups / scales.unsqueeze(-1)).abs(), midpoints)
    codes = codes + 8 * (groups < 0)
    table = torch.cat([levels, -levels]).to(torch.int8)
    return Table4(pack_nibbles(codes.flatten(1)), table, as_half(scales), unit=0.5)


def _affine(groups: Tensor, first: int, last: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [N, K] from `first` to `last`, scales and offsets that span a group's range evenly."""
    low, high = groups.amin(-1), groups.amax(-1)
    scales = _nonzero(as_half((high - low) / (last - first)))
    offsets = as_half(low - first * scales.float())  # the value of code 0
    codes = (groups - offsets.float().unsqueeze(-1)) / scales.float().unsqueeze(-1)
    return codes.round().clamp(first, last).flatten(1), scales, offsets


def _grouped(weight: Tensor, scheme: Scheme) -> Tensor:
    num_out, num_in = weight.shape
    return weight.view(num_out, -1, scheme.group(num_in))


def _nonzero(scales: Tensor) -> Tensor:
    """Replace zero scales by one: a group of equal weights has no range, and any scale is valid."""
    return torch.where(scales == 0, torch.ones_like(scales), scales)


_QUANTISE = {"int4": _int4, "int8": _int8, "fp8": _float8, "table4": _table4, "mxfp4": _mxfp4}
