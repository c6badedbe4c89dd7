"""Families, formats and features with 2 and 4 real processes: the numbers of one process."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from tests.lora.folders import write_adapter, write_model
from tests.models import tiny
from tests.parallel.pool import pooled_ranks
from tests.quant import packers, test_files
from tests.quant.folders import rewrite, write_plain
from tests.speculative import test_heads
from windlass import LLM, SamplingParams

VOCAB = 96
BASE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "float32",
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "dense": {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": False},
    "norms of all heads": {"architectures": ["Olmo2ForCausalLM"]},
    "moe": {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 6, **EXPERTS},
    "windows": {
        "architectures": ["Gemma2ForCausalLM"],
        "query_pre_attn_scalar": 16,
        "sliding_window": 20,
    },
    "growing scores": {
        "architectures": ["Ministral3ForCausalLM"],
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.5,
        },
    },
    "sinks": {
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "sliding_window": 20,
    },
    "chunks": {
        "architectures": ["Llama4ForCausalLM"],
        "no_rope_layers": [1, 0],
        "num_local_experts": 4,
        "intermediate_size_mlp": 96,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 20,
        "floor_scale": 16,
    },
    "heads of two sizes": {
        "architectures": ["Gemma4ForCausalLM"],
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 20,
        "global_head_dim": 32,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCAB,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 64,
    },
    "mla": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "q_lora_rank": None,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "topk_method": "greedy",
        **EXPERTS,
    },
}
PROMPTS = [[(11 * i) % VOCAB for i in range(75)], [5, 9, 2], [7] * 40, [3] * 17]
GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, logprobs=2)
# Chunked prompts, and fewer blocks than all requests need: some are preempted.
FEW = {"max_num_batched_tokens": 32, "max_num_seqs": 4}


@pytest.fixture(scope="module", autouse=True)
def pool() -> Iterator[None]:
    with pooled_ranks():
        yield


def make(folder: Path, size: int, **options: Any) -> LLM:
    gc.collect()  # the engine before this one, whose ranks the pool needs
    options = {"dtype": "float32", "num_blocks": 64, **options}
    return LLM(str(folder), device="cpu", tensor_parallel_size=size, **options)


def family(name: str, folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(BASE | FAMILIES[name]))
    return folder


def results(llm: LLM, sampling: Any = GREEDY, **options: Any) -> tuple[list[Any], list[float]]:
    """Tokens, and their log probabilities with those of the alternatives."""
    outputs = [each.outputs[0] for each in llm.generate(PROMPTS, sampling, **options)]
    scores = [score for each in outputs for score in each.logprobs or ()]
    values = [value for score in scores for value in (score.logprob, *(v for _, v in score.top))]
    return [each.token_ids for each in outputs], values


def assert_equal(found: tuple[list[Any], list[float]], want: tuple[list[Any], list[float]]) -> None:
    assert found[0] == want[0]
    assert found[1] == pytest.approx(want[1], abs=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str, tmp_path: Path) -> None:
    folder = family(name, tmp_path)
    want = results(make(folder, 1, load_format="dummy"))
    for size in (2, 4):
        local = {"sliding_window", "attention_chunk_size"} & FAMILIES[name].keys()
        num_blocks = 24 if local else 12  # of several groups, or of one
        llm = make(folder, size, load_format="dummy", num_blocks=num_blocks, **FEW)
        assert_equal(results(llm), want)
        assert_equal(results(llm), want)  # with prefix hits
        assert llm.engine.stats().num_preemptions
        assert llm.engine.stats().prefix_hits
        del llm


def gguf(kind: str, folder: Path) -> Path:
    """A GGUF whose o_proj has 512 inputs: a K block of 256 is not cut."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "HEAD_DIM", 128)
        tensors = tiny.block_tensors(kind, tied=False)
        path = folder / "m.gguf"
        return tiny.write_gguf(path, kind=tiny.Type[kind], tensors=tensors, metadata=tiny.TOKENIZER)


