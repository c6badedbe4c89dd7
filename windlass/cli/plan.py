"""`windlass plan`: which formats of a model fit, how fast and how good they would be, and the choice.

With --workload or --trace: what an engine of these settings would do with that load. Planning and
printing are in tools/plan.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windlass.cli.command import Options
from windlass.cli.flags import (
    LOAD,
    InputLen,
    MaxConcurrency,
    NumPrompts,
    OutputLen,
    RequestRate,
    SkipBadLines,
    log,
    option,
    records_folder,
    split_names,
    switch,
)
from windlass.cli.options import ENGINE_OPTIONS, parse_share, parse_size
from windlass.cli.results import check_path, finish
from windlass.config import flag
from windlass.errors import ConfigError

if TYPE_CHECKING:
    from windlass.tools.common.load import Load
    from windlass.tools.common.slo import Slo
    from windlass.tools.plan.what_if import WhatIf

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
_FORMATS = "Formats"


def parse_bandwidth(text: str) -> float:
    """Bytes a second from 4800GB/s or 4.8TB/s."""
    return float(parse_size(text.strip().removesuffix("/s")))


def plan(
    options: Options,
    memory: Annotated[
        int | None,
        option(
            "SIZE",
            "Memory for everything; default: what is free.",
            parser=parse_size,
            panel=_FORMATS,
        ),
    ] = None,
    min_quality: Annotated[
        float | None,
        option(
            "SHARE",
            "Least share of the 16-bit model's quality to keep: 0.95 or 95%.",
            parser=parse_share,
            panel=_FORMATS,
        ),
    ] = None,
    context: Annotated[
        int | None,
        option("N", "Tokens of a request [default: 4096, or the model's].", panel=_FORMATS),
    ] = None,
    concurrency: Annotated[
        int | None, option("N", "Requests at once [default: 8].", panel=_FORMATS)
    ] = None,
    kv_cache_dtype: Annotated[
        str | None, option("auto|fp8|int8", "Only this KV type; default: all.", panel=_FORMATS)
    ] = None,
    formats: Annotated[
        str | None,
        option("NAMES", "Only these, with commas: as stored,int8,int4+head.", panel=_FORMATS),
    ] = None,
    bandwidth: Annotated[
        float | None,
        option(
            "RATE",
            "Plan for a device that reads so fast, such as 4800GB/s; default: measured here.",
            parser=parse_bandwidth,
            panel=_FORMATS,
        ),
    ] = None,
    records: Annotated[
        Path | None,
        option(
            "DIR",
            "Results of windlass eval; default: benchmarks/ where there is one.",
            panel=_FORMATS,
        ),
    ] = None,
    measure: Annotated[
        bool,
        switch(
            "Load the model and measure its steps first: speeds are those of its like.",
            "--measure",
            panel=_FORMATS,
        ),
    ] = False,
    trace: Annotated[
        Path | None,
        option("FILE", "JSONL of requests with timestamps, as bench serve reads.", panel=LOAD),
    ] = None,
    workload: Annotated[
        str | None,
        option("NAMES", "Loads of bench serve by name; several with commas.", panel=LOAD),
    ] = None,
    request_rate: RequestRate = None,
    max_concurrency: MaxConcurrency = None,
    num_prompts: NumPrompts = None,
    input_len: InputLen = None,
    output_len: OutputLen = None,
    skip_bad_lines: SkipBadLines = False,
    slo: Annotated[
        list[str] | None,
        option(
            "TARGETS", "ttft_p99=500ms,tpot_p99=40ms: says how many devices it needs.", panel=LOAD
        ),
    ] = None,
    max_devices: Annotated[int, option("N", "Most devices to try.", panel=LOAD)] = 64,
    step_costs: Annotated[
        Path | None,
        option("FILE", "Take costs of steps from here, or write them here.", panel=LOAD),
    ] = None,
    check: Annotated[
        bool, switch("Run the load for real too, and compare.", "--check", panel=LOAD)
    ] = False,
    repeat: Annotated[int, option("N", "With --check: turns of each load.", panel=LOAD)] = 1,
    output: Annotated[Path | None, option("FILE", "Write everything here.", "--json")] = None,
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
        return _replay(options, given)
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
        records=records_folder(records),
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

    WhatIf(options.engine(), log=log)


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


def _replay(options: Options, given: Mapping[str, Any]) -> int:
    """Predict, and with --check measure too; `given` are the flags of `plan`."""
    from windlass.tools.common.slo import parse_slo
    from windlass.tools.plan.what_if import WhatIf

    loads, slo = make_loads(given), parse_slo(given["slo"] or [])
    if given["max_devices"] < 1 or given["repeat"] < 1:
        raise ConfigError("--max-devices and --repeat must be at least 1.")
    if given["repeat"] > 1 and not given["check"]:
        raise ConfigError("--repeat means something only with --check.")
    config = options.engine()
    if given["kv_cache_dtype"] is not None:
        config = replace(
            config, cache=replace(config.cache, kv_cache_dtype=given["kv_cache_dtype"])
        )
    about = WhatIf(config, given["step_costs"], log, loads)
    if given["check"]:
        finish(about.check(loads, slo, given["repeat"]), given["output"])
        return 0
    return _predicted(about, loads, slo, given)


def _predicted(about: WhatIf, loads: list[Load], slo: Slo, given: Mapping[str, Any]) -> int:
    from windlass.tools.common.record import Record
    from windlass.tools.plan.show import lines

    rows, good = [], True
    for load in loads:
        most = given["max_devices"] if slo.targets else 0
        found = about.predict(load, slo, most)
        if len(loads) > 1:
            typer.echo(f"\n{load.title}")
        for line in lines(found, load.max_concurrency, load.arrivals.rate):
            typer.echo(line)
        needed = next((fleet.num_devices for fleet in found.fleets if not fleet.misses), None)
        rows.append(found.row() | {"slo": str(slo), "devices_needed": needed})
        good = good and slo.is_met(found.summary)
    if given["output"] is not None:
        settings = {"model": about.opened.files.name, "costs": about.steps.to_json()}
        Record("plan", rows, settings=settings).save(given["output"])
        typer.echo(f"written to {given['output']}", err=True)
    return 0 if good else 1


def make_loads(given: Mapping[str, Any]) -> list[Load]:
    """The loads that the flags name; `plan` and `tune` have the same ones."""
    from windlass.tools.common.arrivals import Arrivals
    from windlass.tools.common.load import Load

    trace: Path | None = given["trace"]
    if trace is not None and given["workload"] is not None:
        raise ConfigError("--trace and --workload exclude each other.")
    if trace is not None and given["request_rate"] is not None:
        raise ConfigError("--request-rate means nothing for --trace, which has its own times.")
    rate = math.inf if given["request_rate"] is None else given["request_rate"]
    arrivals = Arrivals("trace") if trace is not None else Arrivals(rate=rate)
    names = ["trace"] if trace is not None else split_names(given["workload"] or "chat")
    sizes = {name: given[name] for name in ("num_prompts", "input_len", "output_len")}
    return [
        Load(
            name,
            trace,
            **sizes,
            arrivals=arrivals,
            max_concurrency=given["max_concurrency"],
            skip_bad_lines=given["skip_bad_lines"],
        )
        for name in names
    ]
