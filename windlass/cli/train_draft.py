"""`windlass train-draft`: Medusa or EAGLE heads for speculation, from the model's own output."""

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
    from windlass.tools.train_draft.training import Progress, Watch
    from windlass.tools.train_draft.writing import Advance

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
    kind: Annotated[str, option("medusa|eagle", "What to train.")],
    output: Annotated[Path, option("DIR", "The new head's folder.", "--output", "-o")],
    data: Annotated[
        Path | None,
        option("FILE", "JSONL of prompt, messages or text; without it the model invents prompts."),
    ] = None,
    texts: Annotated[
        Path | None,
        option("FILE", "Keep what the model writes here, for another run with the same prompts."),
    ] = None,
    prompts: Annotated[
        int | None, option("N", "How many to use; default: all of --data, or 2000 invented ones.")
    ] = None,
    max_tokens: Annotated[int, option("N", "Tokens of an answer.")] = 256,
    context: Annotated[int, option("N", "Tokens of a prompt with its answer.")] = 512,
    heads: Annotated[int | None, option("N", "medusa: tokens to guess; default: 3.")] = None,
    blocks: Annotated[
        int | None, option("N", "medusa: residual blocks of each head; default: 1.")
    ] = None,
    share_head: Annotated[
        bool | None,
        switch(
            "medusa: use the model's own output matrix, the default, or train one per head.",
            "--share-head/--no-share-head",
        ),
    ] = None,
    unroll: Annotated[
        int | None, option("N", "eagle: guesses made from its own output; default: 4.")
    ] = None,
    draft_vocab: Annotated[
        int | None,
        option(
            "N",
            "Tokens that it can guess; default: 8192 for eagle, all for medusa, "
            "where it needs --no-share-head.",
        ),
    ] = None,
    lr: Annotated[float, option("X", "The highest learning rate.")] = 1e-3,
    epochs: Annotated[int, option("N", "Times to see every text.")] = 8,
    max_steps: Annotated[int | None, option("N", "End the training after so many steps.")] = None,
    time_limit: Annotated[
        float | None, option("SECONDS", "End the training, not the writing, after so long.")
    ] = None,
    batch_tokens: Annotated[
        int | None, option("N", "Tokens of a step; default: 32768 on CUDA, 512 on a CPU.")
    ] = None,
    save_every: Annotated[int, option("STEPS", "How often the training's state is saved.")] = 200,
    skip_broken_lines: Annotated[
        bool, switch("Leave out lines that cannot be used.", "--skip-broken-lines")
    ] = False,
    progress: ShowProgress = True,
) -> int:
    """Train a head that guesses the model's next tokens.

    The model answers prompts, the head learns from its hidden states, and report.json says how many
    of its guesses are right on answers that were held out. A run that was interrupted goes on when
    the same command is given again.
    """
    from windlass.tools.train_draft.program import run
    from windlass.tools.train_draft.wishes import Order, Wishes

    wishes = Wishes(
        kind=kind,  # type: ignore[arg-type]  # checked when made
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
        skip_broken=skip_broken_lines,
    )
    order = Order(options.engine(), wishes, output, data, texts)
    try:
        with _progress_bar(progress) as (advance, watch):
            made = run(order, log, advance, watch)
    except KeyboardInterrupt:
        log("interrupted; what is done is kept, and the same command goes on from there")
        raise
    _show(made.acceptance)
    typer.echo(f"{output}: serve it with --spec {kind} --spec-model {output}")
    return 0


def _show(acceptance: Acceptance) -> None:
    typer.echo(
        f"Held-out greedy answers: {acceptance.num_texts}, {acceptance.num_positions} places"
    )
    typer.echo("first guesses all right    share")
    for number, share in enumerate(acceptance.by_position, start=1):
        typer.echo(f"{number:23}   {share:6.1%}")
    typer.echo(
        f"mean acceptance length {acceptance.mean_length:.3f} over all places, "
        f"{acceptance.walk_length:.3f} as a server walks through them"
    )


@contextmanager
def _progress_bar(shown: bool) -> Iterator[tuple[Advance, Watch]]:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar
    from rich.progress import TaskProgressColumn as Share
    from rich.progress import TimeRemainingColumn as Remaining

    columns = (TextColumn("{task.description}"), BarColumn(), Share(), Remaining())
    console = Console(stderr=True)
    bar = Bar(*columns, TextColumn("{task.fields[text]}"), console=console, disable=not shown)
    tasks: dict[str, int] = {}

    def update(what: str, done: float, total: float, text: str) -> None:
        if what not in tasks:
            bar.start()
            tasks[what] = bar.add_task(what, total=total, text="")
        bar.update(tasks[what], completed=done, total=total, text=text)  # type: ignore[arg-type]

    def advance(what: str, done: int, total: int) -> None:
        update(what, done, total, f"{done} of {total}")

    def watch(now: Progress) -> None:
        text = (
            f"step {now.step} of {now.total}, loss {now.loss:.3f}, first guess right "
            f"{now.accuracy:.1%}, {now.tokens_per_s:,.0f} tok/s"
        )
        update("training", now.share, 1.0, text)

    try:
        yield advance, watch
    finally:
        bar.stop()
