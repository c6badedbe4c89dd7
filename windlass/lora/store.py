"""Adapters in host memory: names that were registered, and the few whose weights are there now.

Reading runs in threads of its own, so that steps go on meanwhile; every method is called by one
other thread. Which adapter is on the device, and for whom, is decided in core.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from windlass.errors import AdapterConflict, AdapterNotFound, CheckpointError, EngineError
from windlass.lora.base import Adapter
from windlass.lora.peft import AdapterFolder
from windlass.lora.stored import StoredAdapter, Version
from windlass.models.hparams import HParams

# A quarter of the cores may read: the rest computes or serves.
_MOST_READERS = 8


def _readers() -> int:
    return max(1, min(_MOST_READERS, (os.cpu_count() or 1) // 4))


class AdapterStore:
    """Owns the adapters in host memory, at most `max_host`: the least recently used goes first.

    `pack` makes of every adapter, as it is stored, what travels to the network's device best; it
    raises when the network cannot take it.
    """

    def __init__(
        self,
        hparams: HParams,
        max_rank: int,
        max_host: int,
        pack: Callable[[StoredAdapter], Adapter] | None = None,
    ) -> None:
        self._hparams = hparams
        self._max_rank = max_rank
        self._max_host = max_host
        self._pack = pack
        self._folders: dict[str, Path] = {}
        self._there: OrderedDict[str, Adapter] = OrderedDict()  # the least recently used first
        self._coming: dict[str, Future[tuple[Adapter, Version]]] = {}
        self._versions: dict[str, Version] = {}  # of what was read first
        self._held: dict[str, int] = {}
        self._reader = ThreadPoolExecutor(_readers(), "windlass-adapters")
        self.num_loads = 0
        self.num_ended = 0
        self.num_failures = 0

    # ---- names -------------------------------------------------------------------------------

    def register(self, name: str, folder: str | Path) -> None:
        """Make a name known. Nothing is read until somebody wants it."""
        if name in self._folders:
            raise AdapterConflict(
                f"an adapter {name!r} is loaded already, from {self._folders[name]}. Unload it "
                "first, or choose another name.",
                "lora_name",
            )
        self._folders[name] = Path(folder)

    def check_folder(self, folder: Path) -> None:
        """Read config and header, and raise what speaks against the adapter; no weight is read."""
        AdapterFolder(folder, self._hparams, self._max_rank)

    def unregister(self, name: str) -> None:
        """Forget a name and its weights; one that is being read is dropped when it comes."""
        del self._folders[name]
        self._there.pop(name, None)
        self._versions.pop(name, None)
        coming = self._coming.pop(name, None)
        if coming is not None:
            coming.cancel()

    @property
    def names(self) -> Collection[str]:
        return self._folders.keys()

    @property
    def folders(self) -> dict[str, str]:
        """Where each adapter lies."""
        return {name: str(folder) for name, folder in self._folders.items()}

    @property
    def num_there(self) -> int:
        return len(self._there)

    @property
    def max_there(self) -> int:
        return self._max_host

    # ---- weights -----------------------------------------------------------------------------

    def ready(self, name: str) -> bool:
        """Whether the weights are in memory; if not, reading begins.

        A reading that failed raises here, once; who asks after that starts another one.
        """
        if name in self._there:
            self._there.move_to_end(name)
            return True
        coming = self._coming.get(name)
        if coming is None:
            folder = self._folder(name)
            self._take_abandoned()
            coming = self._reader.submit(self._read, name, folder, self._versions.get(name))
            coming.add_done_callback(self._count)
            self._coming[name] = coming
            return False
        if not coming.done():
            return False
        del self._coming[name]
        try:
            self._take(name, *coming.result())
        except EngineError:
            self.num_failures += 1
            raise
        return True

    def _take(self, name: str, adapter: Adapter, version: Version) -> None:
        self.num_loads += 1
        self._versions[name] = version
        self._there[name] = adapter
        self._make_room()

    def _take_abandoned(self) -> None:
        """What was read for requests that are gone counts as the rest does, and makes room."""
        for name, coming in list(self._coming.items()):
            if coming.done() and coming.exception() is None:
                del self._coming[name]
                self._take(name, *coming.result())

    def get(self, name: str) -> Adapter:
        """The weights of an adapter that is ready."""
        return self._there[name]

    def hold(self, name: str) -> None:
        """Keep an adapter that is ready until `drop`: a plan is going to put it on the device."""
        self._held[name] = self._held.get(name, 0) + 1

    def drop(self, name: str) -> None:
        self._held[name] -= 1
        if not self._held[name]:
            del self._held[name]

    def close(self) -> None:
        """End the thread; what waits to be read is not read any more."""
        self._reader.shutdown(wait=True, cancel_futures=True)

    def _count(self, _ended: Future[tuple[Adapter, Version]]) -> None:
        self.num_ended += 1

    def _folder(self, name: str) -> Path:
        if name not in self._folders:
            raise AdapterNotFound(f"there is no adapter {name!r}.", "model")
        return self._folders[name]

    def _make_room(self) -> None:
        """Let go of the least recently used until the rest fits; the newest stays."""
        newest = next(reversed(self._there))
        for name in list(self._there):
            if len(self._there) <= self._max_host:
                return
            if name not in self._held and name != newest:
                del self._there[name]

    def _read(self, name: str, folder: Path, known: Version | None) -> tuple[Adapter, Version]:
        """In the thread. Whatever goes wrong reaches whoever wants the adapter, as our own error."""
        try:
            found = AdapterFolder(folder, self._hparams, self._max_rank)
            if known not in (None, found.version):
                raise CheckpointError(
                    f"{folder}: was changed since it was first read, and prefixes may be cached of "
                    "what it was. Unload the adapter and load it again."
                )
            adapter = found.read(name) if self._pack is None else self._pack(found.stored(name))
        except EngineError as error:
            raise type(error)(f"adapter {name!r} could not be loaded: {error}") from error
        except Exception as error:  # the border of the thread: reported to the request
            raise CheckpointError(
                f"adapter {name!r} could not be loaded from {folder}: "
                f"{type(error).__name__}: {error}"
            ) from error
        return adapter, found.version
