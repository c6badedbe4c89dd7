"""`windlass ladder`: every lever alone and stacked, with speed, tails, memory, quality and cost."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from windlass.cli.command import Options
from windlass.cli.flags import ShowProgress, log, option, some_names, switch
from windlass.cli.options import ENGINE_OPTIONS
from windlass.cli.results import check_path
from windlass.errors import ConfigError, UnsupportedError

_INTERRUPTED = 130
# What the rungs differ in, and what follows from the load.
_VARIED = (
    "quantization",
    "quantize_head",
    "kv_cache_dtype",
    "kv_cache_memory_bytes",
    "memory_share",
    "num_blocks",
    "prefix_caching",
    "enable_chunked_prefill",
    "batching",
    "max_model_len",
)
LADDER_OPTIONS = [option for option in ENGINE_OPTIONS if option.name not in _VARIED]


def ladder(
    options: Options,
    rungs: Annotated[
        str | None,
        option(
            "NAMES",
            "Some of naive, static, continuous, chunked, prefix, int8, fp8, int4, gptq, awq, "
            "kv, spec, everything; with commas. Default: all.",
        ),
    ] = None,
    loads: Annotated[str | None, option("NAMES", "low, saturation; default: both.")] = None,
    weights: Annotated[
        str | None,
        option("NAME", "The weights that later rungs stand on; default: the last that can."),
    ] = None,
    workload: Annotated[
        str | None,
        option("NAMES", "Loads as for bench serve, with their parts [default: chat:3,random:1]."),
    ] = None,
    num_requests: Annotated[
        int | None, option("N", "At saturation; default: by the device.")
    ] = None,
    naive_requests: Annotated[
        int | None,
        option(
            "N",
            "So many, the first, for one request at a time, the slowest rung by far; default: "
            "all on a CPU, 32 on a GPU.",
        ),
    ] = None,
    low_requests: Annotated[int | None, option("N", "At low load; default: by the device.")] = None,
    low_rate: Annotated[
        float | None, option("X", "Low load: requests a second (Poisson); default: one at a time.")
    ] = None,
    prefix_len: Annotated[int | None, option("N", "Tokens of the system prompt.")] = None,
    input_len: Annotated[
        int | None, option("N", "Tokens of a question; other prompts have four times as many.")
    ] = None,
    output_len: Annotated[int | None, option("N", "Mean tokens of an answer.")] = None,
    turns: Annotated[int | None, option("N", "Turns of a chat [default: 1].")] = None,
    data: Annotated[
        str | None, option("FILE", "Text for the quality, as for eval; default: a short one.")
    ] = None,
    awq: Annotated[str | None, option("MODEL", "An AWQ checkpoint of the same model.")] = None,
    gptq: Annotated[str | None, option("MODEL", "A GPTQ checkpoint of the same model.")] = None,
    full: Annotated[
        bool, switch("Make the AWQ and GPTQ checkpoints that are not given.", "--full")
    ] = False,
    calibration: Annotated[
        Path | None, option("FILE", "With --full: JSONL, as for quantize.")
    ] = None,
    price_per_hour: Annotated[
        float | None, option("X", "Dollars of this machine; default: a usual price.")
    ] = None,
    output: Annotated[Path, option("FILE", "Write JSON here.", "-o", "--output")] = Path(
        "ladder.json"
    ),
    html: Annotated[
        Path | None, option("FILE", "The page with plots; default: beside the JSON.")
    ] = None,
    progress: ShowProgress = True,
) -> int:
    """Measure every lever alone and stacked, at low load and at saturation.

    The base is continuous batching with 16-bit weights. Each row is saved as it comes: the same
    command goes on after an interruption. --spec chooses who guesses; default: ngram.
    """
    check_path("-o", output)
    check_path("--html", html)
    if calibration is not None and not full:
        raise ConfigError("--calibration does nothing without --full.")
    from windlass.tools.common.report import markdown
    from windlass.tools.ladder.bar import watched
    from windlass.tools.ladder.forms import Given
    from windlass.tools.ladder.report import save_report
    from windlass.tools.ladder.run import Ladder, LadderOrder

    names = some_names("--rungs", rungs, "naive,everything")
    sizes = {
        "workload": workload,
        "num_requests": num_requests,
        "naive_requests": naive_requests,
        "low_requests": low_requests,
        "low_rate": low_rate,
        "prefix_len": prefix_len,
        "input_len": input_len,
        "output_len": output_len,
        "turns": turns,
    }
    checkpoints = {name: model for name, model in (("awq", awq), ("gptq", gptq)) if model}
    order = LadderOrder(
        options.engine_values(),
        output,
        names,
        some_names("--loads", loads, "saturation"),
        weights,
        {name: value for name, value in sizes.items() if value is not None},
        data,
        price_per_hour,
        Given(names, checkpoints, full, calibration),
    )
    run, page = Ladder(order, log), _page(html, output)
    outcome = run.run(partial(watched, shown=progress))
    log(f"written to {output}")
    if page is not None:
        save_report(outcome.record, page)
        log(f"written to {page}")
    typer.echo(markdown("ladder", outcome.record.rows))
    typer.echo(f"\n{outcome.record.notes}")
    if not outcome.complete:
        log("\ninterrupted; the same command goes on")
        return _INTERRUPTED
    return 0


def _page(html: Path | None, output: Path) -> Path | None:
    """Where the page goes. One that was asked for and cannot be is an error before the run."""
    from windlass.tools.common.page import plotly_js

    try:
        plotly_js()
    except UnsupportedError as error:
        if html is not None:
            raise
        log(f"no page with plots: {error}")
        return None
    return html or output.with_suffix(".html")
