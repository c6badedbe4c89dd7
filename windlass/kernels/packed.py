"""In-memory forms of quantised weights. Many file formats map to each form.

A form is a set of tensors and their meaning: `dequantise` is the definition that every kernel is
tested against. Kernels may repack a form at load. This file knows no kernel and no file format.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

# How activations are quantised before the GEMM: not at all, with one scale per token, with one
# static scale from the checkpoint, or with one scale per token and block of 128 inputs.
Activation = Literal["none", "token", "tensor", "block"]


def pack_nibbles(codes: Tensor) -> Tensor:
    """Pack 4-bit codes [rows, K] to uint8 [rows, K / 2]: input 2 j is the low half of byte j."""
    low, high = codes[:, 0::2].to(torch.uint8), codes[:, 1::2].to(torch.uint8)
    return low | (high << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Unpack uint8 [rows, K / 2] to uint8 [rows, K]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)


def _expand(per_group: Tensor, num_in: int) -> Tensor:
    """Repeat the value of each group for its inputs."""
    return per_group.float().repeat_interleave(num_in // per_group.shape[1], dim=1)


@dataclass(frozen=True, slots=True)
class Int4Group:
    """weight[n, k] = code[n, k] * scales[n, k // group] + offsets[n, k // group], codes 0 to 15."""

    codes: Tensor  # uint8 [N, K / 2], as pack_nibbles makes them
    scales: Tensor  # float [N, K / group]
    offsets: Tensor  # float [N, K / group]
    perm: Tensor | None = None  # [K]: column k of the weight belongs to input perm[k]
    activation: Activation = "none"  # "token": e4m3, or a finer type if that is free

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], 2 * self.codes.shape[1]

    @property
    def group(self) -> int:
        return self.shape[1] // self.scales.shape[1]

    def dequantise(self) -> Tensor:
        num_in = self.shape[1]
        codes = unpack_nibbles(self.codes).float()
        weight = codes * _expand(self.scales, num_in) + _expand(self.offsets, num_in)
        return _unpermute(weight, self.perm)


@dataclass(frozen=True, slots=True)
class Int8Group:
    """weight[n, k] = code[n, k] * scales[n, k // group] (+ offsets), codes of `bits` bits.

    8 bits: codes -128 to 127; 6 bits: codes -32 to 31, which a kernel may store in 6 bits. With
    quantised activations the GEMM is an integer GEMM, and each row is one group.
    """

    codes: Tensor  # int8 [N, K]
    scales: Tensor  # float [N, K / group]
    offsets: Tensor | None = None
    perm: Tensor | None = None
    activation: Activation = "none"
    input_scale: Tensor | None = None  # [1], for activation "tensor"
    bits: Literal[6, 8] = 8

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def group(self) -> int:
        return self.shape[1] // self.scales.shape[1]

    def dequantise(self) -> Tensor:
        num_in = self.shape[1]
        weight = self.codes.float() * _expand(self.scales, num_in)
        if self.offsets is not None:
            weight += _expand(self.offsets, num_in)
        return _unpermute(weight, self.perm)


@dataclass(frozen=True, slots=True)
class Float8:
    """weight = code * scale, e4m3 codes; scales are [1, 1], [N, 1] or one per block, rounded up."""

    codes: Tensor  # float8_e4m3fn [N, K]
    scales: Tensor  # float32
    activation: Activation = "none"
    input_scale: Tensor | None = None  # [1], for activation "tensor"
    block: tuple[int, int] | None = None  # outputs and inputs per scale, if scales are per block

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def dequantise(self) -> Tensor:
        scales = self.scales.float()
        if self.block is not None:
            num_out, num_in = self.shape
            scales = scales.repeat_interleave(self.block[0], 0)[:num_out]
            scales = scales.repeat_interleave(self.block[1], 1)[:, :num_in]
        return self.codes.float() * scales


@dataclass(frozen=True, slots=True)
class Table4:
    """weight[n, k] = table[code[n, k]] * unit * scales[n, k // group]: a 4-bit codebook.

    NF4, and GGUF's IQ types and MXFP4. With `sub_scales` a group's scale is a float per super-group of
    inputs times a small integer per group. That takes one byte per group and is exact.
    """

    codes: Tensor  # uint8 [N, K / 2], as pack_nibbles makes them
    table: Tensor  # [16], float32 or int8
    scales: Tensor  # float [N, K / super-group]
    sub_scales: Tensor | None = None  # int8 [N, K / group]; None: a super-group is one group
    unit: float = 1.0  # a power of two

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], 2 * self.codes.shape[1]

    @property
    def group(self) -> int:
        per_row = self.scales if self.sub_scales is None else self.sub_scales
        return self.shape[1] // per_row.shape[1]

    @property
    def values(self) -> Tensor:
        """The weight values of the 16 codes, float32 [16]."""
        return self.table.float() * self.unit

    @property
    def super_group(self) -> int:
        return self.shape[1] // self.scales.shape[1]

    def dequantise(self) -> Tensor:
        num_in = self.shape[1]
        scales = _expand(self.scales, num_in)
        if self.sub_scales is not None:
            scales *= _expand(self.sub_scales, num_in)
        return self.values[unpack_nibbles(self.codes).long()] * scales


Packed = Int4Group | Int8Group | Float8 | Table4


def _unpermute(weight: Tensor, perm: Tensor | None) -> Tensor:
    """Undo the permutation of the columns."""
    if perm is None:
        return weight
    restored = torch.empty_like(weight)
    restored[:, perm.long()] = weight
    return restored
