"""The engine on a real GPU: recorded = eager, overlapped = plain, alone = in a batch."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from windlass import LLM, SamplingParams

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


def outputs(folder: Path, wish: SamplingParams, **options) -> list[list[int]]:
    options = {"num_blocks": 400, "max_num_seqs": 16, "max_num_batched_tokens": 64, **options}
    llm = LLM(str(folder), load_format="dummy", **options)
    prompts = [[(7 * i + j) % 1000 for j in range(3 + 9 * i)] for i in range(20)]
    results = llm.generate(prompts, wish)
    assert llm.engine.stats().num_used_blocks == 0
    return [result.outputs[0].token_ids for result in results]


GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def agreement(a: list[list[int]], b: list[list[int]]) -> float:
    """Share of requests with the same tokens; random weights have near-ties, so some may part."""
    return sum(x == y for x, y in zip(a, b, strict=True)) / len(a)


def test_overlapped_equals_plain(folder: Path) -> None:
    """Steps have other rows then, and a recorded one has room for more: only a fixed order is exact."""
    batch_invariant = replace(GREEDY, deterministic=True)
    assert outputs(folder, batch_invariant) == outputs(folder, batch_invariant, overlap=False)
    assert agreement(outputs(folder, GREEDY), outputs(folder, GREEDY, overlap=False)) >= 0.9


def test_overlapped_equals_plain_when_requests_are_preempted(folder: Path) -> None:
    few = {"num_blocks": 40, "max_model_len": 400}
    assert agreement(outputs(folder, GREEDY, **few), outputs(folder, GREEDY)) >= 0.8


def test_recorded_equals_eager(folder: Path) -> None:
    assert agreement(outputs(folder, GREEDY), outputs(folder, GREEDY, enforce_eager=True)) >= 0.9


def test_kernels_equal_the_plain_versions(folder: Path) -> None:
    """Random weights have near-ties, so scores are compared, not tokens."""
    wish = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    prompts = [[(7 * i + j) % 1000 for j in range(3 + 9 * i)] for i in range(12)]
    scores = []
    for plain in (False, True):
        llm = LLM(str(folder), load_format="dummy", num_blocks=400, plain_kernels=plain)
        results = llm.generate(prompts, wish)
        scores.append([score.logprob for result in results for score in result.prompt_logprobs])
    assert scores[0] == pytest.approx(scores[1], abs=0.02)


def test_a_seed_gives_the_same_in_any_batch(folder: Path) -> None:
    wish = SamplingParams(
        temperature=0.9, top_p=0.9, top_k=50, max_tokens=20, seed=3, ignore_eos=True
    )
    llm = LLM(str(folder), load_format="dummy", num_blocks=400, max_num_seqs=16)
    alone = llm.generate([[5, 6, 7]], wish)[0].outputs[0].token_ids
    batch = llm.generate([[5, 6, 7], *[[i] * 9 for i in range(9)]], wish)[0].outputs[0].token_ids
    assert alone == batch


def test_special_wishes_beside_plain_ones(folder: Path) -> None:
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
    """To the bit: tokens and log probabilities, recorded and eager, in chunks and after preemption."""
    prompt = [(11 * i) % 1000 for i in range(150)]
    siblings = [[(7 * i + j) % 1000 for j in range(2 + 23 * i)] for i in range(12)]
    wish = SamplingParams(
        temperature=0.7, seed=3, max_tokens=50, ignore_eos=True, logprobs=1, deterministic=True
    )
    found = []
    for prompts, options in [
        ([prompt], {}),
        ([prompt, *siblings], {}),
        ([prompt, *siblings], {"max_num_batched_tokens": 48}),
        ([prompt, *siblings], {"num_blocks": 60, "max_model_len": 400}),
        ([prompt, *siblings], {"enforce_eager": True}),
    ]:
        options = {"num_blocks": 400, "max_num_seqs": 16, **options}
        llm = LLM(str(folder), load_format="dummy", **options)
        output = llm.generate(prompts, wish)[0].outputs[0]
        found.append((output.token_ids, [score.logprob for score in output.logprobs]))
    assert all(one == found[0] for one in found)


def test_a_prompt_longer_than_a_step_alone(folder: Path) -> None:
    """Steps in which no row gets a token."""
    prompt = [(11 * i) % 1000 for i in range(150)]
    options = {"num_blocks": 100, "max_num_batched_tokens": 32, "max_num_seqs": 8}
    llm = LLM(str(folder), load_format="dummy", **options)
    assert len(llm.generate([prompt], GREEDY)[0].outputs[0].token_ids) == 40


def test_a_step_that_lacks_memory_is_made_smaller(folder: Path) -> None:
    """Somebody else takes almost all of the device: requests take longer, and none is lost."""
    prompts = [[(7 * i + j) % 1000 for j in range(900)] for i in range(16)]
    options = {"num_blocks": 1200, "max_num_seqs": 16, "max_num_batched_tokens": 16384}
    llm = LLM(str(folder), load_format="dummy", **options)
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    taken = torch.empty(free - 40 * 2**20, dtype=torch.uint8, device="cuda")
    results = llm.generate(prompts, GREEDY)
    assert [len(result.outputs[0].token_ids) for result in results] == [40] * 16
    assert llm.engine.stats().num_used_blocks == 0
    del taken