def packed(pack: Any, quantization: dict[str, Any], folder: Path) -> Path:
    sizes = {"intermediate_size": 256, "vocab_size": VOCAB, "max_position_embeddings": 256}
    plain = write_plain(folder / "plain", **sizes)
    (path, _) = rewrite(plain, folder / "packed", pack, quantization)
    words = {f"t{i}": i for i in range(VOCAB)}
    Tokenizer(WordLevel(words, "t0")).save(str(path / "tokenizer.json"))
    return path


FORMATS = {
    "int8": lambda folder: packed(*test_files.CASES["bnb int8"], folder),
    "awq": lambda folder: packed(*test_files.CASES["awq"], folder),
    "gptq act-order": lambda folder: packed(*test_files.CASES["gptq act-order"], folder),
    "Q4_K": lambda folder: gguf("Q4_K", folder),
    "Q6_K": lambda folder: gguf("Q6_K", folder),
}


@pytest.mark.parametrize("name", FORMATS)
def test_formats(name: str, tmp_path: Path) -> None:
    path = FORMATS[name](tmp_path)
    want = results(make(path, 1))
    for size in (2,) if name.endswith("_K") else (2, 4):
        assert_equal(results(make(path, size)), want)


def test_fp8_inputs_are_rounded_alike(tmp_path: Path) -> None:
    """The order of a sum may round an input to the next fp8 number, so scores are close, not equal."""
    static = test_files.FP8 | {"activation_scheme": "static"}
    path = packed(lambda _, w: packers.fp8(w, None, 0.02), static, tmp_path)
    want = results(make(path, 1))
    for size in (2, 4):
        assert results(make(path, size))[1][:3] == pytest.approx(want[1][:3], abs=1e-2)


@pytest.mark.parametrize("name", ["dense", "moe", "mla", "windows"])
def test_recorded_steps(name: str, tmp_path: Path) -> None:
    folder = family(name, tmp_path)
    options = {"dtype": "auto", "load_format": "dummy", "quantization": "int8"}
    llm = make(folder, 2, **options)
    steps = next(each for each in llm.report.choices if each.what == "steps")
    assert "one native call" in steps.value, steps.reason
    found = results(llm)
    assert set(llm.engine.stats().executors) == {"program"}
    del llm
    eager = results(make(folder, 2, **options, enforce_eager=True))
    assert found == eager, "to the bit"
    # Ranks have scales of their own for their inputs of a weight, so sequences may differ later on.
    want = results(make(folder, 1, **options))
    assert found[1][:3] == pytest.approx(want[1][:3], abs=0.05)


@pytest.mark.parametrize("method", ["ngram", "lookahead", "draft", "self", "medusa", "eagle"])
def test_proposers(method: str, tmp_path: Path) -> None:
    folder = family("dense", tmp_path)
    options: dict[str, Any] = {"load_format": "dummy", "spec": method, "num_blocks": 128}
    if method == "draft":
        options |= {"spec_model": str(folder)}
    if method == "self":
        options |= {"spec_exit_layer": 1}
    if method in ("medusa", "eagle"):
        (folder / "config.json").write_text(json.dumps(test_heads.CONFIG))
        options |= {"spec_model": str(getattr(test_heads, method)(tmp_path / "head"))}
    want = results(make(folder, 1, load_format="dummy"))
    assert_equal(results(make(folder, 2, **options)), want)


def test_adapters_grammars_and_sampling(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    modules = [f"{name}={write_adapter(tmp_path / name, seed=i)}" for i, name in enumerate("ab")]
    options = {"load_format": "dummy", "enable_lora": True, "lora_modules": modules, "max_loras": 1}
    later = write_adapter(tmp_path / "c", seed=5)
    adapters = ["a", "", "b", "c"]
    sampling = [
        GREEDY,
        SamplingParams(max_tokens=8, seed=3, top_k=20, logprobs=2),
        SamplingParams(max_tokens=8, seed=5, structured_outputs={"regex": "(w1|w2| )*"}),
        SamplingParams(max_tokens=8, seed=4, repetition_penalty=1.2, deterministic=True),
    ]
    found = []
    for size in (1, 2, 4):
        llm = make(folder, size, **options)
        llm.add_adapter("c", str(later))
        found.append(results(llm, sampling, adapter=adapters))
        llm.remove_adapter("c")
        del llm
    assert_equal(found[1], found[0])
    assert_equal(found[2], found[0])
