"""What passes between kernels beside plain tensors: inputs that are rounded already, and products
whose scales are still to be multiplied in.

Both save a pass over memory: a norm rounds what it has in its registers anyway, and whoever reads
a product next scales it on the way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rounding:
    """How a product wants its inputs: e4m3 with a scale for each row."""

    kind: Literal["rows"]


@dataclass(frozen=True, slots=True)
class Rounded:
    """Rows of inputs as e4m3 codes."""

    codes: Tensor  # float8_e4m3fn [M, K]
    scales: Tensor  # float32 [M, 1]
    dtype: torch.dtype  # of the arithmetic around

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape


@dataclass(frozen=True, slots=True)
class Scaled:
    """A product without its scales: each value is to be multiplied by its row's and its column's."""

    values: Tensor  # [M, N]
    rows: Tensor  # float32 [M, 1]
    columns: Tensor  # float32 [N]

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def whole(self) -> Tensor:
        return (self.values.float() * self.rows * self.columns).to(self.values.dtype)


Inputs = Tensor | Rounded
Outputs = Tensor | Scaled
