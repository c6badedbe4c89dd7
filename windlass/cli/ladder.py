"""`windlass ladder`: measures every optimisation alone and stacked, with its cost in quality."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from windlass.cli.command import Options
from windlass.cli.flags import ShowProgress, log, option, some_names, switch
from windlass.cli.options import ENGINE_OPTIONS
from windlass.cli.results import check_path
from windlass.errors import ConfigError, UnsupportedError

_INTERRUPTED = 130
# Options that the rungs or the load set.
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
            "Comma-separated: naive, static, continuous, chunked, prefix, int8, fp8, int4, gptq, "
            "awq, kv, spec, everything; default: all.",
        ),
    ] = None,
    loads: Annotated[str | None, option("NAMES", "low, saturation; default: both.")] = None,
    weights: Annotated[
        str | None,
        option("NAME", "Weights that later rungs stack on; default: the last available."),
    ] = None,
    workload: Annotated[
        str | None,
        option(
            "NAMES",
            "Workloads of bench serve with relative shares [default: chat:3,random:1].",
        ),
    ] = None,
    num_requests: Annotated[
        int | None, option("N", "Requests at saturation; default: by device.")
    ] = None,
    naive_requests: Annotated[
        int | None,
        option(
            "N",
            "Requests of naive, the slowest rung by far; default: all on a CPU, 32 on a GPU.",
        ),
    ] = None,
    low_requests: Annotated[
        int | None, option("N", "Requests at low load; default: by device.")
    ] = None,
    low_rate: Annotated[
        float | None,
        option("X", "Requests per second at low load (Poisson); default: one at a time."),
    ] = None,
    prefix_len: Annotated[int | None, option("N", "Tokens of the system prompt.")] = None,
    input_len: Annotated[
        int | None,
        option("N", "Tokens of a user message; prompts without a system prompt: four times."),
    ] = None,
    output_len: Annotated[int | None, option("N", "Mean output tokens.")] = None,
    turns: Annotated[int | None, option("N", "Turns of a chat [default: 1].")] = None,
    data: Annotated[
        str | None, option("FILE", "Evaluation text, as for eval; default: short built-in texts.")
    ] = None,
    awq: Annotated[str | None, option("MODEL", "An AWQ checkpoint of the same model.")] = None,
    gptq: Annotated[str | None, option("MODEL", "A GPTQ checkpoint of the same model.")] = None,
    full: Annotated[
        bool, switch("Build AWQ and GPTQ checkpoints that are not given.", "--full")
    ] = False,
    calibration: Annotated[
        Path | None, option("FILE", "Calibration JSONL for --full, as for quantize.")
    ] = None,
    price_per_hour: Annotated[
        float | None, option("X", "Price of this machine in dollars; default: a typical price.")
    ] = None,
    output: Annotated[Path, option("FILE", "Write JSON here.", "-o", "--output")] = Path(
        "ladder.json"
    ),
    html: Annotated[
        Path | None, option("FILE", "HTML page with plots; default: beside the JSON.")
    ] = None,
    progress: ShowProgress = True,
) -> int:
    """Measure every optimisation alone and stacked, at low load and at saturation.

    The base is continuous batching with 16-bit weights. Each finished row is saved, and the same
    command resumes an interrupted run. --spec selects the proposer; default: ngram.
    """
    check_path("-o", output)
    check_path("--html", html)
    if calibration is not None and not full:
        raise ConfigError("--calibration has no effect without --full.")
    from windlass.tools.common.record import save_text
    from windlass.tools.common.report import COLUMNS, markdown
    from windlass.tools.ladder.report import page as html_page
    from windlass.tools.ladder.run import Ladder, LadderConfig
    from windlass.tools.ladder.weights import WeightInputs

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
    config = LadderConfig(
        options=options.engine_values(),
        output=output,
        names=names,
        loads=some_names("--loads", loads, "saturation"),
        weights=weights,
        sizes={name: value for name, value in sizes.items() if value is not None},
        data=data,
        price_per_hour=price_per_hour,
        inputs=WeightInputs(
            named=names, checkpoints=checkpoints, full=full, calibration=calibration
        ),
    )
    run, page = Ladder(config, log), _page(html, output)
    complete = run.run(progress)
    record = run.record()
    log(f"written to {output}")
    if page is not None:
        save_text(page, html_page(record))
        log(f"written to {page}")
    typer.echo(markdown(COLUMNS["ladder"], record.rows))
    typer.echo(f"\n{record.notes}")
    if not complete:
        log("\ninterrupted; the same command resumes the run")
        return _INTERRUPTED
    return 0


def _page(html: Path | None, output: Path) -> Path | None:
    """Path of the page. A requested page without plotly is an error before the run."""
    from windlass.tools.common.page import plotly_js

    try:
        plotly_js()
    except UnsupportedError as error:
        if html is not None:
            raise
        log(f"no page with plots: {error}")
        return None
    return html or output.with_suffix(".html")
