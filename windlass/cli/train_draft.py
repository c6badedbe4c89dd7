"""`windlass train-draft`: trains Medusa or EAGLE heads on the model's own output."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from windlass.cli.command import Options
from windlass.cli.flags import ShowProgress, log, option, switch
from windlass.cli.options import ENGINE_OPTIONS

if TYPE_CHECKING:
    from windlass.tools.train_draft.acceptance import Acceptance
    from windlass.tools.train_draft.corpus import OnProgress
    from windlass.tools.train_draft.training import OnStep, StepReport

_NAMES = (
    "tokenizer",
    "dtype",
    "quantization",
    "quantize_head",
    "device",
    "load_format",
    "revision",
    "download_dir",
    "hf_token",
    "hf_overrides",
    "seed",
    "num_threads",
    "max_num_seqs",
)
TRAIN_DRAFT_OPTIONS = [option for option in ENGINE_OPTIONS if option.name in _NAMES]


def train_draft(
    options: Options,
    kind: Annotated[str, option("medusa|eagle", "Kind of head to train.")],
    output: Annotated[Path, option("DIR", "The new head's folder.", "--output", "-o")],
    data: Annotated[
        Path | None,
        option(
            "FILE", "JSONL with prompt, messages or text; default: the model generates prompts."
        ),
    ] = None,
    texts: Annotated[
        Path | None,
        option("FILE", "Keep the generated answers here, for other runs with the same prompts."),
    ] = None,
    prompts: Annotated[
        int | None,
        option("N", "Number of prompts; default: all of --data, or 2000 generated prompts."),
    ] = None,
    max_tokens: Annotated[int, option("N", "Maximum tokens of an answer.")] = 256,
    context: Annotated[int, option("N", "Maximum tokens of a prompt with its answer.")] = 512,
    heads: Annotated[int | None, option("N", "medusa: number of heads; default: 3.")] = None,
    blocks: Annotated[
        int | None, option("N", "medusa: residual blocks per head; default: 1.")
    ] = None,
    share_head: Annotated[
        bool | None,
        switch(
            "medusa: share the model's LM head (default), or train a matrix per head.",
            "--share-head/--no-share-head",
        ),
    ] = None,
    unroll: Annotated[
        int | None, option("N", "eagle: draft tokens to unroll in training; default: 4.")
    ] = None,
    draft_vocab: Annotated[
        int | None,
        option(
            "N",
            "Size of the draft vocabulary; default: 8192 for eagle, all for medusa, "
            "where it needs --no-share-head.",
        ),
    ] = None,
    lr: Annotated[float, option("X", "Peak learning rate.")] = 1e-3,
    epochs: Annotated[int, option("N", "Number of epochs.")] = 8,
    max_steps: Annotated[int | None, option("N", "Maximum number of training steps.")] = None,
    time_limit: Annotated[
        float | None, option("SECONDS", "Time limit of the training, without generating texts.")
    ] = None,
    batch_tokens: Annotated[
        int | None, option("N", "Tokens per step; default: 32768 on CUDA, 512 on a CPU.")
    ] = None,
    save_every: Annotated[int, option("STEPS", "Save the training state every STEPS steps.")] = 200,
    skip_bad_lines: Annotated[
        bool, switch("Skip invalid lines.", "--skip-bad-lines", "--skip-broken-lines")
    ] = False,
    progress: ShowProgress = True,
) -> int:
    """Train a Medusa or EAGLE head for speculative decoding.

    The model answers prompts, and the head learns from its hidden states. report.json has the
    acceptance on held-out answers. To resume an interrupted run, run the same command again.
    """
    from windlass.tools.train_draft.options import TrainJob, TrainOptions
    from windlass.tools.train_draft.program import run

    train_options = TrainOptions(
        kind=kind,  # type: ignore[arg-type]  # __post_init__ checks it
        heads=heads,
        blocks=blocks,
        share_head=share_head,
        unroll=unroll,
        draft_vocab=draft_vocab,
        prompts=prompts,
        max_tokens=max_tokens,
        context=context,
        lr=lr,
        epochs=epochs,
        max_steps=max_steps,
        time_limit=time_limit,
        batch_tokens=batch_tokens,
        save_every=save_every,
        skip_bad_lines=skip_bad_lines,
    )
    job = TrainJob(
        config=options.engine(), options=train_options, output=output, data=data, texts=texts
    )
    try:
        with _progress_bar(progress) as (on_progress, on_step):
            trained = run(job, log, on_progress=on_progress, on_step=on_step)
    except KeyboardInterrupt:
        log("interrupted; finished work is kept, and the same command resumes from there")
        raise
    _print_acceptance(trained.acceptance)
    typer.echo(f"{output}: serve it with --spec {kind} --spec-model {output}")
    return 0


def _print_acceptance(acceptance: Acceptance) -> None:
    typer.echo(
        f"Held-out greedy answers: {acceptance.num_texts}, {acceptance.num_positions} positions"
    )
    typer.echo("draft tokens accepted      share")
    for number, share in enumerate(acceptance.by_position, start=1):
        typer.echo(f"{number:23}   {share:6.1%}")
    typer.echo(
        f"mean acceptance length {acceptance.mean_length:.3f} over all positions, "
        f"{acceptance.walk_length:.3f} where a server drafts"
    )


@contextmanager
def _progress_bar(shown: bool) -> Iterator[tuple[OnProgress, OnStep]]:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar
    from rich.progress import TaskProgressColumn as Share
    from rich.progress import TimeRemainingColumn as Remaining

    columns = (TextColumn("{task.description}"), BarColumn(), Share(), Remaining())
    console = Console(stderr=True)
    bar = Bar(*columns, TextColumn("{task.fields[text]}"), console=console, disable=not shown)
    tasks: dict[str, int] = {}

    def update(phase: str, done: float, total: float, text: str) -> None:
        if phase not in tasks:
            bar.start()
            tasks[phase] = bar.add_task(phase, total=total, text="")
        bar.update(tasks[phase], completed=done, total=total, text=text)  # type: ignore[arg-type]

    def on_progress(phase: str, done: int, total: int) -> None:
        update(phase, done, total, f"{done} of {total}")

    def on_step(now: StepReport) -> None:
        text = (
            f"step {now.step} of {now.total}, loss {now.loss:.3f}, first draft token accuracy "
            f"{now.accuracy:.1%}, {now.tokens_per_s:,.0f} tok/s"
        )
        update("training", now.share, 1.0, text)

    try:
        yield on_progress, on_step
    finally:
        bar.stop()
