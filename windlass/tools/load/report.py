"""One page of results that needs no network: figures, plots, and how they were made.

Plotly's JavaScript is written into the page from the installed package. The plots are in plots.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

from windlass.errors import ConfigError, UnsupportedError
from windlass.tools.bench.columns import COLUMNS, cells
from windlass.tools.bench.record import Record
from windlass.tools.load.plots import Plot, all_plots, label_of

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1280px; padding: 0 1rem;
  color: #1f2328; background: #fff; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.05rem; margin: 0 0 .25rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid #d8dee4; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.wide { overflow-x: auto; margin-bottom: 1.5rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(460px, 1fr)); gap: 1.5rem; }
.plot { height: 340px; } .warning { background: #fff4e5; padding: .6rem 1rem; border-radius: 6px; }
.origin { color: #57606a; font-size: .85rem; } code { overflow-wrap: anywhere; }
"""


def plotly_js() -> str:
    """Plotly's JavaScript, from the package."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise UnsupportedError(
            "a report needs the package plotly. Install it with: pip install 'windlass[report]'."
        ) from error
    text: str = get_plotlyjs()
    return text


def read_records(paths: Sequence[Path], labels: Sequence[str] = ()) -> list[Record]:
    """The results of `bench serve` in these files, under these labels where there are any."""
    if labels and len(labels) != len(paths):
        raise ConfigError(f"--label was given {len(labels)} times for {len(paths)} files.")
    records = []
    for index, path in enumerate(paths):
        record = _read(path)
        if labels:
            record = replace(record, rows=[{**row, "label": labels[index]} for row in record.rows])
        elif not any(row.get("label") for row in record.rows):
            record = replace(record, rows=[{**row, "label": path.stem} for row in record.rows])
        records.append(record)
    return records


def _read(path: Path) -> Record:
    try:
        record = Record(**json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}.") from error
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path}: is no benchmark's result: {error}.") from error
    if record.name != "serve" or not record.rows:
        raise ConfigError(f"{path}: is no result of windlass bench serve, or has no run.")
    return record


def save_report(records: Sequence[Record], path: Path) -> None:
    """Write the page, whole or not at all."""
    save_page(page(records), path)


def save_page(text: str, path: Path) -> None:
    """Whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def page(records: Sequence[Record]) -> str:
    """The HTML."""
    names = ", ".join(dict.fromkeys(label_of(record) for record in records))
    top = f'{_warnings(records)}\n<div class="wide">{_table(records)}</div>'
    return html_page(f"Load on {names}", top, all_plots(records), _origins(records))


def html_page(name: str, top: str, plots: Sequence[Plot], bottom: str) -> str:
    """Plots between two pieces of HTML; `name` is plain text."""
    title = escape(name)
    figures = "\n".join(
        f'<section><h2>{escape(plot.title)}</h2><div class="plot" id="plot-{i}"></div></section>'
        for i, plot in enumerate(plots)
    )
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>{_STYLE}</style>
<script>{plotly_js()}</script></head>
<body><h1>{title}</h1>
{top}
<div class="plots">
{figures}
</div>
{bottom}
<script>{_script(plots)}</script>
</body></html>
"""


def _script(plots: Sequence[Plot]) -> str:
    values = [{"data": plot.data, "layout": plot.layout} for plot in plots]
    # "</script>" in a label must not end the script.
    text = json.dumps(values, allow_nan=False).replace("</", "<\\/")
    return (
        f"const plots = {text};\n"
        "plots.forEach((plot, i) => Plotly.newPlot('plot-' + i, plot.data, plot.layout, "
        "{responsive: true, displaylogo: false}));"
    )


def _table(records: Sequence[Record]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in COLUMNS["serve"].values())
    lines = [
        "".join(f"<td>{escape(text)}</td>" for text in cells("serve", row))
        for record in records
        for row in record.rows
    ]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _warnings(records: Sequence[Record]) -> str:
    """What makes two engines' figures hard to compare."""
    said = []
    for key, what in (("fingerprint", "were not asked the same"), ("model", "have other models")):
        if len({str(record.settings.get(key)) for record in records}) > 1:
            said.append(f"The engines {what}: compare with care.")
    if len({record.hardware for record in records}) > 1:
        said.append("The results come from different machines.")
    for record in records:
        for row in record.rows:
            if row.get("stopped"):
                said.append(f"{label_of(record)}: a run ended early: {row['stopped']}.")
            if row.get("failed"):
                errors = "; ".join(f"{n} times {error}" for error, n in row["errors"].items())
                said.append(f"{label_of(record)}: {row['failed']} requests failed: {errors}.")
    return "".join(f'<p class="warning">{escape(text)}</p>' for text in dict.fromkeys(said))


def _origins(records: Sequence[Record]) -> str:
    parts = [f"<p>{escape(records[0].notes)}</p>"]
    for record in records:
        versions = ", ".join(f"{name} {number}" for name, number in record.versions.items())
        text = f"at {record.commit} on {record.date}; {record.hardware}; {versions}."
        parts.append(
            f"<p>{escape(label_of(record))}: <code>{escape(record.command)}</code> {escape(text)}</p>"
        )
    return f'<div class="origin">{"".join(parts)}</div>'
