"""Arrival times."""

from __future__ import annotations

import statistics
from itertools import pairwise
from random import Random

import pytest

from windlass.errors import ConfigError
from windlass.tools.common.arrivals import Arrivals, Ramp
from windlass.tools.common.requests import TextRequest


def gaps(arrivals: Arrivals, count: int = 4000) -> list[float]:
    times = arrivals.times(count, Random(1))
    return [after - before for before, after in pairwise(times)]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_poisson_has_its_rate_and_burstiness(burstiness: float) -> None:
    found = gaps(Arrivals(rate=5.0, burstiness=burstiness))
    assert statistics.fmean(found) == pytest.approx(0.2)
    # Gamma-distributed gaps: deviation over mean is one over the square root of the shape.
    deviation = statistics.pstdev(found) / statistics.fmean(found)
    assert deviation == pytest.approx(burstiness**-0.5, rel=0.08)


def test_a_seed_gives_the_same_times() -> None:
    requests = [TextRequest(1)] * 20
    arrivals = Arrivals(rate=3.0)
    assert arrivals.set(requests, "1") == arrivals.set(requests, "1")
    assert arrivals.set(requests, "1") != arrivals.set(requests, "2")


def test_constant_burst_and_all_at_once() -> None:
    assert gaps(Arrivals("constant", 4.0), 5) == [0.25] * 4
    assert Arrivals("burst", 4.0, burst_size=2).times(5, Random(0)) == [0, 0, 0.5, 0.5, 1.0]
    assert Arrivals().times(3, Random(0)) == [0, 0, 0]


@pytest.mark.parametrize(("strategy", "middle"), [("linear", 5.5), ("exponential", 10**0.5)])
def test_a_ramp_goes_from_its_first_rate_to_its_last(strategy: str, middle: float) -> None:
    ramp = Ramp(strategy, 1.0, 10.0)  # type: ignore[arg-type]
    assert [ramp.rate(at) for at in (0, 0.5, 1)] == pytest.approx([1, middle, 10])
    arrivals = Arrivals("constant", ramp=ramp)
    times = arrivals.times(11, Random(0))
    assert times[1] == 1.0
    assert times[-1] - times[-2] == pytest.approx(1 / ramp.rate(0.9))
    events = arrivals.rate_changes([TextRequest(1, at=at) for at in times])
    assert events[0] == {"rps": 1, "at": 0.0}
    assert events[-1]["rps"] == 10


def test_a_trace_keeps_its_times_and_scales_by_speed() -> None:
    requests = [TextRequest(1, at=10.0), TextRequest(1, at=11.0), TextRequest(1, at=14.0)]
    assert [request.at for request in Arrivals("trace", speed=2.0).set(requests, "0")] == [
        0,
        0.5,
        2.0,
    ]


@pytest.mark.parametrize(
    ("made", "named"),
    [
        (lambda: Arrivals(rate=0), "--request-rate"),
        (lambda: Arrivals(burstiness=-1), "--burstiness"),
        (lambda: Arrivals("even"), "--arrivals 'even'"),  # type: ignore[arg-type]
        (lambda: Arrivals(burst_size=0), "--burst-size"),
        (lambda: Arrivals(burst_size=3), "--burst-size has an effect only"),
        (lambda: Arrivals(burstiness=2), "--burstiness has an effect only"),
        (lambda: Arrivals(rate=1, speed=2), "--trace-speed has an effect only"),
        (lambda: Arrivals("burst"), "--arrivals burst needs --request-rate"),
        (lambda: Arrivals("trace", 2.0), "--request-rate has no effect"),
        (lambda: Ramp("steep", 1, 2), "--ramp-up-strategy 'steep'"),  # type: ignore[arg-type]
        (lambda: Ramp("linear", 0, 2), "--ramp-up-start-rps"),
        (lambda: Arrivals(rate=3, ramp=Ramp("linear", 1, 2)), "--request-rate"),
    ],
)
def test_invalid_settings_are_rejected(made: object, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        made()  # type: ignore[operator]
