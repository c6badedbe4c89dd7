"""`windlass eval`: what a model is worth, alone and beside a reference."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from windlass.cli.command import Options
from windlass.cli.flags import Context, MaxWindows, ShowProgress, Stride, option, some_names
from windlass.cli.reference import reference_config
from windlass.cli.results import check_path, finish
from windlass.config import EngineConfig, GateConfig
from windlass.errors import ConfigError

if TYPE_CHECKING:
    from windlass.tools.common.record import Record
    from windlass.tools.eval.windows import Cut

_INTERRUPTED = 130


def eval(
    options: Options,
    against: Annotated[str | None, option("REF", "Compare with this model; as MODEL.")] = None,
    against_dtype: Annotated[str | None, option("TEXT", "The reference's --dtype.")] = None,
    against_options: Annotated[
        str | None,
        option(
            "NAME=VALUE,...", "The reference's own options; without --against it is the same model."
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
            "strided scores every token once; llama.cpp the second half of each window.",
        ),
    ] = "strided",
    context: Context = 1024,
    stride: Stride = None,
    max_windows: MaxWindows = None,
    tasks: Annotated[
        str | None, option("NAMES", "lm-eval's tasks, with commas; text only with --data.")
    ] = None,
    task_dir: Annotated[Path | None, option("DIR", "Further tasks, as lm-eval's YAML.")] = None,
    num_fewshot: Annotated[int | None, option("N", "Examples before a task's question.")] = None,
    limit: Annotated[int | None, option("N", "Only the first samples of each task.")] = None,
    json: Annotated[Path | None, option("FILE", "Write JSON here.", "--json", "-o")] = None,
    progress: ShowProgress = True,
) -> int:
    """Measure a model's quality: perplexity, and the distance to a reference.

    A JSONL line is {"text": ...} or {"messages": [...]}, with a "label" if results by label are
    wanted. Exit code 1: a limit of --min-agreement, --max-ppl-increase or --max-kl was missed.
    """
    config, gate = options.engine(), options.gate()
    reference = _reference(options, against, against_dtype, against_options)
    if gate.has_limits and (reference is None or (tasks and data is None)):
        raise ConfigError(
            "--min-agreement, --max-ppl-increase and --max-kl compare on text: "
            "give --against or --against-options, and --data."
        )
    if tasks is None and (task_dir or num_fewshot is not None or limit is not None):
        raise ConfigError("--task-dir, --num-fewshot and --limit go with --tasks.")
    check_path("--json", json)
    from windlass.tools.eval.windows import Cut

    cut = Cut(method, context, stride, max_windows)  # type: ignore[arg-type]
    if tasks is not None:
        from windlass.tools.eval.tasks import TaskOrder, run_tasks

        order = TaskOrder(
            list(some_names("--tasks", tasks, "hellaswag")), task_dir, num_fewshot, limit
        )
        record = run_tasks(config, reference, order, progress)
        _finish(record, json if data is None else _beside(json))
    if tasks is None or data is not None:
        return _text(config, reference, data or "wikitext2", cut, gate, json, progress)
    return 0


def _text(
    config: EngineConfig,
    reference: EngineConfig | None,
    data: str,
    cut: Cut,
    gate: GateConfig,
    json: Path | None,
    progress: bool,
) -> int:
    from windlass.tools.eval.data import read_corpus
    from windlass.tools.eval.gates import judge
    from windlass.tools.eval.progress import bar
    from windlass.tools.eval.run import measure

    corpus = read_corpus(data)
    with bar(progress) as watch:
        outcome = measure(config, reference, corpus, cut, watch)
    _finish(outcome.record, json)
    if not outcome.complete:
        return _INTERRUPTED
    if gate.has_limits:
        judge(outcome.overall, gate)
    return 0


def _reference(
    options: Options, against: str | None, dtype: str | None, own: str | None
) -> EngineConfig | None:
    if against is None and dtype is None and own is None:
        return None
    words = [own or "", f"dtype={dtype}" if dtype is not None else ""]
    return reference_config(options.engine_values(), against, ",".join(words))


def _beside(path: Path | None) -> Path | None:
    """RESULT.json -> RESULT.tasks.json, when both kinds are measured."""
    return path.with_suffix(f".tasks{path.suffix}") if path is not None else None


def _finish(record: Record, path: Path | None) -> None:
    typer.echo(record.notes, err=True)
    finish(record, path)
