"""Saves and prints the results of commands that measure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from windlass.errors import ConfigError, file_errors

if TYPE_CHECKING:
    from windlass.tools.common.record import Record


def check_path(flag: str, path: Path | None) -> None:
    """Reject a bad path before the measurement; create its parent folders."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"{flag} {path}: is a folder; name a file.")
    with file_errors(f"{flag} {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)


def finish(record: Record, path: Path | None) -> None:
    """Save the record, then print its table."""
    from windlass.tools.common.report import show

    if path is not None:
        record.save(path)
        typer.echo(f"written to {path}", err=True)
    show(record)
