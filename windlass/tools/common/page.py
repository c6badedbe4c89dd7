"""Renders a self-contained HTML page with plots; plotly's JavaScript is embedded.

The caller provides the content.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from windlass.errors import UnsupportedError
from windlass.tools.common.record import Record
from windlass.tools.common.report import COLUMNS, cells

_STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --page: #fff; --line: #d8dee4; --faint: #57606a;
  --warning: #fff4e5; }
@media (prefers-color-scheme: dark) { :root { --ink: #d1d7e0; --page: #14181d; --line: #333b45;
  --faint: #9198a1; --warning: #3a2d17; } }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1280px; padding: 0 1rem;
  color: var(--ink); background: var(--page); }
h1 { font-size: 1.5rem; } h2 { font-size: 1.05rem; margin: 0 0 .25rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0;
  background: var(--page); }
td.reason { text-align: left; color: var(--faint); }
.wide { overflow-x: auto; margin-bottom: 1.5rem; }
.plots { display: grid; gap: 1.5rem;
  grid-template-columns: repeat(auto-fit, minmax(min(460px, 100%), 1fr)); }
section { min-width: 0; } .plot { height: 360px; }
.warning { background: var(--warning); padding: .6rem 1rem; border-radius: 6px; }
.plots + h2 { margin-top: 1.5rem; } .remarks { padding-left: 1.2rem; }
.remarks li { margin-bottom: .4rem; }
.origin { color: var(--faint); font-size: .85rem; } code { overflow-wrap: anywhere; }
"""
# The plots follow the page's light or dark colours.
_DRAW = """
const dark = matchMedia('(prefers-color-scheme: dark)');
function draw() {
  const [ink, grid] = dark.matches ? ['#d1d7e0', '#333b45'] : ['#1f2328', '#e6eaee'];
  const axis = {gridcolor: grid, linecolor: grid, zerolinecolor: grid, automargin: true};
  plots.forEach(({data, layout}, i) => Plotly.react('plot-' + i, data, {
    margin: {l: 56, r: 16, t: 16, b: 40},
    legend: {orientation: 'h', x: 0, y: 1.02, yanchor: 'bottom'},
    hovermode: 'closest',
    ...layout,
    font: {family: 'system-ui, sans-serif', size: 12, color: ink},
    paper_bgcolor: 'transparent', plot_bgcolor: 'transparent',
    xaxis: {...axis, ...layout.xaxis},
    yaxis: {...axis, ...layout.yaxis, title: {standoff: 10, ...layout.yaxis.title}},
  }, {responsive: true, displayModeBar: false}));
}
draw();
dark.addEventListener('change', draw);
"""


@dataclass(frozen=True, slots=True)
class Plot:
    """One plotly figure: traces and layout."""

    title: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]


def plotly_js() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise UnsupportedError(
            "a report needs the package plotly. Install it with: pip install 'windlass-llm[report]'."
        ) from error
    text: str = get_plotlyjs()
    return text


def html_table(name: str, lines: Iterable[str]) -> str:
    """A table with the headings of record type `name`; `lines` are rows of HTML cells."""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in COLUMNS[name].values())
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="wide">{table}</div>'


def html_cells(name: str, row: Mapping[str, Any]) -> list[str]:
    return [f"<td>{escape(text)}</td>" for text in cells(COLUMNS[name], row)]


def html_origin(record: Record) -> str:
    """The command of a record and the machine it ran on."""
    return f"<code>{escape(record.command)}</code> {escape(record.origin)}"


def html_page(name: str, top: str, plots: Sequence[Plot], bottom: str) -> str:
    """A page with plots between two HTML fragments; `name` is plain text."""
    title = escape(name)
    figures = "\n".join(
        f'<section><h2>{escape(plot.title)}</h2><div class="plot" id="plot-{i}"></div></section>'
        for i, plot in enumerate(plots)
    )
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}</title>
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
    return f"const plots = {text};{_DRAW}"
