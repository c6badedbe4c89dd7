"""Adds LoRA deltas to a GEMM's outputs: y += up[slot] @ (down[slot] @ x), rows of mixed adapters.

With int8 codes, down @ x is multiplied by the scales of its ranks before up. This file has the
adapter matrices of one layer, the kernel interface, and the reference implementation for any device.
The bank (lora/bank.py) fills the slots.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from windlass.kernels.batch import AdapterRows
from windlass.kernels.gemm import Norm, batch_invariant_linear
from windlass.kernels.gemm_io import Inputs, Outputs
from windlass.kernels.storages import Held

RANK_TILE = 16  # ranks of an output that are adjacent in the `by_output` layout
SiluMul = Callable[[Outputs], Inputs]


class LoraDelta(NamedTuple):
    """Views of some ranks of a part's matrices in one slot."""

    outputs: slice  # of the layer
    down: Tensor  # [ranks, in]
    up: Tensor  # [ranks, out]
    scales: Tensor | None  # [ranks]


@dataclass(frozen=True, slots=True)
class Stacks:
    """LoRA matrices of one layer, by slot. Values above a slot's rank are finite and unused."""

    down: Tensor  # [slots + 1, parts, max_rank, in]
    up: Tensor  # [slots + 1, max_rank * out]: a [max_rank, out] matrix per part, one after another
    ranks: Tensor  # [slots + 1, parts] int32; 0: the slot does not change this part
    sizes: tuple[int, ...]  # outputs of each part
    deltas: dict[int, list[LoraDelta]]  # by slot, on the host: views into the tensors above
    # [slots + 1, parts, max_rank] float32, of int8 codes; row stride as that of `ranks`.
    scales: Tensor | None = None
    # Whether a part's matrix in `up` is laid out as [max_rank / 16, out, 16] instead.
    by_output: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of the matrices."""
        return self.down.nbytes + self.up.nbytes

    def clear(self, slot: int) -> None:
        self.deltas[slot] = []

    def destinations(self, slot: int, part: int, rank: int) -> tuple[Tensor, list[Tensor]]:
        """Destinations of a part's matrices: down [rank, in], and up in chunks [some ranks, out].

        Call `clear` first. The caller writes ranks and scales itself.
        """
        max_rank, first, size = self.down.shape[2], sum(self.sizes[:part]), self.sizes[part]
        flat = self.up[slot, max_rank * first : max_rank * (first + size)]
        step = RANK_TILE if self.by_output else max_rank
        matrices = flat.view(-1, size, step).mT if self.by_output else flat.view(1, max_rank, size)
        down, scales = self.down[slot, part], None
        chunks = []
        for start, matrix in zip(range(0, rank, step), matrices, strict=False):
            ranks = slice(start, min(start + step, rank))
            chunks.append(matrix[: ranks.stop - start])
            if self.scales is not None:
                scales = self.scales[slot, part, ranks]
            delta = LoraDelta(
                outputs=slice(first, first + size), down=down[ranks], up=chunks[-1], scales=scales
            )
            self.deltas[slot].append(delta)
        return down[:rank], chunks


class LoraKernel(ABC):
    """Computes LoRA deltas for x [tokens, in] and adds them to y [tokens, out].

    `begin` runs before the base GEMM and `end` after it. `gated` and `then` also apply the
    operation after the GEMM; a kernel may override them with a fused version.
    """

    def by_output(
        self, dtype: torch.dtype, inputs: torch.dtype, max_rank: int, sizes: Sequence[int]
    ) -> bool:
        """Whether a layer's stacks should use the `by_output` layout (see `Stacks`)."""
        del dtype, inputs, max_rank, sizes
        return False

    def storages(self) -> Iterator[Held]:
        """Tensors of its own, beside the stacks."""
        return iter(())

    @abstractmethod
    def begin(self, x: Tensor, stacks: Stacks, adapters: AdapterRows) -> Any: ...

    @abstractmethod
    def end(self, y: Tensor, low: Any, stacks: Stacks, adapters: AdapterRows) -> Tensor:
        """Add the deltas to y, perhaps in place. `low` is the result of `begin`."""

    def gated(
        self, y: Tensor, low: Any, stacks: Stacks, adapters: AdapterRows, silu_mul: SiluMul
    ) -> Inputs:
        """`end`, then silu(first half) * second half."""
        return silu_mul(self.end(y, low, stacks, adapters))

    def then(
        self,
        y: Tensor,
        low: Any,
        stacks: Stacks,
        adapters: AdapterRows,
        residual: Tensor,
        norm: Norm,
    ) -> tuple[Inputs, Tensor]:
        """`end`, then the residual addition and norm of `Norm.add`, without quantised outputs."""
        return norm.add(self.end(y, low, stacks, adapters), residual, unquantised=True)


@dataclass(frozen=True, slots=True)
class Lora:
    """The adapter matrices of one layer and the kernel chosen for them."""

    stacks: Stacks
    kernel: LoraKernel

    def begin(self, x: Tensor, adapters: AdapterRows) -> Any:
        return self.kernel.begin(x, self.stacks, adapters)

    def end(self, y: Tensor, low: Any, adapters: AdapterRows) -> Tensor:
        return self.kernel.end(y, low, self.stacks, adapters)

    def gated(self, y: Tensor, low: Any, adapters: AdapterRows, silu_mul: SiluMul) -> Inputs:
        return self.kernel.gated(y, low, self.stacks, adapters, silu_mul)

    def then(
        self, y: Tensor, low: Any, adapters: AdapterRows, residual: Tensor, norm: Norm
    ) -> tuple[Inputs, Tensor]:
        return self.kernel.then(y, low, self.stacks, adapters, residual, norm)


class ReferenceLora(LoraKernel):
    """The reference implementation: one adapter at a time, after the GEMM, float32 accumulation."""

    def begin(self, x: Tensor, stacks: Stacks, adapters: AdapterRows) -> Tensor:
        del stacks, adapters
        return x

    def end(self, y: Tensor, low: Tensor, stacks: Stacks, adapters: AdapterRows) -> Tensor:
        gemm = batch_invariant_linear if adapters.batch_invariant else linear
        for slot, tokens in adapters.groups:
            deltas = stacks.deltas[slot]
            if deltas:
                x = low[tokens].float()
            for outputs, down, up, scales in deltas:
                shrunk = gemm(x, down.float())
                if scales is not None:
                    shrunk *= scales
                y[tokens, outputs] += gemm(shrunk, up.float().T)
        return y
