"""`windlass tune`: the best settings for a load and an SLO, written as YAML, with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

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
    some_names,
    switch,
)
from windlass.cli.options import ENGINE_OPTIONS, parse_share
from windlass.cli.plan import make_loads
from windlass.cli.results import check_path, finish
from windlass.config import flag
from windlass.errors import ConfigError

# What is searched for; the profile sets where the search starts.
_SEARCHED = (
    *("quantization", "quantize_head", "kv_cache_dtype", "num_blocks", "max_num_seqs"),
    *("max_num_batched_tokens", "kv_cache_memory_bytes", "spec", "spec_model", "spec_quantization"),
)
TUNE_OPTIONS = [
    option
    for option in ENGINE_OPTIONS
    if option.name not in _SEARCHED and not option.name.startswith("spec_")
]


def tune(
    options: Options,
    workload: Annotated[
        str | None, option("NAME", "A load of bench serve [default: chat].", panel=LOAD)
    ] = None,
    trace: Annotated[
        Path | None, option("FILE", "JSONL of requests with timestamps, instead.", panel=LOAD)
    ] = None,
    request_rate: RequestRate = None,
    max_concurrency: MaxConcurrency = None,
    num_prompts: NumPrompts = None,
    input_len: InputLen = None,
    output_len: OutputLen = None,
    skip_bad_lines: SkipBadLines = False,
    slo: Annotated[
        list[str] | None, option("TARGETS", "ttft_p99=500ms,tpot_p99=40ms; default: none.")
    ] = None,
    min_quality: Annotated[
        float,
        option("SHARE", "Least share of the 16-bit quality: 0.95 or 95%.", parser=parse_share),
    ] = 0.0,
    trials: Annotated[int, option("N", "Settings to try on the simulator.")] = 60,
    finalists: Annotated[int, option("N", "The best of them are measured.")] = 3,
    runs: Annotated[int, option("N", "Of each that is measured, in turns.")] = 2,
    max_formats: Annotated[int, option("N", "Formats of the weights to try.")] = 2,
    formats: Annotated[
        str | None, option("NAMES", "These instead, as for plan: as stored,int8,int4.")
    ] = None,
    speculate: Annotated[
        bool, switch("Measure the best with guesses too (ngram, lookahead).")
    ] = True,
    price_per_hour: Annotated[
        float | None, option("USD", "What the machine costs: adds dollars per million tokens.")
    ] = None,
    records: Annotated[
        Path | None,
        option("DIR", "Results of windlass eval; default: benchmarks/ where there is one."),
    ] = None,
    output: Annotated[Path, option("FILE", "The settings.", "-o", "--output")] = Path(
        "windlass.yaml"
    ),
    report: Annotated[
        Path | None, option("FILE", "Write all that was tried here.", "--json")
    ] = None,
) -> int:
    """Find the settings that are fastest under an SLO, and write them for serve --config.

    Sequences, tokens a step, blocks, and the forms of weights and keys and values are searched with
    optuna on a simulator whose costs of steps are measured first; the best are run for real, then
    with guesses. --profile chat, batch or hybrid says where to start. Exit code 1: nothing meets the
    SLO, and the nearest was written; 130 after ctrl-C, with the best until then.
    """
    given = dict(locals())
    check_path("-o", output)
    check_path("--json", report)
    _check(given)
    from windlass.tools.common.slo import parse_slo
    from windlass.tools.tune.report import options_of, record_of, verdict, write_yaml
    from windlass.tools.tune.tune import Tuner, Wish

    formats_wanted = some_names("--formats", formats, "int8,int4")
    loads = make_loads(given)
    if len(loads) > 1:
        raise ConfigError("--workload: one load is tuned for; give one name.")
    wish = Wish(
        options.engine_values(),
        loads[0],
        parse_slo(slo or []),
        min_quality,
        trials,
        finalists,
        max_formats,
        formats_wanted,
        runs,
        speculate,
        price_per_hour,
        records_folder(records),
    )
    tuner = Tuner(wish, log)
    found = tuner.run()
    finish(record_of(found, wish, tuner.model), report)
    why = verdict(found, wish)
    typer.echo("\n" + "\n".join(why))
    if found.best is None:
        return 130
    write_yaml(output, options_of(found, wish.given), why)
    typer.echo(f"\nwritten to {output}:\n  windlass serve --config {output}")
    if found.interrupted:
        return 130
    return 0 if found.best.is_good else 1


def _check(given: dict[str, Any]) -> None:
    if not 0 <= given["min_quality"] <= 1:
        raise ConfigError(f"--min-quality must be from 0 to 1, got {given['min_quality']:g}.")
    for name in ("trials", "finalists", "runs", "max_formats"):
        if given[name] < 1:
            raise ConfigError(f"{flag(name)} must be at least 1, got {given[name]}.")
    price = given["price_per_hour"]
    if price is not None and price < 0:
        raise ConfigError(f"--price-per-hour must be at least 0, got {price:g}.")
