"""`windlass cache`: shows, checks and clears the directory of --prefix-cache-dir."""

from __future__ import annotations

import json
import re
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windlass.cli.command import CommandGroup, PanelCommand, reported
from windlass.cli.flags import log, option, switch
from windlass.errors import ConfigError

if TYPE_CHECKING:
    from windlass.tiers.disk_admin import StoredModel

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Show, check and clear the KV blocks of --prefix-cache-dir.",
)

Directory = Annotated[
    Path, option("DIR", "The directory that the server was started with.", "--prefix-cache-dir")
]
Model = Annotated[
    str | None,
    option("NAME", "Only records of this model, or of this fingerprint (its start).", "--model"),
]
AsJson = Annotated[bool, switch("Print JSON.", "--json")]

_AGE = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@app.command("ls", cls=PanelCommand)
def list_models(
    ctx: typer.Context, directory: Directory, model: Model = None, as_json: AsJson = False
) -> None:
    """Show the stored models with the size, age and hits of their KV blocks.

    Changed weights, another KV dtype, block size, rank or version of Windlass are another fingerprint,
    whose records the old ones do not replace: the least recently used ones are evicted first.
    """
    with reported(ctx):
        from windlass.tiers.disk_admin import find_models, summarise

        found = [
            summarise(digest, folder) for digest, folder in find_models(directory, model).items()
        ]
        found.sort(key=lambda item: item.last_used_ns or 0, reverse=True)
        if as_json:
            typer.echo(json.dumps(_listing(directory, found), indent=2))
        else:
            _print_listing(found)


@app.command("verify", cls=PanelCommand)
def verify_records(
    ctx: typer.Context,
    directory: Directory,
    model: Model = None,
    delete: Annotated[bool, switch("Remove the bad records.", "--delete")] = False,
    as_json: AsJson = False,
) -> None:
    """Read every record and report the bad ones, which an engine would recognise and not use.

    The exit code is 1 if bad records were found and not removed.
    """
    with reported(ctx):
        from windlass.tiers.disk_admin import find_models, verify

        results = [
            result
            for digest, folder in find_models(directory, model).items()
            for result in verify(digest, folder)
        ]
        bad = [result for result in results if result is not None]
        if delete:
            for item in bad:
                Path(item.path).unlink(missing_ok=True)
        if as_json:
            report = {
                "num_records": len(results),
                "num_bad": len(bad),
                "deleted": delete,
                "bad": [{"path": item.path, "reason": item.reason} for item in bad],
            }
            typer.echo(json.dumps(report, indent=2))
        else:
            for item in bad:
                typer.echo(f"{item.path} {item.reason}")
            removed = ", which were removed" if delete and bad else ""
            log(f"{len(results):,} records, {len(bad):,} bad{removed}")
    raise typer.Exit(1 if bad and not delete else 0)


@app.command("clear", cls=PanelCommand)
def clear_records(
    ctx: typer.Context,
    directory: Directory,
    model: Model = None,
    older_than: Annotated[
        str | None,
        option("AGE", "Only records that were not used for so long: 90m, 12h, 7d.", "--older-than"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Remove all records, or those of a model or an age. A running server computes them again."""
    with reported(ctx):
        from windlass.cli.report import readable_bytes
        from windlass.tiers.disk_admin import clear, find_models

        before = None if older_than is None else time.time_ns() - int(_seconds(older_than) * 1e9)
        removed = [
            clear(folder, used_before_ns=before)
            for folder in find_models(directory, model).values()
        ]
        num_records, num_bytes = (sum(item[i] for item in removed) for i in range(2))
        if as_json:
            typer.echo(json.dumps({"num_records": num_records, "num_bytes": num_bytes}))
        else:
            log(f"removed {num_records:,} records, {readable_bytes(num_bytes)}")


def _seconds(age: str) -> float:
    found = _AGE.fullmatch(age)
    if found is None:
        raise ConfigError(f"--older-than {age!r}: expected a number and a unit, such as 90m or 7d.")
    return float(found[1]) * _SECONDS[found[2]]


def _listing(directory: Path, found: list[StoredModel]) -> dict[str, Any]:
    return {
        "directory": str(directory),
        "num_records": sum(item.num_records for item in found),
        "num_bytes": sum(item.num_bytes for item in found),
        "models": [
            {
                "fingerprint": item.fingerprint,
                **item.about,
                "num_records": item.num_records,
                "num_bytes": item.num_bytes,
                "hits": item.hits,
                "last_used": _date(item.last_used_ns),
                "oldest": _date(item.oldest_ns),
            }
            for item in found
        ],
    }


def _date(time_ns: int | None) -> str | None:
    if time_ns is None:
        return None
    return datetime.fromtimestamp(time_ns / 1e9, UTC).isoformat(timespec="seconds")


def _print_listing(found: list[StoredModel]) -> None:
    from windlass.cli.report import make_console, make_table, readable_bytes

    table = make_table("Fingerprint", "Model", "KV", "Records", "Size", "Hits", "Unused for")
    for item in found:
        about = item.about
        name = str(about.get("model", "unknown"))
        if about.get("world", 1) != 1:
            name += f", rank {about.get('rank')} of {about['world']}"
        table.add_row(
            item.fingerprint[:8],
            name,
            str(about.get("kv_dtype", "")),
            f"{item.num_records:,}",
            readable_bytes(item.num_bytes),
            f"{item.hits:,}",
            _age(item.last_used_ns),
        )
    make_console().print(table)


def _age(time_ns: int | None) -> str:
    """90 m, 12 h, 7 d"""
    if time_ns is None:
        return ""
    seconds = max(0.0, (time.time_ns() - time_ns) / 1e9)
    unit = next(unit for unit in "dhms" if seconds >= 2 * _SECONDS[unit] or unit == "s")
    return f"{seconds / _SECONDS[unit]:.0f} {unit}"
