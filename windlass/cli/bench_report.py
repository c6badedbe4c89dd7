"""`windlass bench report`: results that were written earlier, as one page with plots."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from windlass.cli.command import reported
from windlass.cli.results import check_path
from windlass.errors import ConfigError


def report(
    ctx: typer.Context,
    results: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="JSONs of bench serve, or one of ladder."),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="The page.")
    ] = Path("report.html"),
    label: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="For each file in turn; default: the file's own."),
    ] = None,
) -> None:
    """Put results of bench serve, of one engine or several, into one page that needs no network.

    The result of a ladder, such as one from a machine without plotly, becomes its page.
    """
    with reported(ctx):
        check_path("-o", output)
        from windlass.tools.bench.record import read_record

        if len(results) == 1 and (record := read_record(results[0])).name == "ladder":
            from windlass.tools.ladder.report import save_report as save_ladder

            if label:
                raise ConfigError("--label means nothing for the result of a ladder.")
            save_ladder(record, output)
        else:
            from windlass.tools.load.report import read_records, save_report

            save_report(read_records(results, label or []), output)
        typer.echo(f"written to {output}", err=True)
