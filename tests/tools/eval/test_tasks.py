"""lm-eval with a small local task, and the error if lm-eval is missing."""

from __future__ import annotations

import importlib.util
import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.tools.eval.conftest import Run
from windlass.config import EngineConfig

LM_EVAL = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed"
)
# Warnings of lm-eval and its dependencies are not our concern.
QUIET = pytest.mark.filterwarnings("ignore")

TASK = """
task: lifting
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""


@pytest.fixture
def task_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A task, without lm-eval's built-in tasks: reading all of them takes ten seconds."""
    from lm_eval import tasks

    rows = [
        {"question": "A windlass lifts", "choices": ["loads", "purple", "why"], "answer": 0},
        {"question": "A rope is wound around a", "choices": ["verb", "drum"], "answer": 1},
        {"question": "The crank", "choices": ["turns", "sings"], "answer": 0},
    ]
    folder = tmp_path / "tasks"
    folder.mkdir()
    data = folder / "lifting.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "lifting.yaml").write_text(TASK.format(data=data))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tasks, "TaskManager", partial(tasks.TaskManager, include_defaults=False))
    return folder


@LM_EVAL
@QUIET
def test_local_task_on_both_models(evaluate: Run, task_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    code, shown, errors = evaluate(
        *("--tasks", "lifting", "--task-dir", task_dir, "--json", path),
        *("--against-options", "load_format=dummy"),
    )
    assert code == 0, errors
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["task"], row["metric"], row["samples"]) == ("lifting", "acc", 3)
    assert row["value"] == row["reference"]
    assert "lifting" in shown


@LM_EVAL
@QUIET
def test_unknown_task_suggests_the_nearest(evaluate: Run, task_dir: Path) -> None:
    code, _, errors = evaluate("--tasks", "liftin", "--task-dir", task_dir)
    assert code == 2
    assert "Did you mean 'lifting'?" in errors


@LM_EVAL
@QUIET
def test_loglikelihood_rolling_and_generation(toy: Path) -> None:
    from lm_eval.api.instance import Instance

    from windlass.tools.eval.lm_eval import WindlassLM

    config = EngineConfig.of(model=str(toy), load_format="dummy", num_threads=1, max_model_len=64)
    model = WindlassLM(config)
    pairs = [("The rope", " turns"), ("", "The drum"), ("x" * 90, " end")]
    scores = model.loglikelihood([_instance(Instance, pair) for pair in pairs])
    tokens = torch.tensor(model.tok_encode("The rope turns"))
    (chunk,) = model._built.scorer.logits([_window(tokens.tolist())])
    logprobs = chunk.values.log_softmax(-1)[7:-1]
    assert scores[0][0] == pytest.approx(logprobs.gather(-1, tokens[8:, None]).sum().item())
    assert all(value < 0 for value, _ in scores)
    # Disjoint windows score every token of the text once.
    long = "The windlass lifts the anchor. " * 5
    (rolling,) = model.loglikelihood_rolling([_instance(Instance, (long,))])
    assert rolling < -100
    arguments = {"until": ["."], "max_gen_toks": 8, "do_sample": False}
    texts = model.generate_until([_instance(Instance, ("A lever", arguments))] * 2)
    assert texts[0] == texts[1]


def _instance(kind: type, arguments: tuple) -> object:
    return kind(request_type="loglikelihood", doc={}, arguments=arguments, idx=0)


def _window(tokens: list[int]) -> object:
    from windlass.runner.scoring import Window

    return Window(tokens)


def test_missing_lm_eval_is_reported(evaluate: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    code, _, errors = evaluate("--tasks", "hellaswag")
    assert code == 2
    assert "pip install 'windlass-llm[eval]'" in errors
