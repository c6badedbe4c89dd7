"""The CPU's captured program: the same results as eager steps, for any batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.native.test_prompts import has_prompt_gemm
from tests.models.tiny import Type, write_gguf
from tests.runner.test_deterministic import CONFIG, PROMPT, SIBLINGS
from windlass import LLM, SamplingParams
from windlass.build import build_engine
from windlass.build_rank import Source
from windlass.config import EngineConfig
from windlass.core.types import NewRequest, SlotId, SlotInit, StepPlan
from windlass.kernels.native.compiler import find_compilers
from windlass.kernels.native.ops import NativeOps
from windlass.kernels.native.pool import Workers
from windlass.kernels.native.program import ProgramLimits, record
from windlass.kernels.native.record import Unrecordable
from windlass.models.card import load_hparams
from windlass.models.source import resolve
from windlass.runner.inputs import SlotFacts

_COMPILERS, _ = find_compilers()
pytestmark = pytest.mark.skipif(not _COMPILERS, reason="no C++ compiler")

PROMPTS = [PROMPT, *SIBLINGS]
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 20},
    "llama": {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True},
}


WINDOWS = {"sliding_window": 20, "sliding_window_pattern": 2}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
# Structures that differ in operations, with one format each.
OTHER_SHAPES: dict[str, dict[str, Any]] = {
    "gemma2": {"architectures": ["Gemma2ForCausalLM"], "query_pre_attn_scalar": 16, **WINDOWS},
    "gemma3": {"architectures": ["Gemma3ForCausalLM"], "query_pre_attn_scalar": 16, **WINDOWS},
    "qwen3-moe": {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 6, **EXPERTS},
    "gpt-oss": {
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "sliding_window": 20,
    },
    "phimoe": {
        "architectures": ["PhimoeForCausalLM"],
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "router_jitter_noise": 0.5,
        "lm_head_bias": True,
    },
    "olmo2": {"architectures": ["Olmo2ForCausalLM"]},
    "cohere": {"architectures": ["CohereForCausalLM"], "layer_norm_eps": 1e-5},
}


def make(folder: Path, shape: str = "qwen3", **options: Any) -> LLM:
    path = folder / shape
    path.mkdir(exist_ok=True)
    sizes = {"head_dim": 16, "intermediate_size": 224}
    (path / "config.json").write_text(json.dumps(CONFIG | sizes | (SHAPES | OTHER_SHAPES)[shape]))
    chosen = {"num_blocks": 200, "max_num_seqs": 16, "quantization": "int4", "quantize_head": True}
    return LLM(str(path), load_format="dummy", device="cpu", **(chosen | options))


def how(llm: LLM) -> str:
    return next(choice.value for choice in llm.report.choices if choice.what == "steps")


def outputs_of(llm: LLM, params: SamplingParams) -> list[Any]:
    return [
        (result.outputs[0].token_ids, [s.logprob for s in result.outputs[0].logprobs or ()])
        for result in llm.generate(PROMPTS, params)
    ]


@pytest.mark.parametrize(
    ("shape", "quantization"),
    [
        *((shape, kind) for shape in SHAPES for kind in ("int4", "int8", "w8a8", "nf4")),
        *((shape, "int8") for shape in OTHER_SHAPES),
    ],
)
def test_the_program_matches_eager_steps(tmp_path: Path, shape: str, quantization: str) -> None:
    """To the bit: greedy, with scores, and drawn, in steps of many sizes."""
    options = {"quantization": quantization, "max_num_batched_tokens": 40}
    captured = make(tmp_path, shape, **options)
    eager = make(tmp_path, shape, enforce_eager=True, **options)
    assert how(captured).startswith("one native call")
    for options_of_request in (
        {"temperature": 0.0},
        {"temperature": 0.0, "logprobs": 2},
        {"seed": 3},
    ):
        params = SamplingParams(max_tokens=12, ignore_eos=True, **options_of_request)
        assert outputs_of(captured, params) == outputs_of(eager, params)


@pytest.mark.parametrize("kv", ["auto", "int8"])
def test_a_row_is_the_same_alone_and_in_any_batch(tmp_path: Path, kv: str) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.0, logprobs=1)
    together = outputs_of(make(tmp_path, kv_cache_dtype=kv), params)
    llm = make(tmp_path, kv_cache_dtype=kv, max_num_seqs=1, max_num_batched_tokens=30)
    assert outputs_of(llm, params) == together


def prompt_scores(llm: LLM) -> list[list[float]]:
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    results = llm.generate(PROMPTS, params)
    return [[score.logprob for score in result.prompt_logprobs] for result in results]


def test_prompt_quantisation_does_not_depend_on_chunks(tmp_path: Path) -> None:
    coarse = prompt_scores(make(tmp_path))
    for options in ({"max_num_batched_tokens": 17}, {"enforce_eager": True}):
        assert prompt_scores(make(tmp_path, **options)) == coarse
    fine = prompt_scores(make(tmp_path, prompt_rounding="fine"))
    assert (fine != coarse) == has_prompt_gemm(Workers(1))
    for one, other in zip(coarse, fine, strict=True):
        assert one == pytest.approx(other, abs=0.1)


@pytest.mark.parametrize(
    ("num_prompt", "num_coarse"),
    [(1, 0), (3, 0), (16, 0), (17, 16), (18, 16), (19, 19), (129, 128)],
)
def test_short_prompts_and_few_tokens_behind_full_blocks_are_quantised_finely(
    num_prompt: int, num_coarse: int
) -> None:
    slot = SlotId(0)
    facts = SlotFacts(coarse_prompts=True)
    new = SlotInit(
        request_id="a",
        slot=slot,
        tokens=[5] * num_prompt,
        num_prompt=num_prompt,
        sampling=SamplingParams(),
        stop_ids=frozenset(),
        seed=0,
    )
    facts.apply(StepPlan([], admitted=[new]))
    assert facts.num_coarse(slot) == num_coarse


@pytest.mark.parametrize("num_last", [1, 2, 3])
def test_tokens_behind_cached_blocks_have_the_same_logprobs(tmp_path: Path, num_last: int) -> None:
    prompt = (PROMPT * 3)[: 32 + num_last]
    params = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0, logprobs=1)
    llm = make(tmp_path, block_size=16)
    first, again = (llm.generate([prompt], params)[0] for _ in range(2))
    assert again.num_cached == 32
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    assert again.outputs[0].logprobs == first.outputs[0].logprobs


def test_recomputation_after_preemption_gives_the_same_tokens(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.0, logprobs=1)
    scarce = make(tmp_path, num_blocks=24, block_size=8, prefix_caching=False)
    found = outputs_of(scarce, params)
    assert scarce.engine.stats().num_preemptions > 0
    assert found == outputs_of(make(tmp_path), params)


def test_the_program_is_close_to_the_reference(tmp_path: Path) -> None:
    """Weights that lose nothing: float32 sums in another order, inputs kept to 15 bits."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    scores = []
    for options in ({}, {"plain_kernels": True}):
        results = make(tmp_path, quantization="int8", prompt_rounding="fine", **options).generate(
            PROMPTS, params
        )
        scores.append([score.logprob for result in results for score in result.prompt_logprobs])
    assert scores[0] == pytest.approx(scores[1], abs=1e-3)


