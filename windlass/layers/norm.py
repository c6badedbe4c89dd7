"""RMSNorm, alone or fused with the residual addition."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from windlass.kernels.gemm_io import InputQuant, Inputs, Outputs
from windlass.kernels.ops import Ops
from windlass.layers.stored import ShardedRows
from windlass.quant.shard import Shard


def _unquantised(num_rows: int) -> InputQuant | None:
    del num_rows
    return None


class RMSNorm(nn.Module):
    """Scales the last dimension to unit root mean square.

    `input_quant` returns how the next layer wants its inputs quantised, for a number of rows.
    """

    def __init__(self, size: int, eps: float, dtype: torch.dtype, ops: Ops) -> None:
        super().__init__()
        self.eps = eps
        self.ops = ops
        self.input_quant: Callable[[int], InputQuant | None] = _unquantised
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)

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


class HeadNorm(ShardedRows):
    """The weight of a q or k norm, which the attention layer applies.

    `rows` is the shard of the weight's first dimension; `shape` has the other dimensions.
    """

    def __init__(self, rows: Shard, dtype: torch.dtype, shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.rows = rows
        weight = torch.empty((rows.count, *shape), dtype=dtype)
        self.weight = nn.Parameter(weight, requires_grad=False)
