"""HTML page of a ladder: the table, plots with a waterfall per load, and the remarks."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from windlass.tools.common.page import Plot, html_cells, html_origin, html_page, html_table
from windlass.tools.common.record import Record
from windlass.tools.ladder.record import ARTICLE_TABLE
from windlass.tools.ladder.rungs import BASE
from windlass.tools.ladder.workload import LOAD_NAMES

Row = dict[str, Any]

_BLUE, _RED, _GREEN, _GREY = "#1b81ae", "#c14c8a", "#448361", "#787774"
_COLOURS = {"low": _GREEN, "sat": _BLUE}
_PALETTE = (_BLUE, "#d9730d", _GREEN, "#9065b0", _RED, _GREY)
_SYMBOLS = ("circle", "square", "diamond", "cross", "x", "triangle-up")


def page(record: Record) -> str:
    top = html_table("ladder", (_line(row) for row in record.rows))
    return html_page(
        f"The ladder of {record.settings['name']}",
        top,
        plots=all_plots(record.rows),
        bottom=_remarks(record),
    )


def _line(row: Row) -> str:
    """One row of the table, or the reason if it was not measured."""
    first, *others = html_cells("ladder", row)
    if "reason" not in row:
        return first + "".join(others)
    reason = f'<td class="reason" colspan="{len(others)}">{escape(row["reason"])}</td>'
    return f"<td>{escape(row['title'])}</td>{reason}"


def all_plots(rows: Sequence[Row]) -> list[Plot]:
    measured = [row for row in rows if "reason" not in row]
    plots = [_waterfall(measured, load) for load in _COLOURS]
    plots += [_alone(measured), _latency(measured), _quality(measured), _articles(measured)]
    return [plot for plot in plots if plot.data]


def stacked_rows(rows: Sequence[Row]) -> list[Row]:
    """The rows that stack on each other, without `everything`."""
    last = next((row for row in rows if row["rung"] == "everything"), None)
    kept = []
    for row in rows:
        is_batching = row["kind"] == "batching"
        is_stacked = row["mode"] in ("stacked", "both") and row["kind"] != "all"
        # Of several weights, only those of the final stack belong here.
        is_other = (
            row["kind"] == "weights" and last is not None and row["weights"] != last["weights"]
        )
        if is_batching or (is_stacked and not is_other):
            kept.append(row)
    return kept


def corrected_tok_s(rows: Sequence[Row], load: str) -> dict[str, float]:
    """Tokens per second by rung, corrected to the machine's speed during the base's run."""
    base = next((row for row in rows if row["rung"] == BASE), None)
    if base is None or base[f"{load}_speedup"] is None:
        return {}
    kept = [*stacked_rows(rows), *(row for row in rows if row["rung"] == "everything")]
    return {row["title"]: row[f"{load}_speedup"] * base[f"{load}_tok_s"] for row in kept}


def _waterfall(rows: Sequence[Row], load: str) -> Plot:
    found = corrected_tok_s(rows, load)
    names, values = list(found), list(found.values())
    changes = [after - before for before, after in zip([0.0, *values], values, strict=False)]
    measures = ["relative"] * len(values)
    if any(row["rung"] == "everything" for row in rows) and values:  # measured separately
        changes[-1], measures[-1] = values[-1], "absolute"
    trace = {
        "type": "waterfall",
        "x": names,
        "y": [round(change, 2) for change in changes],
        "measure": measures,
        "text": [f"{value:,.0f}" for value in values],
        "textposition": "outside",
        "cliponaxis": False,
        "increasing": {"marker": {"color": _COLOURS[load]}},
        "decreasing": {"marker": {"color": _RED}},
        "totals": {"marker": {"color": _GREY}},
    }
    title = f"Output tokens per second at {LOAD_NAMES[load]}, rung by rung"
    return Plot(title, [trace] if values else [], _layout("tok/s"))


def _alone(rows: Sequence[Row]) -> Plot:
    kept = [row for row in rows if row["mode"] in ("alone", "both") and row["rung"] != BASE]
    data = [
        {
            "type": "bar",
            "name": LOAD_NAMES[load],
            "x": [row["title"] for row in kept],
            "y": [row[f"{load}_speedup"] for row in kept],
            "marker": {"color": colour},
        }
        for load, colour in _COLOURS.items()
        if any(row[f"{load}_speedup"] is not None for row in kept)
    ]
    return Plot("Each rung alone, speedup over the base", data, _layout("speedup"))


def _latency(rows: Sequence[Row]) -> Plot:
    steps = stacked_rows(rows)
    data = [
        {
            "name": f"{name}, {LOAD_NAMES[load]}",
            "x": [row["title"] for row in steps],
            "y": [row[f"{load}_{key}_p50_ms"] for row in steps],
            "mode": "lines+markers",
            "line": {"color": colour, "dash": dash},
        }
        for load, colour in _COLOURS.items()
        if any(f"{load}_tok_s" in row for row in steps)
        for name, key, dash in (("TTFT p50", "ttft", "solid"), ("TPOT p50", "tpot", "dot"))
    ]
    layout = _layout("milliseconds")
    layout["yaxis"] = {"title": {"text": "milliseconds"}, "type": "log"}
    return Plot("Latency, rung by rung", data, layout)


def _quality(rows: Sequence[Row]) -> Plot:
    formats = {row["format"]: row for row in rows if row.get("perplexity") is not None}
    data = [
        {
            "name": name,
            "x": [row["memory_mib"]],
            "y": [row["perplexity"]],
            "mode": "markers",
            "marker": {
                "size": 11,
                "color": _PALETTE[i % len(_PALETTE)],
                "symbol": _SYMBOLS[i % len(_SYMBOLS)],
            },
        }
        for i, (name, row) in enumerate(formats.items())
    ]
    layout = {
        "xaxis": {"title": {"text": "MiB of weights and KV"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": "perplexity, lower is better"}},
        "showlegend": True,
    }
    return Plot("Quality and memory of each format", data, layout)


def _articles(rows: Sequence[Row]) -> Plot:
    """Compare with the articles, relative to the naive rung, since models and machines differ."""
    kept = [row for row in rows if row.get("article_req_s") is not None]
    naive = next((row for row in kept if row["rung"] == "naive"), None)
    if naive is None or not naive["sat_speedup"]:
        return Plot("", [], {})
    naive_req_s = ARTICLE_TABLE["naive", "alone"].req_s
    names = [row["title"] for row in kept]
    ours = [row["sat_speedup"] / naive["sat_speedup"] for row in kept]
    theirs = [row["article_req_s"] / naive_req_s for row in kept]
    data = [
        {"type": "bar", "name": name, "x": names, "y": [round(value, 2) for value in values]}
        | {"marker": {"color": colour}}
        for name, values, colour in (("here", ours, _BLUE), ("the articles", theirs, _GREY))
    ]
    return Plot("Requests per second relative to the naive rung", data, _layout("ratio"))


def _layout(unit: str) -> dict[str, Any]:
    return {
        "xaxis": {"tickangle": -35},
        "yaxis": {"title": {"text": unit}, "rangemode": "tozero"},
    }


def _remarks(record: Record) -> str:
    text = record.notes.partition("\n\n")[0]
    items = "".join(
        f"<li><b>{escape(row['label'])}</b><br>{'<br>'.join(map(escape, row['remarks']))}</li>"
        for row in record.rows
        if row["remarks"]
    )
    return (
        f'<h2>Effect of each rung</h2><ul class="remarks">{items}</ul>'
        f'<div class="origin"><p>{escape(text)}</p><p>{html_origin(record)}</p></div>'
    )
