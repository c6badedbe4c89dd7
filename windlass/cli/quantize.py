"""`windlass quantize`: makes a quantised checkpoint, calibrated on the user's texts."""

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
    output: Annotated[Path, option("DIR", "Folder of the new checkpoint.", "--output", "-o")],
    bits: Annotated[int | None, option("4|8|3", "Bits per weight; default: the method's.")] = None,
    group_size: Annotated[
        int | None,
        option(
            "N",
            "Inputs that share a scale; -1: one scale per output; default: 128, or 64 or 32 if 128 "
            "does not divide.",
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        option("FILE", "JSONL with text or messages; gptq, awq and smoothquant need it."),
    ] = None,
    samples: Annotated[
        int | None,
        option("N", "Calibration texts to choose; default: 256, or all if there are fewer."),
    ] = None,
    sample_tokens: SampleTokens = 512,
    skip_bad_lines: Annotated[
        bool,
        switch("Skip invalid calibration lines.", "--skip-bad-lines", "--skip-broken-lines"),
    ] = False,
    format: Annotated[
        str | None,
        option("NAME", "compressed-tensors (the default), gptq, awq or bitsandbytes (nf4)."),
    ] = None,
    symmetric: Annotated[
        bool | None,
        switch(
            "No zero points, or zero points; default: the format's.", "--symmetric/--asymmetric"
        ),
    ] = None,
    act_order: Annotated[
        str | None,
        option(
            "none|static|group",
            "gptq: static quantises columns with large inputs first; group also groups them in that order.",
        ),
    ] = None,
    damping: Annotated[
        float, option("X", "gptq: dampening, as a share of the mean of the Hessian's diagonal.")
    ] = 0.01,
    alpha: Annotated[float, option("X", "smoothquant: migration strength, from 0 to 1.")] = 0.5,
    clip: Annotated[bool, switch("awq: search clipping ranges.")] = True,
    scales: Annotated[
        str, option("channel|block", "fp8: one scale per output, or per 128 x 128 block.")
    ] = "channel",
    progress: ShowProgress = True,
) -> int:
    """Make a checkpoint with quantised weights.

    One decoder layer is in memory at a time. The same command resumes an interrupted run. The
    folder has a quality.json with the quantisation error of every layer.
    """
    from windlass.tools.quantize.calibration import SampleOptions
    from windlass.tools.quantize.program import QuantizeJob, run
    from windlass.tools.quantize.recipe import QuantizeOptions

    model = _model(options)
    quantize_options = QuantizeOptions(
        method=method,  # type: ignore[arg-type]  # checked by the constructor
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
    job = QuantizeJob(
        model=model,
        options=quantize_options,
        output=output,
        calibration=calibration,
        samples=SampleOptions(
            num_samples=samples,
            sample_tokens=sample_tokens,
            skip_bad_lines=skip_bad_lines,
            seed=model.seed,
        ),
    )
    try:
        with _progress_bar(progress) as advance:
            report = run(job, log, advance)
    except KeyboardInterrupt:
        log("interrupted; finished layers are saved, and the same command resumes")
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
