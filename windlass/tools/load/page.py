"""A page of HTML with plots that needs no network: plotly's JavaScript is written into it.

What is on the page is its caller's business. Nothing of a server's client is needed here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from windlass.errors import UnsupportedError

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


@dataclass(frozen=True, slots=True)
class Plot:
    """One figure: plotly's traces and layout."""

    title: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]


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


def save_page(text: str, path: Path) -> None:
    """Whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


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
