"""Helpers that declare CLI flags, and flags that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from windlass.cli.options import parse_share
from windlass.errors import ConfigError

LOAD = "Load"
FORMATS = "Formats"


def option(metavar: str, help: str, *names: str, panel: str | None = None, **more: Any) -> Any:
    """A flag with a value. `panel` is its section of the help."""
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel=panel, **more)


def switch(help: str, *names: str, panel: str | None = None, **more: Any) -> Any:
    """A flag without a value."""
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


def log(text: str) -> None:
    """Log progress to stderr; results go to stdout."""
    typer.echo(text, err=True)


def split_names(text: str) -> list[str]:
    """Split comma-separated names."""
    return [name.strip() for name in text.split(",") if name.strip()]


def some_names(flag: str, given: str | None, such_as: str) -> tuple[str, ...]:
    """Split comma-separated names; empty without the flag, an error for an empty flag."""
    names = tuple(split_names(given or ""))
    if given is not None and not names:
        raise ConfigError(f"{flag} is empty; name at least one, such as {such_as}.")
    return names


def records_folder(given: Path | None) -> Path | None:
    """The folder of --records; default: benchmarks/, if it exists."""
    default = Path("benchmarks")
    return given or (default if default.is_dir() else None)


ShowProgress = Annotated[bool, switch("Show a progress bar on stderr.")]
JsonOutput = Annotated[Path | None, option("FILE", "Write JSON here.", "-o", "--output")]
Repeat = Annotated[int, option("N", "Number of runs; the median is reported.")]
Adapter = Annotated[str, option("NAME", "One of --lora-modules; default: the model itself.")]

# Windows of text, for `eval` and `bench formats`.
Context = Annotated[int, option("N", "Tokens per window.")]
Stride = Annotated[int | None, option("N", "Tokens between windows; default: half of the context.")]
MaxWindows = Annotated[int | None, option("N", "Measure only the first windows.")]
SampleTokens = Annotated[int, option("N", "Tokens per calibration text, from its start.")]

# The load of `plan` and `tune`.
RequestRate = Annotated[
    float | None,
    option("R", "Requests per second; default: all at once, or the trace's.", panel=LOAD),
]
MaxConcurrency = Annotated[int | None, option("N", "Max requests in flight.", panel=LOAD)]
NumPrompts = Annotated[
    int | None, option("N", "Number of requests [default: 64, or the whole trace].", panel=LOAD)
]
InputLen = Annotated[int | None, option("N", "Prompt tokens; default: the workload's.", panel=LOAD)]
OutputLen = Annotated[
    int | None, option("N", "Output tokens; default: the workload's.", panel=LOAD)
]
SkipBadLines = Annotated[bool, switch("Skip invalid lines.", "--skip-bad-lines", panel=LOAD)]
TraceFile = Annotated[
    Path | None,
    option("FILE", "JSONL of requests with timestamps, as for bench serve.", panel=LOAD),
]
SloTargets = Annotated[
    list[str] | None, option("TARGETS", "SLO, e.g. ttft_p99=500ms,tpot_p99=40ms.", panel=LOAD)
]

# The formats of `plan` and `tune`.
MinQuality = Annotated[
    float | None,
    option(
        "SHARE",
        "Minimum share of the 16-bit model's quality, e.g. 0.95 or 95%; default: 0.99 of the best "
        "that fits (plan), none (tune).",
        parser=parse_share,
        panel=FORMATS,
    ),
]
FormatNames = Annotated[
    str | None,
    option("NAMES", "Only these formats, e.g. 'as stored,int8,int4+head'.", panel=FORMATS),
]
Records = Annotated[
    Path | None,
    option(
        "DIR", "Folder with results of windlass eval; default: benchmarks/, if any.", panel=FORMATS
    ),
]
