"""Memory report of the runner, and sleep / wake.

Walks all objects reachable from the runner for tensors, so that a proposer's weights and KV pages
count as well. Sleep on a CPU returns the pages of the KV cache and the workspace to the system and
writes the weights to a file. Addresses stay valid, so recorded programs work after `wake`.
"""

from __future__ import annotations

import ctypes
import sys
import tempfile
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import MethodType
from typing import IO

import torch
from torch import Tensor, nn

from windlass.core.card import MemoryPart, MemoryReport
from windlass.errors import EngineError, UnsupportedError
from windlass.folders import cache_folder
from windlass.kernels.batch import KVCache
from windlass.kernels.native.program import Program
from windlass.lora.bank import Bank
from windlass.lora.store import AdapterStore
from windlass.models.network import Network
from windlass.pages import PAGE, give_back, libc, mappings
from windlass.runner import device as found

WEIGHTS, PAGES, STEPS, ADAPTERS, TABLES = (
    "weights",
    "KV cache",
    "recorded steps",
    "adapters",
    "tables",
)
# The first owner that reaches a tensor is charged; programs also point at weights.
_OWNERS: tuple[tuple[str, tuple[type, ...]], ...] = (
    (PAGES, (KVCache,)),
    (ADAPTERS, (Bank, AdapterStore)),
    (WEIGHTS, (Network,)),
    (STEPS, (Program,)),
)
_OURS = "windlass."


