"""Compares results of `bench serve` with those of guidellm, another client, on the same prompts.

    python benchmarks/scripts/guidellm_compare.py --ours A.json --theirs guidellm.json -o FILE

Several runs of each, which alternate on one server, are averaged. Means and medians are computed
from guidellm's requests with our definitions; its inter-token latency is our TPOT.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from docs_tables import COLUMNS

from windlass.errors import ConfigError
from windlass.tools.common.record import Record
from windlass.tools.common.report import show
from windlass.tools.load.report import read_records

# figure -> our key, guidellm's metric
_RATES = {
    "requests per second": ("request_throughput", "requests_per_second"),
    "output tokens per second": ("output_throughput", "output_tokens_per_second"),
}
# figure -> our metric, guidellm's field of a request, conversion factor to our unit
_TIMES = {
    "TTFT": ("ttft", "time_to_first_token_ms", 1.0),
    "TPOT": ("tpot", "inter_token_latency_ms", 1.0),
    "end to end": ("e2el", "request_latency", 1e3),
}
_STATISTICS: dict[str, Callable[[list[float]], float]] = {"mean": fmean, "median": median}


def compare(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]) -> Record:
    """Compare rows of bench serve with reports of guidellm, each with one benchmark."""
    runs = [report["benchmarks"][0] for report in theirs]
    rows = []
    for figure, (key, metric) in _RATES.items():
        other = fmean(run["metrics"][metric]["successful"]["mean"] for run in runs)
        rows.append(_row(figure, fmean(row[key] for row in ours), other))
    for figure, (name, field, unit) in _TIMES.items():
        values = [[unit * item[field] for item in run["requests"]["successful"]] for run in runs]
        for statistic, apply in _STATISTICS.items():
            own = fmean(row[f"{statistic}_{name}_ms"] for row in ours)
            rows.append(_row(f"{figure} {statistic}, ms", own, fmean(map(apply, values))))
    version = theirs[0]["metadata"]["guidellm_version"]
    num_theirs = len(runs[0]["requests"]["successful"])
    notes = (
        f"Same server, prompts and concurrency limit, in alternation: {len(ours)} runs of windlass "
        f"bench serve with {ours[0]['completed']} requests, {len(theirs)} of guidellm {version} with "
        f"{num_theirs}."
    )
    command = shlex.join(["python", "benchmarks/scripts/guidellm_compare.py", *sys.argv[1:]])
    return Record("outside", rows, notes, command=command)


def _row(figure: str, own: float, other: float) -> dict[str, Any]:
    return {
        "figure": figure,
        "windlass": round(own, 3),
        "guidellm": round(other, 3),
        "difference_pct": round(100 * (own / other - 1), 2),
    }


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
        raise ConfigError(f"--theirs: is not a report of guidellm: {error!r}.") from error
    record.save(given.output)
    show(record, COLUMNS["outside"])


if __name__ == "__main__":
    main()
