"""Llama 4 against transformers: attention in chunks, layers without RoPE, experts with scaled inputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.comparison import TINY, check_logits, our_logits, save_tiny
from tests.models.dense_gguf import TOKENIZER
from tests.models.hybrids import check_llama_cpp, needs_llama_cpp
from tests.models.test_deepseek import COUNT, PROMPTS, run
from tests.models.test_networks import LLAMA3_ROPE
from tests.models.tiny import add_value
from tests.runner.test_windows import make, transformers_tokens
from tests.steps import generate
from windlass import SamplingParams
from windlass.errors import CheckpointError, UnsupportedError
from windlass.kernels.native.compiler import find_compilers
from windlass.models.families.registry import read_hparams

IDS = torch.randint(3, 97, (37,), generator=torch.Generator().manual_seed(2))
SCOUT: dict[str, Any] = {
    "num_hidden_layers": 5,
    "head_dim": 16,
    "intermediate_size": 32,
    "intermediate_size_mlp": 80,
    "num_local_experts": 4,
    "attention_chunk_size": 8,
    "floor_scale": 10,
    "attn_scale": 0.5,
    "rope_parameters": {**LLAMA3_ROPE, "rope_theta": 500000.0},
}
MAVERICK = {
    **SCOUT,
    "interleave_moe_layer_step": 2,
    "use_qk_norm": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}
CASES: dict[str, dict[str, Any]] = {
    "scout": SCOUT,
    "maverick": MAVERICK,
    "listed layers": {**SCOUT, "moe_layers": [0, 3], "no_rope_layers": [1, 0, 1, 1, 0]},
    "without growth": {**SCOUT, "attn_temperature_tuning": False, "attention_chunk_size": 100},
    "without experts": {**SCOUT, "moe_layers": [], "tie_word_embeddings": True},
    "full attention": {**SCOUT, "layer_types": ["full_attention"] * 5, "attention_bias": True},
}


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    check_logits("Llama4", CASES[name], tmp_path)


def test_the_reference_kernels_give_the_same_logits(tmp_path: Path) -> None:
    model = save_tiny("Llama4", SCOUT, tmp_path)
    with torch.inference_mode():
        want = model(IDS[None]).logits[0]
    got = our_logits(tmp_path, IDS.tolist(), [20, 17], plain=True)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_the_text_model_of_a_model_with_images(tmp_path: Path) -> None:
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "vision_output_dim": 32,
        "projector_input_dim": 32,
        "projector_output_dim": 32,
    }
    kind = transformers.Llama4ForConditionalGeneration
    text = {**TINY, **SCOUT}
    torch.manual_seed(1)
    model = kind(kind.config_class(text_config=dict(text), vision_config=vision)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.15)
        want = model(input_ids=IDS[None]).logits[0]
    model.save_pretrained(tmp_path)
    for chunks in ([37], [5, 1, 1, 30]):
        got = our_logits(tmp_path, IDS.tolist(), chunks)
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["scout", "maverick"])
def test_tokens_equal_transformers_in_batches_after_preemption_and_with_prefixes(
    name: str, tmp_path: Path
) -> None:
    """Prompts are longer than a chunk, and are computed in parts that cross its borders."""
    model = save_tiny("Llama4", CASES[name], tmp_path)
    want = [transformers_tokens(model, prompt, COUNT) for prompt in PROMPTS]
    for options in ({}, {"plain_kernels": True, "max_num_batched_tokens": 7}):
        built = make(tmp_path, dtype="float32", num_blocks=200, **options)
        assert run(built, PROMPTS) == want
        assert run(built, PROMPTS[:1]) == want[:1]
        assert built.engine.stats().prefix_hits > 0
    kinds = {group.kind: group.window for group in built.report.capacity.layout.groups}
    assert kinds == {"full": None, "window": 8}
    scarce = make(tmp_path, dtype="float32", num_blocks=57)
    short = [[3 + (5 + n) * i % 89 for i in range(9)] for n in range(4)]
    growing = generate(scarce.engine, short, SamplingParams(temperature=0.0, max_tokens=30))
    assert growing == [transformers_tokens(model, prompt, 30) for prompt in short]
    assert scarce.engine.stats().num_preemptions > 0


@pytest.mark.skipif(not find_compilers()[0], reason="no C++ compiler")
def test_the_recorded_program_gives_the_tokens_of_eager_steps(tmp_path: Path) -> None:
    save_tiny("Llama4", {**SCOUT, "attn_temperature_tuning": False}, tmp_path)
    recorded, eager = (make(tmp_path, num_blocks=200, enforce_eager=flag) for flag in (False, True))
    how = next(choice for choice in recorded.report.choices if choice.what == "steps")
    assert how.value.startswith("one native call"), how.reason
    assert run(recorded, PROMPTS) == run(eager, PROMPTS)


def test_deterministic_requests_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    save_tiny("Llama4", SCOUT, tmp_path)
    built = make(tmp_path, num_blocks=200, plain_kernels=True)
    alone = run(built, PROMPTS[:1], deterministic=True)
    other = make(tmp_path, num_blocks=200, plain_kernels=True, max_num_batched_tokens=23)
    assert run(other, PROMPTS, deterministic=True)[:1] == alone


def test_experts_that_are_stored_apart(tmp_path: Path) -> None:
    """Quantised checkpoints have a tensor for each expert and projection."""
    save_tiny("Llama4", SCOUT, tmp_path)
    ids, file = IDS.tolist(), tmp_path / "model.safetensors"
    want = our_logits(tmp_path, ids, [37])
    tensors = load_file(file)
    for name in [name for name in tensors if ".experts." in name]:
        stack = tensors.pop(name).mT.contiguous()
        module, _, part = name.rpartition(".")
        for expert, weight in enumerate(stack):
            halves = {"down_proj": weight}
            if part == "gate_up_proj":
                halves = dict(zip(("gate_proj", "up_proj"), weight.chunk(2), strict=True))
            for each, rows in halves.items():
                tensors[f"{module}.{expert}.{each}.weight"] = rows.contiguous()
    save_file(tensors, file)
    assert torch.equal(our_logits(tmp_path, ids, [37]), want)


def config(**changes: Any) -> dict[str, Any]:
    return {**TINY, **SCOUT, "architectures": ["Llama4ForCausalLM"], **changes}


def test_old_configs_have_a_number_for_the_growth_of_scores() -> None:
    for found, grows in ((4, True), (0, False)):
        assert bool(read_hparams(config(attn_temperature_tuning=found)).unrotated_growth) is grows
    without = config(num_local_experts=0, moe_layers=[], interleave_moe_layer_step=0)
    assert read_hparams(without).moe is None


def test_weight_formats_name_the_modules_of_the_network() -> None:
    formats = {"quant_method": "compressed-tensors", "ignore": ["re:.*feed_forward.shared_expert"]}
    text = {**TINY, **SCOUT, "model_type": "llama4_text"}
    whole = {
        "architectures": ["Llama4ForConditionalGeneration"],
        "text_config": text,
        "quantization_config": formats,
    }
    for found in (config(quantization_config=formats), whole):
        assert read_hparams(found).quantization["ignore"] == ["re:.*mlp.shared_expert"]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_experts_per_tok": 2}, UnsupportedError, "num_experts_per_tok is 2; only 1"),
        ({"layer_types": ["sliding_attention"] * 5}, UnsupportedError, "only chunked_attention"),
        ({"no_rope_layers": [1, 0]}, CheckpointError, "no_rope_layers has 2 layers"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
            UnsupportedError,
            "rope type 'yarn' is not supported for Llama 4",
        ),
    ],
)
def test_unsupported_variants_are_refused_by_name(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        read_hparams(config(**changes))


GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    "self_attn.o_proj": "attn_output",
    "feed_forward.router": "ffn_gate_inp",
    **{f"feed_forward.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    **{
        f"feed_forward.shared_expert.{part}_proj": f"ffn_{part}_shexp"
        for part in ("gate", "up", "down")
    },
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """The weights as llama.cpp's converter stores them."""
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        module, _, kind = name.rpartition(".")
        if module in OUTER:
            tensors[f"{OUTER[module]}.weight"] = value
            continue
        _, _, layer, local = module.split(".", 3)
        block = f"blk.{layer}."
        if local == "feed_forward.experts":
            parts = {"down": value.mT}
            if kind == "gate_up_proj":
                parts = dict(zip(("gate", "up"), value.mT.chunk(2, dim=1), strict=True))
            tensors |= {f"{block}ffn_{part}_exps.weight": each for part, each in parts.items()}
        else:
            tensors[f"{block}{GGUF_NAMES[local]}.weight"] = value
    return tensors


