"""What adapters add to a product on the CPU, by the native library; steps with them are recorded."""

from __future__ import annotations

import torch
from torch import Tensor

from windlass.kernels.batch import AdapterRows
from windlass.kernels.lora import LoraKernel, Stacks
from windlass.kernels.native.commands import Call, Op, Step
from windlass.kernels.native.pool import shared_pool


class NativeLora(LoraKernel):
    """As `kernels.lora.LoraKernel` says, behind the product; a row's sums are always in one order."""

    def __init__(self) -> None:
        self._shapes: dict[int, Tensor] = {}  # by layer; commands point into them

    def begin(self, x: Tensor, stacks: Stacks, adapters: AdapterRows) -> Tensor:
        del stacks, adapters
        return x.contiguous()

    def end(self, y: Tensor, low: Tensor, stacks: Stacks, adapters: AdapterRows) -> Tensor:
        # Ranks and scales of other layers lie between those of this one: only their place is given.
        scales = None if stacks.scales is None else stacks.scales.data_ptr()
        fixed = (stacks.down, stacks.up, stacks.ranks.data_ptr(), self._shape(stacks), scales)
        call = Call(Op.LORA, len(y), (low, y), fixed)
        slots = adapters.slots.to(torch.int32).contiguous()
        shared_pool().run(call, Step(num_tokens=len(y), adapters=slots.data_ptr()))
        return y

    def _shape(self, stacks: Stacks) -> Tensor:
        """Inputs, parts, most ranks, how far the ranks of slots lie apart, outputs of the parts."""
        at = stacks.down.data_ptr()
        if at not in self._shapes:
            _, parts, most, num_in = stacks.down.shape
            numbers = (num_in, parts, most, stacks.ranks.stride(0), *stacks.sizes)
            self._shapes[at] = torch.tensor(numbers, dtype=torch.int32)
        return self._shapes[at]
