"""Capture, replay and staging of CUDA graphs, behind an interface that tests implement without a GPU."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor

from windlass.errors import EngineError
from windlass.kernels.capture import garbage_kept
from windlass.kernels.compile_only import is_compiling
from windlass.kernels.storages import Held, held

Key = TypeVar("Key", bound=Hashable)
Outputs = tuple[Tensor, ...]

_PATIENCE = 64  # steps that use a larger graph before one of their size is captured


class HostCopy(Protocol):
    """A copy to the host in progress. `wait` blocks until it is complete."""

    def wait(self) -> Tensor: ...


class Backend(Protocol):
    """What executors need of a device."""

    def host_buffer(self, size: int) -> Tensor:
        """An int32 buffer from which copies to the device are asynchronous."""
        ...

    def copy_to_host(self, tensor: Tensor) -> HostCopy:
        """Start a copy to the host."""
        ...

    def capture(self, compute: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        """Capture `compute`. Returns its replay, and its outputs.

        Replays of any graph of this backend overwrite the outputs: whatever reads them must be launched
        before the next replay.
        """
        ...


class CudaBackend:
    """Owns the memory pool of captured graphs, which all use the same memory, also for outputs."""

    def __init__(self) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()

    def host_buffer(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32).pin_memory()

    def copy_to_host(self, tensor: Tensor) -> HostCopy:
        return _CudaHostCopy(tensor)

    def capture(self, compute: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        outputs = compute()  # compiles kernels outside of the capture
        if is_compiling():
            return _no_replay, ()  # the outputs of all sizes would take gigabytes
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Another thread may pin memory for an adapter during the capture.
        captured = torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local")
        with garbage_kept(), captured:
            outputs = compute()
        # Without an owner, the memory of the outputs is free for the next capture: logits of every size
        # would take gigabytes. The graph keeps the pool.
        return graph.replay, tuple(map(_unowned, outputs))


class _Memory:
    """Device memory that something else keeps, in the form that torch makes tensors of."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


def _unowned(tensor: Tensor) -> Tensor:
    """The same values at the same address, without keeping the memory."""
    if not tensor.numel():
        return torch.empty_like(tensor)  # an empty view would keep its memory
    storage = tensor.untyped_storage()
    memory = _Memory(storage.data_ptr(), storage.nbytes())
    found = torch.as_tensor(memory, device=tensor.device).view(tensor.dtype)
    return found.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _no_replay() -> None:
    raise EngineError("a graph that was not captured cannot be replayed.")


class _CudaHostCopy:
    def __init__(self, tensor: Tensor) -> None:
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def wait(self) -> Tensor:
        self._event.synchronize()
        return self._host


@dataclass(frozen=True, slots=True)
class Graph:
    """A captured graph and its outputs, which replays of all graphs overwrite."""

    replay: Callable[[], None]
    outputs: Outputs


class GraphSet(Generic[Key]):
    """Owns the captured graphs of one executor by shape. A missing graph is captured on first use."""

    def __init__(self, backend: Backend, compute: Callable[[Key], Outputs]) -> None:
        """`compute` must not refer to the executor: its graphs are freed with the last reference to it."""
        self._backend = backend
        self._compute = compute
        self._graphs: dict[Key, Graph] = {}

    def get(self, key: Key) -> Graph | None:
        return self._graphs.get(key)

    def capture(self, key: Key) -> Graph:
        """The graph of a shape, captured now if it does not exist."""
        graph = self._graphs.get(key)
        if graph is None:
            with torch.inference_mode():
                graph = Graph(*self._backend.capture(partial(self._compute, key)))
            self._graphs[key] = graph
        return graph


class AtStart(Enum):
    """Which sizes of an executor are captured at start."""

    ALL = "all"
    SPREAD = "the largest, and one for each power of two"
    ENDS = "the largest and the smallest"  # to measure how much memory graphs take


class CapturedSizes:
    """Which sizes of an executor are captured. Steps of another size use the next larger one.

    Sizes that are not captured at start are captured while the engine is idle, or once enough steps would
    have used them: by then, padding has cost more than the capture does.
    """

    def __init__(self, sizes: Sequence[int], at_start: AtStart) -> None:
        """`sizes`: ascending."""
        self._sizes = list(sizes)
        self.largest = self._sizes[-1]
        first = self._sizes
        if at_start is AtStart.SPREAD:
            first = _spread(self._sizes)
        elif at_start is AtStart.ENDS:
            first = sorted({self._sizes[0], self.largest})
        # Smaller graphs reuse the memory of larger ones.
        self.at_start = first[::-1]
        self._ready = list(first)
        self._missing = [size for size in self._sizes if size not in first]
        self._asked: Counter[int] = Counter()

    @property
    def missing(self) -> Sequence[int]:
        return self._missing

    def next_missing(self) -> int | None:
        """Return the size to capture next and count it as captured; None if all are."""
        if not self._missing:
            return None
        asked = max(self._missing, key=lambda size: (self._asked[size], size))
        self._add(asked)
        return asked

    def fit(self, count: int) -> int:
        """The smallest captured size that fits a step of `count`."""
        return self._ready[bisect_left(self._ready, count)]

    def ran(self, count: int) -> None:
        """Count a step of `count`. A size that was missing often is captured by the next step that uses it."""
        wanted = self._sizes[bisect_left(self._sizes, count)]
        if wanted in self._missing:
            self._asked[wanted] += 1
            if self._asked[wanted] >= _PATIENCE:
                self._add(wanted)

    def _add(self, size: int) -> None:
        self._missing.remove(size)
        insort(self._ready, size)


def _spread(sizes: list[int]) -> list[int]:
    """The largest size, and the largest ones below each power of two: a step pads at most twofold."""
    powers = (1 << power for power in range(sizes[-1].bit_length()))
    below = {sizes[bisect_right(sizes, power) - 1] for power in powers if power > sizes[0]}
    return sorted(below | {sizes[0], sizes[-1]})


class StagedInputs:
    """Owns an int32 buffer on the device and some on the host: all but one may be in flight."""

    def __init__(self, backend: Backend, size: int, device: torch.device, num_host: int) -> None:
        self.on_device = torch.zeros(size, dtype=torch.int32, device=device)
        self._on_host = [backend.host_buffer(size) for _ in range(num_host)]

    def storages(self) -> Iterator[Held]:
        return held("tables", self.on_device, *self._on_host)

    def stage(self) -> NDArray[Any]:
        """The host buffer to fill for the next step."""
        self._on_host.append(self._on_host.pop(0))
        return self._on_host[0].numpy()

    @property
    def staged(self) -> Tensor:
        return self._on_host[0]

    def send(self, size: int | None = None) -> None:
        """Copy the first `size` numbers of the filled buffer to the device."""
        self.on_device[:size].copy_(self._on_host[0][:size], non_blocking=True)
