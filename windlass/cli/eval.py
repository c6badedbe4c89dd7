"""`windlass eval`: measures a model's quality, alone or against a reference."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from windlass.cli.command import Options
from windlass.cli.flags import Context, MaxWindows, ShowProgress, Stride, option, some_names
from windlass.cli.reference import reference_config
from windlass.cli.results import check_path, finish
from windlass.cli.starting import starting
from windlass.config import EngineConfig
from windlass.errors import ConfigError

if TYPE_CHECKING:
    from windlass.tools.common.record import Record
    from windlass.tools.eval.run import Outcome
    from windlass.tools.eval.windows import Cut

_INTERRUPTED = 130


def eval(
    options: Options,
    against: Annotated[str | None, option("REF", "Reference model; same syntax as MODEL.")] = None,
    against_dtype: Annotated[str | None, option("TEXT", "--dtype of the reference.")] = None,
    against_options: Annotated[
        str | None,
        option(
            "NAME=VALUE,...",
            "Engine options of the reference; without --against, the reference is the same model.",
        ),
    ] = None,
    data: Annotated[
        str | None,
        option(
            "FILE",
            "wikitext2, a folder with its test split, or a .txt, .parquet or .jsonl file "
            "[default: wikitext2].",
        ),
    ] = None,
    method: Annotated[
        str,
        option(
            "strided|llama.cpp",
            "strided: score every token once; llama.cpp: score the second half of each window.",
        ),
    ] = "strided",
    context: Context = 1024,
    stride: Stride = None,
    max_windows: MaxWindows = None,
    tasks: Annotated[
        str | None,
        option(
            "NAMES", "lm-eval tasks, separated by commas; text is then only scored with --data."
        ),
    ] = None,
    task_dir: Annotated[
        Path | None, option("DIR", "Folder with more tasks, as lm-eval YAML.")
    ] = None,
    num_fewshot: Annotated[int | None, option("N", "Few-shot examples per question.")] = None,
    limit: Annotated[int | None, option("N", "Max samples per task.")] = None,
    json: Annotated[Path | None, option("FILE", "Write JSON here.", "--json", "-o")] = None,
    progress: ShowProgress = True,
) -> int:
    """Measure a model's quality: perplexity, and the divergence from a reference.

    A JSONL line is {"text": ...} or {"messages": [...]}, with an optional "label" for results by
    label. Exit code 1: a limit of --min-agreement, --max-ppl-increase or --max-kl was missed.
    """
    config, gate = options.engine(), options.gate()
    reference = _reference(options, against, against_dtype, against_options)
    if gate.has_limits and (reference is None or (tasks and data is None)):
        raise ConfigError(
            "--min-agreement, --max-ppl-increase and --max-kl need a reference and text: "
            "give --against or --against-options, and --data."
        )
    if tasks is None and (task_dir or num_fewshot is not None or limit is not None):
        raise ConfigError("--task-dir, --num-fewshot and --limit apply only with --tasks.")
    check_path("--json", json)
    from windlass.tools.eval.windows import Cut

    cut = Cut(method=method, context=context, stride=stride, max_windows=max_windows)  # type: ignore[arg-type]
    if tasks is not None:
        with starting(config.model.model, shown=progress):
            from windlass.tools.eval.tasks import TaskOptions, run_tasks

        task_options = TaskOptions(
            names=list(some_names("--tasks", tasks, "hellaswag")),
            folder=task_dir,
            num_fewshot=num_fewshot,
            limit=limit,
        )
        record = run_tasks(config, reference, options=task_options, progress=progress)
        _finish(record, json if data is None else _tasks_path(json))
    if tasks is None or data is not None:
        outcome = _score_text(
            config, reference, data=data or "wikitext2", cut=cut, progress=progress
        )
        _finish(outcome.record, json)
        if not outcome.complete:
            return _INTERRUPTED
        if gate.has_limits:
            from windlass.tools.eval.gates import enforce

            enforce(outcome.overall, gate)
    return 0


def _score_text(
    config: EngineConfig, reference: EngineConfig | None, data: str, cut: Cut, progress: bool
) -> Outcome:
    with starting(config.model.model, shown=progress):
        from windlass.tools.eval.data import read_corpus
        from windlass.tools.eval.run import measure, progress_bar

        corpus = read_corpus(data)
        with progress_bar(progress) as watch:
            return measure(config, reference, corpus, cut, watch)


def _reference(
    options: Options, against: str | None, dtype: str | None, own: str | None
) -> EngineConfig | None:
    if against is None and dtype is None and own is None:
        return None
    parts = [own or "", f"dtype={dtype}" if dtype is not None else ""]
    return reference_config(options.engine_values(), against, ",".join(parts))


def _tasks_path(path: Path | None) -> Path | None:
    """RESULT.json -> RESULT.tasks.json, if both text and tasks are measured."""
    return path.with_suffix(f".tasks{path.suffix}") if path is not None else None


def _finish(record: Record, path: Path | None) -> None:
    typer.echo(record.notes, err=True)
    finish(record, path)
