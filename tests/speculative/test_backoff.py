"""Back-off: waits double while attempts fail, and a success resets them."""

from __future__ import annotations

from windlass.core.speculation.backoff import Backoff, BackoffSchedule

SCHEDULE = BackoffSchedule(patience=2, first=4, max_wait=10)


def attempts(backoff: Backoff, steps: range) -> list[int]:
    """The steps with an attempt; all attempts fail."""
    found = []
    for step in steps:
        if backoff.is_due(step):
            found.append(step)
            backoff.failed(step, SCHEDULE)
    return found


def test_waits_start_after_patience_and_double() -> None:
    assert attempts(Backoff(), range(50)) == [0, 1, 5, 13, 23, 33, 43]


def test_reset_restarts_the_schedule() -> None:
    backoff = Backoff()
    attempts(backoff, range(30))
    backoff.reset()
    assert attempts(backoff, range(30, 50)) == [30, 31, 35, 43]


def test_a_failure_after_an_ended_wait_repeats_its_length() -> None:
    backoff = Backoff()
    assert attempts(backoff, range(10)) == [0, 1, 5]
    for _ in range(3):
        backoff.end_wait(10)
    assert attempts(backoff, range(10, 30)) == [10, 18, 28]
    backoff.end_wait(40)
    assert attempts(backoff, range(40, 60)) == [40, 50], "the wait was over already"
