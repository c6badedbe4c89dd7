"""`windlass tune`: searches the settings that are fastest for a load under an SLO."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

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
    some_names,
    switch,
)
from windlass.cli.options import ENGINE_OPTIONS
from windlass.cli.plan import make_loads
from windlass.cli.results import check_path, finish
from windlass.config import flag
from windlass.errors import ConfigError

# Options that the search sets; --profile sets its starting point.
_SEARCHED = (
    "quantization",
    "quantize_head",
    "kv_cache_dtype",
    "num_blocks",
    "max_num_seqs",
    "max_num_batched_tokens",
    "kv_cache_memory_bytes",
    "spec",
)
TUNE_OPTIONS = [
    option
    for option in ENGINE_OPTIONS
    if option.name not in _SEARCHED and not option.name.startswith("spec_")
]


def tune(
    options: Options,
    workload: Annotated[
        str | None, option("NAME", "Workload of bench serve [default: chat].", panel=LOAD)
    ] = None,
    trace: TraceFile = None,
    request_rate: RequestRate = None,
    max_concurrency: MaxConcurrency = None,
    num_prompts: NumPrompts = None,
    input_len: InputLen = None,
    output_len: OutputLen = None,
    skip_bad_lines: SkipBadLines = False,
    slo: SloTargets = None,
    min_quality: MinQuality = None,
    trials: Annotated[int, option("N", "Settings to simulate.")] = 60,
    finalists: Annotated[int, option("N", "Best simulated settings to measure.")] = 3,
    runs: Annotated[int, option("N", "Measured runs of each finalist, in turns.")] = 2,
    max_formats: Annotated[
        int, option("N", "Max weight formats to try without --formats.", panel=FORMATS)
    ] = 2,
    formats: FormatNames = None,
    speculate: Annotated[
        bool, switch("Also measure the best settings with speculation (ngram, lookahead).")
    ] = True,
    price_per_hour: Annotated[
        float | None,
        option("USD", "Price of the machine; adds a column with dollars per million tokens."),
    ] = None,
    records: Records = None,
    output: Annotated[
        Path, option("FILE", "Config file to write, for serve --config.", "-o", "--output")
    ] = Path("windlass.yaml"),
    report: Annotated[
        Path | None, option("FILE", "Write all tried settings as JSON.", "--json")
    ] = None,
) -> int:
    """Find the fastest settings for a load under an SLO, and write them for serve --config.

    Searches max sequences, tokens per step, KV blocks, and the formats of weights and KV cache with
    optuna on a simulator with measured step costs. Then measures the best settings on an engine,
    without and with speculation. --profile chat, batch or hybrid sets the starting point. Exit code
    1: nothing meets the SLO, and the nearest settings are written; 130 after ctrl-C, with the best
    settings so far.
    """
    given = dict(locals())
    check_path("-o", output)
    check_path("--json", report)
    _check(given)
    from windlass.tools.common.slo import parse_slo
    from windlass.tools.tune.report import options_of, record_of, verdict, write_yaml
    from windlass.tools.tune.tune import TuneConfig, Tuner

    format_names = some_names("--formats", formats, "int8,int4")
    loads = make_loads(given)
    if len(loads) > 1:
        raise ConfigError("--workload: tune takes one load; give one name.")
    config = TuneConfig(
        engine_options=options.engine_values(),
        load=loads[0],
        slo=parse_slo(slo or []),
        min_quality=min_quality or 0.0,
        num_trials=trials,
        num_finalists=finalists,
        max_formats=max_formats,
        formats=format_names,
        num_runs=runs,
        speculate=speculate,
        price_per_hour=price_per_hour,
        records=records_folder(records),
    )
    tuner = Tuner(config, log)
    found = tuner.run()
    finish(record_of(found, config, tuner.model), report)
    reasons = verdict(found, config)
    typer.echo("\n" + "\n".join(reasons))
    if found.best is None:
        return 130
    write_yaml(output, options_of(found, config.engine_options), reasons)
    typer.echo(f"\nwritten to {output}:\n  windlass serve --config {output}")
    if found.interrupted:
        return 130
    return 0 if found.best.meets_slo else 1


def _check(given: dict[str, Any]) -> None:
    min_quality, price = given["min_quality"], given["price_per_hour"]
    if min_quality is not None and not 0 <= min_quality <= 1:
        raise ConfigError(f"--min-quality must be from 0 to 1, got {min_quality:g}.")
    for name in ("trials", "finalists", "runs", "max_formats"):
        if given[name] < 1:
            raise ConfigError(f"{flag(name)} must be at least 1, got {given[name]}.")
    if price is not None and price < 0:
        raise ConfigError(f"--price-per-hour must be at least 0, got {price:g}.")
