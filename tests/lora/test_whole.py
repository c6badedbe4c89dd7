"""Engines with adapters and everything else that is switched on: guesses, cached prefixes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.lora.adapters import ALL, make_adapter, save
from tests.quant.folders import write_plain
from tests.speculative.test_speculation import eager  # noqa: F401
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


@pytest.mark.usefixtures("eager")
def test_with_guesses_the_tokens_are_the_same(folder: Path) -> None:
    want = answers(make(folder))
    assert want[0] != want[2], "adapters change nothing"
    guessing = make(folder, spec="ngram")
    assert answers(guessing) == want
    stats = guessing.engine.stats()
    assert 0 < stats.num_accepted_tokens <= stats.num_draft_tokens


def test_adapters_in_a_byte(folder: Path) -> None:
    """Read and rounded as a server does; scores of the first tokens are those of exact ones."""
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
def test_rows_of_the_base_are_the_same_beside_adapters(
    folder: Path, options: dict[str, Any]
) -> None:
    """As in the same steps without adapters, and where all is native also as alone."""
    llm = make(folder, prefix_caching=False, **options)
    wish = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.0, logprobs=1)
    prompts = [*PROMPTS, [3], [4, 5, 6, 7, 8] * 5]

    def scores(prompts: list[list[int]], adapters: list[str]) -> list[list[tuple[int, float]]]:
        found = [each.outputs[0] for each in llm.generate(prompts, wish, adapter=adapters)]
        return [[(score.token, score.logprob) for score in own.logprobs or ()] for own in found]

    adapters = ["one", "", "two", "", "one", ""]
    scores(prompts, adapters)  # from here on nobody waits for an adapter
    mixed = scores(prompts, adapters)
    plain = scores(prompts, [""] * len(prompts))
    assert mixed[1::2] == plain[1::2]
    assert all(len(own) == 12 for own in plain)
    assert all(own != other for own, other in zip(mixed[::2], plain[::2], strict=True))
    if options in NATIVE:
        alone = [scores([prompt], [""])[0] for prompt in prompts]
        assert mixed[1::2] == alone[1::2]


def test_prefixes_are_shared_within_an_adapter_alone(folder: Path) -> None:
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
