"""What adapters add to a product: y += up[slot] @ (down[slot] @ x) for rows of mixed adapters.

Where the matrices are int8 codes, down @ x is multiplied by the scales of its ranks in between.
Here are the adapters' places of one layer, and the plain version: the definition, for any device.
Which adapter lies in which slot, and how it got there, is the bank's business.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from windlass.kernels.batch import AdapterRows
from windlass.kernels.gemm import Norm, batch_invariant_linear
from windlass.kernels.rounded import Inputs, Outputs

TOGETHER = 16  # ranks of an output that may lie side by side
SiluMul = Callable[[Outputs], Inputs]
# Outputs of a part, and down [ranks, in], up [ranks, out] and scales [ranks] of some of its ranks.
Change = tuple[slice, Tensor, Tensor, Tensor | None]


@dataclass(frozen=True, slots=True)
class Stacks:
    """The adapters' matrices of one layer, by slot. Beyond a slot's rank: finite, without meaning."""

    down: Tensor  # [slots + 1, parts, most ranks, in]
    up: Tensor  # [slots + 1, most ranks * out]: a matrix [most ranks, out] of each part in turn
    ranks: Tensor  # [slots + 1, parts] int32; 0: the slot does not change this part
    sizes: tuple[int, ...]  # outputs of each part
    changes: dict[int, list[Change]]  # by slot, where no device need be asked: views of the others
    # [slots + 1, parts, most ranks] float32 of int8 codes; rows lie as far apart as those of ranks.
    scales: Tensor | None = None
    # Whether a part's matrix in `up` is [most ranks / 16, out, 16] instead.
    by_output: bool = False

    @property
    def num_bytes(self) -> int:
        """Of the matrices."""
        return self.down.nbytes + self.up.nbytes

    def clear(self, slot: int) -> None:
        self.changes[slot] = []

    def place(self, slot: int, part: int, rank: int) -> tuple[Tensor, list[Tensor]]:
        """Where a part's down [rank, in] goes, and its up in pieces [some ranks, out], after `clear`.

        Its rank and scales are sent apart.
        """
        most, first, size = self.down.shape[2], sum(self.sizes[:part]), self.sizes[part]
        own = self.up[slot, most * first : most * (first + size)]
        step = TOGETHER if self.by_output else most
        matrices = own.view(-1, size, step).mT if self.by_output else own.view(1, most, size)
        down, scales = self.down[slot, part], None
        pieces = []
        for at, matrix in zip(range(0, rank, step), matrices, strict=False):
            these = slice(at, min(at + step, rank))
            pieces.append(matrix[: these.stop - at])
            if self.scales is not None:
                scales = self.scales[slot, part, these]
            change = (slice(first, first + size), down[these], pieces[-1], scales)
            self.changes[slot].append(change)
        return down[:rank], pieces


class LoraKernel(ABC):
    """What adapters make of x [tokens, in] and add to y [tokens, out], before and after y is known.

    What comes behind a product is a step of its own, unless a kernel does both at once.
    """

    def by_output(
        self, dtype: torch.dtype, inputs: torch.dtype, most: int, sizes: Sequence[int]
    ) -> bool:
        """How a layer's stacks are to lie, for matrices and inputs of these types: see `Stacks`."""
        del dtype, inputs, most, sizes
        return False

    @abstractmethod
    def begin(self, x: Tensor, stacks: Stacks, adapters: AdapterRows) -> Any: ...

    @abstractmethod
    def end(self, y: Tensor, low: Any, stacks: Stacks, adapters: AdapterRows) -> Tensor:
        """y, which may be changed, with what `begin` made added."""

    def gated(
        self, y: Tensor, low: Any, stacks: Stacks, adapters: AdapterRows, silu_mul: SiluMul
    ) -> Inputs:
        """silu(first half) * second half of that."""
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
        """That into the residual stream and through a norm, not rounded: as `Norm.add`."""
        return norm.add(self.end(y, low, stacks, adapters), residual, whole=True)


@dataclass(frozen=True, slots=True)
class Lora:
    """The adapters of one layer, and the kernel that was chosen for them."""

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


class PlainLora(LoraKernel):
    """The plain version, adapter by adapter, behind the product: sums in float32, rounded once."""

    def begin(self, x: Tensor, stacks: Stacks, adapters: AdapterRows) -> Tensor:
        del stacks, adapters
        return x

    def end(self, y: Tensor, low: Tensor, stacks: Stacks, adapters: AdapterRows) -> Tensor:
        gemm = batch_invariant_linear if adapters.batch_invariant else linear
        for slot, tokens in adapters.groups:
            changes = stacks.changes[slot]
            if changes:
                own = low[tokens].float()
            for outputs, down, up, scales in changes:
                short = gemm(own, down.float())
                if scales is not None:
                    short *= scales
                y[tokens, outputs] += gemm(short, up.float().T)
        return y
