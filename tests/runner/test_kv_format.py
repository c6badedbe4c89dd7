"""--kv-cache-dtype: what it saves and what it costs, on a tiny network and on the default model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.runner.test_deterministic import CONFIG, PROMPT, SIBLINGS, first_of, sampling
from tests.tools.eval.test_model import TEXT
from windlass import LLM, SamplingParams
from windlass.cli.model_report import examine
from windlass.config import EngineConfig
from windlass.errors import ConfigError
from windlass.tools.eval.data import read_corpus
from windlass.tools.eval.run import measure
from windlass.tools.eval.windows import Cut

FORMATS = ["int8", "fp8"]
# Largest difference of a log probability to a cache in float32, on the tiny network.
BOUND = {"int8": 0.02, "fp8": 0.15}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def make(folder: Path, **options) -> LLM:
    options = {"num_blocks": 200, "max_num_seqs": 16, **options}
    return LLM(str(folder), load_format="dummy", device="cpu", **options)


def prompt_scores(llm: LLM) -> list[float]:
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    results = llm.generate([PROMPT, *SIBLINGS], params)
    return [score.logprob for result in results for score in result.prompt_logprobs]


@pytest.mark.parametrize("kv", FORMATS)
def test_logprobs_are_close_to_those_of_an_unquantised_cache(folder: Path, kv: str) -> None:
    want = prompt_scores(make(folder))
    for options in ({}, {"plain_kernels": True}, {"max_num_batched_tokens": 40}):
        got = prompt_scores(make(folder, kv_cache_dtype=kv, **options))
        assert got == pytest.approx(want, abs=BOUND[kv])
        assert got != pytest.approx(want, abs=1e-6), "nothing was rounded"


@pytest.mark.parametrize("kv", FORMATS)
def test_deterministic_alone_equals_any_batch(folder: Path, kv: str) -> None:
    batch_invariant = sampling(deterministic=True, temperature=0.0)
    alone = first_of(folder, [PROMPT], batch_invariant, kv_cache_dtype=kv)
    tight = {"num_blocks": 24, "max_model_len": 200, "max_num_batched_tokens": 40}
    preempted = first_of(folder, [PROMPT, *SIBLINGS], batch_invariant, kv_cache_dtype=kv, **tight)
    assert preempted == alone, "in chunks, beside others, and with preemption"


@pytest.mark.parametrize("kv", FORMATS)
def test_prefixes_are_reused(folder: Path, kv: str) -> None:
    llm = make(folder, kv_cache_dtype=kv)
    params = sampling(temperature=0.0)
    first = llm.generate([PROMPT], params)[0].outputs[0].token_ids
    again = llm.generate([PROMPT], params)[0].outputs[0].token_ids
    assert llm.engine.stats().prefix_hits == 64
    assert again == first


def test_preempted_requests_complete(folder: Path) -> None:
    llm = make(folder, kv_cache_dtype="int8", num_blocks=16, max_model_len=120)
    results = llm.generate([PROMPT, *SIBLINGS[:7]], sampling(temperature=0.0))
    assert [len(result.outputs[0].token_ids) for result in results] == [30] * 8
    assert llm.engine.stats().num_used_blocks == 0


@pytest.mark.parametrize("kv", FORMATS)
def test_the_same_bytes_hold_more_tokens(folder: Path, kv: str) -> None:
    """A head is 24 numbers here: 48 bytes in float16, 24 and a scale of 4 in one byte each."""
    options = {"num_blocks": None, "kv_cache_memory_bytes": 2**20}
    usual = make(folder, **options).report
    coded = make(folder, kv_cache_dtype=kv, **options).report
    assert usual.capacity.bytes_per_block == 2 * 2 * 2 * 16 * 48
    assert coded.capacity.bytes_per_block == 2 * 2 * 2 * 16 * 28
    assert coded.capacity.num_blocks == 2**20 // coded.capacity.bytes_per_block
    assert coded.memory["KV cache"] == coded.capacity.num_blocks * coded.capacity.bytes_per_block
    (line,) = [choice for choice in coded.choices if choice.what == "KV format"]
    assert line.value.startswith(kv)
    # fp8 is left to torch, which would keep float32.
    more = {"int8": "1.71x the tokens of float16", "fp8": "3.43x the tokens of float32"}
    assert more[kv] in line.reason
    assert ("int8 is faster on a CPU" in line.reason) == (kv == "fp8")


@pytest.mark.model
def test_inspect_shows_the_format(default_gguf: Path) -> None:
    config = {"model": str(default_gguf), "device": "cpu"}
    usual = examine(EngineConfig.of(**config))
    coded = examine(EngineConfig.of(**config, kv_cache_dtype="fp8_e4m3"))
    assert usual["estimate"]["kv_bytes_per_token"] == 2 * 30 * 3 * 64 * 2
    assert coded["estimate"]["kv_bytes_per_token"] == 2 * 30 * 3 * (64 + 4)
    assert "fp8 (e4m3)" in {choice["value"].split(",")[0] for choice in coded["choices"]}


def test_the_reference_cache_is_float32(folder: Path) -> None:
    options = {"num_blocks": None, "kv_cache_memory_bytes": 2**20}
    exact = make(folder, dtype="float32", **options).report
    assert exact.capacity.bytes_per_block == 2 * 2 * 2 * 16 * 96


def test_an_unknown_kv_format_is_rejected_by_name() -> None:
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype must be one of auto, fp8, .*'fp4'"):
        EngineConfig.of(kv_cache_dtype="fp4")


PROMPTS = ["A windlass is", "The capital of France is", "Water boils at"]


@pytest.mark.model
@pytest.mark.parametrize(("kv", "divergence"), [("int8", 2e-3), ("fp8", 1e-2)])
def test_the_default_model_stays_close(tmp_path: Path, kv: str, divergence: float) -> None:
    """Weights in float32, so that nothing else rounds: the kernels of packed weights do.

    Some hundred tokens are too few to count agreement: docs/quantisation.md has it on 2,559.
    """
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    base = {"model": "default", "dtype": "float32", "device": "cpu"}
    outcome = measure(
        EngineConfig.of(**base, kv_cache_dtype=kv),
        EngineConfig.of(**base),
        read_corpus(str(path)),
        Cut(context=256, max_windows=1),
    )
    against = outcome.overall.against
    assert against is not None
    assert 1e-6 < against.kl_mean < divergence
    assert against.ppl_ratio == pytest.approx(1, abs=0.02)


@pytest.mark.model
def test_the_default_model_generates_the_same_text() -> None:
    params = SamplingParams(max_tokens=8, temperature=0.0)
    options = {"dtype": "float32", "device": "cpu", "num_blocks": 64}
    usual, coded = (
        LLM("default", **options, **more).generate(PROMPTS, params)
        for more in ({}, {"kv_cache_dtype": "int8"})
    )
    pairs = zip(usual, coded, strict=True)
    same = [a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in pairs]
    assert sum(same) >= len(PROMPTS) - 1
