"""Runs lm-eval tasks on a model, and on a reference."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass.config import EngineConfig
from windlass.errors import ConfigError, DownloadError
from windlass.tools.common.record import Record
from windlass.tools.eval.run import changed

_BOOTSTRAP = 1000


@dataclass(frozen=True, slots=True)
class TaskOptions:
    """Which tasks to run, and how many samples of them."""

    names: list[str]
    folder: Path | None = None  # with more tasks, as YAML
    num_fewshot: int | None = None  # None: the task's default
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.folder is not None and not self.folder.is_dir():
            raise ConfigError(f"--task-dir {self.folder}: there is no such folder.")
        if self.num_fewshot is not None and self.num_fewshot < 0:
            raise ConfigError(f"--num-fewshot must be at least 0, got {self.num_fewshot}.")
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"--limit must be at least 1, got {self.limit}.")


def run_tasks(
    config: EngineConfig,
    reference: EngineConfig | None,
    options: TaskOptions,
    progress: bool = False,
) -> Record:
    """Return a record with a row per task and metric."""
    manager = _manager(options)
    rows = _evaluate(config, options, manager=manager, progress=progress)
    settings: dict[str, Any] = {
        "num_fewshot": options.num_fewshot,
        "limit": options.limit,
        "model": {"name": config.model.model, "options": changed(config)},
    }
    if reference is not None:
        others = _evaluate(reference, options, manager=manager, progress=progress)
        rows = [
            row | {"reference": other["value"]} for row, other in zip(rows, others, strict=True)
        ]
        settings["reference"] = {"name": reference.model.model, "options": changed(reference)}
    return Record(
        name="tasks", rows=rows, notes="lm-eval tasks; ± is the standard error.", settings=settings
    )


def _manager(options: TaskOptions) -> Any:
    """Make lm-eval's task manager; refuse unknown tasks before a model is loaded."""
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ConfigError(
            f"--tasks needs lm-eval, which cannot be imported ({error}): "
            "pip install 'windlass-llm[eval]'"
        ) from error
    manager = TaskManager(include_path=str(options.folder) if options.folder else None)
    for name in options.names:
        if not manager.match_tasks([name]):
            near = difflib.get_close_matches(name, manager.all_tasks, n=1, cutoff=0.5)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"--tasks: lm-eval knows no task {name!r}.{hint}")
    return manager


def _evaluate(
    config: EngineConfig, options: TaskOptions, manager: Any, progress: bool
) -> list[dict[str, Any]]:
    from lm_eval import simple_evaluate

    from windlass.tools.eval.lm_eval import WindlassLM

    model = WindlassLM(config, progress)
    try:
        results = simple_evaluate(
            model=model,
            tasks=options.names,
            num_fewshot=options.num_fewshot,
            limit=options.limit,
            task_manager=manager,
            bootstrap_iters=_BOOTSTRAP,
            log_samples=False,
        )
    except OSError as error:  # raised by `datasets` if the hub is unreachable
        raise DownloadError(
            f"the data of {', '.join(options.names)} could not be downloaded: {error}. "
            "Check the network, or give tasks with local data with --task-dir."
        ) from error
    return _rows(results)


def _rows(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Convert lm-eval's results: `acc,none` and its error `acc_stderr,none`."""
    rows = []
    for task, figures in results["results"].items():
        samples = results.get("n-samples", {}).get(task, {}).get("effective")
        for key, value in figures.items():
            metric, comma, variant = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            error = figures.get(f"{metric}_stderr,{variant}")
            shown = metric if variant == "none" else f"{metric} ({variant})"
            rows.append(
                {
                    "task": task,
                    "metric": shown,
                    "value": value,
                    "error": error if isinstance(error, (int, float)) else None,
                    "samples": samples,
                }
            )
    return rows
