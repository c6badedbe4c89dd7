"""Where commands that measure leave their results: a file that was checked first, and the screen."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from windlass.errors import ConfigError

if TYPE_CHECKING:
    from windlass.tools.common.record import Record


def check_path(flag: str, path: Path | None) -> None:
    """Refuse a bad path before anything is measured."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"{flag} {path}: is a folder; name a file.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror or error}.") from error


def finish(record: Record, path: Path | None) -> None:
    """Save, then show: the table is the last thing on the screen."""
    from windlass.tools.common.report import show

    if path is not None:
        record.save(path)
        typer.echo(f"written to {path}", err=True)
    show(record)
