"""Figures of a load, from synthetic timings."""

from __future__ import annotations

import numpy as np
import pytest

from windlass.errors import ConfigError
from windlass.tools.common.requests import Timing
from windlass.tools.common.summary import (
    parse_goodput,
    peak_concurrency,
    percentile,
    summarise,
    tokens_by_second,
)

# A slow start, three tokens in one chunk, a single token, a failure half way.
TIMINGS = [
    Timing(0.0, 0.0, 1.35, 100, 4, times=(0.5, 0.7, 1.0, 1.3), tokens=(1, 1, 1, 1)),
    Timing(0.0, 0.1, 0.9, 50, 4, times=(0.2, 0.8), tokens=(1, 3), num_cached=32, num_rejected=1),
    Timing(0.5, 1.0, 1.2, 10, 1, times=(1.2,), tokens=(1,)),
    Timing(0.5, 1.0, 1.1, 10, 1, times=(1.05,), tokens=(1,), error="connection lost"),
]


def test_one_request() -> None:
    first, second, third, failed = TIMINGS
    assert first.ttft == 0.5
    assert first.tpot == pytest.approx(0.8 / 3)
    assert first.itls == pytest.approx([0.2, 0.3, 0.3])
    assert first.e2el == 1.3  # its last token, not the end of the connection
    assert second.tpot == pytest.approx(0.2)  # per token, not per chunk
    assert second.itls == pytest.approx([0.6])
    assert third.tpot is None
    assert not failed.is_good


def test_rates_count_only_successful_requests() -> None:
    summary = summarise(TIMINGS, 2.0)
    assert (summary.completed, summary.failed) == (3, 1)
    assert summary.total_input_tokens == 160
    assert summary.total_output_tokens == 9
    assert summary.request_throughput == 1.5
    assert summary.output_throughput == 4.5
    assert summary.total_token_throughput == 84.5
    assert summary.num_rejected == 1
    assert summary.cached_input_tokens == 32
    assert summary.errors == {"connection lost": 1}
    assert summary.request_goodput is None


def test_spreads_match_numpy() -> None:
    spread = summarise(TIMINGS, 2.0, percentiles=(25, 50, 99.9)).spreads["ttft"]
    values = [500.0, 100.0, 200.0]
    assert spread.mean == pytest.approx(np.mean(values))
    assert spread.median == pytest.approx(np.median(values))
    assert spread.std == pytest.approx(np.std(values))
    for share, value in spread.percentiles.items():
        assert value == pytest.approx(np.percentile(values, share))
    assert percentile([7.0], 99) == 7.0


def test_goodput_needs_every_target() -> None:
    def of(*specs: str) -> float | None:
        return summarise(TIMINGS, 2.0, parse_goodput(specs)).request_goodput

    assert of("ttft:200") == 1.0  # the second and the third; the failed request never counts
    assert of("ttft:200", "e2el:300") == 0.5
    assert of("tpot:210") == 1.0  # a single-token request has no TPOT
    assert of("ttft:1") == 0.0


@pytest.mark.parametrize("spec", ["ttft", "ttft:", "ttft:abc", "ttft:-1", "ttft:nan", "itl:5", ":"])
def test_invalid_goodput_is_rejected(spec: str) -> None:
    with pytest.raises(ConfigError, match=f"--goodput '{spec}'"):
        parse_goodput([spec])


def test_goodput_in_one_or_several_words_but_not_twice() -> None:
    assert parse_goodput(["ttft:500 tpot:40"]) == parse_goodput(["ttft:500", "tpot:40"])
    with pytest.raises(ConfigError, match="ttft twice"):
        parse_goodput(["ttft:1", "ttft:2"])


def test_peaks() -> None:
    assert tokens_by_second(TIMINGS) == [6, 4]
    summary = summarise(TIMINGS, 2.0)
    assert summary.max_output_tokens_per_s == 6
    assert summary.max_concurrent_requests == 3
    # A request that starts when another ends does not overlap it.
    assert peak_concurrency([Timing(0, 0, 1, 1, 1), Timing(0, 1, 2, 1, 1)]) == 1


def test_fields_and_lines_have_vllms_names() -> None:
    summary = summarise(TIMINGS, 2.0, {"ttft": 200.0}, percentiles=(99, 99.9))
    row = summary.row()
    assert row["p99.9_ttft_ms"] == pytest.approx(499.4, abs=0.1)
    for metric in ("ttft", "tpot", "itl", "e2el"):
        for name in ("mean", "median", "std", "p99"):
            assert isinstance(row[f"{name}_{metric}_ms"], float)
    text = "\n".join(summary.lines(max_concurrency=4, request_rate=2.0))
    for line in (
        "Successful requests:                     3",
        "Failed requests:                         1",
        "Maximum request concurrency:             4",
        "Request rate configured (RPS):           2.00",
        "Request goodput (req/s):                 1.00",
        "Output token throughput (tok/s):         4.50",
        "Peak concurrent requests:                3",
        "P99.9 TTFT (ms):                         499.40",
        "Mean ITL (ms):                           350.00",
    ):
        assert line in text.splitlines()


def test_a_summary_without_successful_requests() -> None:
    summary = summarise([TIMINGS[3]], 1.0)
    assert summary.request_throughput == 0.0
    assert "no values" in summary.lines()
    assert summarise([], 0.0).completed == 0
