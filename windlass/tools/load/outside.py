"""Compares results of `bench serve` with those of guidellm, another client, on the same prompts.

    python -m windlass.tools.load.outside --ours A.json --theirs guidellm.json -o FILE

Several runs of each are averaged, since they take turns on one server. guidellm's inter-token latency
is a request's own average, which is called time per output token here.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from windlass.errors import ConfigError
from windlass.tools.bench.columns import show
from windlass.tools.bench.record import Record
from windlass.tools.load.report import read_records

# figure -> our key, guidellm's metric, its statistic, what makes its unit ours
_FIGURES = {
    "requests a second": ("request_throughput", "requests_per_second", "mean", 1.0),
    "output tokens a second": ("output_throughput", "output_tokens_per_second", "mean", 1.0),
    "TTFT mean, ms": ("mean_ttft_ms", "time_to_first_token_ms", "mean", 1.0),
    "TTFT median, ms": ("median_ttft_ms", "time_to_first_token_ms", "median", 1.0),
    "TPOT mean, ms": ("mean_tpot_ms", "inter_token_latency_ms", "mean", 1.0),
    "TPOT median, ms": ("median_tpot_ms", "inter_token_latency_ms", "median", 1.0),
    "end to end mean, ms": ("mean_e2el_ms", "request_latency", "mean", 1e3),
    "end to end median, ms": ("median_e2el_ms", "request_latency", "median", 1e3),
}


def compare(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]) -> Record:
    """`ours`: rows of bench serve; `theirs`: reports of guidellm, each of one benchmark."""
    measured = [report["benchmarks"][0]["metrics"] for report in theirs]
    rows = []
    for figure, (key, metric, statistic, unit) in _FIGURES.items():
        own = fmean(row[key] for row in ours)
        other = fmean(metrics[metric]["successful"][statistic] * unit for metrics in measured)
        rows.append(
            {
                "figure": figure,
                "windlass": round(own, 3),
                "guidellm": round(other, 3),
                "difference_pct": round(100 * (own / other - 1), 2),
            }
        )
    version = theirs[0]["metadata"]["guidellm_version"]
    counts = [metrics["request_totals"]["successful"] for metrics in measured]
    notes = (
        f"Same server, prompts and limit of concurrency, in turns: {len(ours)} runs of windlass bench "
        f"serve, {len(theirs)} of guidellm {version}; {ours[0]['completed']} and {counts[0]} requests a run."
    )
    return Record("outside", rows, notes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ours", type=Path, nargs="+", required=True)
    parser.add_argument("--theirs", type=Path, nargs="+", required=True)
    parser.add_argument("-o", "--output", type=Path, required=True)
    given = parser.parse_args()
    ours = [record.rows[0] for record in read_records(given.ours)]
    try:
        theirs = [json.loads(path.read_text()) for path in given.theirs]
        record = compare(ours, theirs)
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ConfigError(f"--theirs: is no report of guidellm: {error!r}.") from error
    record.save(given.output)
    show(record)


if __name__ == "__main__":
    main()
