"""Deterministic requests: the same numbers to the bit alone, in a batch, in chunks, and retracted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from windlass import LLM, SamplingParams
from windlass.errors import RequestError

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "intermediate_size": 200,
    "vocab_size": 500,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
PROMPT = [(11 * i) % 500 for i in range(75)]
SIBLINGS = [[(7 * i + j) % 500 for j in range(2 + 13 * i)] for i in range(9)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def sampling(**options) -> SamplingParams:
    return SamplingParams(max_tokens=30, ignore_eos=True, logprobs=3, **options)


def first_of(folder: Path, prompts: list[list[int]], params: SamplingParams, **options):
    """Tokens and log probabilities of the first prompt, to the bit.

    With torch's products: the CPU's own always sum in one order.
    """
    options = {"num_blocks": 200, "max_num_seqs": 16, "dtype": "float32", **options}
    llm = LLM(str(folder), load_format="dummy", device="cpu", **options)
    output = llm.generate(prompts, params)[0].outputs[0]
    return output.token_ids, [score.logprob for score in output.logprobs]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_alone_equals_any_batch(folder: Path, temperature: float) -> None:
    batch_invariant = sampling(deterministic=True, temperature=temperature, seed=5)
    alone = first_of(folder, [PROMPT], batch_invariant)
    beside = {"max_num_batched_tokens": 40}
    assert first_of(folder, [PROMPT, *SIBLINGS], batch_invariant) == alone
    assert first_of(folder, [PROMPT, *SIBLINGS], batch_invariant, **beside) == alone, "in chunks"
    tight = {"num_blocks": 24, "max_model_len": 200, **beside}
    assert first_of(folder, [PROMPT, *SIBLINGS], batch_invariant, **tight) == alone, (
        "with preemption"
    )


def test_other_requests_depend_on_the_batch_in_the_last_bits(folder: Path) -> None:
    """Or else the tests above would show nothing."""
    usual = sampling(temperature=0.0)
    _, alone = first_of(folder, [PROMPT], usual)
    _, together = first_of(folder, [PROMPT, *SIBLINGS], usual)
    assert alone != together
    assert alone == pytest.approx(together, abs=1e-3)


def test_deterministic_requests_beside_others(folder: Path) -> None:
    llm = LLM(str(folder), load_format="dummy", device="cpu", num_blocks=200, max_num_seqs=16)
    batch_invariant, usual = (
        sampling(deterministic=True, temperature=0.0),
        sampling(temperature=0.0),
    )
    alone = llm.generate([PROMPT], [batch_invariant])[0].outputs[0]
    mixed = llm.generate([*SIBLINGS, PROMPT], [usual] * len(SIBLINGS) + [batch_invariant])[
        -1
    ].outputs[0]
    assert mixed.token_ids == alone.token_ids
    assert [s.logprob for s in mixed.logprobs] == [s.logprob for s in alone.logprobs]


def test_deterministic_requests_do_not_reuse_blocks_of_others(folder: Path) -> None:
    llm = LLM(str(folder), load_format="dummy", device="cpu", num_blocks=200, max_num_seqs=16)
    hits = []
    for deterministic in (False, True, True):
        before = llm.engine.stats().prefix_hits
        llm.generate([PROMPT], [sampling(deterministic=deterministic, temperature=0.0)])
        hits.append(llm.engine.stats().prefix_hits - before)
    assert hits == [0, 0, 64]


def test_kernels_without_batch_invariance_are_named(folder: Path) -> None:
    llm = LLM(
        str(folder),
        load_format="dummy",
        device="cpu",
        num_blocks=50,
        quantization="int8",
        plain_kernels=True,
    )
    with pytest.raises(RequestError, match="plain kernel of int8"):
        llm.generate([[1, 2, 3]], sampling(deterministic=True))
    assert len(llm.generate([[1, 2, 3]], sampling())[0].outputs[0].token_ids) == 30
