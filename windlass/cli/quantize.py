"""`windlass quantize`: a new checkpoint with smaller weights, calibrated on your own texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from windlass.cli.command import Options
from windlass.cli.flags import SampleTokens, ShowProgress, log, option, switch
from windlass.cli.options import ENGINE_OPTIONS
from windlass.config import ModelConfig
from windlass.errors import ConfigError

_NAMES = (
    "tokenizer",
    "device",
    "revision",
    "download_dir",
    "hf_token",
    "hf_overrides",
    "seed",
    "num_threads",
)
QUANTIZE_OPTIONS = [option for option in ENGINE_OPTIONS if option.name in _NAMES]


def quantize(
    options: Options,
    method: Annotated[str, option("NAME", "rtn, gptq, awq, smoothquant, fp8 or nf4.")],
    output: Annotated[Path, option("DIR", "The new checkpoint's folder.", "--output", "-o")],
    bits: Annotated[int | None, option("4|8|3", "Bits of a weight; default: the method's.")] = None,
    group_size: Annotated[
        int | None,
        option(
            "N",
            "Inputs that share a scale; -1: one scale per output; default: 128, or less "
            "where that does not divide.",
        ),
    ] = None,
    calibration: Annotated[
        Path | None, option("FILE", "JSONL of text or messages; gptq, awq and smoothquant need it.")
    ] = None,
    samples: Annotated[
        int | None, option("N", "Texts to choose of it; default: 256, or all there are.")
    ] = None,
    sample_tokens: SampleTokens = 512,
    skip_broken_lines: Annotated[
        bool, switch("Leave out lines that cannot be read.", "--skip-broken-lines")
    ] = False,
    format: Annotated[
        str | None,
        option("NAME", "compressed-tensors (the default), gptq, awq or bitsandbytes (nf4)."),
    ] = None,
    symmetric: Annotated[
        bool | None,
        switch("Without or with zero points; default: the format's.", "--symmetric/--asymmetric"),
    ] = None,
    act_order: Annotated[
        str | None,
        option(
            "none|static|group",
            "gptq: columns with large inputs first; group: groups follow that order.",
        ),
    ] = None,
    damping: Annotated[float, option("X", "gptq: share of the mean added to the diagonal.")] = 0.01,
    alpha: Annotated[float, option("X", "smoothquant: how much the weights take over.")] = 0.5,
    clip: Annotated[bool, switch("awq: search for narrower ranges.")] = True,
    scales: Annotated[
        str, option("channel|block", "fp8: one scale per output, or per block.")
    ] = "channel",
    progress: ShowProgress = True,
) -> int:
    """Make a checkpoint with quantised weights.

    One decoder layer is in memory at a time. A run that was interrupted goes on when the same
    command is given again. The folder holds a quality.json with the error of every layer.
    """
    from windlass.tools.quantize.calibration import SampleOptions
    from windlass.tools.quantize.program import QuantizeJob, run
    from windlass.tools.quantize.recipe import QuantizeOptions

    model = _model(options)
    wishes = QuantizeOptions(
        method=method,  # type: ignore[arg-type]  # checked when made
        bits=bits,
        group_size=group_size,
        format=format,  # type: ignore[arg-type]
        symmetric=symmetric,
        act_order=act_order,  # type: ignore[arg-type]
        scales=scales,  # type: ignore[arg-type]
        damping=damping,
        alpha=alpha,
        clip=clip,
    )
    choice = SampleOptions(samples, sample_tokens, skip_broken_lines, model.seed)
    order = QuantizeJob(model, wishes, output, calibration, choice)
    try:
        with _progress_bar(progress) as advance:
            report = run(order, log, advance)
    except KeyboardInterrupt:
        log("interrupted; what is done is kept, and the same command goes on from there")
        raise
    errors = ", ".join(f"{name.replace('_', ' ')} {e:.2e}" for name, e in report["mean"].items())
    typer.echo(f"{output}: {report['method']}, {report['bits']} bits, {report['format']}; {errors}")
    return 0


def _model(options: Options) -> ModelConfig:
    values: dict[str, Any] = dict(options.values)
    if "model" not in values:
        raise ConfigError("MODEL is missing: a hub id, a folder, a .gguf file, or 'default'.")
    return ModelConfig(**values)


@contextmanager
def _progress_bar(shown: bool) -> Iterator[Callable[[int, int, str], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("layers"), Remaining())
    bar = Progress(
        *columns, TextColumn("{task.description}"), console=Console(stderr=True), disable=not shown
    )
    task = bar.add_task("", total=None)

    def advance(done: int, total: int, text: str) -> None:
        if not bar.live.is_started and done < total:
            bar.start()
        bar.update(task, completed=done, total=total, description=text)

    try:
        yield advance
    finally:
        bar.stop()
