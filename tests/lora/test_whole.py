"""Engines with adapters and other features: speculation, prefix caching, quantisation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.lora.adapters import ALL, make_adapter, save
from tests.quant.folders import write_plain
from tests.speculative.test_speculation import verify_all  # noqa: F401
from windlass import LLM, SamplingParams

PROMPTS = [[7, 8, 9] * 6, [5, 6] * 8, [7, 8, 9] * 6, [11, 12, 13, 14] * 5]
ADAPTERS = ["one", "", "two", "one"]
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("one", "two")):
        save(root / name, make_adapter(name, ALL, seed))
    return write_plain(root / "base")


def make(folder: Path, **options: Any) -> LLM:
    named = [f"{name}={folder.parent / name}" for name in ("one", "two")]
    options = {"quantization": "int4", "num_blocks": 64, "max_num_seqs": 8, **options}
    lora = {"enable_lora": True, "lora_modules": tuple(named), "max_loras": 2, "max_lora_rank": 8}
    return LLM(str(folder), load_format="dummy", device="cpu", **lora, **options)


def answers(llm: LLM) -> list[list[int]]:
    results = llm.generate(PROMPTS, GREEDY, adapter=ADAPTERS)
    return [result.outputs[0].token_ids for result in results]


@pytest.mark.usefixtures("verify_all")
def test_speculation_gives_the_same_tokens(folder: Path) -> None:
    want = answers(make(folder))
    assert want[0] != want[2], "the adapters have no effect"
    speculative = make(folder, spec="ngram")
    assert answers(speculative) == want
    stats = speculative.engine.stats()
    assert 0 < stats.num_accepted_tokens <= stats.num_draft_tokens


def test_int8_adapters(folder: Path) -> None:
    """Read and quantised as in a server; first-token logprobs are close to unquantised adapters."""
    one_token = SamplingParams(max_tokens=1, temperature=0.0, logprobs=1)
    found = []
    for kind in ("auto", "int8"):
        llm = make(folder, lora_dtype=kind)
        results = llm.generate(PROMPTS, one_token, adapter=ADAPTERS)
        scores = [result.outputs[0].logprobs for result in results]
        found.append([own[0].logprob for own in scores if own])
    assert found[1] == pytest.approx(found[0], abs=0.1)
    assert [a == b for a, b in zip(*found, strict=True)] == [False, True, False, False]


NATIVE: list[dict[str, Any]] = [
    {"quantization": None},
    {"quantization": "int4"},
    {"quantization": "w8a8"},
    {"quantization": "nf4"},
    {"quantization": "int8", "kv_cache_dtype": "int8"},
    {"quantization": "int4", "enforce_eager": True},
]
TORCH: list[dict[str, Any]] = [
    {"quantization": "fp8"},
    {"quantization": "fp8-block"},
    {"quantization": None, "kv_cache_dtype": "fp8"},
    {"quantization": None, "dtype": "float16"},
    {"quantization": None, "plain_kernels": True},
]


@pytest.mark.parametrize("options", [*NATIVE, *TORCH], ids=str)
def test_base_rows_are_bitwise_equal_with_adapters(folder: Path, options: dict[str, Any]) -> None:
    """Equal to the same steps without adapters; with native kernels also to single requests."""
    llm = make(folder, prefix_caching=False, **options)
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.0, logprobs=1)
    prompts = [*PROMPTS, [3], [4, 5, 6, 7, 8] * 5]

    def scores(prompts: list[list[int]], adapters: list[str]) -> list[list[tuple[int, float]]]:
        found = [each.outputs[0] for each in llm.generate(prompts, params, adapter=adapters)]
        return [[(score.token, score.logprob) for score in own.logprobs or ()] for own in found]

    adapters = ["one", "", "two", "", "one", ""]
    scores(prompts, adapters)  # loads the adapters, so that no later request waits
    mixed = scores(prompts, adapters)
    plain = scores(prompts, [""] * len(prompts))
    assert mixed[1::2] == plain[1::2]
    assert all(len(own) == 12 for own in plain)
    assert all(own != other for own, other in zip(mixed[::2], plain[::2], strict=True))
    if options in NATIVE:
        alone = [scores([prompt], [""])[0] for prompt in prompts]
        assert mixed[1::2] == alone[1::2]


@pytest.mark.parametrize("quantization", [None, "int4"])
def test_deterministic_tokens_do_not_depend_on_the_executor(
    folder: Path, quantization: str | None
) -> None:
    """Steps that compute prompt logprobs run eagerly, all others as one recorded program."""
    llm = make(folder, prefix_caching=False, quantization=quantization, max_num_batched_tokens=16)
    params = SamplingParams(
        max_tokens=24, ignore_eos=True, temperature=0.0, logprobs=2, deterministic=True
    )
    beside = SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=1)
    assert executors(llm) == set()
    (alone,) = llm.generate([PROMPTS[0]], params, adapter=["one"])
    assert executors(llm) == {"program"}
    prompts, adapters = [PROMPTS[0], *[[7, 8, 9, 10] * 12] * 3], ["one", "two", "", "one"]
    shared, *_ = llm.generate(prompts, [params, *[beside] * 3], adapter=adapters)
    assert executors(llm) == {"program", "eager"}
    assert shared.outputs[0] == alone.outputs[0]


def executors(llm: LLM) -> set[str]:
    return {name for name, count in llm.engine.stats().executors.items() if count}


def test_prefixes_are_shared_only_within_an_adapter(folder: Path) -> None:
    llm = make(folder)
    found, hits = [], []
    for adapter in ("one", "", "two", "one"):
        before = llm.engine.stats().prefix_hits
        (result,) = llm.generate(PROMPTS[:1], GREEDY, adapter=adapter)
        found.append(result.outputs[0].token_ids)
        hits.append(llm.engine.stats().prefix_hits - before)
    assert hits == [0, 0, 0, 16]
    assert found[3] == found[0]
    assert len({tuple(tokens) for tokens in found}) == 3
