"""`windlass config`: checks the options of a server, and shows their effective values."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Annotated, Any

import typer

from windlass.cli.command import Options
from windlass.cli.flags import log, switch
from windlass.cli.secrets import with_environment_keys
from windlass.cli.serve import fallback_of
from windlass.config import EngineConfig, check_server, flag
from windlass.settings import describe

_CHOSEN_AT_START = ("max_num_seqs", "max_num_batched_tokens", "memory_share")
_MAX_VALUE_CHARS = 60

Settings = dict[str, dict[str, Any]]


def config(
    options: Options,
    as_json: Annotated[bool, switch("Print JSON.", "--json")] = False,
    show_all: Annotated[bool, switch("Show options with their defaults, too.", "--all")] = False,
) -> int:
    """Check the options of `windlass serve`, and show their effective values.

    Takes the flags of `windlass serve`, a config file and the environment, and checks them and the key
    files as at start. Opens no model and starts nothing. Shows the value and the source of each option:
    flag, file, environment, profile or default. GET /admin/config shows the same for a running server.
    """
    for note in options.notes:
        log(note)
    values = with_environment_keys(options.values, dict(os.environ))
    sources = {name: options.sources.get(name, "environment") for name in values}
    options = replace(options, values=values)
    settings = _checked(options, sources)
    if as_json:
        typer.echo(json.dumps({"settings": settings}, indent=2))
        return 0
    shown = {
        name: each for name, each in settings.items() if show_all or each["source"] != "default"
    }
    for line in _table(shown):
        typer.echo(line)
    typer.echo(f"{len(settings)} options, {len(shown)} shown: the configuration is valid.")
    return 0


def _checked(options: Options, sources: Mapping[str, str]) -> Settings:
    """All settings; raises ConfigError for what a server would refuse before it opens the model."""
    from windlass.serve.keys import Keys  # imports the HTTP stack

    engine, serve, gate = options.engine(), options.serve(), options.gate()
    check_server(serve, engine)
    Keys.of(serve)
    for text in serve.fallback:
        fallback_of(options, text)
    sections = [*(getattr(engine, item.name) for item in fields(engine)), serve, gate]
    settings = {
        item.name: describe(item, getattr(each, item.name), sources.get(item.name, "default"))
        for each in sections
        for item in fields(each)
    }
    for name, value in _from_profile(engine).items():
        if settings[name]["value"] is None:
            settings[name] |= {"value": value, "source": "profile"}
    return settings


def _from_profile(engine: EngineConfig) -> dict[str, Any]:
    """The limits that a profile sets; empty: they depend on the device, which is found at start."""
    device = engine.model.device
    limits = engine.limits("cpu" if device == "cpu" else "cuda")  # raises if they do not fit
    if engine.scheduler.profile is None and device == "auto":
        return {}
    found = {name: getattr(limits, name) for name in _CHOSEN_AT_START}
    if device == "cuda" and limits.default_tpot_ms is not None:
        found["slo_tpot_ms"] = limits.default_tpot_ms
    return found


def _table(settings: Settings) -> list[str]:
    rows = [("option", "value", "source", "live")]
    for name, each in settings.items():
        value = json.dumps(each["value"], ensure_ascii=False)
        if len(value) > _MAX_VALUE_CHARS:
            value = value[: _MAX_VALUE_CHARS - 1] + "…"
        rows.append((flag(name), value, each["source"], "live" if each["live"] else ""))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return [
        "  ".join(
            [*(text.ljust(width) for text, width in zip(row, widths, strict=False)), row[3]]
        ).rstrip()
        for row in rows
    ]
