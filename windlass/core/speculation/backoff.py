"""Exponential back-off, counted in steps: repeated failures make the next attempt rarer.

Has no clock. The caller defines what an attempt is and whether it succeeded.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BackoffSchedule:
    """Waits in steps. The first wait begins after `patience` failures in a row."""

    patience: int
    first: int
    max_wait: int


class Backoff:
    """Tracks when the next attempt is due; the first is due at once."""

    __slots__ = ("_due", "_num_failures", "_wait")

    def __init__(self) -> None:
        self._due = 0  # step
        self._wait = 0  # length of the current wait, or of the last
        self._num_failures = 0  # in a row

    def is_due(self, now: int) -> bool:
        """Whether an attempt is due in this step."""
        return now >= self._due

    def failed(self, now: int, schedule: BackoffSchedule) -> None:
        """Count a failed attempt. After a wait, one failure starts the next, twice as long."""
        self._num_failures += 1
        if self._num_failures >= schedule.patience:
            self._wait = min(max(schedule.first, 2 * self._wait), schedule.max_wait)
            self._due = now + self._wait

    def end_wait(self, now: int) -> None:
        """Make an attempt due now; if it fails, a wait as long as the current one follows."""
        if not self.is_due(now):
            self._due = now
            self._wait //= 2

    def reset(self) -> None:
        """Forget all failures: an attempt succeeded, or conditions changed."""
        self._due = self._wait = self._num_failures = 0
