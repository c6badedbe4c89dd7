"""One page of a ladder that needs no network: the table, a waterfall for each load, and the remarks."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from windlass.tools.common.page import Plot, html_cells, html_origin, html_page, html_table
from windlass.tools.common.record import Record, save_text
from windlass.tools.ladder.record import TABLE
from windlass.tools.ladder.rungs import BASE
from windlass.tools.ladder.work import LOAD_NAMES

Row = dict[str, Any]

_BLUE, _RED, _GREEN, _GREY = "#1b81ae", "#c14c8a", "#448361", "#787774"
_COLOURS = {"low": _GREEN, "sat": _BLUE}
_INK = (_BLUE, "#d9730d", _GREEN, "#9065b0", _RED, _GREY)
_SIGNS = ("circle", "square", "diamond", "cross", "x", "triangle-up")


def save_report(record: Record, path: Path) -> None:
    """Write the page, whole or not at all."""
    save_text(path, page(record))


def page(record: Record) -> str:
    """The HTML."""
    top = html_table("ladder", (_line(row) for row in record.rows))
    return html_page(
        f"The ladder of {record.settings['name']}", top, all_plots(record.rows), _remarks(record)
    )


def _line(row: Row) -> str:
    """One row of the table; of one that could not be measured, why."""
    first, *others = html_cells("ladder", row)
    if "reason" not in row:
        return first + "".join(others)
    reason = f'<td class="reason" colspan="{len(others)}">{escape(row["reason"])}</td>'
    return f"<td>{escape(row['title'])}</td>{reason}"


def all_plots(rows: Sequence[Row]) -> list[Plot]:
    """Those for which there is anything to draw."""
    measured = [row for row in rows if "reason" not in row]
    plots = [_waterfall(measured, load) for load in _COLOURS]
    plots += [_alone(measured), _latency(measured), _quality(measured), _articles(measured)]
    return [plot for plot in plots if plot.data]


def stairs(rows: Sequence[Row]) -> list[Row]:
    """The rows that stand on each other, from the first to everything."""
    last = next((row for row in rows if row["rung"] == "everything"), None)
    kept = []
    for row in rows:
        below = row["kind"] == "batching"
        stacked = row["how"] in ("stacked", "both") and row["kind"] != "all"
        # Of the weights only those that the top stands on are a step of these stairs.
        other = row["kind"] == "weights" and last is not None and row["weights"] != last["weights"]
        if below or (stacked and not other):
            kept.append(row)
    return kept


def heights(rows: Sequence[Row], load: str) -> dict[str, float]:
    """Tokens a second of each rung, all as if the machine had given what it gave the base."""
    base = next((row for row in rows if row["rung"] == BASE), None)
    if base is None or base[f"{load}_times"] is None:
        return {}
    kept = [*stairs(rows), *(row for row in rows if row["rung"] == "everything")]
    return {row["title"]: row[f"{load}_times"] * base[f"{load}_tok_s"] for row in kept}


def _waterfall(rows: Sequence[Row], load: str) -> Plot:
    found = heights(rows, load)
    names, tops = list(found), list(found.values())
    rises = [after - before for before, after in zip([0.0, *tops], tops, strict=False)]
    measures = ["relative"] * len(tops)
    if any(row["rung"] == "everything" for row in rows) and tops:  # measured again, at the end
        rises[-1], measures[-1] = tops[-1], "absolute"
    trace = {
        "type": "waterfall",
        "x": names,
        "y": [round(rise, 2) for rise in rises],
        "measure": measures,
        "text": [f"{top:,.0f}" for top in tops],
        "textposition": "outside",
        "cliponaxis": False,
        "increasing": {"marker": {"color": _COLOURS[load]}},
        "decreasing": {"marker": {"color": _RED}},
        "totals": {"marker": {"color": _GREY}},
    }
    title = f"Output tokens a second at {LOAD_NAMES[load]}, rung by rung"
    return Plot(title, [trace] if tops else [], _layout("tok/s"))


def _alone(rows: Sequence[Row]) -> Plot:
    kept = [row for row in rows if row["how"] in ("alone", "both") and row["rung"] != BASE]
    data = [
        {
            "type": "bar",
            "name": LOAD_NAMES[load],
            "x": [row["title"] for row in kept],
            "y": [row[f"{load}_times"] for row in kept],
            "marker": {"color": colour},
        }
        for load, colour in _COLOURS.items()
        if any(row[f"{load}_times"] is not None for row in kept)
    ]
    return Plot("Each alone, times the base", data, _layout("times the base"))


def _latency(rows: Sequence[Row]) -> Plot:
    steps = stairs(rows)
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
            "marker": {"size": 11, "color": _INK[i % len(_INK)], "symbol": _SIGNS[i % len(_SIGNS)]},
        }
        for i, (name, row) in enumerate(formats.items())
    ]
    layout = {
        "xaxis": {"title": {"text": "MiB of weights and KV"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": "perplexity, less is better"}},
        "showlegend": True,
    }
    return Plot("What each format costs in quality", data, layout)


def _articles(rows: Sequence[Row]) -> Plot:
    """Both as multiples of the naive rung: the machines have nothing else in common."""
    kept = [row for row in rows if row.get("article_req_s") is not None]
    naive = next((row for row in kept if row["rung"] == "naive"), None)
    if naive is None or not naive["sat_times"]:
        return Plot("", [], {})
    first = TABLE["naive", "alone"].req_s
    names = [row["title"] for row in kept]
    ours = [row["sat_times"] / naive["sat_times"] for row in kept]
    said = [row["article_req_s"] / first for row in kept]
    data = [
        {"type": "bar", "name": name, "x": names, "y": [round(value, 2) for value in values]}
        | {"marker": {"color": colour}}
        for name, values, colour in (("here", ours, _BLUE), ("the articles", said, _GREY))
    ]
    return Plot("Requests a second, times the naive rung", data, _layout("times naive"))


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
        f'<h2>What each rung did</h2><ul class="told">{items}</ul><div class="origin"><p>{escape(text)}</p>'
        f"<p>{html_origin(record)}</p></div>"
    )
