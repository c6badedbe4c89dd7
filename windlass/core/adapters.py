"""Residency of LoRA adapters: assigns device slots to adapters.

Adapters of running requests are pinned. Other resident adapters are evicted, least recently used
first, when a slot is needed. This module neither reads nor computes adapters.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from typing import Protocol

from windlass.core.memory import AdapterUse, Place
from windlass.core.types import AdapterSize, AdapterStats
from windlass.errors import AdapterConflict, AdapterNotFound, EngineError

# Younger requests that may take a slot before the longest-waiting request gets the next one.
_MAX_PASSES = 64


class Shelf(Protocol):
    """Adapters in host memory, by name."""

    num_loads: int
    num_ended: int  # finished reads, including failures; counted by the reader thread

    @property
    def names(self) -> Collection[str]: ...

    @property
    def num_in_memory(self) -> int: ...

    @property
    def max_in_memory(self) -> int: ...

    def register(self, name: str, folder: str, *roots: str) -> None:
        """Add a name. With `roots`, only files inside of these folders are read."""
        ...

    def version(self, name: str) -> str:
        """The version of an adapter's weights; other weights under the same name have another version."""
        ...

    def ready(self, name: str) -> bool:
        """Whether the adapter is in host memory; if not, start to read it. Raises once if the read failed."""
        ...

    def in_memory(self, name: str) -> bool: ...

    def size(self, name: str) -> AdapterSize | None:
        """The size of an adapter when it was last read; None: it was not."""
        ...

    def hold(self, name: str) -> None: ...

    def drop(self, name: str) -> None: ...

    def unregister(self, name: str) -> None: ...


class _NoShelf:
    """The shelf of an engine without adapters."""

    num_loads = num_ended = 0
    names: Collection[str] = ()
    num_in_memory = max_in_memory = 0

    def ready(self, name: str) -> bool:  # noqa: ARG002
        return False

    in_memory = ready

    def size(self, name: str) -> None:
        pass

    def version(self, name: str) -> str:
        raise AssertionError(f"{name!r} is not registered")

    def register(self, name: str, folder: str, *roots: str) -> None:  # noqa: ARG002
        raise AdapterConflict(
            f"the adapter {name!r:.200} cannot be loaded from {folder}: the engine was started "
            "without --enable-lora.",
            "lora_name",
        )

    def hold(self, name: str) -> None:
        pass

    drop = unregister = hold


