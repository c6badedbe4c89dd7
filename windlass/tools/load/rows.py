"""A run as a row of a record: figures, percentile curves, and what happened in every second.

Also the same rows as CSV, without what does not fit into a table.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from windlass.tools.common.summary import METRICS, Summary, percentile, values_of
from windlass.tools.common.timing import Timing
from windlass.tools.load.drive import Outcome
from windlass.tools.load.gauges import Reading, speculation

CURVE = (0, 1, 5, *range(10, 100, 10), 95, 98, 99, 99.5, 100)  # the percentiles of a curve
_MOST_POINTS = 300  # in a row's series over time
_NESTED = (list, dict)


def make_row(summary: Summary, outcome: Outcome, readings: Sequence[Reading]) -> dict[str, Any]:
    """The figures of one run, and what its plots are made of."""
    curves = {}
    for metric in METRICS:
        values = values_of(outcome.timings, metric)
        if values:
            curves[metric] = [round(percentile(values, share), 3) for share in CURVE]
    return {
        **summary.row(),
        **speculation(list(readings)),
        "stopped": outcome.stopped,
        "num_left": outcome.num_left,
        "errors": summary.errors,
        "curves": curves,
        "over_time": _over_time(outcome),
        "server": _server(readings, outcome.began),
    }


def details(timings: Sequence[Timing], began: float) -> dict[str, Any]:
    """Every request, as `vllm bench serve --save-detailed` gives it."""
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
    """Tokens a second, and requests under way, in equal slices of the run."""
    width = max(1, math.ceil(outcome.duration / _MOST_POINTS))
    count = max(1, math.ceil(outcome.duration / width))
    tokens, running = [0] * count, [0] * count
    for timing in outcome.timings:
        for at, num in zip(timing.times, timing.tokens, strict=True):
            tokens[_slice(at - outcome.began, width, count)] += num
        first = _slice(timing.sent_at - outcome.began, width, count)
        last = _slice(timing.ended_at - outcome.began, width, count)
        for index in range(first, last + 1):
            running[index] += 1
    # The last slice is as long as what is left of the run.
    lengths = [width] * (count - 1) + [outcome.duration - width * (count - 1) or width]
    rates = [round(num / length, 2) for num, length in zip(tokens, lengths, strict=True)]
    return {
        "second": [index * width for index in range(count)],
        "output_tok_s": rates,
        "requests": running,
    }


def _slice(second: float, width: int, count: int) -> int:
    return min(count - 1, max(0, int(second / width)))


def _server(readings: Sequence[Reading], began: float) -> dict[str, Any]:
    """The server's own gauges, thinned out; empty where it has none."""
    kept = readings[:: max(1, math.ceil(len(readings) / _MOST_POINTS))]
    if not kept or all(r.running is r.waiting is r.kv is None for r in kept):
        return {}
    return {
        "second": [round(reading.at - began, 2) for reading in kept],
        "running": [reading.running for reading in kept],
        "waiting": [reading.waiting for reading in kept],
        "kv": [None if reading.kv is None else round(reading.kv, 4) for reading in kept],
    }


def save_csv(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """One line a run, its figures only."""
    flat = [{k: v for k, v in row.items() if not isinstance(v, _NESTED)} for row in rows]
    names = list(dict.fromkeys(name for row in flat for name in row))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(flat)
