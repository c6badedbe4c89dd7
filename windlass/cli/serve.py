"""`windlass serve`: the OpenAI-compatible server."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from windlass.cli.command import Options
from windlass.cli.reference import reference_config
from windlass.cli.secrets import with_environment_keys
from windlass.config import EngineConfig, GateConfig, ServeConfig
from windlass.core.card import EngineReport
from windlass.serve.logs import start_logging

if TYPE_CHECKING:
    from windlass.serve.fallback import FallbackStep

_log = logging.getLogger("windlass.serve")


def serve(options: Options) -> int:
    """Serve a model over HTTP with an OpenAI-compatible API.

    Options marked [live] can change while the server runs: see PATCH /admin/config.
    """
    start_logging(options.values.get("log_format", "text"), options.values.get("log_level", "info"))
    for note in options.notes:
        _log.info(note)
    _log.info("starting with %s", options.model)
    values = with_environment_keys(options.values, os.environ)
    sources = {name: options.sources.get(name, "environment") for name in values}
    options = replace(options, values=values)
    config, serve_config = options.engine(), options.serve()
    _check_quality(options)
    from windlass import start
    from windlass.cli.report import print_report

    def on_ready(report: EngineReport, url: str) -> None:
        print_report(report)
        typer.echo(f"\nWindlass serves at {url}\n")
        if serve_config.console and serve_config.uds is None:
            typer.echo(f"  in a browser: {url}/\n")
        typer.echo(_curl(url, serve_config))

    return start.serve(
        config,
        serve_config,
        on_ready,
        sources=sources,
        fallbacks=[fallback_of(options, text) for text in serve_config.fallback],
    )


def fallback_of(options: Options, text: str) -> tuple[FallbackStep, EngineConfig | None]:
    """A step of --fallback, and the config of its model; None: it has none."""
    from windlass.serve.fallback import parse_step  # imports the HTTP stack

    step = parse_step(text)
    if step.model is None:
        return step, None
    return step, reference_config(options.engine_values(), step.model, step.options)


def _check_quality(options: Options) -> None:
    """Measure the model's quality and raise QualityError if it misses a limit of the gate."""
    gate = options.gate()
    if gate == GateConfig():
        return
    from windlass.tools.eval.gates import is_enabled, run_gate

    if is_enabled(gate):
        reference = reference_config(
            options.engine_values(), gate.gate_against, gate.gate_against_options
        )
        typer.echo(run_gate(options.engine(), reference, gate), err=True)


def _curl(url: str, config: ServeConfig) -> str:
    """An example request to copy."""
    body = {"messages": [{"role": "user", "content": "What is a windlass?"}], "max_tokens": 64}
    address = url
    if config.uds is not None:
        address = f"--unix-socket {config.uds} http://localhost"
    key = (
        " -H 'Authorization: Bearer KEY'"
        if config.api_key or config.api_key_file or config.keys_file
        else ""
    )
    return (
        f"  curl {address}/v1/chat/completions -H 'Content-Type: application/json'{key} \\\n"
        f"    -d '{json.dumps(body)}'"
    )
