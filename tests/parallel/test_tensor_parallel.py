"""Tensor parallelism with real processes: the tokens of several ranks are those of one process."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.ranks import rank_processes
from windlass import LLM, SamplingParams
from windlass.errors import ConfigError, ShardError

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 290,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
PROMPTS = [[1, 5, 9, 22, 7, 3], [(7 * i) % 290 for i in range(75)], [7] * 40]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def make(folder: Path, size: int, **options: Any) -> LLM:
    options = {"num_blocks": 64, "dtype": "float32", "load_format": "dummy", **options}
    return LLM(str(folder), device="cpu", tensor_parallel_size=size, **options)


def tokens(llm: LLM, sampling: Any = GREEDY) -> list[list[int]]:
    return [each.outputs[0].token_ids for each in llm.generate(PROMPTS, sampling)]


@pytest.mark.parametrize("size", [2, 4])
def test_greedy_tokens_are_those_of_one_process(folder: Path, size: int) -> None:
    want = tokens(make(folder, 1))
    llm = make(folder, size, max_num_batched_tokens=32)
    assert tokens(llm) == want
    assert tokens(llm) == want, "with prefix hits"
    sampled = SamplingParams(max_tokens=12, temperature=1.0, seed=4, ignore_eos=True)
    assert tokens(llm, sampled) == tokens(make(folder, 1), sampled)
    llm.engine.sleep()
    llm.engine.wake()
    assert tokens(llm) == want, "after a sleep"
    del llm
    gc.collect()
    assert rank_processes() == [], "the ranks end with the engine"


def test_backends(folder: Path) -> None:
    options = {"quantization": "int8", "dtype": "auto"}
    want = tokens(make(folder, 2, **options))
    llm = make(folder, 2, distributed_backend="gloo", **options)
    assert [each.value for each in llm.report.choices if each.what == "collectives"] == ["gloo"]
    assert tokens(llm) == want
    with pytest.raises(ConfigError, match="nccl needs GPUs"):
        make(folder, 2, distributed_backend="nccl")
    del llm
    gc.collect()
    assert rank_processes() == []


def test_a_size_that_does_not_divide_names_those_that_work(folder: Path) -> None:
    with pytest.raises(
        ShardError, match=r"size 3: the model has 4 query heads.*Numbers that work: 1, 2, 4\."
    ):
        make(folder, 3)
    assert rank_processes() == []


def test_several_machines_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"nnodes is 2, .* Use `windlass serve` or AsyncLLM"):
        make(folder, 2, nnodes=2)
    with pytest.raises(ConfigError, match="--master-port does nothing without --nnodes"):
        make(folder, 2, master_port=1234)
