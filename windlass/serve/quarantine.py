"""Prevents a request that kills the engine from killing it repeatedly.

A request that is running when its engine dies, hangs or fails a step gets a strike. Requests with
one strike are suspects: only one suspect runs at a time, beside other requests and in one of all
replicas, so that an innocent request does not get a second strike. Two strikes block a request for
BLOCKED_S. A request that completes loses its strike. Requests are identified by their content, so
that a client's retry counts as the same request. The engines of one server share the strikes: a
request that ends the engine of one model must not end those of its fallbacks.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import msgspec

from windlass.core.types import NewRequest
from windlass.errors import RequestBlocked
from windlass.serve.journal import FINGERPRINT_BYTES
from windlass.serve.messages import Add

MAX_STRIKES = 2
MAX_SUSPECTS = 1024
BLOCKED_S = 3600.0  # after the last strike


def fingerprint(request: NewRequest) -> bytes:
    """Hash the content of a request: prompt, sampling and pooling params, grammar and adapter."""
    if request.fingerprint:
        return request.fingerprint
    return hash_content(
        msgspec.msgpack.encode((request.adapter, request.sampling, request.prompt, request.pooling))
    )


def hash_content(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=FINGERPRINT_BYTES).digest()


@dataclass(frozen=True, slots=True)
class _Suspect:
    strikes: int
    struck_at: float
    how: str  # how the engine failed at the last strike
    incident: str = ""  # identifies the last strike


class Suspects:
    """Owns the strikes, by fingerprint."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._suspects: dict[bytes, _Suspect] = {}

    def __len__(self) -> int:
        return len(self._suspects)

    def __contains__(self, key: bytes) -> bool:
        return self._find(key) is not None

    def strike(self, fingerprints: Iterable[bytes], how: str, incident: str = "") -> None:
        """Give each fingerprint a strike; `how` describes the failure of the engine.

        One failure is one strike, even if several equal requests were running. `incident`: strikes of
        one failure that arrive one by one count once.
        """
        now = self._clock()
        for each in dict.fromkeys(filter(None, fingerprints)):
            before = self._find(each)
            if before is None:
                self._suspects[each] = _Suspect(1, now, how, incident)
            elif not incident or incident != before.incident:
                self._suspects[each] = _Suspect(before.strikes + 1, now, how, incident)
        while len(self._suspects) > MAX_SUSPECTS:
            self._suspects.pop(min(self._suspects, key=self._eviction_order))

    def block(self, key: bytes, how: str) -> None:
        """Block a fingerprint that another process has blocked."""
        if key and self.blocked(key) is None:
            self._suspects[key] = _Suspect(MAX_STRIKES, self._clock(), how)

    def _eviction_order(self, key: bytes) -> tuple[int, float]:
        """Fewest strikes first, then the oldest."""
        suspect = self._suspects[key]
        return suspect.strikes, suspect.struck_at

    def clear(self, key: bytes) -> None:
        """Remove the strikes of a request that has completed."""
        self._suspects.pop(key, None)

    def blocked(self, key: bytes) -> RequestBlocked | None:
        """The error of a request that has two strikes; None: it may run."""
        suspect = self._find(key)
        if suspect is None or suspect.strikes < MAX_STRIKES:
            return None
        left_s = suspect.struck_at + BLOCKED_S - self._clock()
        return RequestBlocked(
            f"this request is blocked: the engine failed {suspect.strikes} times while it was "
            f"running (last: {suspect.how}). The server refuses it for {math.ceil(left_s / 60)} "
            "min. Change the request; the engine's log may show the cause."
        )

    def check(self, fingerprints: Iterable[bytes]) -> None:
        """Raise RequestBlocked if any fingerprint is blocked."""
        if not self._suspects:
            return
        for each in fingerprints:
            if (error := self.blocked(each)) is not None:
                raise error

    def _find(self, key: bytes) -> _Suspect | None:
        """The suspect of this fingerprint, unless it has expired."""
        suspect = self._suspects.get(key)
        if suspect is None or self._clock() - suspect.struck_at <= BLOCKED_S:
            return suspect
        del self._suspects[key]
        return None


class Quarantine:
    """Owns the requests that one client holds back. Knows no process and no socket."""

    def __init__(self, suspects: Suspects | None = None) -> None:
        self.suspects = Suspects() if suspects is None else suspects  # other clients may share them
        self._in_flight: dict[str, bytes] = {}  # fingerprints by request id
        self._held: dict[str, Add] = {}
        self._running: str | None = None  # the suspect that an engine is running

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def num_held_tokens(self) -> int:
        return sum(len(add.request.prompt) for add in self._held.values())

    def is_held(self, request_id: str) -> bool:
        return request_id in self._held

    def enter(self, add: Add) -> bool:
        """Add a request. False: it is held back until `leave` returns it."""
        request_id = add.request.request_id
        self._in_flight[request_id] = add.fingerprint
        if add.fingerprint not in self.suspects:
            return True
        if self._running is None:
            self._running = request_id
            return True
        self._held[request_id] = add
        return False

    def leave(self, request_id: str, completed: bool) -> list[Add]:
        """Remove a request; returns the held requests that may run now."""
        fingerprint = self._in_flight.pop(request_id, None)
        if fingerprint is None or not (self.suspects or self._held):
            return []
        if completed:
            self.suspects.clear(fingerprint)
        self._held.pop(request_id, None)
        if self._running == request_id:
            self._running = None
        return self._release()

    def _release(self) -> list[Add]:
        released = []
        for request_id, add in list(self._held.items()):
            if add.fingerprint in self.suspects:
                if self._running is not None:
                    continue
                self._running = request_id
            released.append(self._held.pop(request_id))
        return released

    def blocked_in_flight(self) -> dict[str, RequestBlocked]:
        """The error of each request in flight whose content is now blocked."""
        found = ((name, self.suspects.blocked(key)) for name, key in self._in_flight.items())
        return {name: error for name, error in found if error is not None}

    def engine_ended(self, request_ids: Collection[str]) -> list[Add]:
        """Remove the requests of an engine that ended; the strikes stay.

        Returns the held requests that may run now, in another engine.
        """
        for request_id in request_ids:
            self._in_flight.pop(request_id, None)
            self._held.pop(request_id, None)
            if self._running == request_id:
                self._running = None
        return self._release()
