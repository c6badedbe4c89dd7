"""`windlass plan`: which formats of a model fit, how fast and how good they would be, and the choice.

Planning and printing are in tools/plan; this reads the flags and writes the command. Loads are
replayed in what_if.py.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from windlass.cli.command import Options
from windlass.cli.load_flags import (
    LOAD,
    InputLen,
    MaxConcurrency,
    NumPrompts,
    OutputLen,
    RequestRate,
    SkipBadLines,
    of,
)
from windlass.cli.options import ENGINE_OPTIONS, parse_share, parse_size, split_names
from windlass.cli.results import check_path
from windlass.cli.what_if import what_if
from windlass.config import flag
from windlass.errors import ConfigError

# What decides how a model is held is what is planned; a load is replayed with what is set.
_PLANNED = (
    "quantization",
    "quantize_head",
    "kv_cache_memory_bytes",
    "num_blocks",
    "memory_share",
    "max_model_len",
    "max_num_seqs",
)
# A flag of its own here: only one type is to be planned with.
PLAN_OPTIONS = [option for option in ENGINE_OPTIONS if option.name != "kv_cache_dtype"]
_SECRETS = ("hf_token",)
_RECORDS = Path("benchmarks")
_FORMATS = "Formats"


def parse_bandwidth(text: str) -> float:
    """Bytes a second from 4800GB/s or 4.8TB/s."""
    return float(parse_size(text.strip().removesuffix("/s")))


def plan(
    options: Options,
    memory: Annotated[
        int | None,
        of(_FORMATS, "SIZE", "Memory for everything; default: what is free.", parser=parse_size),
    ] = None,
    min_quality: Annotated[
        float | None,
        of(
            _FORMATS,
            "SHARE",
            "Least share of the 16-bit model's quality to keep: 0.95 or 95%.",
            parser=parse_share,
        ),
    ] = None,
    context: Annotated[
        int | None,
        of(_FORMATS, "N", "Tokens of a request [default: 4096, or the model's]."),
    ] = None,
    concurrency: Annotated[int | None, of(_FORMATS, "N", "Requests at once [default: 8].")] = None,
    kv_cache_dtype: Annotated[
        str | None, of(_FORMATS, "auto|fp8|int8", "Only this KV type; default: all.")
    ] = None,
    formats: Annotated[
        str | None,
        of(_FORMATS, "NAMES", "Only these, with commas: as stored,int8,int4+head."),
    ] = None,
    bandwidth: Annotated[
        float | None,
        of(
            _FORMATS,
            "RATE",
            "Plan for a device that reads so fast, such as 4800GB/s; default: measured here.",
            parser=parse_bandwidth,
        ),
    ] = None,
    records: Annotated[
        Path | None,
        of(_FORMATS, "DIR", "Results of windlass eval; default: benchmarks/ where there is one."),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Load the model and measure its steps first: speeds are those of its like.",
            rich_help_panel=_FORMATS,
        ),
    ] = False,
    trace: Annotated[
        Path | None, of(LOAD, "FILE", "JSONL of requests with timestamps, as bench serve reads.")
    ] = None,
    workload: Annotated[
        str | None, of(LOAD, "NAMES", "Loads of bench serve by name; several with commas.")
    ] = None,
    request_rate: RequestRate = None,
    max_concurrency: MaxConcurrency = None,
    num_prompts: NumPrompts = None,
    input_len: InputLen = None,
    output_len: OutputLen = None,
    skip_bad_lines: SkipBadLines = False,
    slo: Annotated[
        list[str] | None,
        of(LOAD, "TARGETS", "ttft_p99=500ms,tpot_p99=40ms: says how many devices it needs."),
    ] = None,
    max_devices: Annotated[int, of(LOAD, "N", "Most devices to try.")] = 64,
    step_costs: Annotated[
        Path | None, of(LOAD, "FILE", "Take costs of steps from here, or write them here.")
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Run the load for real too, and compare.", rich_help_panel=LOAD
        ),
    ] = False,
    repeat: Annotated[int, of(LOAD, "N", "With --check: turns of each load.")] = 1,
    output: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write everything here.")
    ] = None,
) -> int:
    """Say before anything is served what fits, how fast and how good it would be.

    Without a load: which formats of a model fit into a memory, and the command for the best. No
    weight is read. Bytes of weights and keys and values are exact, speeds are estimates, quality is
    measured or typical and says which. Exit code 1: nothing fits, or nothing is good enough.

    With --trace or --workload: the load goes through the real scheduler with the costs of steps
    that were measured on this machine, and the figures of bench serve come out. Exit code 1: the SLO
    is missed, or requests would fail.
    """
    given = dict(locals())
    check_path("--json", output)
    if trace is not None or workload is not None:
        _refuse(given, _FOR_FORMATS, "without --trace and --workload")
        return what_if(options, given)
    _refuse(given, _FORLOADS, "with --trace or --workload")
    set_too = [name for name in _PLANNED if name in options.values]
    if set_too:
        raise ConfigError(
            f"{flag(set_too[0])} is what is planned: say what it is for with --memory, --context, "
            "--concurrency and --formats, or replay a load with --workload or --trace."
        )
    if measure:
        _measure_steps(options)
    from windlass.tools.plan.formats import FORMATS
    from windlass.tools.plan.select import select_quantization
    from windlass.tools.plan.show import show

    found = select_quantization(
        **options.engine_values(),
        memory=memory,
        min_quality=min_quality or 0.0,
        context=context,
        concurrency=8 if concurrency is None else concurrency,
        kv_cache_dtype=kv_cache_dtype,
        bandwidth=bandwidth,
        formats=FORMATS if formats is None else split_names(formats),
        records=records or (_RECORDS if _RECORDS.is_dir() else None),
    )
    command = serve_command(options.engine_values(), found.best.options) if found.best else None
    if output is not None:
        _write(output, asdict(found) | {"command": command})
    show(found, command)
    return 0 if found.best else 1


_FOR_FORMATS = (
    *("memory", "min_quality", "context", "concurrency", "formats", "bandwidth", "records"),
    "measure",
)
_FORLOADS = (
    *("request_rate", "max_concurrency", "num_prompts", "input_len", "output_len"),
    *("skip_bad_lines", "slo", "step_costs", "check"),
)


def _refuse(given: Mapping[str, Any], names: Sequence[str], where: str) -> None:
    for name in names:
        if given[name] is not None and given[name] not in (False, []):
            raise ConfigError(f"{flag(name)} means something only {where}.")


def _measure_steps(options: Options) -> None:
    from windlass.tools.plan.what_if import WhatIf

    WhatIf(options.engine(), say=partial(typer.echo, err=True))


def serve_command(given: Mapping[str, Any], chosen: Mapping[str, Any]) -> str:
    """The words that serve the model as planned; a token is not repeated."""
    rest = {name: value for name, value in given.items() if name not in ("model", *_SECRETS)}
    words = ["windlass", "serve", *([str(given["model"])] if "model" in given else [])]
    for name, value in {**rest, **chosen}.items():
        if isinstance(value, bool):
            words.append(flag(name) if value else f"--no-{flag(name).removeprefix('--')}")
        else:
            text = json.dumps(value) if isinstance(value, Mapping) else str(value)
            words += [flag(name), text]
    return shlex.join(words)


def _write(path: Path, values: Mapping[str, Any]) -> None:
    try:
        path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {path}: {error.strerror or error}.") from error
