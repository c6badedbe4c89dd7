"""Keeps a request that kills the engine from killing it again and again.

A request that runs while the engine dies, hangs or fails a step gets a strike. Requests with one
strike are suspects: they run one at a time beside the others, so that only a guilty one gets the
second strike. Two strikes block a request for BLOCKED_S. A request that completes loses its strike.
Requests are recognised by their content, so that a client's retry is the same request.
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
    """A hash of what the engine computes: prompt, sampling params, grammar and adapter."""
    content = msgspec.msgpack.encode((request.adapter, request.sampling, request.prompt))
    return hashlib.blake2b(content, digest_size=FINGERPRINT_BYTES).digest()


@dataclass(frozen=True, slots=True)
class _Suspect:
    strikes: int
    struck_at: float
    how: str  # the engine ended the last time


class Quarantine:
    """Owns the suspects, and which requests wait because of them. Knows no process and no socket."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._suspects: dict[bytes, _Suspect] = {}
        self._in_flight: dict[str, bytes] = {}  # fingerprints by request id
        self._held: dict[str, Add] = {}
        self._running: str | None = None  # the one suspect that the engine has

    @property
    def num_suspects(self) -> int:
        return len(self._suspects)

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def num_held_tokens(self) -> int:
        return sum(len(add.request.prompt) for add in self._held.values())

    def is_held(self, request_id: str) -> bool:
        return request_id in self._held

    def check(self, fingerprints: Iterable[bytes]) -> None:
        """Raise RequestBlocked if one of them is blocked."""
        if not self._suspects:
            return
        for each in fingerprints:
            suspect = self._find(each)
            if suspect is not None and suspect.strikes >= MAX_STRIKES:
                raise self._blocked(suspect)

    def _blocked(self, suspect: _Suspect) -> RequestBlocked:
        left_s = suspect.struck_at + BLOCKED_S - self._clock()
        return RequestBlocked(
            f"this request is blocked: the engine failed {suspect.strikes} times while it was "
            f"running (last: {suspect.how}). The server refuses it for {math.ceil(left_s / 60)} "
            "min. Change the request; the engine's log may say what is wrong with it."
        )

    def enter(self, add: Add) -> bool:
        """Take in a request. False: hold it back; `leave` returns it when it may run."""
        request_id = add.request.request_id
        self._in_flight[request_id] = add.fingerprint
        if self._find(add.fingerprint) is None:
            return True
        if self._running is None:
            self._running = request_id
            return True
        self._held[request_id] = add
        return False

    def leave(self, request_id: str, completed: bool) -> list[Add]:
        """Forget a request; returns the held ones that may run now."""
        left = self._in_flight.pop(request_id, None)
        if left is None or not (self._suspects or self._held):
            return []
        if completed:
            self._suspects.pop(left, None)
        self._held.pop(request_id, None)
        if self._running == request_id:
            self._running = None
        return self._release()

    def _release(self) -> list[Add]:
        released = []
        for request_id, add in list(self._held.items()):
            if self._find(add.fingerprint) is not None:
                if self._running is not None:
                    continue
                self._running = request_id
            released.append(self._held.pop(request_id))
        return released

    def strike(self, fingerprints: Iterable[bytes], how: str) -> None:
        """Give a strike to each; `how` says what happened to the engine."""
        now = self._clock()
        for each in filter(None, fingerprints):
            before = self._find(each)
            strikes = 1 if before is None else before.strikes + 1
            self._suspects[each] = _Suspect(strikes, now, how)
        while len(self._suspects) > MAX_SUSPECTS:
            self._suspects.pop(min(self._suspects, key=self._weight))

    def _weight(self, key: bytes) -> tuple[int, float]:
        suspect = self._suspects[key]
        return suspect.strikes, suspect.struck_at

    def _find(self, key: bytes) -> _Suspect | None:
        """The suspect of this fingerprint, unless its time is over."""
        suspect = self._suspects.get(key)
        if suspect is None or self._clock() - suspect.struck_at <= BLOCKED_S:
            return suspect
        del self._suspects[key]
        return None

    def in_flight(self, fingerprints: Collection[bytes]) -> set[str]:
        """The requests of this content that the engine has."""
        return {
            request_id
            for request_id, key in self._in_flight.items()
            if key in fingerprints and request_id not in self._held
        }

    def blocked_in_flight(self) -> dict[str, RequestBlocked]:
        """The error of each request that was taken in before a strike blocked it."""
        found = {request_id: self._find(key) for request_id, key in self._in_flight.items()}
        return {
            request_id: self._blocked(suspect)
            for request_id, suspect in found.items()
            if suspect is not None and suspect.strikes >= MAX_STRIKES
        }

    def engine_ended(self) -> None:
        """Forget what was in flight; the strikes stay."""
        self._in_flight.clear()
        self._held.clear()
        self._running = None
