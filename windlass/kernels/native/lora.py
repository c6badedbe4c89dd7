"""LoRA on the CPU by the native library. Steps with adapters can be recorded."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from windlass.kernels.batch import AdapterRows
from windlass.kernels.gemm import Norm
from windlass.kernels.gemm_io import Inputs
from windlass.kernels.lora import LoraKernel, Stacks
from windlass.kernels.native.commands import Call, Op, Step
from windlass.kernels.native.pool import Pool
from windlass.kernels.storages import Held, held


class NativeLora(LoraKernel):
    """Computes both LoRA GEMMs after the base GEMM; the order of a row's sums never changes."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._shapes: dict[int, Tensor] = {}  # by address of `down`; commands point into them

    def storages(self) -> Iterator[Held]:
        return held("adapters", *self._shapes.values())

    def begin(self, x: Tensor, stacks: Stacks, adapters: AdapterRows) -> Tensor:
        del stacks, adapters
        return x.contiguous()

    def end(self, y: Tensor, low: Tensor, stacks: Stacks, adapters: AdapterRows) -> Tensor:
        # Ranks and scales are strided views over all layers: the command gets their addresses.
        scales = None if stacks.scales is None else stacks.scales.data_ptr()
        tensors = (stacks.down, stacks.up, stacks.ranks.data_ptr(), self._shape(stacks), scales)
        call = Call(Op.LORA, len(y), step_tensors=(low, y), model_tensors=tensors)
        slots = adapters.slots.to(torch.int32).contiguous()
        self._pool.run(call, Step(num_tokens=len(y), adapters=slots.data_ptr()))
        return y

    def then(
        self,
        y: Tensor,
        low: Tensor,
        stacks: Stacks,
        adapters: AdapterRows,
        residual: Tensor,
        norm: Norm,
    ) -> tuple[Inputs, Tensor]:
        """Add the deltas to the residual, after y: the GEMM of a recorded step adds y to it."""
        return norm.add(self.end(residual.add_(y), low, stacks, adapters), None, unquantised=True)

    def _shape(self, stacks: Stacks) -> Tensor:
        """Return inputs, parts, maximum rank, stride of the slots' ranks, outputs of each part."""
        key = stacks.down.data_ptr()
        if key not in self._shapes:
            _, parts, max_rank, num_in = stacks.down.shape
            shape = (num_in, parts, max_rank, stacks.ranks.stride(0), *stacks.sizes)
            self._shapes[key] = torch.tensor(shape, dtype=torch.int32)
        return self._shapes[key]
