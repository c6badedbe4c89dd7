"""LFM2 and LFM2 MoE: the logits and tokens of transformers, GGUF files, states, and bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

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
    quantise_fp8,
)
from tests.models.test_dense_gguf import IDS
from tests.models.tiny import Type
from tests.quant.folders import loaded, logits
from tests.runner.test_windows import make
from windlass.cli.model_report import examine
from windlass.config import EngineConfig
from windlass.errors import CheckpointError, ConfigError, UnsupportedError
from windlass.lora.modules import linear_shapes
from windlass.models.families.registry import read_hparams
from windlass.models.gguf_file import GGUFCheckpoint

HYBRID: dict[str, Any] = {"layer_types": ["conv", "full_attention", "conv"]}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "num_dense_layers": 1,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("Lfm2", HYBRID),
    "biases": (
        "Lfm2",
        {
            "full_attn_idxs": [0],
            "conv_bias": True,
            "conv_L_cache": 4,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": False,
        },
    ),
    "experts": ("Lfm2Moe", {**HYBRID, **EXPERTS}),
    "experts without bias": ("Lfm2Moe", {**HYBRID, **EXPERTS, "use_expert_bias": False}),
}
GGUF = {
    "dense": ("lfm2", {"feed_forward_length": 256}),
    "experts": (
        "lfm2moe",
        {
            "expert_count": 4,
            "expert_used_count": 2,
            "expert_feed_forward_length": 24,
            "leading_dense_block_count": 1,
            "expert_gating_func": 2,
        },
    ),
}
STATE = 48 * 2  # numbers of a layer's state


def save(name: str, folder: Path, **changes: Any) -> torch.nn.Module:
    family, own = CASES[name]
    return save_tiny(family, {**own, **changes}, folder)


def write(name: str, folder: Path, kind: Type = Type.F32, **metadata: Any) -> Path:
    architecture, own = GGUF[name]
    values = {"attention.head_count_kv": [0, 2, 0], "shortconv.l_cache": 3, **own, **metadata}
    return write_hybrid(folder, architecture, values, kind)


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    check_logits(*CASES[name], tmp_path)


@pytest.mark.parametrize("options", PATHS, ids=str)
def test_tokens_equal_transformers_in_batches_after_preemption_and_with_prefixes(
    options: dict[str, Any], tmp_path: Path
) -> None:
    check_tokens(save("experts", tmp_path), tmp_path, 30, **options)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_step_that_fills_several_blocks_keeps_the_state_of_each(
    deterministic: bool, tmp_path: Path
) -> None:
    check_state_of_each_block(save("dense", tmp_path), tmp_path, deterministic)


def test_steps_are_one_native_call_with_the_bits_of_eager_steps(tmp_path: Path) -> None:
    save("experts", tmp_path)
    check_recorded_steps(tmp_path)


@pytest.mark.parametrize("name", GGUF)
def test_gguf_gives_the_same_logits(name: str, tmp_path: Path) -> None:
    model = save(name, tmp_path)
    got = gguf_logits(write(name, tmp_path))
    torch.testing.assert_close(got, logits_by(model), atol=1e-4, rtol=1e-4)


@needs_llama_cpp
@pytest.mark.parametrize("name", GGUF)
def test_logits_equal_llama_cpp(name: str, tmp_path: Path) -> None:
    model = save(name, tmp_path)
    check_llama_cpp(model, write(name, tmp_path))


def test_quantised_projections_run_with_their_packed_weights(tmp_path: Path) -> None:
    save("dense", tmp_path, hidden_size=96)
    path = write("dense", tmp_path, Type.Q8_0)
    made = loaded(path, device="cpu", dtype="float32", plain_kernels=True)
    mixer = made.network.get_submodule("model.layers.0.conv")
    assert {mixer.in_proj.method.name, mixer.o_proj.method.name} == {"Q8_0"}
    got = logits(made, IDS.tolist())
    torch.testing.assert_close(got, gguf_logits(path), atol=1e-4, rtol=1e-4)


def test_formats_of_files_apply_to_the_parts_of_their_modules(tmp_path: Path) -> None:
    """Modules that the config lists as unquantised have other names here."""
    model = save("dense", tmp_path)
    quantise_fp8(model, tmp_path, ["conv.in_proj", "self_attn.out_proj", "feed_forward.w2"])
    made = loaded(tmp_path, device="cpu", dtype="float32", plain_kernels=True)
    mixer = made.network.get_submodule("model.layers.0.conv")
    assert mixer.in_proj.method.name == "float32"
    assert mixer.o_proj.method.name == "compressed-tensors fp8"
    got = logits(made, IDS.tolist())
    torch.testing.assert_close(got, logits_by(model), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["biases", "experts"])
def test_ranks_divide_the_channels(name: str, tmp_path: Path) -> None:
    check_ranks_and_stages(save(name, tmp_path), tmp_path)


def test_inspect_shows_the_state_of_a_sequence(tmp_path: Path) -> None:
    save("dense", tmp_path)
    config = {"model": str(tmp_path), "device": "cpu", "load_format": "dummy", "block_size": 4}
    estimate = examine(EngineConfig.of(**config))["estimate"]
    assert estimate["state_bytes_per_sequence"] == 2 * 4 * STATE


def config_of(**changes: Any) -> dict[str, Any]:
    return {**TINY, "architectures": ["Lfm2ForCausalLM"], **HYBRID, **changes}


def test_published_configs_name_the_mlp_size_and_the_tied_head_otherwise() -> None:
    hparams = read_hparams(config_of(block_ff_dim=1500, tie_embedding=False))
    assert (hparams.intermediate_size, hparams.tie_embeddings) == (1024, False)
    given = {"block_multiple_of": 100, "block_ffn_dim_multiplier": 1.25}
    assert read_hparams(config_of(block_ff_dim=1500, **given)).intermediate_size == 1300
    assert read_hparams(config_of()).rope.theta == 1e6


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"layer_types": ["conv"]}, CheckpointError, "layer_types has 1 layers"),
        ({"layer_types": ["rnn"] * 3}, UnsupportedError, "layer_types contains rnn"),
        ({"conv_L_cache": 0}, CheckpointError, "conv_L_cache is 0"),
        ({"block_multiple_of": 0}, CheckpointError, "block_multiple_of is 0"),
    ],
)
def test_bad_configs_are_refused_by_name(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        read_hparams(config_of(**changes))


def test_gguf_with_other_scores_is_refused(tmp_path: Path) -> None:
    save("experts", tmp_path)
    path = write("experts", tmp_path, expert_gating_func=1)
    with pytest.raises(UnsupportedError, match="expert_gating_func is 1"):
        GGUFCheckpoint(path).hf_config()


def test_speculation_is_refused_at_start(tmp_path: Path) -> None:
    save("dense", tmp_path)
    with pytest.raises(ConfigError, match="--spec ngram: Lfm2ForCausalLM has recurrent states"):
        make(tmp_path, num_blocks=100, spec="ngram")


def test_adapters_may_change_attention_and_mlp_and_not_the_mixer(tmp_path: Path) -> None:
    save("dense", tmp_path)
    shapes = linear_shapes(read_hparams(json.loads((tmp_path / "config.json").read_text())))
    assert "model.layers.1.self_attn.q_proj" in shapes
    assert "model.layers.0.mlp.down_proj" in shapes
    assert not any(".conv." in name or "layers.0.self_attn" in name for name in shapes)
