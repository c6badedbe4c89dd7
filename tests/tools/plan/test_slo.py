"""InflightPrefixes: how they are written, and by how much they are missed."""

from __future__ import annotations

import pytest

from windlass.errors import ConfigError
from windlass.tools.common.requests import Timing
from windlass.tools.common.slo import parse_slo
from windlass.tools.common.summary import summarise


def timing(first: float, last: float) -> Timing:
    return Timing(0.0, 0.0, last, 4, 11, (first, last), (1, 10))


def test_targets_are_milliseconds_of_a_statistic() -> None:
    slo = parse_slo(["ttft_p99=500ms,tpot_mean=0.04s", "e2el_p99.9<=2s"])
    assert [(item.name, item.max_ms) for item in slo.targets] == [
        ("ttft_p99", 500.0),
        ("tpot_mean", 40.0),
        ("e2el_p99.9", 2000.0),
    ]
    assert slo.goodput == {"ttft": 500.0, "tpot": 40.0, "e2el": 2000.0}
    assert slo.percentiles == [90.0, 99.0, 99.9]
    assert str(slo) == "ttft_p99=500ms,tpot_mean=40ms,e2el_p99.9=2000ms"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("ttft=500ms", "expected a target such as"),
        ("ttft_p99=500", "expected a target such as"),
        ("speed_p99=5ms", "ttft, tpot, itl, e2el, then _mean"),
        ("ttft_p99=0ms", "above 0"),
        ("ttft_p101=5ms", "at most 100"),
        ("ttft_p99=1e3e3ms", "above 0"),
        ("ttft_p99=5ms,ttft_p99=6ms", "twice"),
    ],
)
def test_bad_targets_are_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_slo([text])


def test_by_how_much_it_is_missed() -> None:
    timings = [timing(0.1, 1.1), timing(0.3, 1.3)]
    slo = parse_slo(["ttft_p100=200ms,tpot_mean=150ms"])
    summary = summarise(timings, 2.0, slo.goodput, slo.percentiles)
    assert slo.excess(summary) == pytest.approx(0.5)
    assert slo.misses(summary) == ["ttft_p100 is 300.0 ms, 100.0 ms (50 %) above 200 ms"]
    assert summary.request_goodput == 0.5
    assert not slo.is_met(summary)
    assert parse_slo(["tpot_p90=101ms"]).is_met(summary)
