"""The device's slots for adapters: for every linear layer of a network, room for all of them.

Who is in which slot, and when one may be taken, is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from windlass.errors import CheckpointError
from windlass.kernels.lora import Change, Lora, LoraKernel, PlainLora, Stacks
from windlass.kernels.ops import Ops
from windlass.layers.linear import Linear
from windlass.layers.norm import RMSNorm
from windlass.lora.base import Adapter, Low
from windlass.lora.packing import compiled_code, place_of, stored, write
from windlass.lora.pinned import pin, room
from windlass.lora.stored import StoredAdapter, not_finite
from windlass.lora_config import LoraDType
from windlass.models.hparams import HParams
from windlass.models.network import Network


@dataclass(frozen=True, slots=True)
class _Place:
    """One module of the checkpoint: which part of which layer it is."""

    stacks: Stacks
    part: int
    column: int  # among all modules

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.stacks.sizes[self.part], self.stacks.down.shape[3]


class _Laid:
    """Where the parts of a packed adapter go: down and up of each module in turn."""

    def __init__(self, modules: tuple[tuple[str, int], ...]) -> None:
        self.modules = modules  # names and ranks
        self.sizes: list[int] = []  # numbers of each part
        self.targets: list[Tensor] = []
        self.changes: list[list[Change]] = []  # by layer
        self.ranks = torch.empty(0)
        # Of each part that is not copied as it is: its shape, and how wide its pieces are.
        self._cut: dict[int, tuple[tuple[int, int], list[int]]] = {}

    def add(self, targets: list[Tensor], shape: tuple[int, int]) -> None:
        """The next part; several targets, or one with gaps, take columns of it."""
        if len(targets) == 1 and targets[0].is_contiguous():
            targets = [targets[0].view(-1)]
        else:
            self._cut[len(self.sizes)] = (shape, [target.shape[1] for target in targets])
        self.sizes.append(shape[0] * shape[1])
        self.targets += targets

    def sources(self, parts: tuple[Tensor, ...]) -> tuple[Tensor, ...] | list[Tensor]:
        """What the targets get."""
        if not self._cut:
            return parts
        found: list[Tensor] = []
        for i, part in enumerate(parts):
            if i in self._cut:
                shape, widths = self._cut[i]
                found += part.view(shape).split(widths, dim=1)
            else:
                found.append(part)
        return found


class Bank:
    """Owns the adapters' matrices on the device. Slots are 1 to `num_slots`; 0 is nobody's.

    From when it is made, the network's layers can compute steps whose rows have adapters.
    """

    def __init__(
        self,
        network: Network,
        hparams: HParams,
        num_slots: int,
        max_rank: int,
        dtype: LoraDType = "auto",
    ) -> None:
        compiled_code()  # now, not when the first adapter is read
        self.num_slots = num_slots
        self.max_rank = max_rank
        self._architecture = hparams.architecture
        self._layers: list[Stacks] = []
        self._laid: dict[int, _Laid] = {}  # by slot, of what was there last
        self._places: dict[str, _Place] = {}
        norm = _norm(network)
        self._device = norm.weight.device
        self._dtype = _stored_as(norm, dtype)
        self._copying = torch.cuda.Stream() if self._device.type == "cuda" else None
        kernel = _kernel(norm.ops)
        linears = [(path, m) for path, m in network.named_modules() if isinstance(m, Linear)]
        # Ranks of all layers lie side by side, so that a put sends them at once; so do scales.
        shape = (num_slots + 1, sum(len(layer.parts) for _, layer in linears))
        self._ranks = torch.zeros(shape, dtype=torch.int32, device=self._device)
        self._scales: Tensor | None = None
        if dtype == "int8":
            self._scales = self._ranks.new_zeros((*shape, max_rank), dtype=torch.float32)
        first = 0
        for path, layer in linears:
            own = slice(first, first + len(layer.parts))
            scales = None if self._scales is None else self._scales[:, own]
            sizes = tuple(layer.parts.values())
            by_output = kernel.by_output(self._dtype, norm.weight.dtype, max_rank, sizes)
            stacks = self._stacks(layer, self._ranks[:, own], scales, by_output)
            layer.lora = Lora(stacks, kernel)
            self._layers.append(stacks)
            for part, name in enumerate(_names(path, layer)):
                self._places[name] = _Place(stacks, part, first + part)
            first = own.stop

    @property
    def num_bytes(self) -> int:
        scales = 0 if self._scales is None else self._scales.nbytes
        return self._ranks.nbytes + scales + sum(stacks.num_bytes for stacks in self._layers)

    @contextmanager
    def as_if_full(self) -> Iterator[None]:
        """While it lasts, steps are computed as if every slot had an adapter: before there is any."""
        self._ranks.fill_(self.max_rank)
        try:
            yield
        finally:
            self._ranks.zero_()

    def check(self, adapter: Adapter | StoredAdapter) -> None:
        """Raise where an adapter does not belong to this network, with the module and both shapes."""
        for name, low in adapter.modules.items():
            place = self._places.get(name)
            if place is None:
                raise CheckpointError(
                    f"adapter {adapter.name!r} changes {name}, which this network "
                    f"({self._architecture}) does not have. It was made for another base model."
                )
            rank = low.down.shape[0]
            found = (low.up.shape[0], low.down.shape[1])
            if found != place.shape or low.up.shape[1] != rank:
                raise CheckpointError(
                    f"adapter {adapter.name!r}, {name}: lora_A {_by(low.down.shape)} and lora_B "
                    f"{_by(low.up.shape)} change a weight of {_by(found)}, but the network's is "
                    f"{_by(place.shape)}. It was made for another base model."
                )
            if rank > self.max_rank:
                raise CheckpointError(
                    f"adapter {adapter.name!r}, {name}: rank {rank} is above --max-lora-rank "
                    f"{self.max_rank}. Raise it to load this adapter."
                )

    def pack(self, adapter: Adapter | StoredAdapter) -> Adapter:
        """The same adapter as it travels fastest: checked, as the slots hold it, in one piece.

        For a CUDA device the piece is pinned. May be called from any thread.
        """
        self.check(adapter)
        made = self._packed(adapter)
        if self._device.type != "cpu":
            assert made.packed is not None
            pin(made.packed)
        return made

    def _packed(self, adapter: Adapter | StoredAdapter) -> Adapter:
        """Codes have the scales of a whole slot before them."""
        found = stored(adapter) if isinstance(adapter, Adapter) else adapter
        total = sum(half.size for change in found.modules.values() for half in change[:2])
        packed = room(self._scale_bytes + total, self._dtype)
        views = self._unpack(packed, found)
        wrong = write(list(found.modules.values()), list(map(place_of, views.values())))
        if wrong is not None:
            raise not_finite(found.file, list(found.modules)[wrong])
        return Adapter(found.name, views, packed)

    @property
    def _scale_bytes(self) -> int:
        """Of one slot."""
        return 0 if self._scales is None else self._scales[0].nbytes

    def _unpack(self, packed: Tensor, adapter: StoredAdapter) -> dict[str, Low]:
        """Views of a piece that has, or will have, this adapter: each down, then its up, turned where
        ranks come first in the slots.
        """
        views: dict[str, Low] = {}
        at = self._scale_bytes
        sizes = [half.size for change in adapter.modules.values() for half in change[:2]]
        parts = iter(packed[at:].split(sizes))
        scales = packed[:at].view(torch.float32).view(-1, self.max_rank) if at else None
        for name, change in adapter.modules.items():
            num_out, rank = change.up.shape
            down, up = next(parts).view(rank, -1), next(parts)
            place = self._places[name]
            up = up.view(num_out, rank) if place.stacks.by_output else up.view(rank, num_out).T
            own = None if scales is None else scales[place.column, :rank]
            views[name] = Low(down, up, own)
        return views

    @torch.inference_mode()
    def put(self, slot: int, adapter: Adapter) -> None:
        """Put an adapter into a slot, in the place of what was there.

        On CUDA it is done in the order of the current stream: steps before it see what was there.
        """
        if not 1 <= slot <= self.num_slots:
            raise ValueError(f"adapter slot {slot} is not one of 1 to {self.num_slots}")
        packed = adapter.packed
        if packed is None:
            self.check(adapter)
            packed = self._packed(adapter).packed
        assert packed is not None
        laid = self._lay_out(slot, adapter)
        arrived = self._send(packed)
        parts = arrived[self._scale_bytes :].split(laid.sizes)
        torch._foreach_copy_(laid.targets, laid.sources(parts))
        for stacks, changes in zip(self._layers, laid.changes, strict=True):
            stacks.changes[slot] = changes
        if self._scales is not None:
            whole = arrived[: self._scale_bytes].view(torch.float32)
            self._scales[slot].copy_(whole.view_as(self._scales[slot]))
        self._ranks[slot].copy_(laid.ranks, non_blocking=True)

    def _lay_out(self, slot: int, adapter: Adapter) -> _Laid:
        """Where in a slot an adapter goes: kept, as the next one is mostly of the same ranks."""
        own = tuple((name, low.down.shape[0]) for name, low in adapter.modules.items())
        laid = self._laid.get(slot)
        if laid is None or laid.modules != own:
            laid = self._laid[slot] = self._find_places(slot, own)
        return laid

    def _find_places(self, slot: int, modules: tuple[tuple[str, int], ...]) -> _Laid:
        laid = _Laid(modules)
        ranks = [0] * self._ranks.shape[1]
        for stacks in self._layers:
            stacks.clear(slot)
        for name, rank in modules:
            place = self._places[name]
            num_out, num_in = place.shape
            down, pieces = place.stacks.place(slot, place.part, rank)
            laid.add([down], (rank, num_in))
            by_output = place.stacks.by_output
            shape = (num_out, rank) if by_output else (rank, num_out)
            laid.add([piece.T if by_output else piece for piece in pieces], shape)
            ranks[place.column] = rank
        laid.changes = [stacks.changes[slot] for stacks in self._layers]
        laid.ranks = torch.tensor(ranks, dtype=torch.int32)
        if self._device.type != "cpu":
            laid.ranks = laid.ranks.pin_memory()
        return laid

    def _send(self, packed: Tensor) -> Tensor:
        """Copied to the device while steps before it still compute."""
        if self._copying is None:
            return packed.to(self._device)
        here = torch.cuda.current_stream()
        with torch.cuda.stream(self._copying):
            arrived = packed.to(self._device, non_blocking=True)
        here.wait_stream(self._copying)
        arrived.record_stream(here)
        return arrived

    def _stacks(
        self, layer: Linear, ranks: Tensor, scales: Tensor | None, by_output: bool
    ) -> Stacks:
        count, sizes = len(ranks), tuple(layer.parts.values())
        shapes = (
            (count, len(sizes), self.max_rank, layer.num_in),
            (count, self.max_rank * sum(sizes)),
        )
        # Kernels read ranks that an adapter lacks as well, and multiply them by zero.
        down, up = (torch.zeros(s, dtype=self._dtype, device=self._device) for s in shapes)
        changes: dict[int, list[Change]] = {slot: [] for slot in range(count)}
        return Stacks(down, up, ranks, sizes, changes, scales, by_output)


def bytes_of_slot(network: Network, max_rank: int, dtype: LoraDType) -> int:
    """What the matrices of one slot take."""
    linears = [module for module in network.modules() if isinstance(module, Linear)]
    values = sum(len(one.parts) * one.num_in + sum(one.parts.values()) for one in linears)
    return values * max_rank * _stored_as(_norm(network), dtype).itemsize


def _norm(network: Network) -> RMSNorm:
    return next(module for module in network.modules() if isinstance(module, RMSNorm))


def _stored_as(norm: RMSNorm, dtype: LoraDType) -> torch.dtype:
    return norm.weight.dtype if dtype == "auto" else torch.int8


def _names(path: str, layer: Linear) -> Iterator[str]:
    """What the checkpoint calls a layer's parts; a head is called so even where it is tied."""
    parent = path.rpartition(".")[0]
    for part in layer.parts:
        yield f"{parent}.{part}" if len(layer.parts) > 1 else path


def _kernel(ops: Ops) -> LoraKernel:
    """Of the same kind as the operations beside it."""
    if ops.is_triton:
        from windlass.kernels.triton.lora import TritonLora

        return TritonLora()
    if ops.is_native:
        from windlass.kernels.native.lora import NativeLora

        return NativeLora()
    return PlainLora()


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
