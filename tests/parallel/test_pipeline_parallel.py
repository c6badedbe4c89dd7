"""Pipeline parallelism with real processes: the tokens of several stages are those of one process."""

from __future__ import annotations

import gc
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.lora.folders import write_adapter, write_model
from tests.models.comparison import save_tiny
from tests.models.test_deepseek import CASES, EXPERTS, MLA, run
from tests.parallel.ranks import rank_processes
from tests.parallel.test_tensor_parallel import CONFIG, GREEDY, PROMPTS
from tests.runner.test_windows import make as build
from tests.speculative import test_heads
from tests.speculative.test_speculation import model_in, small, verify_all
from windlass import LLM, SamplingParams
from windlass.core.types import TokenLogprob
from windlass.errors import ConfigError, WorkerDied

__all__ = ["small", "verify_all"]

SAMPLED = [
    GREEDY,
    SamplingParams(max_tokens=12, temperature=1.0, seed=4, ignore_eos=True, logprobs=2),
    SamplingParams(max_tokens=12, seed=5, repetition_penalty=1.3, deterministic=True),
    SamplingParams(max_tokens=12, seed=6, structured_outputs={"regex": "[a-p ,]*"}),
    SamplingParams(max_tokens=3, temperature=0.0, prompt_logprobs=1),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(
        json.dumps({**CONFIG, "num_hidden_layers": 4, "eos_token_id": 2})
    )
    return path


def make(folder: Path, stages: int, **options: Any) -> LLM:
    options = {"num_blocks": 64, "dtype": "float32", "load_format": "dummy", **options}
    return LLM(str(folder), device="cpu", pipeline_parallel_size=stages, **options)


def tokens(llm: LLM, sampling: Any = GREEDY, prompts: Any = PROMPTS) -> list[Any]:
    found = [each.outputs[0] for each in llm.generate(prompts, sampling)]
    return [(each.token_ids, each.finish_reason, rounded(each.logprobs)) for each in found]


def rounded(logprobs: list[TokenLogprob] | None) -> list[tuple[int, float]]:
    return [(each.rank, round(each.logprob, 3)) for each in logprobs or []]


def close(llm: LLM) -> None:
    llm.__dict__.clear()
    gc.collect()
    assert rank_processes() == [], "the ranks end with the engine"


def many(llm: LLM) -> list[Any]:
    """The results of prompts in chunks, prefix hits, and sampling of every kind."""
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(SAMPLED))]
    return [tokens(llm), tokens(llm), tokens(llm, SAMPLED, prompts)]


def test_two_stages_give_the_tokens_of_one_process(folder: Path) -> None:
    want = many(make(folder, 1))
    llm = make(folder, 2, max_num_batched_tokens=32)
    assert many(llm) == want
    choices = {choice.what: choice.value for choice in llm.report.choices}
    assert choices["pipeline"] == "2 stages of 2 + 2 layers"
    llm.engine.sleep()
    llm.engine.wake()
    assert tokens(llm) == want[0], "after a sleep"
    close(llm)


def windows(folder: Path) -> None:
    save_tiny("Cohere2", {"num_hidden_layers": 4, "sliding_window": 8, "logit_scale": 0.5}, folder)


def experts_and_latents(folder: Path) -> None:
    changes = {**MLA, **EXPERTS, **CASES["V2 Lite"][1], "num_hidden_layers": 4}
    save_tiny("DeepseekV2", changes, folder)


LENGTHS = ((1, 22), (7, 5), (5, 6), (9, 7))  # chunks are shorter than the first prompt


@pytest.mark.parametrize(
    ("save", "stages", "tensor", "num_blocks"),
    [(windows, 2, 2, 200), (experts_and_latents, 4, 1, 16)],
)
def test_models_and_meshes(
    save: Any, stages: int, tensor: int, num_blocks: int, tmp_path: Path
) -> None:
    save(tmp_path)
    prompts = [[3 + (i * k) % 90 for i in range(length)] for k, length in LENGTHS]
    want = run(build(tmp_path, dtype="float32", num_blocks=200), prompts)
    mesh = {"pipeline_parallel_size": stages, "tensor_parallel_size": tensor}
    built = build(tmp_path, dtype="float32", num_blocks=num_blocks, **mesh)
    assert run(built, prompts) == want
    for _ in range(2):
        assert run(built, prompts[:1]) == want[:1]
    stats = built.engine.stats()
    assert stats.prefix_hits > 0
    assert (stats.num_preemptions > 0) == (save is experts_and_latents), "it has few blocks"


@pytest.mark.parametrize("method", ["ngram", "lookahead"])
def test_proposers_of_tokens(method: str, folder: Path) -> None:
    want = tokens(make(folder, 1))
    llm = make(folder, 2, spec=method)
    assert tokens(llm) == want
    close(llm)


@pytest.mark.usefixtures("verify_all")
@pytest.mark.parametrize("method", ["draft", "medusa", "eagle"])
def test_proposers_with_weights(method: str, small: Path, tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.mkdir()
    model_in(path, num_hidden_layers=4)
    want = tokens(make(path, 1))
    head = small if method == "draft" else getattr(test_heads, method)(tmp_path / method)
    llm = make(path, 2, spec=method, spec_model=str(head))
    assert tokens(llm) == want
    assert llm.engine.stats().num_draft_tokens > 0
    close(llm)


def test_drafting_with_the_first_layers_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="different pipeline stages"):
        make(folder, 2, spec="self")


def test_adapters(tmp_path: Path) -> None:
    model, adapter = write_model(tmp_path / "model"), write_adapter(tmp_path / "a")
    options: dict[str, Any] = {"enable_lora": True, "lora_modules": (f"a={adapter}",)}
    prompts = [[5, 9, 22, 7, 3], [8] * 40]

    def results(llm: LLM) -> list[list[int]]:
        found = llm.generate(prompts * 2, GREEDY, adapter=["", "", "a", "a"])
        return [each.outputs[0].token_ids for each in found]

    want = results(make(model, 1, **options))
    assert want[:2] != want[2:]
    llm = make(model, 2, **options)
    assert results(llm) == want
    close(llm)


def test_a_stage_that_dies_takes_the_replica_down(folder: Path) -> None:
    llm = make(folder, 2)
    (rank,) = rank_processes()
    os.kill(rank.pid, signal.SIGKILL)
    with pytest.raises(WorkerDied, match="rank 1 was ended by signal 9"):
        tokens(llm)
    close(llm)


def test_more_stages_than_layers_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"the model has 4 layers.*Use 1 to 4"):
        make(folder, 5)
    assert rank_processes() == []
