"""Rate search: doubling, bisection, and targets that no rate meets."""

from __future__ import annotations

import pytest

from windlass.tools.load.rate_search import RateSearch


def _found(limit: float, min_share: float = 0.9) -> RateSearch:
    """Search against a server that meets its targets up to a rate."""
    search = RateSearch(min_share)
    while (rate := search.next_rate()) is not None:
        search.add(rate, 1.0 if rate <= limit else 0.5)
    return search


@pytest.mark.parametrize("limit", [0.3, 1.0, 5.7, 300.0])
def test_the_search_converges_from_below(limit: float) -> None:
    search = _found(limit)
    assert search.best is not None
    assert limit / 1.1 <= search.best <= limit
    assert len(search.shares) <= 14
    found = f"{search.best:g} req/s (100%); 50% at {search.lowest_failing:g} req/s."
    assert found in search.verdict()


def test_no_rate_or_every_rate_meets_the_targets() -> None:
    assert _found(0.001).best is None
    assert _found(0.001).verdict().startswith("No rate was found at which at least 90% of the")
    assert _found(1e9).verdict().endswith("no rate was too high.")
    assert RateSearch(0.9).verdict() == "No rate was measured to its end."


def test_a_passing_rate_above_a_failing_rate_does_not_count() -> None:
    search = RateSearch(0.9, {1.0: 1.0, 2.0: 0.8, 4.0: 0.95})
    assert (search.best, search.lowest_failing) == (1.0, 2.0)
    assert search.next_rate() == 1.41
