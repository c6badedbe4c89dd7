"""The engine's state as the HTTP process sees it: heartbeat, health, backlog, restart policy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

LOST_AFTER = 1.5  # hang timeouts without a heartbeat, until the server kills the engine


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How often a dead engine is restarted before the server exits."""

    max_restarts: int = 5
    window_s: float = 600.0
    first_pause_s: float = 0.5
    max_pause_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Health:
    """`reason`: why it is not ok, or what is degraded. `status`: the response's field with a reason."""

    ok: bool
    reason: str = ""
    status: str = "unavailable"


@dataclass(frozen=True, slots=True)
class Backlog:
    """Requests in the engine's queue, and those sent to it that it has not reported yet."""

    num_running: int
    num_waiting: int
    num_unseen: int
    num_tokens: int

    def at_most(self, num_in_flight: int) -> Backlog:
        """Without requests that have ended since the engine's report, which may be 100 ms old.

        Which of them were running is not known: assume those that leave the longest queue.
        """
        excess = max(0, self.num_running + self.num_waiting + self.num_unseen - num_in_flight)
        running = max(0, self.num_running - excess)
        excess -= self.num_running - running
        waiting = max(0, self.num_waiting - excess)
        excess -= self.num_waiting - waiting
        unseen = self.num_unseen - excess
        return Backlog(
            num_running=running,
            num_waiting=waiting,
            num_unseen=unseen,
            num_tokens=self.num_tokens if waiting + unseen else 0,
        )


class Heartbeat:
    """Measures how long the engine has sent nothing, in ticks of the HTTP process.

    A late tick counts as at most two: an HTTP process that was stopped, or whose event loop was
    blocked, must not take its own pause for silence of the engine. `timeout_s` 0: no limit.
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.silent_s = 0.0
        self.set_timeout(timeout_s)
        self._clock = clock
        self._ticked_at = clock()
        self._paused = False

    def set_timeout(self, timeout_s: float) -> None:
        self.interval_s = min(1.0, timeout_s / 8) or 1.0
        self._timeout_s = timeout_s

    def heard(self) -> None:
        self.silent_s = 0.0

    def tick(self) -> None:
        """Count the time since the last tick. Called every `interval_s`."""
        now = self._clock()
        if not self._paused:
            self.silent_s += min(now - self._ticked_at, 2 * self.interval_s)
        self._ticked_at = now

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Expect no heartbeat during a slow operation of the engine."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False
            self.heard()

    @property
    def is_late(self) -> bool:
        """Whether the engine counts as hung; it may recover."""
        return 0.0 < self._timeout_s < self.silent_s

    @property
    def is_lost(self) -> bool:
        """Whether the engine must be killed."""
        return 0.0 < self._timeout_s * LOST_AFTER < self.silent_s
