"""`windlass plan`: memory, speed and quality of a model's formats, before anything is loaded.

With --workload or --trace: predicted figures of a load. tools/plan has the implementation.
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
    FORMATS,
    LOAD,
    FormatNames,
    InputLen,
    MaxConcurrency,
    MinQuality,
    NumPrompts,
    OutputLen,
    Records,
    RequestRate,
    SkipBadLines,
    SloTargets,
    TraceFile,
    log,
    option,
    records_folder,
    split_names,
    switch,
)
from windlass.cli.options import ENGINE_OPTIONS, parse_size
from windlass.cli.results import check_path, finish
from windlass.config import EngineConfig, flag
from windlass.errors import ConfigError, file_errors

if TYPE_CHECKING:
    from windlass.tools.common.load import Load
    from windlass.tools.common.slo import Slo
    from windlass.tools.plan.what_if import WhatIf

SCALING = "Several devices"
# Options that a plan chooses. With a load, they are inputs.
_PLANNED = (
    "quantization",
    "quantize_head",
    "kv_cache_memory_bytes",
    "num_blocks",
    "memory_share",
    "max_model_len",
    "max_num_seqs",
)
# --kv-cache-dtype is a flag of this command: without it, the plan compares all types.
PLAN_OPTIONS = [option for option in ENGINE_OPTIONS if option.name != "kv_cache_dtype"]
_SECRETS = ("hf_token",)
_WHOLE_TRACE = 1_000_000  # requests that are read from a trace when no number is given


def parse_bandwidth(text: str) -> float:
    """Bytes per second from 4800GB/s or 4.8TB/s."""
    return float(parse_size(text.strip().removesuffix("/s")))


def plan(
    options: Options,
    memory: Annotated[
        int | None,
        option(
            "SIZE",
            "Memory for weights, KV cache and steps; default: free memory.",
            parser=parse_size,
            panel=FORMATS,
        ),
    ] = None,
    min_quality: MinQuality = None,
    context: Annotated[
        int | None,
        option("N", "Tokens per request [default: 4096, or the model's].", panel=FORMATS),
    ] = None,
    concurrency: Annotated[
        int | None, option("N", "Concurrent requests [default: 8].", panel=FORMATS)
    ] = None,
    kv_cache_dtype: Annotated[
        str | None,
        option("auto|fp8|int8", "Only this KV cache type; default: all.", panel=FORMATS),
    ] = None,
    formats: FormatNames = None,
    bandwidth: Annotated[
        float | None,
        option(
            "RATE",
            "Read bandwidth of the device to plan for, e.g. 4800GB/s; default: measured here.",
            parser=parse_bandwidth,
            panel=FORMATS,
        ),
    ] = None,
    records: Records = None,
    measure: Annotated[
        bool,
        switch(
            "Load the model and measure its step costs first, for better speed estimates.",
            "--measure",
            panel=FORMATS,
        ),
    ] = False,
    devices: Annotated[
        int | None,
        option("N", "Compare all ways to use this number of GPUs.", panel=SCALING),
    ] = None,
    tensor_parallel_size: Annotated[
        int | None,
        option(
            "N",
            "Only this number of GPUs that share every layer.",
            "--tensor-parallel-size",
            "-tp",
            "--tp",
            panel=SCALING,
        ),
    ] = None,
    pipeline_parallel_size: Annotated[
        int | None,
        option(
            "N",
            "Only this number of pipeline stages.",
            "--pipeline-parallel-size",
            "-pp",
            "--pp",
            panel=SCALING,
        ),
    ] = None,
    enable_expert_parallel: Annotated[
        bool,
        switch(
            "Only with whole experts on every GPU; default: with and without.",
            "--enable-expert-parallel",
            "--ep",
            panel=SCALING,
        ),
    ] = False,
    link_bandwidth: Annotated[
        float | None,
        option(
            "RATE",
            "What a GPU sends to others [default: 450GB/s, NVLink 4].",
            parser=parse_bandwidth,
            panel=SCALING,
        ),
    ] = None,
    price_per_hour: Annotated[
        float | None,
        option("X", "Price of one GPU in dollars; default: a typical price.", panel=SCALING),
    ] = None,
    explain: Annotated[
        bool, switch("List all assumptions with their sources.", "--explain", panel=SCALING)
    ] = False,
    trace: TraceFile = None,
    workload: Annotated[
        str | None,
        option("NAMES", "Workloads of bench serve, separated by commas.", panel=LOAD),
    ] = None,
    request_rate: RequestRate = None,
    max_concurrency: MaxConcurrency = None,
    num_prompts: NumPrompts = None,
    input_len: InputLen = None,
    output_len: OutputLen = None,
    skip_bad_lines: SkipBadLines = False,
    slo: SloTargets = None,
    max_devices: Annotated[
        int, option("N", "With --slo: max devices to try until it is met.", panel=LOAD)
    ] = 64,
    step_costs: Annotated[
        Path | None,
        option("FILE", "Read step costs from this file, or write them to it.", panel=LOAD),
    ] = None,
    check: Annotated[
        bool, switch("Run the load on an engine too, and compare.", "--check", panel=LOAD)
    ] = False,
    repeat: Annotated[int, option("N", "With --check: turns of each load.", panel=LOAD)] = 1,
    output: Annotated[Path | None, option("FILE", "Write all results as JSON.", "--json")] = None,
) -> int:
    """Plan memory, speed and quality before serving.

    Without a load: list which formats of a model fit into memory, and print the command for the
    best. No weights are read. Sizes of weights and KV cache are exact, speeds are estimates, and
    quality is measured, typical or assumed. Exit code 1: nothing fits, or nothing is good enough.

    With --devices or --tensor-parallel-size: compare tensor, pipeline and expert parallelism and
    replicas on several H200, with the format of -q. Times are a model; --explain lists what it
    assumes. Exit code 1: nothing fits.

    With --trace or --workload: replay the load on the real scheduler with step costs measured on
    this machine, and print the figures of bench serve. Exit code 1: the SLO is missed, or requests
    would fail.
    """
    given = dict(locals())
    check_path("--json", output)
    if trace is not None or workload is not None:
        _refuse(given, _FORMAT_FLAGS, "without --trace and --workload")
        _refuse(given, (*_SHAPE_FLAGS, *_SCALING_FLAGS), "without --trace and --workload")
        return _replay(options, given)
    _refuse(given, _LOAD_FLAGS, "with --trace or --workload")
    if any(given[name] is not None and given[name] is not False for name in _SHAPE_FLAGS):
        _refuse(given, ("min_quality", "formats", "bandwidth", "measure"), "to one device")
        return _scale(options, given)
    _refuse(given, _SCALING_FLAGS, "with --devices or --tensor-parallel-size")
    planned = [name for name in _PLANNED if name in options.values]
    if planned:
        raise ConfigError(
            f"{flag(planned[0])} is chosen by the plan: use --memory, --context, --concurrency and "
            "--formats instead, or replay a load with --workload or --trace."
        )
    if measure:
        from windlass.tools.plan.what_if import WhatIf

        WhatIf(options.engine(), log=log)
    from windlass.tools.plan.formats import FORMATS as ALL_FORMATS
    from windlass.tools.plan.select import select_quantization
    from windlass.tools.plan.show import show

    found = select_quantization(
        **options.engine_values(),
        memory=memory,
        min_quality=min_quality,
        context=context,
        concurrency=8 if concurrency is None else concurrency,
        kv_cache_dtype=kv_cache_dtype,
        bandwidth=bandwidth,
        formats=ALL_FORMATS if formats is None else split_names(formats),
        records=records_folder(records),
    )
    command = serve_command(options.engine_values(), found.best.options) if found.best else None
    if output is not None:
        _write(output, asdict(found) | {"command": command})
    show(found, command)
    return 0 if found.best else 1


_FORMAT_FLAGS = (
    "memory",
    "min_quality",
    "context",
    "concurrency",
    "formats",
    "bandwidth",
    "records",
    "measure",
)
_SHAPE_FLAGS = (
    "devices",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "enable_expert_parallel",
)
_SCALING_FLAGS = ("link_bandwidth", "price_per_hour", "explain")
_LOAD_FLAGS = (
    "request_rate",
    "max_concurrency",
    "num_prompts",
    "input_len",
    "output_len",
    "skip_bad_lines",
    "slo",
    "step_costs",
    "check",
)


def _refuse(given: Mapping[str, Any], names: Sequence[str], where: str) -> None:
    for name in names:
        if given[name] is not None and given[name] is not False and given[name] != []:
            raise ConfigError(f"{flag(name)} only applies {where}.")


def serve_command(given: Mapping[str, Any], chosen: Mapping[str, Any]) -> str:
    """Return the command that serves the model as planned, without secrets."""
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
    with file_errors(f"--json {path}"):
        path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _scale(options: Options, given: Mapping[str, Any]) -> int:
    """Compare layouts on several GPUs. `given` are the flags of `plan`."""
    from windlass.tools.plan.scaling import ScalingQuery, plan_on_h200
    from windlass.tools.plan.show import show_scaling

    sized = [name for name in ("num_blocks", "kv_cache_memory_bytes") if name in options.values]
    if sized:
        raise ConfigError(f"{flag(sized[0])} is chosen by the plan: use --memory and --context.")
    tp, pp = given["tensor_parallel_size"], given["pipeline_parallel_size"]
    concurrency = given["concurrency"]
    query = ScalingQuery(
        devices=(tp or 1) * (pp or 1) if given["devices"] is None else given["devices"],
        tp=tp,
        pp=pp,
        expert_parallel=given["enable_expert_parallel"],
        context=given["context"],
        concurrency=64 if concurrency is None else concurrency,
    )
    cache = {name: given[name] for name in ("kv_cache_dtype",) if given[name] is not None}
    values = options.engine_values() | cache
    found = plan_on_h200(
        EngineConfig.of(**values),
        query,
        memory=given["memory"],
        link_bandwidth=given["link_bandwidth"],
        price_per_hour=given["price_per_hour"],
        records=records_folder(given["records"]),
    )
    command = serve_command(values, found.best.options) if found.best else None
    if given["output"] is not None:
        _write(given["output"], asdict(found) | {"command": command})
    show_scaling(found, command, explain=given["explain"])
    return 0 if found.best else 1


def _replay(options: Options, given: Mapping[str, Any]) -> int:
    """Predict loads, and with --check measure them too. `given` are the flags of `plan`."""
    from windlass.tools.common.slo import parse_slo
    from windlass.tools.plan.what_if import WhatIf

    loads, slo = make_loads(given), parse_slo(given["slo"] or [])
    if given["max_devices"] < 1 or given["repeat"] < 1:
        raise ConfigError("--max-devices and --repeat must be at least 1.")
    if given["repeat"] > 1 and not given["check"]:
        raise ConfigError("--repeat applies only with --check.")
    config = options.engine()
    if given["kv_cache_dtype"] is not None:
        config = replace(
            config, cache=replace(config.cache, kv_cache_dtype=given["kv_cache_dtype"])
        )
    what_if = WhatIf(config=config, costs=given["step_costs"], log=log, loads=loads)
    if given["check"]:
        finish(what_if.check(loads, slo, given["repeat"]), given["output"])
        return 0
    return _predict(what_if, loads, slo, given)


def _predict(what_if: WhatIf, loads: list[Load], slo: Slo, given: Mapping[str, Any]) -> int:
    from windlass.tools.common.record import Record
    from windlass.tools.plan.show import prediction_lines

    rows, good = [], True
    for load in loads:
        found = what_if.predict(load, slo, given["max_devices"] if slo.targets else 0)
        if len(loads) > 1:
            typer.echo(f"\n{load.title}")
        for line in prediction_lines(found, load.max_concurrency, load.arrivals.rate):
            typer.echo(line)
        needed = next((fleet.num_devices for fleet in found.fleets if not fleet.misses), None)
        rows.append(found.row() | {"slo": str(slo), "devices_needed": needed})
        good = good and slo.is_met(found.summary)
    if given["output"] is not None:
        settings = {"model": what_if.opened.files.name, "costs": what_if.steps.to_json()}
        Record("plan", rows, settings=settings).save(given["output"])
        typer.echo(f"written to {given['output']}", err=True)
    return 0 if good else 1


def make_loads(given: Mapping[str, Any]) -> list[Load]:
    """Return the loads that the flags of `plan` or `tune` describe."""
    from windlass.tools.common.arrivals import Arrivals
    from windlass.tools.common.load import Load
    from windlass.tools.common.text_workload import TEXT_WORKLOADS, Sizes

    trace: Path | None = given["trace"]
    if trace is not None and given["workload"] is not None:
        raise ConfigError("--trace and --workload exclude each other.")
    if trace is not None and given["request_rate"] is not None:
        raise ConfigError("--request-rate has no effect with --trace, which has its own times.")
    rate = math.inf if given["request_rate"] is None else given["request_rate"]
    arrivals = Arrivals("trace") if trace is not None else Arrivals(rate=rate)
    names = ["timed_trace"] if trace is not None else split_names(given["workload"] or "chat")
    if trace is not None and given["input_len"] is not None:
        raise ConfigError("--input-len has no effect with --trace, which sets the lengths.")
    if trace is None and given["skip_bad_lines"]:
        raise ConfigError("--skip-bad-lines has no effect without --trace.")
    for name in names if trace is None else ():
        if name not in TEXT_WORKLOADS:
            raise ConfigError(
                f"--workload {name!r} is not known. Known: {', '.join(TEXT_WORKLOADS)}; or a file of "
                "requests with --trace."
            )
    count = given["num_prompts"]
    if count is None:
        count = _WHOLE_TRACE if trace is not None else Sizes().num_prompts
    sizes = Sizes(count, given["input_len"], given["output_len"])
    return [
        Load(
            name,
            trace,
            sizes=sizes,
            arrivals=arrivals,
            max_concurrency=given["max_concurrency"],
            skip_bad_lines=given["skip_bad_lines"],
        )
        for name in names
    ]
