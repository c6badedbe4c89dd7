"""Pauses between tries: they grow while tries are in vain, and end when one pays."""

from __future__ import annotations

from windlass.spec.pause import Lengths, Pause

LENGTHS = Lengths(patience=2, first=4, longest=10)


def tries(pause: Pause, steps: range) -> list[int]:
    """The steps with one, all of them in vain."""
    found = []
    for step in steps:
        if pause.is_over(step):
            found.append(step)
            pause.in_vain(step, LENGTHS)
    return found


def test_patience_comes_first_and_each_pause_is_twice_as_long_as_the_last() -> None:
    assert tries(Pause(), range(50)) == [0, 1, 5, 13, 23, 33, 43]


def test_when_a_try_paid_all_is_as_at_first() -> None:
    pause = Pause()
    tries(pause, range(30))
    pause.begin_anew()
    assert tries(pause, range(30, 50)) == [30, 31, 35, 43]


def test_one_that_is_ended_goes_on_as_long_as_it_was() -> None:
    pause = Pause()
    assert tries(pause, range(10)) == [0, 1, 5]
    for _ in range(3):
        pause.end(10)
    assert tries(pause, range(10, 30)) == [10, 18, 28]
    pause.end(40)
    assert tries(pause, range(40, 60)) == [40, 50], "it was over"
