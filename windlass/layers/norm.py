"""Norms of the residual stream, alone or fused with the residual addition.

A sublayer's output goes through `add` of the norm that follows: it is added to the residual stream,
and the sum is normalised for the next sublayer. Norms of outputs and scales of the residual stream
wrap that norm, so sublayers need not know of them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from windlass.kernels.gemm import Norm
from windlass.kernels.gemm_io import InputQuant, Inputs, Outputs, UnscaledOutputs
from windlass.kernels.ops import Ops
from windlass.layers.stored import ShardedRows
from windlass.quant.shard import Shard


def _unquantised(num_rows: int) -> InputQuant | None:
    del num_rows
    return None


def _never(num_rows: int) -> bool:
    del num_rows
    return False


class RMSNorm(nn.Module):
    """Scales the last dimension to unit root mean square.

    `input_quant` returns how the next layer wants its inputs quantised, for a number of rows, and `defers`
    whether it normalises them itself.
    """

    fusable = True

    def __init__(self, size: int, eps: float, dtype: torch.dtype, ops: Ops) -> None:
        super().__init__()
        self.eps = eps
        self.ops = ops
        self.input_quant: Callable[[int], InputQuant | None] = _unquantised
        self.defers: Callable[[int], bool] = _never
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add(
        self, x: Outputs, residual: Tensor | None, unquantised: bool = False
    ) -> tuple[Inputs, Tensor]:
        """Add x to the residual stream, perhaps in place: (normalised sum, new residual).

        With `unquantised` the normalised sum is never quantised.
        """
        input_quant = None if unquantised else self.input_quant(x.shape[0])
        options = () if input_quant is None else (input_quant,)
        if residual is None:
            assert isinstance(x, Tensor)
            return self.ops.rms_norm(x, self.weight, self.eps, *options), x
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps, *options)


class LayerNorm(nn.Module):
    """Scales the last dimension to zero mean and unit variance."""

    fusable = False
    defers = staticmethod(_never)

    def __init__(self, size: int, eps: float, dtype: torch.dtype, ops: Ops, bias: bool) -> None:
        super().__init__()
        self.eps = eps
        self.ops = ops
        self.input_quant: Callable[[int], InputQuant | None] = _unquantised
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps)

    def add(
        self, x: Outputs, residual: Tensor | None, unquantised: bool = False
    ) -> tuple[Inputs, Tensor]:
        """See RMSNorm.add. The result is never quantised."""
        del unquantised
        y = x.scaled() if isinstance(x, UnscaledOutputs) else x
        if residual is None:
            return self(y), y
        return self.ops.add_layer_norm(y, residual, self.weight, self.bias, self.eps)


class NoNorm(nn.Module):
    """Leaves the residual stream as it is: the next sublayer reads it without a norm."""

    fusable = False
    defers = staticmethod(_never)
    eps = 0.0
    input_quant = staticmethod(_unquantised)

    @property
    def weight(self) -> Tensor:
        raise AttributeError("there is no norm, so there is no weight")

    def add(
        self, x: Outputs, residual: Tensor | None, unquantised: bool = False
    ) -> tuple[Inputs, Tensor]:
        del unquantised
        total = _total(x, residual)
        return total, total


class OutputNorm:
    """Scales or normalises a sublayer's output before `following` adds it to the residual stream."""

    fusable = False
    defers = staticmethod(_never)

    def __init__(self, norm: nn.Module | None, scale: float, following: Norm) -> None:
        self._norm = norm
        self._scale = scale
        self._following = following
        self.eps = following.eps

    @property
    def weight(self) -> Tensor:
        return self._following.weight

    def input_quant(self, num_rows: int) -> InputQuant | None:
        return self._following.input_quant(num_rows)

    def add(
        self, x: Outputs, residual: Tensor | None, unquantised: bool = False
    ) -> tuple[Inputs, Tensor]:
        y = x.scaled() if isinstance(x, UnscaledOutputs) else x
        if self._norm is not None:
            y = self._norm(y)
        if self._scale != 1.0:
            y = y * self._scale
        return self._following.add(y, residual, unquantised)


class ScaledStream:
    """Multiplies the residual stream by a number before `following` normalises it."""

    fusable = False
    defers = staticmethod(_never)

    def __init__(self, scale: Tensor, following: Norm) -> None:
        self._scale = scale
        self._following = following
        self.eps = following.eps

    @property
    def weight(self) -> Tensor:
        return self._following.weight

    def input_quant(self, num_rows: int) -> InputQuant | None:
        return self._following.input_quant(num_rows)

    def add(
        self, x: Outputs, residual: Tensor | None, unquantised: bool = False
    ) -> tuple[Inputs, Tensor]:
        return self._following.add(_total(x, residual) * self._scale, None, unquantised)


def after(norm: nn.Module | None, scale: float, following: Norm) -> Norm:
    """`following`, with the output norm and the residual scale before it, if there are any."""
    if norm is None and scale == 1.0:
        return following
    return OutputNorm(norm, scale, following)


def _total(x: Outputs, residual: Tensor | None) -> Tensor:
    y = x.scaled() if isinstance(x, UnscaledOutputs) else x
    return y if residual is None else residual + y


class HeadNorm(ShardedRows):
    """The weight of a q or k norm, which the attention layer applies.

    `rows` is the shard of the weight's first dimension; `shape` has the other dimensions.
    """

    def __init__(self, rows: Shard, dtype: torch.dtype, shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.rows = rows
        weight = torch.empty((rows.count, *shape), dtype=dtype)
        self.weight = nn.Parameter(weight, requires_grad=False)


class UnitNorm(nn.Module):
    """The weight of a norm that has none in checkpoints: ones."""

    weight: Tensor

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        ones = torch.ones(size, dtype=dtype, device=device)
        self.register_buffer("weight", ones, persistent=False)
