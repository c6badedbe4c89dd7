"""GEMMs of int4 weights for 17 to 2,048 rows on Hopper: the fastest of two kernels, or both for parts of the rows.

Both compute tiles in waves over the multiprocessors, and a last wave that is nearly empty takes as long as a
full one. int4_many.py is faster for whole tiles of 256 rows; int4_wide.py wastes less on the rows behind them.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from windlass.kernels.gpu import gpu_of
from windlass.kernels.triton.int4_many import MAX_ROWS, TILE_ROWS, Int4ManyGemm
from windlass.kernels.triton.int4_wide import MAX_ROWS as MAX_WIDE_ROWS
from windlass.kernels.triton.int4_wide import STEP, Int4Weight, Int4WideGemm
from windlass.kernels.triton.reduce import SplitWorkspace

_FEW_ROWS = 64  # the fused kernel of grouped.py is faster than int4_many.py

Plan = tuple[tuple[Int4WideGemm | Int4ManyGemm, int], ...]


class Int4HopperGemm:
    """Computes with the codes of one weight."""

    def __init__(self, weight: Int4Weight, space: SplitWorkspace) -> None:
        self._num_out = weight.num_out
        wide, many = Int4WideGemm.refuse(weight.half), Int4ManyGemm.refuse(weight.num_out)
        self._wide = None if wide is not None else Int4WideGemm(weight, space)
        self._many = None if many is not None else Int4ManyGemm(weight, space)
        self.plan = functools.cache(self._plan)

    @staticmethod
    def refuse(device: torch.device, num_in: int, num_out: int, half: int) -> str | None:
        """Why it refuses weights of such sizes, packed in blocks of `half` bytes, or None."""
        if device.type != "cuda":
            return f"Gluon kernels need CUDA, this is {device.type}"
        if num_in % 8:
            return f"TMA needs strides of 16 bytes, and rows have {num_in} inputs"
        if half % STEP:
            return f"the kernel needs groups of at least {STEP} inputs, these have {half}"
        if (wide := Int4WideGemm.refuse(half)) and (many := Int4ManyGemm.refuse(num_out)):
            return f"{wide}; {many}"
        return gpu_of(device).lacks_warpgroups()

    def _plan(self, num_rows: int) -> Plan:
        """The kernels, each with its number of rows; none if others than these are faster."""
        plans: list[Plan] = []
        if self._wide is not None and num_rows <= MAX_WIDE_ROWS:
            plans.append(((self._wide, num_rows),))
        if self._many is not None and _FEW_ROWS < num_rows <= MAX_ROWS:
            plans.append(((self._many, num_rows),))
            rest = (num_rows - 1) % TILE_ROWS + 1
            if self._wide is not None and rest < num_rows:
                plans.append(((self._many, num_rows - rest), (self._wide, rest)))
        return min(plans, key=_microseconds, default=())

    def apply(self, x: Tensor) -> Tensor:
        """x @ weight.T; x is a contiguous [rows, K] of 16-bit floats, with a plan for its rows."""
        out = x.new_empty((x.shape[0], self._num_out))
        row = 0
        for kernel, num_rows in self.plan(x.shape[0]):
            kernel.apply(x[row : row + num_rows], out[row : row + num_rows])
            row += num_rows
        return out


def _microseconds(plan: Plan) -> float:
    return sum(kernel.microseconds(num_rows) for kernel, num_rows in plan)
