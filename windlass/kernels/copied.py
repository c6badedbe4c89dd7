"""A packed weight for few rows, and a dequantised copy of it for many.

A GEMM of few rows reads the weight, so a packed one is faster. A GEMM of many rows computes, so unpacking the
weight in it, or before it, only costs time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy

import torch
from torch import Tensor

from windlass.kernels.gemm import Norm, TorchGemm
from windlass.kernels.gemm_io import InputQuant, Inputs, Outputs
from windlass.kernels.packed import Float8, Packed, Table4
from windlass.kernels.prepared import Prepared, RowReader
from windlass.kernels.reference_linear import Unpacked
from windlass.kernels.storages import Held

# Measured on an H200 with int4 weights of the 8B shape: with the copy, decode steps of 96 rows take 8 % less
# time, of 128 rows 2 %, of 256 rows 7 %, and of 64 rows more.
MAX_PACKED_ROWS = 64


def why_not_copied(form: Packed) -> str | None:
    """Why a copy of this form would be of no use, or None."""
    if isinstance(form, Float8):
        return "GEMMs of many rows multiply fp8 numbers"
    if not isinstance(form, Table4) and form.activation != "none":
        return "the format quantises activations too"
    return None


class CopiedGemm(RowReader):
    """Owns a prepared weight and its copy."""

    def __init__(self, packed: Prepared, unpacked: Unpacked) -> None:
        self._packed = packed
        self._unpacked = unpacked

    def using(self, gemm: TorchGemm) -> CopiedGemm:
        """Return the same weights; another engine's TorchGemm multiplies the copy."""
        twin = copy(self)
        twin._unpacked = self._unpacked.using(gemm)
        return twin

    def _of(self, num_rows: int) -> Prepared:
        return self._packed if num_rows <= MAX_PACKED_ROWS else self._unpacked

    @property
    def lacks(self) -> str | None:
        return self._packed.lacks

    def tensors(self) -> tuple[Tensor | None, ...]:
        return *self._packed.tensors(), *self._unpacked.tensors()

    def storages(self) -> Iterator[Held]:
        yield from self._packed.storages()
        yield from self._unpacked.storages()

    def read_bytes(self, num_rows: int) -> int:
        """Bytes of the weight that a GEMM of `num_rows` rows reads."""
        return self._of(num_rows).num_bytes

    def input_quant(self, num_rows: int) -> InputQuant | None:
        return self._of(num_rows).input_quant(num_rows)

    def apply(self, x: Inputs) -> Tensor:
        return self._of(x.shape[0]).apply(x)

    def raw(self, x: Inputs) -> Outputs:
        return self._of(x.shape[0]).raw(x)

    def then(self, x: Inputs, residual: Tensor, norm: Norm) -> tuple[Inputs, Tensor]:
        return self._of(x.shape[0]).then(x, residual, norm)

    def gated(self, x: Inputs, silu_mul: Callable[[Outputs], Inputs]) -> Inputs:
        return self._of(x.shape[0]).gated(x, silu_mul)

    def rows(self, ids: Tensor, dtype: torch.dtype, first: int | None = None) -> Tensor:
        assert isinstance(self._packed, RowReader)
        return self._packed.rows(ids, dtype, first)
