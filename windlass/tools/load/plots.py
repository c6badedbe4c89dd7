"""The plots of a report, as plain data for plotly: one colour per engine, one line per run.

What a page looks like is in page.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from windlass.tools.common.page import Plot
from windlass.tools.common.record import Record
from windlass.tools.common.summary import TITLES
from windlass.tools.load.rows import CURVE

_COLOURS = ("#1b81ae", "#d9730d", "#448361", "#9065b0", "#c14c8a", "#787774")
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Run:
    """One row of one record, and how it is drawn."""

    row: Row
    name: str
    colour: str
    dash: str


def label_of(record: Record) -> str:
    """What the engine of a record is called."""
    return next((row["label"] for row in record.rows if row.get("label")), "") or "server"


def load_of(row: Row) -> str:
    """How much was asked of the server, in a word or two."""
    if isinstance(row["request_rate"], int | float):
        return f"{row['request_rate']:g} req/s"
    if row["max_concurrency"] is not None:
        return f"{row['max_concurrency']} at once"
    return "trace" if row["arrivals"] == "trace" else "all at once"


def runs_of(records: Sequence[Record]) -> list[Run]:
    runs = []
    for index, record in enumerate(records):
        colour = _COLOURS[index % len(_COLOURS)]
        for number, row in enumerate(record.rows):
            name = label_of(record)
            if len(record.rows) > 1:
                name += f", {load_of(row)}"
            runs.append(Run(row, name, colour, _DASHES[number % len(_DASHES)]))
    return runs


def all_plots(records: Sequence[Record]) -> list[Plot]:
    """Those for which there is anything to draw, in the order of a report."""
    runs = runs_of(records)
    plots = [
        _over_load(records, "Time to first token over load", "ttft"),
        _over_load(records, "Time per output token over load", "tpot"),
        _throughput_over_load(records),
        *(_curve(runs, metric) for metric in TITLES),
        _over_time(runs, "Output tokens a second over time", "over_time", "output_tok_s", "tok/s"),
        _over_time(runs, "Requests under way over time", "over_time", "requests", "requests"),
        _over_time(
            runs, "Requests waiting in the server over time", "server", "waiting", "requests"
        ),
        _over_time(runs, "KV cache in use over time", "server", "kv", "share", is_share=True),
    ]
    return [plot for plot in plots if plot.data]


def _layout(x: str, y: str, **axis: Any) -> dict[str, Any]:
    return {
        "xaxis": {"title": {"text": x}, "zeroline": False},
        "yaxis": {"title": {"text": y}, "rangemode": "tozero", **axis},
    }


def _axis(records: Sequence[Record]) -> tuple[str, str]:
    """What the load is drawn over: rates where there are any, else how many ran at once."""
    rows = [row for record in records for row in record.rows]
    if any(isinstance(row["request_rate"], int | float) for row in rows):
        return "request_rate", "requests a second asked for"
    return "max_concurrent_requests", "requests under way at once"


def _places(record: Record, key: str) -> list[float | None]:
    return [row[key] if isinstance(row[key], int | float) else None for row in record.rows]


def _over_load(records: Sequence[Record], title: str, metric: str) -> Plot:
    key, axis = _axis(records)
    data = []
    for index, record in enumerate(records):
        for share, dash in ((50, "solid"), (99, "dot")):
            at = CURVE.index(share)
            curves = [row["curves"].get(metric) for row in record.rows]
            data.append(
                {
                    "x": _places(record, key),
                    "y": [curve[at] if curve else None for curve in curves],
                    "name": f"{label_of(record)} p{share}",
                    "mode": "lines+markers",
                    "line": {"color": _COLOURS[index % len(_COLOURS)], "dash": dash},
                }
            )
    return Plot(title, data, _layout(axis, "milliseconds"))


def _throughput_over_load(records: Sequence[Record]) -> Plot:
    key, axis = _axis(records)
    data = [
        {
            "x": _places(record, key),
            "y": [row["output_throughput"] for row in record.rows],
            "name": label_of(record),
            "mode": "lines+markers",
            "line": {"color": _COLOURS[index % len(_COLOURS)]},
        }
        for index, record in enumerate(records)
    ]
    return Plot("Output tokens a second over load", data, _layout(axis, "tok/s"))


def _line(run: Run, x: Sequence[Any], y: Sequence[Any]) -> dict[str, Any]:
    line = {"color": run.colour, "dash": run.dash}
    return {"x": list(x), "y": list(y), "name": run.name, "mode": "lines", "line": line}


def _curve(runs: Sequence[Run], metric: str) -> Plot:
    """Percentiles from left to right; the last few tell of the tail."""
    data = [
        _line(run, CURVE, run.row["curves"][metric]) for run in runs if metric in run.row["curves"]
    ]
    # Most gaps between tokens are alike, and the few that are not are many times as long.
    scale = {"type": "log", "dtick": 1} if metric == "itl" else {}
    layout = _layout("percentile", "milliseconds", **scale)
    return Plot(f"{TITLES[metric][0]}: percentiles", data, layout)


def _over_time(
    runs: Sequence[Run], title: str, group: str, key: str, unit: str, is_share: bool = False
) -> Plot:
    data = []
    for run in runs:
        series = run.row.get(group) or {}
        values = series.get(key, [])
        if any(value is not None and math.isfinite(value) for value in values):
            data.append(_line(run, series["second"], values))
    axis = {"tickformat": ".3~%"} if is_share else {}
    return Plot(title, data, _layout("seconds", unit, **axis))
