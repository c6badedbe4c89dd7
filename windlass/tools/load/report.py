"""HTML page of `bench serve` results: tables, plots, and the commands that produced them.

One colour per engine, one line per run. The page itself is rendered in common/page.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

from windlass.errors import ConfigError
from windlass.tools.common.page import Plot, html_cells, html_origin, html_page, html_table
from windlass.tools.common.record import Record, read_record
from windlass.tools.common.summary import TITLES
from windlass.tools.load.rows import CURVE

_COLOURS = ("#1b81ae", "#d9730d", "#448361", "#9065b0", "#c14c8a", "#787774")
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")

Row = dict[str, Any]


def read_records(paths: Sequence[Path], labels: Sequence[str] = ()) -> list[Record]:
    """Read results of `bench serve`, with these labels if given."""
    if labels and len(labels) != len(paths):
        raise ConfigError(f"--label was given {len(labels)} times for {len(paths)} files.")
    records = []
    for index, path in enumerate(paths):
        record = read_record(path)
        if record.name != "serve" or not record.rows:
            raise ConfigError(f"{path}: is not a result of windlass bench serve, or has no run.")
        if labels or not any(row.get("label") for row in record.rows):
            label = labels[index] if labels else path.stem
            record = replace(record, rows=[{**row, "label": label} for row in record.rows])
        records.append(record)
    return records


def page(records: Sequence[Record]) -> str:
    names = ", ".join(dict.fromkeys(label_of(record) for record in records))
    rows = ["".join(html_cells("serve", row)) for record in records for row in record.rows]
    top = f"{_warnings(records)}\n{html_table('serve', rows)}"
    return html_page(f"Load on {names}", top, plots=all_plots(records), bottom=_origins(records))


def _warnings(records: Sequence[Record]) -> str:
    """Differences that make the engines' figures hard to compare, and failures."""
    texts = []
    for key, what in (("fingerprint", "requests"), ("model", "models")):
        if len({str(record.settings.get(key)) for record in records}) > 1:
            texts.append(f"The engines were measured with different {what}: compare with care.")
    if len({record.hardware for record in records}) > 1:
        texts.append("The results come from different machines.")
    for record in records:
        for row in record.rows:
            if row.get("stopped"):
                texts.append(f"{label_of(record)}: a run ended early: {row['stopped']}.")
            if row.get("failed"):
                errors = "; ".join(f"{n} times {error}" for error, n in row["errors"].items())
                texts.append(f"{label_of(record)}: {row['failed']} requests failed: {errors}.")
    return "".join(f'<p class="warning">{escape(text)}</p>' for text in dict.fromkeys(texts))


def _origins(records: Sequence[Record]) -> str:
    parts = [f"<p>{escape(records[0].notes)}</p>"]
    for record in records:
        parts.append(f"<p>{escape(label_of(record))}: {html_origin(record)}</p>")
    return f'<div class="origin">{"".join(parts)}</div>'


# ---- plots -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Run:
    """One row of one record, and how it is drawn."""

    row: Row
    name: str
    colour: str
    dash: str


def label_of(record: Record) -> str:
    """The name of a record's engine."""
    return next((row["label"] for row in record.rows if row.get("label")), "") or "server"


def load_of(row: Row) -> str:
    """A short description of a run's load."""
    if isinstance(row["request_rate"], int | float):
        return f"{row['request_rate']:g} req/s"
    if row["max_concurrency"] is not None:
        return f"concurrency {row['max_concurrency']}"
    return "trace" if row["arrivals"] == "trace" else "all at once"


def runs_of(records: Sequence[Record]) -> list[Run]:
    runs = []
    for index, record in enumerate(records):
        colour = _COLOURS[index % len(_COLOURS)]
        for number, row in enumerate(record.rows):
            name = label_of(record)
            if len(record.rows) > 1:
                name += f", {load_of(row)}"
            runs.append(Run(row=row, name=name, colour=colour, dash=_DASHES[number % len(_DASHES)]))
    return runs