class Adapters:
    """Owns the device slots, 1 to `num_slots`, and counts the users of each adapter."""

    def __init__(self, num_slots: int = 0, shelf: Shelf | None = None) -> None:
        self._shelf: Shelf = shelf or _NoShelf()
        self._enabled = shelf is not None
        self._num_slots = num_slots
        self._free = list(range(num_slots, 0, -1))
        self._slots: dict[str, int] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()  # resident and not pinned
        self._pins: dict[str, int] = {}
        self._orders: dict[int, str] = {}  # slots that the next plan fills
        self._given: list[str] = []  # freed when the last plan has run
        self._users: dict[str, int] = {}  # running and queued requests
        self._num_requests: dict[str, int] = {}  # since the adapter was loaded
        self._leaving: set[str] = set()  # to be unloaded when the last user ends
        self._salts: dict[str, str] = {}  # distinguish an adapter from others of the same name
        self._requested: set[str] = set()  # by this plan
        self._num_passes = 0
        self._waits_longest: str | None = None  # the request that waits longest for a slot
        self._closed = False  # to younger requests, until the next plan
        self._fresh = True  # no `available` call in this plan yet
        self._num_waiting = 0  # requests passed over by the last plan
        self._num_changes = 0

    # ---- names -------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """Adapters that requests may name."""
        return [name for name in self._shelf.names if name not in self._leaving]

    def load(self, name: str, folder: str, *roots: str) -> None:
        """Register an adapter and start to read it; poll `loaded` for the result."""
        if name in self._leaving:
            raise self._still_leaving(name)
        self._shelf.register(name, folder, *roots)

    def loaded(self, name: str) -> bool:
        """Whether a `load` has finished. A failed load raises and removes the name."""
        if name not in self._shelf.names:
            raise AdapterNotFound(f"the adapter {name!r} was unloaded meanwhile.", "lora_name")
        try:
            return self._shelf.ready(name)
        except EngineError:
            self.unload(name)
            raise

    def unload(self, name: str) -> int:
        """Refuse new requests for an adapter and drop it after the last. Returns the number of users."""
        if name in self._leaving:
            raise self._still_leaving(name)
        if name not in self._shelf.names:
            raise AdapterNotFound(f"there is no adapter {name!r:.200} here.", "lora_name")
        num_users = self._users.get(name, 0)
        if num_users:
            self._leaving.add(name)
        else:
            self._forget(name)
        return num_users

    def _still_leaving(self, name: str) -> AdapterConflict:
        return AdapterConflict(
            f"the adapter {name!r} is being unloaded; {self._users[name]} requests with it are "
            "still running. Try again when they have ended.",
            "lora_name",
        )

    def _forget(self, name: str) -> None:
        self._leaving.discard(name)
        self._idle.pop(name, None)
        slot = self._slots.pop(name, None)
        if slot is not None:
            self._free.append(slot)
        self._salts.pop(name, None)
        self._num_requests.pop(name, None)
        self._num_changes += 1
        self._shelf.unregister(name)

    # ---- requests ----------------------------------------------------------------------------

    def enter(self, name: str, version: str = "") -> str:
        """Count a new request. Returns the salt of its cached blocks.

        `version`: the weights that the request needs; empty accepts any.
        """
        if name in self._leaving or name not in self._shelf.names:
            hint = "" if self._enabled else " The engine was started without --enable-lora."
            raise AdapterNotFound(f"there is no adapter {name!r:.200} here.{hint}", "model")
        # A name may be loaded again from another folder, and cached blocks may outlive the engine.
        if name not in self._salts:
            self._salts[name] = f"{name}#{self._shelf.version(name)}"
        salt = self._salts[name]
        if version and salt != f"{name}#{version}":
            raise AdapterConflict(
                f"the adapter {name!r:.200} has other weights here than on the server that sends the "
                "request. Give both the same files.",
                "model",
            )
        self._users[name] = self._users.get(name, 0) + 1
        self._num_requests[name] = self._num_requests.get(name, 0) + 1
        return salt

    def leave(self, name: str) -> None:
        """Count a request that has ended."""
        self._users[name] -= 1
        if not self._users[name]:
            del self._users[name]
            if name in self._leaving:
                self._forget(name)

    # ---- a plan ------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start a plan, when the last plan has run or was dropped."""
        for name in self._given:
            self._shelf.drop(name)
        self._given.clear()
        self._requested.clear()
        self._closed = False
        self._fresh = True

    def available(self, name: str, request_id: str) -> bool:
        """Whether a queued request can get its adapter now. Raises if the read failed.

        Call in queue order. Adapters of requests far back in the queue are not read yet, because
        they would evict adapters that are needed sooner.
        """
        if self._fresh:
            self._fresh, self._num_waiting = False, 0
        if self._closed:
            can = False
        elif name in self._slots:
            can = True
        elif name not in self._requested and len(self._requested) >= self._shelf.max_in_memory:
            can = False
        else:
            self._requested.add(name)
            ready = self._shelf.ready(name)
            can = ready and bool(self._free or self._idle)
            if ready and not can:
                self._record_wait(request_id)
        self._num_waiting += not can
        return can

    def is_resident(self, name: str) -> bool:
        """Whether the adapter is on the device."""
        return name in self._slots

    def _record_wait(self, request_id: str) -> None:
        """Prevent starvation: after many younger requests, the oldest gets the next slot."""
        if self._waits_longest is None:
            self._waits_longest, self._num_passes = request_id, 0
        elif self._waits_longest == request_id and self._num_passes >= _MAX_PASSES:
            self._closed = True

    def acquire(self, name: str, request_id: str) -> int:
        """Pin an adapter that is `available`. Returns its slot."""
        if name not in self._slots:
            slot = self._free.pop() if self._free else self._slots.pop(self._idle.popitem(False)[0])
            self._slots[name] = slot
            self._orders[slot] = name
            self._shelf.hold(name)
        self._idle.pop(name, None)
        self._pins[name] = self._pins.get(name, 0) + 1
        if request_id == self._waits_longest:
            self._waits_longest = None
        else:
            self._num_passes += 1
        return self._slots[name]

    def release(self, name: str) -> None:
        """Unpin an adapter after its request ended or was preempted. It stays until evicted."""
        self._pins[name] -= 1
        if not self._pins[name]:
            del self._pins[name]
            self._idle[name] = None
            self._num_changes += 1

    def orders(self) -> list[tuple[int, str]]:
        """The adapters that the current plan must copy into slots."""
        if not self._orders:
            return []
        made = list(self._orders.items())
        self._given = [name for _, name in made]
        self._orders.clear()
        return made

    def forget_idle(self) -> None:
        """Evict idle adapters after a failed plan: their copies may be incomplete."""
        for name in self._idle:
            self._free.append(self._slots.pop(name))
        self._idle.clear()
        self._num_changes += 1

    def drop_waiter(self, request_id: str) -> None:
        """Forget a queued request that is gone."""
        if request_id == self._waits_longest:
            self._waits_longest = None

    # ---- state and statistics ----------------------------------------------------------------

    @property
    def state(self) -> tuple[int, int]:
        """While this is unchanged, a request without its adapter cannot get it."""
        return self._num_changes, self._shelf.num_ended

    def uses(self) -> tuple[AdapterUse, ...]:
        """All adapters, also those that are being unloaded."""
        return tuple(
            AdapterUse(
                name,
                place=self._place(name),
                size=self._shelf.size(name),
                num_running=self._pins.get(name, 0),
                num_waiting=self._users.get(name, 0) - self._pins.get(name, 0),
                num_requests=self._num_requests.get(name, 0),
            )
            for name in self._shelf.names
        )

    def _place(self, name: str) -> Place:
        if name in self._slots:
            return "device"
        return "memory" if self._shelf.in_memory(name) else "disk"

    def stats(self) -> AdapterStats | None:
        """None if the engine has no adapters."""
        shelf = self._shelf
        if not self._enabled:
            return None
        num_not_running = sum(self._users.values()) - sum(self._pins.values())
        return AdapterStats(
            num_resident=len(self._slots),
            num_in_memory=shelf.num_in_memory,
            num_loaded=len(shelf.names),
            num_waiting=min(self._num_waiting, num_not_running),
            num_reads=shelf.num_loads,
            num_slots=self._num_slots,
            running=tuple(self._pins),
            waiting=tuple(
                name for name, count in self._users.items() if count > self._pins.get(name, 0)
            ),
        )
