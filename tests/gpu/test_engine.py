"""The engine on a GPU: captured = eager, overlapped = not overlapped, alone = in a batch."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from windlass import LLM, SamplingParams
from windlass.runner import device
from windlass.runner.cuda import start_steps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
    "vocab_size": 1000,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def outputs(folder: Path, params: SamplingParams, **options) -> list[list[int]]:
    options = {"num_blocks": 400, "max_num_seqs": 16, "max_num_batched_tokens": 64, **options}
    llm = LLM(str(folder), load_format="dummy", **options)
    prompts = [[(7 * i + j) % 1000 for j in range(3 + 9 * i)] for i in range(20)]
    results = llm.generate(prompts, params)
    assert llm.engine.stats().num_used_blocks == 0
    return [result.outputs[0].token_ids for result in results]


GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def agreement(a: list[list[int]], b: list[list[int]]) -> float:
    """Share of requests with equal tokens; random weights have near ties, so some may differ."""
    return sum(x == y for x, y in zip(a, b, strict=True)) / len(a)


def test_overlapped_equals_not_overlapped(folder: Path) -> None:
    """The batches and the padding of graphs differ, so only batch-invariant steps are exact."""
    batch_invariant = replace(GREEDY, deterministic=True)
    assert outputs(folder, batch_invariant) == outputs(folder, batch_invariant, overlap=False)
    assert agreement(outputs(folder, GREEDY), outputs(folder, GREEDY, overlap=False)) >= 0.9


def test_overlap_with_preemption_equals_no_preemption(folder: Path) -> None:
    few = {"num_blocks": 40, "max_model_len": 400}
    assert agreement(outputs(folder, GREEDY, **few), outputs(folder, GREEDY)) >= 0.8


def test_captured_equals_eager(folder: Path) -> None:
    assert agreement(outputs(folder, GREEDY), outputs(folder, GREEDY, enforce_eager=True)) >= 0.9


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_large_captured_steps_equal_eager_ones(
    kv_dtype: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long and short prompts in steps of up to 4,096 tokens, of which some follow cached tokens."""
    monkeypatch.setattr(start_steps, "_LAUNCH_SLOWDOWN", 10**6)
    executors: Counter[str] = Counter()
    found = []
    for eager in (False, True):
        llm = LLM(
            str(folder),
            load_format="dummy",
            dtype="float16",  # fewer near ties than in bfloat16
            kv_cache_dtype=kv_dtype,
            max_num_seqs=32,
            max_num_batched_tokens=4096,
            enforce_eager=eager,
        )
        prompts = [[(7 * i + j) % 1000 for j in range(1 + 53 * i % 900)] for i in range(40)]
        results = llm.generate(prompts, GREEDY) + llm.generate(prompts[20:], GREEDY)
        found.append([result.outputs[0].token_ids for result in results])
        if not eager:
            executors.update(llm.engine.stats().executors)
        del llm
    assert executors["mixed graph"] >= 4
    assert agreement(*found) >= 0.9


WINDOWS = {
    "one group": {"architectures": ["MistralForCausalLM"], "sliding_window": 24},
    "two groups": {
        "architectures": ["Qwen2ForCausalLM"],
        "use_sliding_window": True,
        "sliding_window": 24,
        "max_window_layers": 2,
    },
}


