"""The arguments --notes and -o of a script, and the record of a run with all of its arguments."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from windlass.tools.common.record import Record


def add_record_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--notes", default="")
    parser.add_argument("-o", "--output", type=Path, help="write the record here, as JSON")


def save_record(
    name: str, rows: list[dict[str, Any]], args: Namespace, *, hidden: tuple[str, ...] = ()
) -> None:
    """Write the record if --output is given. Its settings are the arguments that are not `hidden`."""
    if args.output is None:
        return
    import torch  # noqa: F401  # the record names its GPU

    settings = {
        key: value for key, value in vars(args).items() if key not in ("notes", "output", *hidden)
    }
    Record(name=name, settings=settings, rows=rows, notes=args.notes).save(args.output)
