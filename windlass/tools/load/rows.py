"""Converts a run to a row of a record: figures, percentile curves, and time series.

Also writes rows as CSV, without the nested values.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from windlass.tools.common.requests import Timing
from windlass.tools.common.summary import METRICS, Summary, percentile, values_of
from windlass.tools.load.generator import Outcome
from windlass.tools.load.monitor import MetricsSample, speculation

CURVE = (0, 1, 5, *range(10, 100, 10), 95, 98, 99, 99.5, 100)  # the percentiles of a curve
_MAX_POINTS = 300  # of a time series
_NESTED = (list, dict)


def make_row(
    summary: Summary, outcome: Outcome, samples: Sequence[MetricsSample]
) -> dict[str, Any]:
    """The figures of one run and the data of its plots."""
    curves = {}
    for metric in METRICS:
        values = values_of(outcome.timings, metric)
        if values:
            curves[metric] = [round(percentile(values, share), 3) for share in CURVE]
    return {
        **summary.row(),
        **speculation(samples),
        "stopped": outcome.stopped,
        "num_left": outcome.num_left,
        "errors": summary.errors,
        "curves": curves,
        "over_time": _over_time(outcome),
        "server": _server(samples, outcome.began),
    }


def details(timings: Sequence[Timing], began: float) -> dict[str, Any]:
    """Data of every request, under the names of `vllm bench serve --save-detailed`."""
    ordered = sorted(timings, key=lambda timing: timing.sent_at)
    return {
        "start_times": [round(timing.sent_at - began, 6) for timing in ordered],
        "input_lens": [timing.num_prompt for timing in ordered],
        "output_lens": [timing.num_output for timing in ordered],
        "ttfts": [timing.ttft for timing in ordered],
        "itls": [timing.itls for timing in ordered],
        "e2els": [timing.e2el for timing in ordered],
        "generated_texts": [timing.text for timing in ordered],
        "request_errors": [timing.error or "" for timing in ordered],
    }


def _over_time(outcome: Outcome) -> dict[str, Any]:
    """Tokens per second and requests in flight, in equal slices of the run."""
    width = max(1, math.ceil(outcome.duration / _MAX_POINTS))
    count = max(1, math.ceil(outcome.duration / width))
    tokens, running = [0] * count, [0] * count
    for timing in outcome.timings:
        for at, num in zip(timing.times, timing.tokens, strict=True):
            tokens[_slice(at - outcome.began, width, count)] += num
        first = _slice(timing.sent_at - outcome.began, width, count)
        last = _slice(timing.ended_at - outcome.began, width, count)
        for index in range(first, last + 1):
            running[index] += 1
    # The last slice may be shorter.
    lengths = [width] * (count - 1) + [outcome.duration - width * (count - 1) or width]
    rates = [round(num / length, 2) for num, length in zip(tokens, lengths, strict=True)]
    return {
        "second": [index * width for index in range(count)],
        "output_tok_s": rates,
        "requests": running,
    }


def _slice(second: float, width: int, count: int) -> int:
    return min(count - 1, max(0, int(second / width)))


def _server(samples: Sequence[MetricsSample], began: float) -> dict[str, Any]:
    """The server's gauges, thinned out; empty if it reports none."""
    kept = samples[:: max(1, math.ceil(len(samples) / _MAX_POINTS))]
    if not kept or all(s.running is s.waiting is s.kv is None for s in kept):
        return {}
    return {
        "second": [round(sample.at - began, 2) for sample in kept],
        "running": [sample.running for sample in kept],
        "waiting": [sample.waiting for sample in kept],
        "kv": [None if sample.kv is None else round(sample.kv, 4) for sample in kept],
    }


def save_csv(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write one line per run, without nested values."""
    flat = [{k: v for k, v in row.items() if not isinstance(v, _NESTED)} for row in rows]
    names = list(dict.fromkeys(name for row in flat for name in row))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(flat)