def all_plots(records: Sequence[Record]) -> list[Plot]:
    """The plots that have data, in the order of the page."""
    runs = runs_of(records)
    plots = [
        _latency_over_load(records, "Time to first token over load", "ttft"),
        _latency_over_load(records, "Time per output token over load", "tpot"),
        _throughput_over_load(records),
        *(_percentiles(runs, metric) for metric in TITLES),
        _over_time(runs, "Output tokens per second", "over_time", "output_tok_s", unit="tok/s"),
        _over_time(runs, "Requests in flight", "over_time", "requests", unit="requests"),
        _over_time(runs, "Requests queued in the server", "server", "waiting", unit="requests"),
        _over_time(runs, "KV cache in use", "server", "kv", unit="share", is_share=True),
    ]
    return [plot for plot in plots if plot.data]


def _layout(x: str, y: str, **axis: Any) -> dict[str, Any]:
    return {
        "xaxis": {"title": {"text": x}, "zeroline": False},
        "yaxis": {"title": {"text": y}, "rangemode": "tozero", **axis},
    }


def _load_axis(records: Sequence[Record]) -> tuple[str, str]:
    """Key and title of the load axis: request rates if there are any, else concurrency."""
    rows = [row for record in records for row in record.rows]
    if any(isinstance(row["request_rate"], int | float) for row in rows):
        return "request_rate", "requests per second"
    return "max_concurrent_requests", "concurrent requests"


def _over_load(
    record: Record, key: str, y: Sequence[Any], name: str, line: dict[str, str]
) -> dict[str, Any]:
    x = [row[key] if isinstance(row[key], int | float) else None for row in record.rows]
    return {"x": x, "y": list(y), "name": name, "mode": "lines+markers", "line": line}


def _latency_over_load(records: Sequence[Record], title: str, metric: str) -> Plot:
    key, axis = _load_axis(records)
    data = []
    for index, record in enumerate(records):
        curves = [row["curves"].get(metric) for row in record.rows]
        for share, dash in ((50, "solid"), (99, "dot")):
            values = [curve[CURVE.index(share)] if curve else None for curve in curves]
            line = {"color": _COLOURS[index % len(_COLOURS)], "dash": dash}
            data.append(
                _over_load(record, key, y=values, name=f"{label_of(record)} p{share}", line=line)
            )
    return Plot(title, data, _layout(axis, "milliseconds"))


def _throughput_over_load(records: Sequence[Record]) -> Plot:
    key, axis = _load_axis(records)
    data = []
    for index, record in enumerate(records):
        values = [row["output_throughput"] for row in record.rows]
        line = {"color": _COLOURS[index % len(_COLOURS)]}
        data.append(_over_load(record, key, y=values, name=label_of(record), line=line))
    return Plot("Output tokens per second over load", data, _layout(axis, "tok/s"))


def _line(run: Run, x: Sequence[Any], y: Sequence[Any]) -> dict[str, Any]:
    line = {"color": run.colour, "dash": run.dash}
    return {"x": list(x), "y": list(y), "name": run.name, "mode": "lines", "line": line}


def _percentiles(runs: Sequence[Run], metric: str) -> Plot:
    data = [
        _line(run, CURVE, run.row["curves"][metric]) for run in runs if metric in run.row["curves"]
    ]
    # Most inter-token latencies are equal; the few others are many times as long.
    scale = {"type": "log", "dtick": 1} if metric == "itl" else {}
    layout = _layout("percentile", "milliseconds", **scale)
    return Plot(f"{TITLES[metric][0]}: percentiles", data, layout)


def _over_time(
    runs: Sequence[Run], title: str, group: str, key: str, *, unit: str, is_share: bool = False
) -> Plot:
    data = []
    for run in runs:
        series = run.row.get(group) or {}
        values = series.get(key, [])
        if any(value is not None and math.isfinite(value) for value in values):
            data.append(_line(run, series["second"], values))
    axis = {"tickformat": ".3~%"} if is_share else {}
    return Plot(f"{title} over time", data, _layout("seconds", unit, **axis))