def test_gemms_of_different_types_share_a_buffer(tmp_path: Path) -> None:
    kinds = {"attn_v.weight": Type.Q8_0, "ffn_up.weight": Type.Q5_0, "token_embd.weight": Type.Q8_0}
    path = write_gguf(tmp_path / "m.gguf", "qwen2", Type.Q4_1, kinds=kinds)
    tokens = []
    for eager in (False, True):
        config = EngineConfig.of(model=str(path), num_blocks=32, enforce_eager=eager)
        files = resolve(config.model)  # there is no tokenizer in it
        built = build_engine(config, Source(files, load_hparams(files, config.model), ()))
        lines = {choice.what: choice.value for choice in built.report.choices}
        assert lines["steps"].startswith("operator" if eager else "one native call")
        params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.0)
        built.engine.add(NewRequest("a", [i % 96 for i in range(3, 40, 3)], params))
        found: list[int] = []
        while built.engine.has_work:
            found += [token for output in built.engine.step() for token in output.tokens]
        tokens.append(found)
    assert tokens[0] == tokens[1]


def test_torch_operations_in_a_step_are_named(tmp_path: Path) -> None:
    llm = make(tmp_path, quantization="fp8")
    lines = {choice.what: choice for choice in llm.report.choices}
    assert lines["steps"].value == "operator by operator"
    assert lines["steps"].reason == "cannot be recorded: aten.abs.default is not native"


def test_an_operator_on_a_step_tensor_cannot_be_captured() -> None:
    ops = NativeOps(Workers(1).pool)

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        x = ops.rms_norm(ops.embedding(torch.tensor([1]), torch.ones(4, 8)), torch.ones(8), 1e-5)
        return x.mul_(2.0), ops.argmax(x)

    with pytest.raises(Unrecordable, match="mul_"):
        record(ops.pool, forward, ProgramLimits(4, 2), max_bytes=2**20)
    assert not ops.pool.is_recording
