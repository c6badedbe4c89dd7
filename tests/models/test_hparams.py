"""Reading of hyper-parameters from config.json, and errors for invalid ones."""

from __future__ import annotations

import re

import pytest
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from tests.models.tiny import CONFIG, config
from windlass.errors import CheckpointError, UnsupportedError
from windlass.models.families.registry import ARCHITECTURES, read_hparams
from windlass.models.nearest import NEAREST


def test_llama_is_read_with_its_defaults():
    spec = read_hparams(config(torch_dtype="bfloat16", eos_token_id=[2, 7], bos_token_id=1))
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (4, 2, 64)
    assert spec.sliding_windows == (None, None)
    assert (spec.qkv_bias, spec.o_bias, spec.mlp_bias, spec.qk_norm) == (False, False, False, None)
    assert spec.rope.theta == 10000.0
    assert spec.rope.dim == 64
    assert (spec.dtype, spec.bos_id, spec.eos_ids) == ("bfloat16", 1, (2, 7))


@pytest.mark.parametrize(
    ("made", "changes"),
    [
        (LlamaConfig, {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
        (MistralConfig, {"sliding_window": 48}),
        (Qwen2Config, {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}),
        (Qwen3Config, {"head_dim": 128, "attention_bias": True}),
    ],
)
def test_transformers_configs_are_read(made, changes):
    values = {key: value for key, value in CONFIG.items() if key != "architectures"}
    original = made(**values, **changes)
    spec = read_hparams(original.to_dict())
    assert spec.head_dim == changes.get("head_dim", 64)
    assert spec.rope.theta == original.rope_parameters["rope_theta"]
    assert spec.qk_norm == ("head" if made is Qwen3Config else None)
    assert spec.qkv_bias == (made is not MistralConfig)
    assert spec.o_bias == (made in (LlamaConfig, Qwen3Config))
    windows = {MistralConfig: (48, 48), Qwen2Config: (None, 32)}
    assert spec.sliding_windows == windows.get(made, (None, None))


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 5e5, "rope_scaling": LLAMA3 | {"rope_type": "llama3"}},
        {"rope_theta": 5e5, "rope_scaling": LLAMA3 | {"type": "llama3"}},
        {"rope_parameters": LLAMA3 | {"rope_type": "llama3", "rope_theta": 5e5}},
    ],
)
def test_all_spellings_of_rope_scaling_are_equal(changes):
    spec = read_hparams(config(**changes))
    assert spec.rope.kind == "llama3"
    assert (spec.rope.theta, spec.rope.factor) == (5e5, 8.0)
    assert (spec.rope.low_freq_factor, spec.rope.high_freq_factor) == (1.0, 4.0)
    assert spec.rope.original_max_positions == 64
    assert spec.max_positions == 128


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        ({"type": "linear", "factor": 2.0}, 256),
        ({"type": "dynamic", "factor": 2.0}, 128),
        ({"type": "default"}, 128),
        (None, 128),
    ],
)
def test_rope_scaling_extends_the_context(rope, longest):
    assert read_hparams(config(rope_scaling=rope)).max_positions == longest


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_contexts_end_where_dual_chunk_attention_begins(architecture: str) -> None:
    sizes = {"max_position_embeddings": 1_010_000, "architectures": [architecture]}
    chunks = {"chunk_size": 262_144, "original_max_position_embeddings": 262_144}
    config = {**CONFIG, **sizes, "dual_chunk_attention_config": chunks}
    assert read_hparams(config).max_positions == 262_144


def test_the_NEAREST_are_supported() -> None:
    named = {name for text in NEAREST.values() for name in re.findall(r"\w+For\w+", text)}
    assert named
    assert named <= set(ARCHITECTURES)


def test_layer_types_select_sliding_windows():
    spec = read_hparams(
        config(
            architectures=["Qwen3ForCausalLM"],
            use_sliding_window=True,
            sliding_window=16,
            layer_types=["sliding_attention", "full_attention"],
        )
    )
    assert spec.sliding_windows == (16, None)


def test_architecture_may_come_from_the_model_type():
    values = {key: value for key, value in CONFIG.items() if key != "architectures"}
    assert read_hparams(values | {"model_type": "qwen2"}).architecture == "Qwen2ForCausalLM"


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"architectures": ["LlamaForCausalLN"]},
            UnsupportedError,
            "closest name is LlamaForCausalLM",
        ),
        (
            {"architectures": ["MambaForCausalLM"]},
            UnsupportedError,
            "LlamaForCausalLM, Mini",
        ),
        ({"architectures": None}, CheckpointError, "neither architectures nor model_type"),
        ({"hidden_act": "softplus"}, UnsupportedError, "hidden_act 'softplus'"),
        ({"hidden_size": None}, CheckpointError, "field 'hidden_size' is missing"),
        ({"vocab_size": "many"}, CheckpointError, "vocab_size is 'many'"),
        ({"num_key_value_heads": 3}, CheckpointError, "not a multiple of num_key_value_heads"),
        ({"num_attention_heads": 6}, CheckpointError, "not a multiple of num_attention_heads"),
        ({"rope_scaling": {"type": "ntk"}}, UnsupportedError, "rope type 'ntk'"),
        ({"rope_scaling": {"type": "longrope"}}, CheckpointError, "short_factor has 0 factors"),
        ({"rope_scaling": {"type": "linear"}}, CheckpointError, "field 'factor' is missing"),
        ({"rope_parameters": {"full_attention": {}}}, UnsupportedError, "by layer type"),
        ({"quantization_config": "awq"}, CheckpointError, "expected an object"),
        ({"tie_word_embeddings": "yes"}, CheckpointError, "true or false"),
        ({"partial_rotary_factor": 0.01}, CheckpointError, "features per head are rotary"),
    ],
)
def test_invalid_configs_are_rejected(changes, error, message):
    with pytest.raises(error, match=r"some/config\.json") as caught:
        read_hparams(config(**changes), "some/config.json")
    assert message in str(caught.value)
