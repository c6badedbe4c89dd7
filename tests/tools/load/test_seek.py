"""Looking for the highest rate: doubling, halving the gap, and rates that nothing meets."""

from __future__ import annotations

import pytest

from windlass.tools.load.seek import Seek


def _found(limit: float, wanted: float = 0.9) -> Seek:
    """With a server that keeps its targets up to a rate."""
    seek = Seek(wanted)
    while (rate := seek.next_rate()) is not None:
        seek.note(rate, 1.0 if rate <= limit else 0.5)
    return seek


@pytest.mark.parametrize("limit", [0.3, 1.0, 5.7, 300.0])
def test_it_comes_near_from_below(limit: float) -> None:
    seek = _found(limit)
    assert seek.best is not None
    assert limit / 1.1 <= seek.best <= limit
    assert len(seek.shares) <= 14
    assert f"{seek.best:g} req/s (100% do); at {seek.miss:g} req/s 50% do." in seek.verdict()


def test_nothing_is_good_enough_or_everything_is() -> None:
    assert _found(0.001).best is None
    assert _found(0.001).verdict().startswith("At no rate at least 90% of the requests meet")
    assert _found(1e9).verdict().endswith("no rate was too high.")
    assert Seek(0.9).verdict() == "No rate was measured to its end."


def test_a_good_rate_above_a_bad_one_does_not_count() -> None:
    seek = Seek(0.9, {1.0: 1.0, 2.0: 0.8, 4.0: 0.95})
    assert (seek.best, seek.miss) == (1.0, 2.0)
    assert seek.next_rate() == 1.41
