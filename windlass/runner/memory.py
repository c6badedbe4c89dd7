"""Memory report of the runner, and sleep / wake.

Each owner names its own memory (kernels/storages.py). Sleep on a CPU returns the pages of the KV
cache and the workspace to the system and writes the weights to a file. Addresses stay valid, so
recorded programs work after `wake`.
"""

from __future__ import annotations

import ctypes
import sys
import tempfile
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

import torch
from torch import Tensor

from windlass.core.card import MemoryPart, MemoryReport
from windlass.errors import EngineError, UnsupportedError
from windlass.folders import cache_folder
from windlass.kernels.storages import MemoryKind, Owner
from windlass.pages import PAGE, give_back, libc, mappings
from windlass.runner.device import (
    free_bytes,
    other_processes_bytes,
    resident_bytes,
)

if TYPE_CHECKING:
    from windlass.runner.worker import Followers

# Kinds of memory that sleep writes to a file, and kinds whose contents the next steps write again.
_RESTORED: tuple[MemoryKind, ...] = ("weights", "adapters")
_DROPPED: tuple[MemoryKind, ...] = ("KV cache", "recorded steps")


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


def storages(owners: Iterable[Owner]) -> Iterator[tuple[MemoryKind, Storage]]:
    """All memory of the owners, each once: the first owner that names it is charged."""
    seen: set[int] = set()
    for owner in owners:
        for kind, tensor in owner.storages():
            storage = Storage(tensor)
            if storage.num_bytes and storage.address not in seen:
                seen.add(storage.address)
                yield kind, storage


class RunnerMemory:
    """Reports the engine's memory and, during sleep, owns the file with its weights.

    `measured`: bytes without a tensor, such as CUDA graphs. `followers`: other ranks, which sleep and
    wake with this one.
    """

    def __init__(
        self,
        owners: Sequence[Owner],
        device: torch.device,
        measured: dict[str, int],
        followers: Followers | None = None,
    ) -> None:
        self._owners = owners
        self._device = device
        self._measured = measured
        self._followers = followers
        self._asleep: tuple[IO[bytes], list[Storage]] | None = None

    def held(self) -> MemoryReport:
        sizes: dict[str, list[int]] = {}
        on_cpu = self._device.type == "cpu"
        for name, storage in storages(self._owners):
            if storage.on_cpu != on_cpu:
                continue  # pinned staging buffers
            sums = sizes.setdefault(name, [0, 0])
            sums[0] += storage.num_bytes
            sums[1] += _resident(storage) if on_cpu else storage.num_bytes
        known = on_cpu and sys.platform == "linux"
        parts: dict[str, MemoryPart] = {
            name: MemoryPart(a, b if known else None) for name, (a, b) in sorted(sizes.items())
        }
        parts |= {name: MemoryPart(num_bytes) for name, num_bytes in self._measured.items()}
        if on_cpu:
            total, files = resident_bytes(), _mapped_bytes()
            return MemoryReport(
                device="cpu",
                parts=parts,
                total=total,
                files=files,
                device_free=free_bytes(self._device),
            )
        free, total = torch.cuda.mem_get_info(self._device)
        used = total - free - other_processes_bytes(self._device)
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
        all_there = [(name, each) for name, each in storages(self._owners) if each.on_cpu]
        held = [each for name, each in all_there if name in _RESTORED]
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
        if self._followers is not None:
            self._followers.call("sleep")
        self._asleep = file, weights
        for storage in [*held, *(each for name, each in all_there if name in _DROPPED)]:
            give_back(*storage.pages())

    def wake(self) -> None:
        """Restore the weights at their addresses."""
        if self._asleep is None:
            return
        file, weights = self._asleep
        if self._followers is not None:
            self._followers.call("wake")
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
