"""Chooses how the ranks of this machine exchange tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from windlass.core.card import Choice
from windlass.kernels.gemm import Norm
from windlass.kernels.gemm_io import Inputs
from windlass.kernels.native.commands import Call, Op
from windlass.kernels.native.pool import Pool
from windlass.kernels.ops import Ops
from windlass.parallel.groups import GlooGroup
from windlass.parallel.mesh import GpuGroups, Group, Mesh, SymmetricMemory
from windlass.parallel.segment import Exchange

_WHAT = "collectives"


class SharedMemoryGroup:
    """Ranks of one machine that exchange float32 tensors through shared memory, as native commands.

    `sockets`: the same ranks, for other tensors.
    """

    def __init__(self, exchange: Exchange, sockets: Group, pool: Pool) -> None:
        self.rank, self.size = sockets.rank, sockets.size
        self._exchange = exchange  # keeps the memory mapped
        self._sockets = sockets
        self._pool = pool
        self._address = np.frombuffer(exchange.map, dtype=np.uint8).ctypes.data
        self._recorded: list[Tensor] = []  # numbers that recorded commands point to

    def all_reduce(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            return self._sockets.all_reduce(x)
        x, out = x.contiguous(), torch.empty_like(x)
        width = x.shape[-1]
        call = Call(
            Op.ALL_REDUCE,
            x.numel() // width,
            step_tensors=(x, out),
            model_tensors=(self._address,),
            sizes=(width, self.rank, self.size, self._exchange.num_floats),
        )
        self._pool.run(call)
        return out

    def reduce_scatter(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        return self.all_reduce(x).split(list(counts))[self.rank]  # all of x is in memory anyway

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        most = self._exchange.num_floats
        if x.dtype == torch.float32 and x.ndim == 1 and max(widths) > most:
            return self._gather_in_parts(x, widths, most)
        if x.dtype != torch.float32 or max(widths) > most:
            return self._sockets.all_gather(x, widths)
        total, x = sum(widths), x.contiguous()
        out = x.new_empty((*x.shape[:-1], total))
        call = Call(
            Op.ALL_GATHER,
            math.prod(x.shape[:-1]),
            step_tensors=(x, out),
            model_tensors=(self._address, self._numbers(widths)),
            sizes=(total, self.rank, self.size, self._exchange.num_floats),
        )
        self._pool.run(call)
        return out

    def _gather_in_parts(self, x: Tensor, widths: Sequence[int], most: int) -> Tensor:
        """Gather tensors that exceed the shared buffer, up to `most` values of each rank at a time."""
        found: list[list[Tensor]] = [[] for _ in widths]
        for at in range(0, max(widths), most):
            counts = [min(most, max(0, width - at)) for width in widths]
            part = self.all_gather(x[at : at + most], counts)
            for pieces, piece in zip(found, part.split(counts), strict=True):
                pieces.append(piece)
        return torch.cat([piece for pieces in found for piece in pieces])

    def _numbers(self, values: Sequence[int]) -> Tensor:
        """A tensor of `values` that stays alive as long as the recorded commands that point to it."""
        found = torch.tensor(values, dtype=torch.int32)
        if self._pool.is_recording:
            self._recorded.append(found)
        return found

    def all_to_all(self, x: Tensor, *, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        return self._sockets.all_to_all(x, sent=sent, received=received)


class SymmetricMemoryGroup:
    """Ranks whose GPUs read each other's memory: one kernel for sums of few rows.

    `nccl`: the same ranks, for all other collectives and for sums of many rows. NCCL's order of
    summation depends on the number of rows, so batch-invariant steps never use it for sums.
    """

    def __init__(self, nccl: Group, memory: SymmetricMemory, device: torch.device) -> None:
        from windlass.kernels.triton.all_reduce import SharedBuffers

        self.rank, self.size = nccl.rank, nccl.size
        self._nccl = nccl
        self._memory = memory  # keeps the memory mapped
        self._buffers = SharedBuffers.of(nccl.rank, memory.addresses, device)
        self.is_batch_invariant: Callable[[], bool] = bool  # of the current step
        self._aside = torch.cuda.Stream(device)
        # The first call loads the kernel of `release`. CUDA cannot load it later, while another
        # kernel spins.
        self._release(torch.zeros_like(memory.buffer))

    def why_not_in_order(self, width: int, dtype: torch.dtype) -> str | None:
        """The reason why rows of `width` values are not summed in rank order; None if they are."""
        return self._buffers.why_not(torch.empty((1, width), dtype=dtype, device="meta"))

    def all_reduce(self, x: Tensor) -> Tensor:
        if self._buffers.why_not(x) is None:
            return self._buffers.all_reduce(x)
        if self.is_batch_invariant():
            return self._buffers.all_reduce_in_parts(x)
        return self._nccl.all_reduce(x)

    def all_reduce_norm(self, x: Tensor, residual: Tensor, norm: Norm) -> tuple[Inputs, Tensor]:
        """Add the sum of all ranks' x to the residual stream, and normalise it, in one kernel."""
        if self._buffers.why_not(x) is not None:
            return norm.add(self.all_reduce(x), residual)
        return self._buffers.all_reduce_norm(x, residual, norm)

    def release(self) -> None:
        """Make kernels that wait for other ranks return. Their outputs are undefined."""
        self._release(self._memory.buffer)

    def _release(self, buffer: Tensor) -> None:
        with torch.cuda.stream(self._aside):
            self._buffers.release(buffer)

    def reduce_scatter(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        return self._nccl.reduce_scatter(x, counts)

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        return self._nccl.all_gather(x, widths)

    def all_to_all(self, x: Tensor, *, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        return self._nccl.all_to_all(x, sent=sent, received=received)


def _on_gpus(mesh: Mesh, ops: Ops) -> tuple[Mesh, list[Choice]]:
    """The mesh with NCCL's groups, or with sums in symmetric memory where GPUs reach each other."""
    if mesh.connect_gpus is None:
        return mesh, [Choice(_WHAT, "gloo", "as set: through host memory, outside of graphs")]
    device = torch.device("cuda", torch.cuda.current_device())
    groups = mesh.connect_gpus(device)
    mesh.interrupts.extend(groups.interrupts)
    choices = []
    if mesh.pp.size > 1:
        choices.append(Choice("stage links", "nccl", "point to point, between graphs"))
    if mesh.tp.size == 1:
        return replace(mesh, pp=groups.pp), choices
    tp, choice = _all_reduce_group(groups, ops, device)
    if isinstance(tp, SymmetricMemoryGroup):
        mesh.interrupts.insert(0, tp.release)
    ep = tp if mesh.ep is mesh.tp else mesh.ep
    return replace(mesh, tp=tp, ep=ep, pp=groups.pp), [*choices, choice]


def _all_reduce_group(groups: GpuGroups, ops: Ops, device: torch.device) -> tuple[Group, Choice]:
    from windlass.kernels.triton.all_reduce import BUFFER_BYTES, MAX_RANKS, MAX_ROWS

    why_not = groups.why_not_shared
    if groups.tp.size > MAX_RANKS:
        why_not = f"more than {MAX_RANKS} ranks"
    elif not ops.is_triton:
        why_not = "the kernels are plain"
    if why_not or groups.share_memory is None:
        return groups.tp, Choice(_WHAT, "nccl", f"no symmetric memory: {why_not}")
    shared = SymmetricMemoryGroup(groups.tp, groups.share_memory(BUFFER_BYTES), device)
    value = f"symmetric memory for up to {MAX_ROWS} rows, nccl for more"
    return shared, Choice(_WHAT, value, f"the GPUs of the {groups.tp.size} ranks reach each other")


def choose_collectives(mesh: Mesh, ops: Ops, device: torch.device) -> tuple[Mesh, list[Choice]]:
    """The mesh with the fastest groups, and the start-up lines."""
    if device.type == "cuda" and isinstance(mesh.world, GlooGroup):
        return _on_gpus(mesh, ops)
    if mesh.tp.size == 1 or not isinstance(mesh.tp, GlooGroup):
        return mesh, []
    if ops.native is None:
        return mesh, [Choice(_WHAT, "gloo", "no operation is native")]
    if mesh.exchange is None:
        reason = "as set" if mesh.connect_gpus is None else "the ranks are on several machines"
        return mesh, [Choice(_WHAT, "gloo", reason)]
    group = SharedMemoryGroup(mesh.exchange, mesh.tp, ops.native.pool)
    choice = Choice(_WHAT, "shared memory", f"the {mesh.tp.size} ranks are on one machine")
    ep = group if mesh.ep is mesh.tp else mesh.ep
    return replace(mesh, tp=group, ep=ep), [choice]
