"""One page of results that needs no network: figures, plots, and how they were made.

What a page looks like is in page.py, the plots are in plots.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

from windlass.errors import ConfigError
from windlass.tools.common.page import html_cells, html_origin, html_page, html_table
from windlass.tools.common.record import Record, read_record, save_text
from windlass.tools.load.plots import all_plots, label_of


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
    record = read_record(path)
    if record.name != "serve" or not record.rows:
        raise ConfigError(f"{path}: is no result of windlass bench serve, or has no run.")
    return record


def save_report(records: Sequence[Record], path: Path) -> None:
    """Write the page, whole or not at all."""
    save_text(path, page(records))


def page(records: Sequence[Record]) -> str:
    """The HTML."""
    names = ", ".join(dict.fromkeys(label_of(record) for record in records))
    rows = ["".join(html_cells("serve", row)) for record in records for row in record.rows]
    top = f"{_warnings(records)}\n{html_table('serve', rows)}"
    return html_page(f"Load on {names}", top, all_plots(records), _origins(records))


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
        parts.append(f"<p>{escape(label_of(record))}: {html_origin(record)}</p>")
    return f'<div class="origin">{"".join(parts)}</div>'
