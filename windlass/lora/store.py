"""Registered adapters, and an LRU cache of their weights in host memory.

A thread pool reads weights while steps run; one other thread calls all methods. The scheduler
(core/adapters.py) decides which adapters are on the device.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from secrets import token_hex

from windlass.core.types import AdapterSize
from windlass.errors import AdapterConflict, AdapterNotFound, CheckpointError, EngineError
from windlass.kernels.storages import Held
from windlass.lora.base import Adapter
from windlass.lora.modules import AdaptedModules
from windlass.lora.open_below import Opener, open_below
from windlass.lora.peft import CONFIG, WEIGHTS, AdapterFolder
from windlass.lora.stored import StoredAdapter, Version, version_of
from windlass.models.file_digest import sample
from windlass.models.hparams import HParams

# A quarter of the cores read adapters; the others compute and serve.
_MAX_READERS = 8
_POLL_S = 0.001


def _num_readers() -> int:
    return max(1, min(_MAX_READERS, (os.cpu_count() or 1) // 4))


def _do_not_announce(*_: str) -> None:
    """Do nothing: there are no other ranks."""


class AdapterStore:
    """Owns the adapters in host memory, at most `max_host`, and evicts the least recently used.

    `pack` converts a stored adapter to the packed form for the network's device. It raises if the
    adapter does not fit the network.
    """

    def __init__(
        self,
        hparams: HParams,
        max_rank: int,
        max_host: int,
        pack: Callable[[StoredAdapter], Adapter] | None = None,
        *,
        on_many_hosts: bool = False,
    ) -> None:
        """`on_many_hosts`: the times of files do not count for `version`, which differ between copies."""
        self._modules = AdaptedModules(hparams)
        self._max_rank = max_rank
        self._max_host = max_host
        self._pack = pack
        self._on_many_hosts = on_many_hosts
        self._folders: dict[str, Path] = {}
        self._openers: dict[str, Opener] = {}  # of adapters that are confined to folders
        self._loaded: OrderedDict[str, Adapter] = OrderedDict()  # least recently used first
        self._pending: dict[str, Future[tuple[Adapter, Version]]] = {}
        self._versions: dict[str, Version] = {}  # of the files when first used
        self._sizes: dict[str, AdapterSize] = {}  # when last read
        self._held: dict[str, int] = {}  # hold counts
        self._reader = ThreadPoolExecutor(_num_readers(), "windlass-adapters")
        # Called with what other ranks do too: register, unregister or read, and the arguments.
        self.announce: Callable[..., None] = _do_not_announce
        self.num_loads = 0
        self.num_ended = 0
        self.num_failures = 0

    # ---- names -------------------------------------------------------------------------------

    def register(self, name: str, folder: str | Path, *roots: str) -> None:
        """Register a name. The weights are read on the first `ready`, only from files inside of `roots`."""
        if name in self._folders:
            raise AdapterConflict(
                f"an adapter {name!r} is already loaded, from {self._folders[name]}. Unload it "
                "first, or choose another name.",
                "lora_name",
            )
        self.announce("register", name, str(folder), *roots)
        self._folders[name] = Path(folder)
        if roots:
            self._openers[name] = open_below(roots)

    def check_folder(self, folder: Path) -> None:
        """Check config and header without reading weights. Raises if the adapter does not fit."""
        AdapterFolder(folder, self._modules, self._max_rank)

    def unregister(self, name: str) -> None:
        """Remove a name and its weights. The result of a pending read is dropped."""
        self.announce("unregister", name)
        del self._folders[name]
        self._openers.pop(name, None)
        self._loaded.pop(name, None)
        self._versions.pop(name, None)
        self._sizes.pop(name, None)
        pending = self._pending.pop(name, None)
        if pending is not None:
            pending.cancel()

    def version(self, name: str) -> str:
        """Identify an adapter's files, also after a restart. Files that change later are refused."""
        files = [self._folder(name) / file for file in (CONFIG, WEIGHTS)]
        opener = self._openers.get(name)
        try:
            version = version_of(*files, opener=opener)
            times = () if self._on_many_hosts else version
            digest = blake2b(repr(times).encode(), digest_size=16)
            for file in files:
                digest.update(sample(file, opener))
        except (OSError, CheckpointError):
            # The read will fail with the reason, and no request can use the blocks.
            return token_hex(16)
        self._versions.setdefault(name, version)
        return digest.hexdigest()

    @property
    def names(self) -> Collection[str]:
        return self._folders.keys()

    @property
    def folders(self) -> dict[str, str]:
        """Folder of each adapter, by name."""
        return {name: str(folder) for name, folder in self._folders.items()}

    def in_memory(self, name: str) -> bool:
        return name in self._loaded

    def size(self, name: str) -> AdapterSize | None:
        return self._sizes.get(name)

    @property
    def num_in_memory(self) -> int:
        return len(self._loaded)

    @property
    def max_in_memory(self) -> int:
        return self._max_host

    def storages(self) -> Iterator[Held]:
        for adapter in self._loaded.values():
            yield from adapter.storages()

    # ---- weights -----------------------------------------------------------------------------

    def ready(self, name: str) -> bool:
        """Whether the weights are in memory; starts a read if they are not.

        A failed read raises here once; the next call starts a new read.
        """
        if name in self._loaded:
            self._loaded.move_to_end(name)
            return True
        pending = self._pending.get(name)
        if pending is None:
            folder = self._folder(name)
            self.announce("read", name)
            self._collect_finished()
            pending = self._reader.submit(
                self._read, name, folder, self._openers.get(name), self._versions.get(name)
            )
            pending.add_done_callback(self._count)
            self._pending[name] = pending
            return False
        if not pending.done():
            return False
        del self._pending[name]
        try:
            self._insert(name, *pending.result())
        except EngineError:
            self.num_failures += 1
            raise
        return True

    def _insert(self, name: str, adapter: Adapter, version: Version) -> None:
        self.num_loads += 1
        self._versions[name] = version
        self._loaded[name] = adapter
        self._sizes[name] = AdapterSize(adapter.rank, adapter.num_bytes)
        self._evict()

    def _collect_finished(self) -> None:
        """Insert finished reads whose requests are gone, so that they count towards `max_host`."""
        for name, pending in list(self._pending.items()):
            if pending.done() and pending.exception() is None:
                del self._pending[name]
                self._insert(name, *pending.result())

    def get(self, name: str) -> Adapter:
        """The weights of a ready adapter."""
        return self._loaded[name]

    def wait_for(self, name: str) -> Adapter:
        """The weights of an adapter, when they are in memory."""
        while not self.ready(name):
            time.sleep(_POLL_S)
        return self.get(name)

    def hold(self, name: str) -> None:
        """Keep a ready adapter in memory until `drop`: a plan will copy it to the device."""
        self._held[name] = self._held.get(name, 0) + 1

    def drop(self, name: str) -> None:
        self._held[name] -= 1
        if not self._held[name]:
            del self._held[name]

    def close(self) -> None:
        """Stop the reader threads and cancel queued reads."""
        self._reader.shutdown(wait=True, cancel_futures=True)

    def _count(self, _done: Future[tuple[Adapter, Version]]) -> None:
        self.num_ended += 1

    def _folder(self, name: str) -> Path:
        if name not in self._folders:
            raise AdapterNotFound(f"no adapter {name!r} is loaded.", "model")
        return self._folders[name]

    def _evict(self) -> None:
        """Evict the least recently used adapters down to `max_host`, never the newest."""
        newest = next(reversed(self._loaded))
        for name in list(self._loaded):
            if len(self._loaded) <= self._max_host:
                return
            if name not in self._held and name != newest:
                del self._loaded[name]

    def _read(
        self, name: str, folder: Path, opener: Opener | None, known: Version | None
    ) -> tuple[Adapter, Version]:
        """Read an adapter in a reader thread. Every failure becomes an EngineError."""
        try:
            found = AdapterFolder(folder, self._modules, max_rank=self._max_rank, opener=opener)
            if known not in (None, found.version):
                raise CheckpointError(
                    f"{folder}: changed since it was first read, and cached prefixes may depend on "
                    "the old weights. Unload the adapter and load it again."
                )
            adapter = found.read(name) if self._pack is None else self._pack(found.stored(name))
        except EngineError as error:
            raise type(error)(f"adapter {name!r} could not be loaded: {error}") from error
        except Exception as error:  # thread boundary: the request gets the error
            raise CheckpointError(
                f"adapter {name!r} could not be loaded from {folder}: "
                f"{type(error).__name__}: {error}"
            ) from error
        return adapter, found.version