@pytest.mark.parametrize("case", WINDOWS)
def test_blocks_behind_a_window_are_not_read(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Freed blocks are used by other requests at once: 16 requests fill the pool."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | WINDOWS[case]))
    params = replace(GREEDY, deterministic=True)
    few = {"num_blocks": 120, "max_model_len": 400}
    freed = [outputs(tmp_path, params, enforce_eager=eager, **few) for eager in (False, True)]
    plain = agreement(outputs(tmp_path, GREEDY, **few), outputs(tmp_path, GREEDY))
    kv_layout = device.kv_layout
    monkeypatch.setattr(
        device, "kv_layout", lambda *args, **kwargs: kv_layout(*args, **kwargs).without_windows()
    )
    kept = outputs(tmp_path, params)
    assert freed == [kept, kept]
    assert plain >= 0.8


def test_kernels_equal_the_reference(folder: Path) -> None:
    """Random weights have near ties, so logprobs are compared, not tokens."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    prompts = [[(7 * i + j) % 1000 for j in range(3 + 9 * i)] for i in range(12)]
    scores = []
    for plain in (False, True):
        llm = LLM(str(folder), load_format="dummy", num_blocks=400, plain_kernels=plain)
        results = llm.generate(prompts, params)
        scores.append([score.logprob for result in results for score in result.prompt_logprobs])
    assert scores[0] == pytest.approx(scores[1], abs=0.02)


def test_seed_gives_the_same_tokens_in_any_batch(folder: Path) -> None:
    params = SamplingParams(
        temperature=0.9, top_p=0.9, top_k=50, max_tokens=20, seed=3, ignore_eos=True
    )
    llm = LLM(str(folder), load_format="dummy", num_blocks=400, max_num_seqs=16)
    alone = llm.generate([[5, 6, 7]], params)[0].outputs[0].token_ids
    batch = llm.generate([[5, 6, 7], *[[i] * 9 for i in range(9)]], params)[0].outputs[0].token_ids
    assert alone == batch


def test_special_and_usual_sampling_params_in_one_batch(folder: Path) -> None:
    llm = LLM(str(folder), load_format="dummy", num_blocks=400, max_num_seqs=16)
    prompts = [[i, i + 1, i + 2] for i in range(6)]
    usual = llm.generate(prompts, GREEDY)
    special = SamplingParams(
        temperature=0, max_tokens=40, ignore_eos=True, logprobs=2, prompt_logprobs=1
    )
    forced = SamplingParams(temperature=0, max_tokens=5, allowed_token_ids=[11], ignore_eos=True)
    mixed = llm.generate(prompts, [GREEDY, special, forced, GREEDY, special, GREEDY])
    assert mixed[2].outputs[0].token_ids == [11] * 5
    assert len(mixed[1].outputs[0].logprobs) == 40
    assert len(mixed[1].prompt_logprobs) == 2
    same = [mixed[i].outputs[0].token_ids == usual[i].outputs[0].token_ids for i in (0, 1, 3, 4, 5)]
    assert sum(same) >= 4


def test_deterministic_alone_equals_any_batch(folder: Path) -> None:
    """Tokens and logprobs are bitwise equal: captured, eager, in chunks and after preemption."""
    prompt = [(11 * i) % 1000 for i in range(150)]
    others = [[(7 * i + j) % 1000 for j in range(2 + 23 * i)] for i in range(12)]
    params = SamplingParams(
        temperature=0.7, seed=3, max_tokens=50, ignore_eos=True, logprobs=1, deterministic=True
    )
    found = []
    for prompts, options in [
        ([prompt], {}),
        ([prompt, *others], {}),
        ([prompt, *others], {"max_num_batched_tokens": 48}),
        ([prompt, *others], {"num_blocks": 60, "max_model_len": 400}),
        ([prompt, *others], {"enforce_eager": True}),
    ]:
        options = {"num_blocks": 400, "max_num_seqs": 16, **options}
        llm = LLM(str(folder), load_format="dummy", **options)
        output = llm.generate(prompts, params)[0].outputs[0]
        found.append((output.token_ids, [score.logprob for score in output.logprobs]))
    assert all(each == found[0] for each in found)


def test_prompt_longer_than_a_step(folder: Path) -> None:
    """Some steps sample no token."""
    prompt = [(11 * i) % 1000 for i in range(150)]
    options = {"num_blocks": 100, "max_num_batched_tokens": 32, "max_num_seqs": 8}
    llm = LLM(str(folder), load_format="dummy", **options)
    assert len(llm.generate([prompt], GREEDY)[0].outputs[0].token_ids) == 40


def test_step_is_made_smaller_when_memory_is_short(folder: Path) -> None:
    """The process may allocate 40 MiB more: requests take longer, and all complete."""
    prompts = [[(7 * i + j) % 1000 for j in range(900)] for i in range(16)]
    options = {"num_blocks": 1200, "max_num_seqs": 16, "max_num_batched_tokens": 16384}
    llm = LLM(str(folder), load_format="dummy", **options)
    torch.cuda.empty_cache()
    allowed = torch.cuda.memory_reserved() + 40 * 2**20
    torch.cuda.set_per_process_memory_fraction(allowed / torch.cuda.mem_get_info()[1])
    try:
        results = llm.generate(prompts, GREEDY)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert [len(result.outputs[0].token_ids) for result in results] == [40] * 16
    assert llm.engine.stats().num_used_blocks == 0
