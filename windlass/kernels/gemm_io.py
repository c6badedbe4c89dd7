"""Inputs and outputs of GEMMs that are not plain tensors.

Inputs may already be quantised or not normalised yet, and outputs may lack their scales. All save a pass
over memory: a norm quantises its result in registers, and the next kernel applies the scales as it reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class InputQuant:
    """How a GEMM wants its inputs: e4m3 codes with one scale per row, or two int8 planes."""

    kind: Literal["rows", "planes"]
    block: int = 1  # inputs per scale of a plane
    group: int = 1  # inputs per sum of a plane; divides the block


@dataclass(frozen=True, slots=True)
class QuantisedInputs:
    """GEMM inputs as e4m3 codes."""

    codes: Tensor  # float8_e4m3fn [M, K]
    scales: Tensor  # float32 [M, 1]
    dtype: torch.dtype  # of the unquantised activations

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape


@dataclass(frozen=True, slots=True)
class PlaneInputs:
    """GEMM inputs as two int8 planes; the second holds the quantisation error of the first."""

    codes: Tensor  # int8 [2 M, K padded with zeros to whole blocks]
    scales: Tensor  # float32 [blocks, 2 M]
    sums: Tensor  # float32 [groups, 2 M]: sums of the dequantised values
    num_in: int  # K
    dtype: torch.dtype  # of the unquantised activations

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.codes.shape[0] // 2, self.num_in))


@dataclass(frozen=True, slots=True)
class UnnormalisedInputs:
    """GEMM inputs of one row before their RMS norm, which the reader computes."""

    residual: Tensor  # [1, K]: the residual stream, which the next addition to it changes
    squares: Tensor  # float32 [tiles]: sums of squares of the residual stream
    weight: Tensor  # of the norm
    eps: float

    @property
    def shape(self) -> torch.Size:
        return self.residual.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.residual.dtype

    def normalised(self) -> Tensor:
        factor = torch.rsqrt(self.squares.sum() / self.residual.shape[1] + self.eps)
        return (self.residual.float() * factor).to(self.weight.dtype) * self.weight


@dataclass(frozen=True, slots=True)
class UnscaledOutputs:
    """GEMM outputs without their scales: multiply each value by its row's and its column's scale."""

    values: Tensor  # [M, N]
    rows: Tensor  # float32 [M, 1]
    columns: Tensor  # float32 [N]

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def scaled(self) -> Tensor:
        return (self.values.float() * self.rows * self.columns).to(self.values.dtype)


Inputs = Tensor | QuantisedInputs | PlaneInputs | UnnormalisedInputs
Outputs = Tensor | UnscaledOutputs
