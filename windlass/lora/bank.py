"""The device's adapter slots: LoRA matrices of all slots for every linear layer of a network.

The scheduler decides which adapter is in which slot and when a slot is reused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from windlass.errors import CheckpointError
from windlass.kernels.lora import Lora, LoraDelta, LoraKernel, ReferenceLora, Stacks
from windlass.kernels.ops import Ops
from windlass.kernels.storages import Held, held
from windlass.layers.linear import Linear
from windlass.lora.base import Adapter, LoraWeights
from windlass.lora.packing import as_stored, compiled_code, target_of, write
from windlass.lora.pinned import allocate, pin
from windlass.lora.stored import StoredAdapter, StoredWeights, not_finite
from windlass.lora_config import LoraDType
from windlass.models.hparams import HParams
from windlass.models.network import Network, Parts
from windlass.quant.shard import Shard


@dataclass(frozen=True, slots=True)
class _ModuleLocation:
    """The location of a checkpoint module: a part of a layer's stacks."""

    stacks: Stacks
    part: int
    column: int  # index among all modules
    outputs: Shard
    inputs: Shard

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs of this rank."""
        return self.stacks.sizes[self.part], self.stacks.down.shape[3]

    @property
    def whole(self) -> tuple[int, int]:
        """Outputs and inputs of the module."""
        return self.outputs.whole, self.inputs.whole

    def cut(self, weights: StoredWeights) -> StoredWeights:
        """This rank's part of an adapter's matrices."""
        rows, columns = self.outputs, self.inputs
        down = weights.down[:, columns.start : columns.stop]
        return StoredWeights(
            np.ascontiguousarray(down), weights.up[rows.start : rows.stop], weights.scaling
        )


class _SlotLayout:
    """Copy targets of a packed adapter in one slot: down and up of each module, in order."""

    def __init__(self, modules: tuple[tuple[str, int], ...]) -> None:
        self.modules = modules  # names and ranks
        self.sizes: list[int] = []  # elements of each matrix
        self.targets: list[Tensor] = []
        self.deltas: list[list[LoraDelta]] = []  # by layer
        self.ranks = torch.empty(0)
        # Matrices that are copied in column chunks: index -> shape and widths of the chunks.
        self._chunked: dict[int, tuple[tuple[int, int], list[int]]] = {}

    def add(self, targets: list[Tensor], shape: tuple[int, int]) -> None:
        """Add the next matrix. Several targets, or a strided one, take columns of the matrix."""
        if len(targets) == 1 and targets[0].is_contiguous():
            targets = [targets[0].view(-1)]
        else:
            self._chunked[len(self.sizes)] = (shape, [target.shape[1] for target in targets])
        self.sizes.append(shape[0] * shape[1])
        self.targets += targets

    def sources(self, matrices: tuple[Tensor, ...]) -> tuple[Tensor, ...] | list[Tensor]:
        """Split the packed matrices to match `targets`."""
        if not self._chunked:
            return matrices
        found: list[Tensor] = []
        for i, matrix in enumerate(matrices):
            if i in self._chunked:
                shape, widths = self._chunked[i]
                found += matrix.view(shape).split(widths, dim=1)
            else:
                found.append(matrix)
        return found


class Bank:
    """Owns the adapters' matrices on the device. Slots are 1 to `num_slots`; slot 0 has no adapter.

    The constructor attaches the slots to the network's linear layers.
    """

    def __init__(
        self,
        network: Network,
        hparams: HParams,
        parts: Parts,
        *,
        num_slots: int,
        max_rank: int,
        dtype: LoraDType = "auto",
    ) -> None:
        """`parts`: of the network."""
        compiled_code()  # compile now, not when the first adapter is read
        self.num_slots = num_slots
        self.max_rank = max_rank
        self._architecture = hparams.architecture
        self._is_elsewhere = network.is_elsewhere  # modules of other pipeline stages
        self._layers: list[Stacks] = []
        self._layouts: dict[int, _SlotLayout] = {}  # by slot, of its latest adapter
        self._locations: dict[str, _ModuleLocation] = {}
        self._device = parts.device
        self._dtype = slot_dtype(parts, dtype)
        self._copy_stream = torch.cuda.Stream() if self._device.type == "cuda" else None
        self._kernel = kernel = _kernel(parts.ops)
        linears = [(path, m) for path, m in network.named_modules() if isinstance(m, Linear)]
        # Ranks of all layers share one tensor, so that `put` sends them in one copy; so do scales.
        shape = (num_slots + 1, sum(len(layer.parts) for _, layer in linears))
        self._ranks = torch.zeros(shape, dtype=torch.int32, device=self._device)
        self._scales: Tensor | None = None
        if dtype == "int8":
            self._scales = self._ranks.new_zeros((*shape, max_rank), dtype=torch.float32)
        first = 0
        for path, layer in linears:
            columns = slice(first, first + len(layer.parts))
            scales = None if self._scales is None else self._scales[:, columns]
            sizes = tuple(layer.parts.values())
            by_output = kernel.by_output(self._dtype, parts.dtype, max_rank=max_rank, sizes=sizes)
            stacks = self._stacks(
                layer, self._ranks[:, columns], scales=scales, by_output=by_output
            )
            layer.lora = Lora(stacks, kernel)
            self._layers.append(stacks)
            names = zip(_module_names(path, layer), layer.outputs.values(), strict=True)
            for part, (name, outputs) in enumerate(names):
                self._locations[name] = _ModuleLocation(
                    stacks=stacks,
                    part=part,
                    column=first + part,
                    outputs=outputs,
                    inputs=layer.inputs,
                )
            first = columns.stop

    @property
    def num_bytes(self) -> int:
        scales = 0 if self._scales is None else self._scales.nbytes
        return self._ranks.nbytes + scales + sum(stacks.num_bytes for stacks in self._layers)

    def storages(self) -> Iterator[Held]:
        yield from held("adapters", self._ranks, self._scales)
        for stacks in self._layers:
            yield from held("adapters", stacks.down, stacks.up)
        for layout in self._layouts.values():
            yield from held("adapters", layout.ranks)
        yield from self._kernel.storages()

    @contextmanager
    def all_slots_full(self) -> Iterator[None]:
        """Set every slot to the maximum rank, to time steps before any adapter is loaded."""
        self._ranks.fill_(self.max_rank)
        try:
            yield
        finally:
            self._ranks.zero_()

    def check(self, adapter: Adapter | StoredAdapter) -> None:
        """Raise CheckpointError, with the module and both shapes, if an adapter does not fit."""
        for name, weights in adapter.modules.items():
            location = self._locations.get(name)
            if location is None and self._is_elsewhere(f"{name}."):
                continue
            if location is None:
                raise CheckpointError(
                    f"adapter {adapter.name!r} changes {name}, which this network "
                    f"({self._architecture}) does not have. It was made for another base model."
                )
            rank = weights.down.shape[0]
            found = (weights.up.shape[0], weights.down.shape[1])
            if found != location.whole or weights.up.shape[1] != rank:
                raise CheckpointError(
                    f"adapter {adapter.name!r}, {name}: lora_A {_format_shape(weights.down.shape)} "
                    f"and lora_B {_format_shape(weights.up.shape)} change a weight of "
                    f"{_format_shape(found)}, but the network's is {_format_shape(location.whole)}. "
                    "It was made for another base model."
                )
            if rank > self.max_rank:
                raise CheckpointError(
                    f"adapter {adapter.name!r}, {name}: rank {rank} is above --max-lora-rank "
                    f"{self.max_rank}. Raise it to load this adapter."
                )

    def pack(self, adapter: Adapter | StoredAdapter) -> Adapter:
        """Check an adapter, convert it to the slots' dtype, and pack it into one buffer.

        For a CUDA device the buffer is pinned. Thread-safe.
        """
        self.check(adapter)
        packed = self._packed(adapter)
        if self._device.type != "cpu":
            assert packed.packed is not None
            pin(packed.packed)
        return packed

    def _packed(self, adapter: Adapter | StoredAdapter) -> Adapter:
        """Pack an adapter. The scales of a whole slot precede int8 codes in the buffer."""
        found = as_stored(adapter) if isinstance(adapter, Adapter) else adapter
        locations = self._locations  # of this stage
        cut = {
            name: locations[name].cut(own)
            for name, own in found.modules.items()
            if name in locations
        }
        found = replace(found, modules=cut)
        total = sum(matrix.size for weights in found.modules.values() for matrix in weights[:2])
        packed = allocate(self._scale_bytes + total, self._dtype)
        views = self._unpack(packed, found)
        bad = write(list(found.modules.values()), list(map(target_of, views.values())))
        if bad is not None:
            raise not_finite(found.file, list(found.modules)[bad])
        return Adapter(found.name, views, packed)

    @property
    def _scale_bytes(self) -> int:
        """Bytes of one slot's scales."""
        return 0 if self._scales is None else self._scales[0].nbytes

    def _unpack(self, packed: Tensor, adapter: StoredAdapter) -> dict[str, LoraWeights]:
        """Views into a packed buffer, by module: down, then up.

        `up` is transposed where the slots store it as [rank, out].
        """
        views: dict[str, LoraWeights] = {}
        start = self._scale_bytes
        sizes = [matrix.size for weights in adapter.modules.values() for matrix in weights[:2]]
        matrices = iter(packed[start:].split(sizes))
        scales = packed[:start].view(torch.float32).view(-1, self.max_rank) if start else None
        for name, weights in adapter.modules.items():
            num_out, rank = weights.up.shape
            down, up = next(matrices).view(rank, -1), next(matrices)
            location = self._locations[name]
            up = up.view(num_out, rank) if location.stacks.by_output else up.view(rank, num_out).T
            module_scales = None if scales is None else scales[location.column, :rank]
            views[name] = LoraWeights(down, up, module_scales)
        return views

    @torch.inference_mode()
    def put(self, slot: int, adapter: Adapter) -> None:
        """Copy an adapter into a slot and replace the slot's previous adapter.

        On CUDA the copy is ordered on the current stream: steps launched before it read the
        previous adapter.
        """
        if not 1 <= slot <= self.num_slots:
            raise ValueError(f"adapter slot {slot} is not one of 1 to {self.num_slots}")
        if adapter.packed is None:
            self.check(adapter)
            adapter = self._packed(adapter)
        packed = adapter.packed
        assert packed is not None
        layout = self._layout(slot, adapter)
        on_device = self._copy_to_device(packed)
        matrices = on_device[self._scale_bytes :].split(layout.sizes)
        if layout.targets:  # else no layer of this stage is changed
            torch._foreach_copy_(layout.targets, layout.sources(matrices))
        for stacks, deltas in zip(self._layers, layout.deltas, strict=True):
            stacks.deltas[slot] = deltas
        if self._scales is not None:
            scales = on_device[: self._scale_bytes].view(torch.float32)
            self._scales[slot].copy_(scales.view_as(self._scales[slot]))
        self._ranks[slot].copy_(layout.ranks, non_blocking=True)

    def _layout(self, slot: int, adapter: Adapter) -> _SlotLayout:
        """The slot's layout for an adapter. Cached: the next adapter usually has the same ranks."""
        modules = tuple((name, weights.down.shape[0]) for name, weights in adapter.modules.items())
        layout = self._layouts.get(slot)
        if layout is None or layout.modules != modules:
            layout = self._layouts[slot] = self._make_layout(slot, modules)
        return layout

    def _make_layout(self, slot: int, modules: tuple[tuple[str, int], ...]) -> _SlotLayout:
        layout = _SlotLayout(modules)
        ranks = [0] * self._ranks.shape[1]
        for stacks in self._layers:
            stacks.clear(slot)
        for name, rank in modules:
            location = self._locations[name]
            num_out, num_in = location.shape
            down, up_chunks = location.stacks.destinations(slot, location.part, rank)
            layout.add([down], (rank, num_in))
            by_output = location.stacks.by_output
            shape = (num_out, rank) if by_output else (rank, num_out)
            layout.add([chunk.T if by_output else chunk for chunk in up_chunks], shape)
            ranks[location.column] = rank
        layout.deltas = [stacks.deltas[slot] for stacks in self._layers]
        layout.ranks = torch.tensor(ranks, dtype=torch.int32)
        if self._device.type != "cpu":
            layout.ranks = layout.ranks.pin_memory()
        return layout

    def _copy_to_device(self, packed: Tensor) -> Tensor:
        """Copy a packed adapter on a separate stream, which overlaps with running steps."""
        if self._copy_stream is None:
            return packed.to(self._device)
        current = torch.cuda.current_stream()
        with torch.cuda.stream(self._copy_stream):
            on_device = packed.to(self._device, non_blocking=True)
        current.wait_stream(self._copy_stream)
        on_device.record_stream(current)
        return on_device

    def _stacks(
        self, layer: Linear, ranks: Tensor, scales: Tensor | None, by_output: bool
    ) -> Stacks:
        count, sizes = len(ranks), tuple(layer.parts.values())
        shapes = (
            (count, len(sizes), self.max_rank, layer.num_in),
            (count, self.max_rank * sum(sizes)),
        )
        # Kernels also read the ranks above an adapter's own, and multiply them by zero.
        down, up = (torch.zeros(s, dtype=self._dtype, device=self._device) for s in shapes)
        return Stacks(
            down=down,
            up=up,
            ranks=ranks,
            sizes=sizes,
            deltas={slot: [] for slot in range(count)},
            scales=scales,
            by_output=by_output,
        )


def slot_bytes(network: Network, max_rank: int, dtype: torch.dtype) -> int:
    """Bytes of one slot's matrices of `slot_dtype`."""
    linears = [module for module in network.modules() if isinstance(module, Linear)]
    values = sum(len(layer.parts) * layer.num_in + sum(layer.parts.values()) for layer in linears)
    return values * max_rank * dtype.itemsize


def slot_dtype(parts: Parts, dtype: LoraDType) -> torch.dtype:
    return parts.dtype if dtype == "auto" else torch.int8


def _module_names(path: str, layer: Linear) -> Iterator[str]:
    """The names of a layer's parts. A tied head is named lm_head too."""
    parent, dot, _ = path.rpartition(".")
    for part in layer.parts:
        yield path if "." in part else f"{parent}{dot}{part}"


def _kernel(ops: Ops) -> LoraKernel:
    """The LoRA kernel for the backend of the network's other kernels."""
    if ops.is_triton:
        from windlass.kernels.triton.lora import TritonLora

        return TritonLora()
    if ops.is_native and ops.native is not None:
        from windlass.kernels.native.lora import NativeLora

        return NativeLora(ops.native.pool)
    return ReferenceLora()


def _format_shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
