"""The flags of a load that is replayed or served in process: `plan` and `tune` have the same."""

from __future__ import annotations

from typing import Annotated, Any

import typer

LOAD = "Load"


def of(panel: str | None, metavar: str, help: str, *names: str, **more: Any) -> Any:
    """A flag in a section of the help."""
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel=panel, **more)


RequestRate = Annotated[
    float | None, of(LOAD, "R", "Requests a second; default: all at once, or the trace's.")
]
MaxConcurrency = Annotated[int | None, of(LOAD, "N", "Most requests under way at once.")]
NumPrompts = Annotated[int | None, of(LOAD, "N", "Requests [default: 64, or the whole trace].")]
InputLen = Annotated[int | None, of(LOAD, "N", "Prompt tokens; default: the load's.")]
OutputLen = Annotated[int | None, of(LOAD, "N", "Tokens out; default: the load's.")]
SkipBadLines = Annotated[
    bool, typer.Option("--skip-bad-lines", help="Leave them out.", rich_help_panel=LOAD)
]
