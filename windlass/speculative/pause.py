"""When to try again what was in vain: the more often in vain, the longer until the next try.

Counts steps and has no clock. What a try is, and when one paid, its holder knows.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of pauses, in steps. The first begins when `patience` tries in a row were in vain."""

    patience: int
    first: int
    longest: int


class Pause:
    """Knows when the next try is due; at first that is at once."""

    __slots__ = ("_due", "_length", "_num_vain")

    def __init__(self) -> None:
        self._due = 0  # the step
        self._length = 0  # of this pause, or of the last
        self._num_vain = 0  # tries in a row

    def is_over(self, now: int) -> bool:
        """Whether a try is due in this step."""
        return now >= self._due

    def in_vain(self, now: int, lengths: Lengths) -> None:
        """A try gave nothing. After a pause one such is enough for the next, twice as long."""
        self._num_vain += 1
        if self._num_vain >= lengths.patience:
            self._length = min(max(lengths.first, 2 * self._length), lengths.longest)
            self._due = now + self._length

    def end(self, now: int) -> None:
        """Something speaks for a try now; if it is in vain, a pause as long as this one follows."""
        if not self.is_over(now):
            self._due = now
            self._length //= 2

    def begin_anew(self) -> None:
        """A try paid, or what was tried before says nothing of now."""
        self._due = self._length = self._num_vain = 0
