"""What adapters add to a product: y += up[slot] @ (down[slot] @ x) for rows of mixed adapters.

Where the matrices are int8 codes, down @ x is multiplied by the scales of its ranks in between.
Here are the adapters' places of one layer, and the plain version: the definition, for any device.
Which adapter lies in which slot, and how it got there, is the bank's business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from torch.nn.functional import linear

from windlass.kernels.batch import AdapterRows
from windlass.kernels.products import fixed_linear
from windlass.kernels.rounded import Inputs, Outputs

SiluMul = Callable[[Outputs], Inputs]
# Outputs of a part, and its down [rank, in], up [rank, out] and scales [rank] where it has any.
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

    @property
    def num_bytes(self) -> int:
        """Of the matrices."""
        return self.down.nbytes + self.up.nbytes

    def clear(self, slot: int) -> None:
        self.changes[slot] = []

    def place(self, slot: int, part: int, rank: int) -> tuple[Tensor, Tensor]:
        """Where a part's down [rank, in] and up [rank, out] go, after `clear`.

        Its rank and scales are sent apart.
        """
        most, first, size = self.down.shape[2], sum(self.sizes[:part]), self.sizes[part]
        own = self.up[slot, most * first : most * (first + size)].view(most, size)[:rank]
        down = self.down[slot, part, :rank]
        scales = None if self.scales is None else self.scales[slot, part, :rank]
        self.changes[slot].append((slice(first, first + size), down, own, scales))
        return down, own


class LoraKernel(Protocol):
    """What adapters make of x [tokens, in] and add to y [tokens, out], before and after y is known."""

    def begin(self, x: Tensor, stacks: Stacks, adapters: AdapterRows) -> Any: ...

    def end(self, y: Tensor, low: Any, stacks: Stacks, adapters: AdapterRows) -> Tensor:
        """y, which may be changed, with what `begin` made added."""
        ...

    def gated(
        self, y: Tensor, low: Any, stacks: Stacks, adapters: AdapterRows, silu_mul: SiluMul
    ) -> Inputs:
        """silu(first half) * second half of that."""
        ...


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


class PlainLora:
    """The plain version, adapter by adapter, behind the product: sums in float32, rounded once."""

    def begin(self, x: Tensor, stacks: Stacks, adapters: AdapterRows) -> Tensor:
        del stacks, adapters
        return x

    def end(self, y: Tensor, low: Tensor, stacks: Stacks, adapters: AdapterRows) -> Tensor:
        product = fixed_linear if adapters.fixed else linear
        for slot, tokens in adapters.groups:
            changes = stacks.changes[slot]
            if changes:
                own = low[tokens].float()
            for outputs, down, up, scales in changes:
                short = product(own, down.float())
                if scales is not None:
                    short *= scales
                y[tokens, outputs] += product(short, up.float().T)
        return y

    def gated(
        self, y: Tensor, low: Tensor, stacks: Stacks, adapters: AdapterRows, silu_mul: SiluMul
    ) -> Inputs:
        return silu_mul(self.end(y, low, stacks, adapters))
