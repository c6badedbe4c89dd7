"""What adapters add to a product: y += up[slot] @ (down[slot] @ x) for rows of mixed adapters.

Here are the adapters' places of one layer, and the plain version: the definition, for any device.
Which adapter lies in which slot, and how it got there, is the bank's business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from windlass.kernels.batch import AdapterRows
from windlass.kernels.products import fixed_linear


@dataclass(frozen=True, slots=True)
class Stacks:
    """The adapters' matrices of one layer, by slot. Beyond a slot's rank is nothing of meaning."""

    down: Tensor  # [slots + 1, parts, most ranks, in]
    up: Tensor  # [slots + 1, most ranks, out]: outputs of all parts follow each other
    ranks: Tensor  # [slots + 1, parts] int32; 0: the slot does not change this part
    host_ranks: np.ndarray  # the same, where no device need be asked
    sizes: tuple[int, ...]  # outputs of each part

    @property
    def num_bytes(self) -> int:
        """Of the matrices."""
        return self.down.nbytes + self.up.nbytes

    def spans(self) -> list[slice]:
        """Where the outputs of each part lie."""
        ends = np.cumsum(self.sizes).tolist()
        return [slice(end - size, end) for end, size in zip(ends, self.sizes, strict=True)]


# Adds to y [tokens, out], which it may change, what the adapters make of x [tokens, in].
AddLora = Callable[[Tensor, Tensor, Stacks, AdapterRows], Tensor]


@dataclass(frozen=True, slots=True)
class Lora:
    """The adapters of one layer, and the kernel that was chosen for them."""

    stacks: Stacks
    kernel: AddLora

    def add(self, y: Tensor, x: Tensor, adapters: AdapterRows) -> Tensor:
        return self.kernel(y, x, self.stacks, adapters)


def add_lora(y: Tensor, x: Tensor, stacks: Stacks, adapters: AdapterRows) -> Tensor:
    """The plain version: sums in float32, in an order that no other row changes."""
    spans = stacks.spans()
    for slot, tokens in adapters.groups:
        own = x[tokens].float()
        for part, rank in enumerate(stacks.host_ranks[slot].tolist()):
            if rank == 0:
                continue
            outputs = spans[part]
            low = fixed_linear(own, stacks.down[slot, part, :rank].float())
            change = fixed_linear(low, stacks.up[slot, :rank, outputs].float().T)
            y[tokens, outputs] = (y[tokens, outputs].float() + change).to(y.dtype)
    return y
