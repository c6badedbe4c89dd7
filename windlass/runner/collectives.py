"""Chooses how the ranks of this machine exchange tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from windlass.core.card import Choice
from windlass.kernels.native.commands import Call, Op
from windlass.kernels.native.pool import Pool
from windlass.kernels.ops import Ops
from windlass.parallel.groups import GlooGroup
from windlass.parallel.mesh import Group, Mesh
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
        self._recorded: list[Tensor] = []  # widths that recorded commands point to

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

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        if x.dtype != torch.float32 or max(widths) > self._exchange.num_floats:
            return self._sockets.all_gather(x, widths)
        counts = torch.tensor(widths, dtype=torch.int32)
        if self._pool.is_recording:
            self._recorded.append(counts)
        total, x = sum(widths), x.contiguous()
        out = x.new_empty((*x.shape[:-1], total))
        call = Call(
            Op.ALL_GATHER,
            math.prod(x.shape[:-1]),
            step_tensors=(x, out),
            model_tensors=(self._address, counts),
            sizes=(total, self.rank, self.size, self._exchange.num_floats),
        )
        self._pool.run(call)
        return out

    def all_to_all(self, x: Tensor, *, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        return self._sockets.all_to_all(x, sent=sent, received=received)


def choose_collectives(mesh: Mesh, ops: Ops, device: torch.device) -> tuple[Mesh, list[Choice]]:
    """The mesh with the fastest tensor-parallel group, and the start-up line."""
    if mesh.tp.size == 1 or not isinstance(mesh.tp, GlooGroup):
        return mesh, []
    if device.type == "cuda":
        if mesh.connect_gpus is None:
            return mesh, [Choice(_WHAT, "gloo", "as set: through host memory, without graphs")]
        nccl = mesh.connect_gpus(torch.device("cuda", torch.cuda.current_device()))
        chosen = Choice(_WHAT, "nccl", f"the {nccl.size} ranks have a GPU each")
        return replace(mesh, tp=nccl, ep=nccl if mesh.ep is mesh.tp else mesh.ep), [chosen]
    if ops.native is None:
        return mesh, [Choice(_WHAT, "gloo", "no operation is native")]
    if mesh.exchange is None:
        reason = "as set" if mesh.connect_gpus is None else "the ranks are on several machines"
        return mesh, [Choice(_WHAT, "gloo", reason)]
    group = SharedMemoryGroup(mesh.exchange, mesh.tp, ops.native.pool)
    choice = Choice(_WHAT, "shared memory", f"the {mesh.tp.size} ranks are on one machine")
    ep = group if mesh.ep is mesh.tp else mesh.ep
    return replace(mesh, tp=group, ep=ep), [choice]
