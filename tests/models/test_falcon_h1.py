"""Falcon-H1 and Bamba: the logits and tokens of transformers, GGUF files, and bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.comparison import TINY, check_logits, save_tiny
from tests.models.hybrid_gguf import write_hybrid
from tests.models.hybrids import (
    PATHS,
    check_llama_cpp,
    check_ranks_and_stages,
    check_recorded_steps,
    check_state_of_each_block,
    check_tokens,
    gguf_logits,
    logits_by,
    needs_llama_cpp,
)
from windlass.cli.model_report import examine
from windlass.config import EngineConfig
from windlass.errors import CheckpointError, UnsupportedError
from windlass.lora.modules import linear_shapes
from windlass.models.families.registry import read_hparams
from windlass.models.network import kv_layout

MAMBA: dict[str, Any] = {"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 16}
MULTIPLIERS: dict[str, Any] = {
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.5,
    "key_multiplier": 0.7,
    "attention_in_multiplier": 1.5,
    "attention_out_multiplier": 0.8,
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.6,
    "ssm_multipliers": [0.9, 1.2, 1.1, 0.75, 1.4],
    "mlp_multipliers": [0.88, 0.5],
}
FALCON: dict[str, dict[str, Any]] = {
    "plain": {},
    "multipliers": MULTIPLIERS,
    "norm and groups": {
        **MULTIPLIERS,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        "mamba_n_groups": 2,
        "tie_word_embeddings": True,
    },
    "biases": {
        **MULTIPLIERS,
        "attention_bias": True,
        "mlp_bias": True,
        "mamba_proj_bias": True,
        "projectors_bias": True,
        "mamba_conv_bias": False,
    },
}
BAMBA: dict[str, dict[str, Any]] = {
    "some attention": {**MAMBA, "attn_layer_indices": [1]},
    "biases": {**MAMBA, "attn_layer_indices": [0, 2], "attention_bias": True, "mlp_bias": True},
}


def changes_of(name: str) -> dict[str, Any]:
    return {**MAMBA, "mamba_d_ssm": 96, **FALCON[name]}


def save(name: str, folder: Path) -> torch.nn.Module:
    return save_tiny("FalconH1", changes_of(name), folder)


@pytest.mark.parametrize("name", FALCON)
def test_logits_of_falcon_equal_transformers(name: str, tmp_path: Path) -> None:
    check_logits("FalconH1", changes_of(name), tmp_path)


@pytest.mark.parametrize("name", BAMBA)
def test_logits_of_bamba_equal_transformers(name: str, tmp_path: Path) -> None:
    check_logits("Bamba", BAMBA[name], tmp_path)


@pytest.mark.parametrize("options", PATHS, ids=str)
def test_tokens_equal_transformers_in_batches_after_preemption_and_with_prefixes(
    options: dict[str, Any], tmp_path: Path
) -> None:
    changes = {**changes_of("norm and groups"), "num_hidden_layers": 1}  # few groups of blocks
    check_tokens(save_tiny("FalconH1", changes, tmp_path), tmp_path, 28, **options)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_step_that_fills_several_blocks_keeps_the_state_of_each(
    deterministic: bool, tmp_path: Path
) -> None:
    check_state_of_each_block(save("multipliers", tmp_path), tmp_path, deterministic)


def test_steps_are_one_native_call_with_the_bits_of_eager_steps(tmp_path: Path) -> None:
    save("multipliers", tmp_path)
    check_recorded_steps(tmp_path)


def write_falcon(folder: Path) -> Path:
    """As llama.cpp's converter: the multipliers are in the weights."""
    config = json.loads((folder / "config.json").read_text())
    gates, inner, shared = config["ssm_multipliers"], 96, 16 * config["mamba_n_groups"]
    sizes = torch.tensor([inner, inner, shared, shared, 6])
    attention = config["attention_in_multiplier"]
    factors = {
        "q_proj": attention,
        "k_proj": attention * config["key_multiplier"],
        "v_proj": attention,
        "o_proj": config["attention_out_multiplier"],
        "gate_proj": config["mlp_multipliers"][0],
        "down_proj": config["mlp_multipliers"][1],
        "in_proj": config["ssm_in_multiplier"]
        * torch.tensor(gates).repeat_interleave(sizes)[:, None],
        "out_proj": config["ssm_out_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }
    tensors = load_file(folder / "model.safetensors")
    scaled = {
        name: (tensor * factors.get(name.split(".")[-2], 1.0)).contiguous()
        for name, tensor in tensors.items()
    }
    save_file(scaled, folder / "model.safetensors")
    groups = config["mamba_n_groups"]
    ssm = {
        "ssm.conv_kernel": 4,
        "ssm.state_size": 16,
        "ssm.group_count": groups,
        "ssm.inner_size": inner,
        "ssm.time_step_rank": 6,
    }
    return write_hybrid(folder, "falcon-h1", ssm, groups=groups)


@pytest.mark.parametrize("name", ["multipliers", "norm and groups"])
def test_gguf_gives_the_same_logits(name: str, tmp_path: Path) -> None:
    changes = {**changes_of(name), "tie_word_embeddings": False}
    model = save_tiny("FalconH1", changes, tmp_path)
    got = gguf_logits(write_falcon(tmp_path))
    torch.testing.assert_close(got, logits_by(model), atol=1e-4, rtol=1e-4)


@needs_llama_cpp
@pytest.mark.parametrize("name", ["multipliers", "norm and groups"])
def test_logits_equal_llama_cpp(name: str, tmp_path: Path) -> None:
    changes = {**changes_of(name), "tie_word_embeddings": False}
    model = save_tiny("FalconH1", changes, tmp_path)
    check_llama_cpp(model, write_falcon(tmp_path))


@pytest.mark.parametrize("name", ["norm and groups", "biases"])
def test_ranks_divide_the_heads(name: str, tmp_path: Path) -> None:
    check_ranks_and_stages(save(name, tmp_path), tmp_path)


def test_inspect_shows_the_state_of_a_sequence(tmp_path: Path) -> None:
    save("plain", tmp_path)
    config = {"model": str(tmp_path), "device": "cpu", "load_format": "dummy", "block_size": 4}
    estimate = examine(EngineConfig.of(**config))["estimate"]
    state = 4 * (6 * 16 * 16 + (6 * 16 + 2 * 16) * 3)
    assert estimate["state_bytes_per_sequence"] == 3 * state


def config_of(**changes: Any) -> dict[str, Any]:
    own = {**TINY, **changes_of("multipliers"), **changes}
    return {**own, "architectures": ["FalconH1ForCausalLM"]}


def test_every_layer_has_keys_and_a_state() -> None:
    layout = kv_layout(read_hparams(config_of()), 4, torch.float16)
    assert {group.kind for group in layout.groups} == {"full", "state"}
    assert layout.num_layers == 6
    stage = layout.stage(range(1, 3))
    kept = {layer for group in stage.groups if group.kind == "state" for layer in group.layers}
    assert kept == {1, 3}


def test_adapters_may_change_attention_and_mlp_and_not_the_mixer() -> None:
    shapes = linear_shapes(read_hparams(config_of()))
    assert "model.layers.1.self_attn.q_proj" in shapes
    assert "model.layers.0.mlp.down_proj" in shapes
    assert not any(".mamba." in name for name in shapes)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"mamba_d_ssm": 90},
            CheckpointError,
            r"\(6\) times mamba_d_head \(16\) is not mamba_d_ssm",
        ),
        ({"mamba_rms_norm": True}, UnsupportedError, "mamba_norm_before_gate is true"),
        ({"projectors_bias": True}, UnsupportedError, "projectors_bias and mamba_proj_bias differ"),
        ({"ssm_multipliers": [1.0]}, CheckpointError, "ssm_multipliers has 1 numbers, expected 5"),
        ({"mlp_multipliers": [1.0, 0]}, CheckpointError, r"mlp_multipliers\[1\] is 0"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            UnsupportedError,
            "quantization_config is not supported with multipliers",
        ),
    ],
)
def test_bad_configs_are_refused_by_name(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        read_hparams(config_of(**changes))