class Storage:
    """The memory behind one or more tensors."""

    def __init__(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.address = storage.data_ptr()
        self.num_bytes = storage.nbytes()
        self.on_cpu = tensor.device.type == "cpu"

    def pages(self) -> tuple[int, int]:
        """Address and length of the whole memory pages inside."""
        first = -(-self.address // PAGE) * PAGE
        last = (self.address + self.num_bytes) // PAGE * PAGE
        return first, max(0, last - first)

    def lies_in(self, ranges: Sequence[tuple[int, int]]) -> bool:
        """Whether its pages lie in one of the sorted ranges (first, end)."""
        first, length = self.pages()
        at = bisect_right(ranges, (first, sys.maxsize)) - 1
        return at >= 0 and first + length <= ranges[at][1]

    def view(self) -> memoryview:
        """The bytes of the whole pages."""
        first, length = self.pages()
        return memoryview((ctypes.c_char * length).from_address(first)).cast("B")


def storages(*roots: object) -> Iterator[tuple[str, Storage]]:
    """All tensor memory reachable from `roots`, each once, with its owner."""
    everything = list(_walk(*roots))
    seen: set[int] = set()
    for name, classes in _OWNERS:
        owners = [item for item in everything if isinstance(item, classes)]
        yield from ((name, storage) for storage in _unseen(_walk(*owners), seen))
    yield from ((TABLES, storage) for storage in _unseen(everything, seen))


def _unseen(items: Iterable[object], seen: set[int]) -> Iterator[Storage]:
    for item in items:
        if isinstance(item, Tensor) and item.device.type != "meta":
            storage = Storage(item)
            if storage.num_bytes and storage.address not in seen:
                seen.add(storage.address)
                yield storage


def _walk(*roots: object) -> Iterator[object]:
    """Every tensor and every Windlass object reachable from `roots`, each once."""
    seen: set[int] = set()
    left = list(roots)
    while left:
        item = left.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        yield item
        left += _inside(item)


def _inside(item: object) -> Iterable[object]:
    if isinstance(item, Tensor | type):
        return ()
    if isinstance(item, dict):
        return item.values()
    if isinstance(item, list | tuple | set | frozenset):
        return item
    if isinstance(item, MethodType):
        return (item.__self__,)
    if isinstance(item, nn.Module) or type(item).__module__.startswith(_OURS):
        return _attributes(item)
    return ()


def _attributes(item: object) -> list[object]:
    names = [name for kind in type(item).__mro__ for name in getattr(kind, "__slots__", ())]
    own = list(getattr(item, "__dict__", {}).values())
    return own + [getattr(item, name, None) for name in names]


class RunnerMemory:
    """Reports the engine's memory and, during sleep, owns the file with its weights.

    `measured`: bytes without a tensor, such as CUDA graphs.
    """

    def __init__(
        self, roots: tuple[object, ...], device: torch.device, measured: dict[str, int]
    ) -> None:
        self._roots = roots
        self._device = device
        self._measured = measured
        self._asleep: tuple[IO[bytes], list[Storage]] | None = None

    def held(self) -> MemoryReport:
        sizes: dict[str, list[int]] = {}
        on_cpu = self._device.type == "cpu"
        for name, storage in storages(*self._roots):
            if storage.on_cpu != on_cpu:
                continue  # pinned staging buffers
            sums = sizes.setdefault(name, [0, 0])
            sums[0] += storage.num_bytes
            sums[1] += _resident(storage) if on_cpu else storage.num_bytes
        known = on_cpu and sys.platform == "linux"
        parts = {
            name: MemoryPart(a, b if known else None) for name, (a, b) in sorted(sizes.items())
        }
        for name, num_bytes in self._measured.items():
            parts[name] = MemoryPart(num_bytes)
        if on_cpu:
            total, files = found.resident_bytes(), _mapped_bytes()
            return MemoryReport(
                device="cpu",
                parts=parts,
                total=total,
                files=files,
                device_free=found.free_bytes(self._device),
            )
        free, total = torch.cuda.mem_get_info(self._device)
        used = total - free - found.other_processes_bytes(self._device)
        return MemoryReport(
            device=str(self._device),
            parts=parts,
            total=used,
            files=0,
            device_free=free,
            device_total=total,
        )

    def sleep(self) -> None:
        """Release memory that `wake` can restore. A failure loses nothing."""
        if self._device.type != "cpu" or sys.platform != "linux":
            raise UnsupportedError(
                f"memory on {self._device.type} ({sys.platform}) cannot be freed while the "
                "process lives: captured steps hold its addresses."
            )
        all_there = [(name, each) for name, each in storages(*self._roots) if each.on_cpu]
        held = [each for name, each in all_there if name in (WEIGHTS, ADAPTERS)]
        writable = _writable()
        # The other storages are memory-mapped files, which the system reads again on access.
        weights = [each for each in held if each.lies_in(writable)]
        folder = cache_folder("sleep")
        try:
            file = tempfile.TemporaryFile(dir=folder, prefix="asleep-", buffering=0)  # noqa: SIM115
            for storage in weights:
                _write(file, storage.view())
        except OSError as error:
            raise EngineError(
                f"the weights could not be written to {folder} for the time of the sleep: {error}."
            ) from error
        self._asleep = file, weights
        for storage in [*held, *(each for name, each in all_there if name in (PAGES, STEPS))]:
            give_back(*storage.pages())

    def wake(self) -> None:
        """Restore the weights at their addresses."""
        if self._asleep is None:
            return
        file, weights = self._asleep
        file.seek(0)
        for storage in weights:
            _read(file, storage.view())
        file.close()
        self._asleep = None


def _write(file: IO[bytes], view: memoryview) -> None:
    while view:
        view = view[file.write(view) :]


def _read(file: IO[bytes], view: memoryview) -> None:
    while view:
        count = file.readinto(view)  # type: ignore[attr-defined]
        if not count:
            raise EngineError("the file with the weights of the sleeping engine was cut short.")
        view = view[count:]


def _resident(storage: Storage) -> int:
    """Resident bytes; all bytes where the system does not report them."""
    first, length = storage.pages()
    if not length or sys.platform != "linux":
        return storage.num_bytes
    flags = (ctypes.c_ubyte * (length // PAGE))()
    if libc().mincore(ctypes.c_void_p(first), ctypes.c_size_t(length), flags):
        return storage.num_bytes
    edges = storage.num_bytes - length
    return edges + PAGE * bytes(flags).count(1)


def _writable() -> list[tuple[int, int]]:
    """Writable address ranges of this process, sorted and merged."""
    found: list[tuple[int, int]] = []
    for first, end, rights, _file in mappings():
        if "w" not in rights:
            continue
        if found and found[-1][1] == first:
            first = found.pop()[0]
        found.append((first, end))
    return found


def _mapped_bytes() -> int:
    """Bytes of mapped files in this process; 0 if unknown."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.is_file() else []
    sizes = [int(line.split()[1]) * 1024 for line in lines if line.startswith("RssFile:")]
    return sum(sizes)
