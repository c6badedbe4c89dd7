"""Writes the tables of a page of the docs from the stored results, between their markers.

`<!-- table:NAME -->` to `<!-- end -->` holds what `benchmarks/NAME.json` says, and nothing else.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from windlass.errors import ConfigError
from windlass.tools.bench.columns import COLUMNS, markdown

# Those that hold tables.
PAGES = (
    "docs/bench-serve.md",
    "docs/benchmarks.md",
    "docs/lora.md",
    "docs/ladder.md",
    "docs/planning.md",
    "docs/quantisation.md",
    "docs/speculation.md",
)
_PART = re.compile(r"(<!-- table:([\w.-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def fill(page: str, results: Path) -> str:
    """The page with every table made anew."""
    if not _PART.search(page):
        raise ConfigError("the page has no <!-- table:NAME --> ... <!-- end --> to fill.")
    return _PART.sub(lambda found: found[1] + _table(results / f"{found[2]}.json") + found[3], page)


def _table(path: Path) -> str:
    if not path.is_file():
        return f"\nNot measured yet: there is no `{path.name}`.\n\n"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        name, rows = record["name"], record["rows"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: is no benchmark's result: {error!r}.") from error
    if name not in COLUMNS:
        raise ConfigError(
            f"{path}: results of {name!r} have no table. Known: {', '.join(COLUMNS)}."
        )
    return f"\n{markdown(name, rows)}\n\n{_origin(record)}\n\n"


def _origin(record: dict[str, Any]) -> str:
    """Where the numbers come from, so that they can be made again."""
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    origin = (
        f"`{record['command']}` at {record['commit']} on {record['date']}; {record['hardware']}"
    )
    return f"{record['notes']}\n\n{origin}; {versions}."