def write_llama4(
    path: Path, model: torch.nn.Module, tokenizer: dict[str, Any] | None = None, **metadata: Any
) -> Path:
    sizes = model.config
    writer = gguf.GGUFWriter(path, "llama4")
    values: dict[str, Any] = {
        "block_count": sizes.num_hidden_layers,
        "context_length": 128,
        "embedding_length": 48,
        "feed_forward_length": sizes.intermediate_size_mlp,
        "attention.head_count": 6,
        "attention.head_count_kv": 2,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": 16,
        "rope.freq_base": 500000.0,
        "expert_count": 4,
        "expert_used_count": 1,
        "expert_feed_forward_length": 32,
        "interleave_moe_layer_step": sizes.interleave_moe_layer_step,
        **metadata,
    }
    for key, value in values.items():
        add_value(writer, f"llama4.{key}", value)
    for key, value in (tokenizer or {}).items():
        add_value(writer, key, value)
    for key, tensor in gguf_tensors(model).items():
        writer.add_tensor(key, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf_files_give_the_same_tokens(tmp_path: Path) -> None:
    """llama.cpp's files do not store chunks and growth: those of the published models."""
    changes = {**MAVERICK, "use_qk_norm": True, "attention_chunk_size": 8192, "floor_scale": 8192}
    model = save_tiny("Llama4", changes, tmp_path)
    built = make(write_llama4(tmp_path / "m.gguf", model), num_blocks=200, dtype="float32")
    (tokens,) = run(built, PROMPTS[:1])
    assert tokens == transformers_tokens(model, PROMPTS[0], COUNT)
    layout = built.report.capacity.layout
    assert {group.window for group in layout.groups} == {None, 8192}


@needs_llama_cpp
def test_logits_equal_llama_cpp(tmp_path: Path) -> None:
    changes = {**MAVERICK, "use_qk_norm": True, "attention_chunk_size": 8192, "floor_scale": 8192}
    model = save_tiny("Llama4", changes, tmp_path)
    check_llama_cpp(model, write_llama4(tmp_path / "m.gguf", model, TOKENIZER))


def test_gguf_files_without_chunks_are_refused(tmp_path: Path) -> None:
    model = save_tiny("Llama4", SCOUT, tmp_path)
    path = write_llama4(tmp_path / "m.gguf", model, **{"attention.sliding_window": 0})
    with pytest.raises(UnsupportedError, match=r"attention\.sliding_window is set"):
        make(path, num_blocks=20)


def test_a_stack_of_another_size_is_reported(tmp_path: Path) -> None:
    save_tiny("Llama4", SCOUT, tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"intermediate_size": 16}))
    with pytest.raises(CheckpointError, match="The weights and the config do not match"):
        our_logits(tmp_path, [3, 4], [2])
