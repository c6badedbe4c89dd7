"""Nemotron-H and Nemotron Nano 2 and 3: the logits and tokens of transformers, GGUF files, and bad input."""

from __future__ import annotations

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
from tests.quant.ranks import thread_groups
from windlass.errors import CheckpointError, ShardError, UnsupportedError
from windlass.lora.modules import linear_shapes
from windlass.models.families.registry import read_hparams
from windlass.parallel.mesh import Mesh

HYBRID: dict[str, Any] = {
    "num_hidden_layers": None,
    "head_dim": 16,
    "mamba_num_heads": 6,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    # transformers limits the time steps of prompts, not those of later tokens; NVIDIA's code neither.
    "time_step_min": 1e-30,
}
EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 40,
    "routed_scaling_factor": 2.5,
}
CASES: dict[str, dict[str, Any]] = {
    "dense": {"hybrid_override_pattern": "M-MM-*-M", "tie_word_embeddings": False},
    "biases": {
        "hybrid_override_pattern": "*-M-",
        "use_bias": True,
        "mlp_bias": True,
        "use_conv_bias": False,
        "conv_kernel": 3,
        "n_groups": 1,
    },
    "experts": {**EXPERTS, "hybrid_override_pattern": "MEM*EME"},
    "groups of experts": {
        **EXPERTS,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": False,
    },
}
GGUF: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": (
        "nemotron_h",
        {
            "attention.head_count_kv": [0, 0, 0, 0, 0, 2, 0, 0],
            "feed_forward_length": [0, 80, 0, 0, 80, 0, 80, 0],
        },
    ),
    "experts": (
        "nemotron_h_moe",
        {
            "attention.head_count_kv": [0, 0, 0, 2, 0, 0, 0],
            "feed_forward_length": [0, 32, 0, 0, 32, 0, 32],
            "expert_count": 8,
            "expert_used_count": 3,
            "expert_feed_forward_length": 32,
            "expert_shared_feed_forward_length": 40,
            "expert_shared_count": 1,
            "expert_weights_norm": True,
            "expert_weights_scale": 2.5,
            "expert_group_count": 1,
        },
    ),
}


def save(name: str, folder: Path) -> torch.nn.Module:
    return save_tiny("NemotronH", {**HYBRID, **CASES[name]}, folder)


def write(name: str, folder: Path, kind: Type = Type.F32) -> Path:
    architecture, own = GGUF[name]
    ssm = {
        "ssm.conv_kernel": 4,
        "ssm.state_size": 16,
        "ssm.group_count": 2,
        "ssm.inner_size": 96,
        "ssm.time_step_rank": 6,
        "rope.scaling.finetuned": False,
        "attention.layer_norm_epsilon": 1e-5,  # llama.cpp reads both
    }
    return write_hybrid(folder, architecture, {**ssm, **own}, kind, groups=2)


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    check_logits("NemotronH", {**HYBRID, **CASES[name]}, tmp_path)


@pytest.mark.parametrize("options", PATHS, ids=str)
def test_tokens_equal_transformers_in_batches_after_preemption_and_with_prefixes(
    options: dict[str, Any], tmp_path: Path
) -> None:
    check_tokens(save("groups of experts", tmp_path), tmp_path, 28, **options)


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


def test_formats_of_files_apply_to_the_layers_of_the_network(tmp_path: Path) -> None:
    """Modules that the config lists as unquantised have other names and numbers here."""
    model = save("dense", tmp_path)
    quantise_fp8(model, tmp_path, ["3.mixer.in_proj", "5.mixer.q_proj", "6.mixer.up_proj"])
    made = loaded(tmp_path, device="cpu", dtype="float32", plain_kernels=True)
    for layer, name in ((1, "compressed-tensors fp8"), (2, "float32")):
        mixer = made.network.get_submodule(f"model.layers.{layer}.mamba")
        assert mixer.in_proj.method.name == name
    got = logits(made, IDS.tolist())
    torch.testing.assert_close(got, logits_by(model), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["dense", "experts"])
def test_ranks_divide_the_heads(name: str, tmp_path: Path) -> None:
    """Each rank has one group of the norm."""
    check_ranks_and_stages(save(name, tmp_path), tmp_path)


def config_of(**changes: Any) -> dict[str, Any]:
    own = {**TINY, **HYBRID, **CASES["dense"], **changes}
    return {**own, "architectures": ["NemotronHForCausalLM"]}


def test_groups_of_the_norm_are_not_cut() -> None:
    from tests.models.comparison import make_parts
    from windlass.models.network import make_network

    hparams = read_hparams(config_of(n_groups=3))
    parts = make_parts(hparams, mesh=Mesh(thread_groups(2)[0]))
    with pytest.raises(
        ShardError, match="the 3 groups of a Mamba-2 norm cannot be divided among 2"
    ):
        make_network(hparams, parts)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"hybrid_override_pattern": "M-X"}, UnsupportedError, "layer 2 is of an unknown kind"),
        (
            {"hybrid_override_pattern": "M--"},
            UnsupportedError,
            "layer 2 of the pattern M-- is an MLP",
        ),
        ({"hybrid_override_pattern": None}, CheckpointError, "neither layers_block_type nor"),
        ({"layers_block_type": ["rnn"]}, UnsupportedError, "unknown kind in 'rnn'"),
        ({"mamba_num_heads": 5}, CheckpointError, r"\(5\) is not a multiple of n_groups \(2\)"),
        ({"time_step_limit": [0.1, 2.0]}, UnsupportedError, r"time_step_limit \[0.1, 2.0\]"),
        ({"mamba_hidden_act": "gelu"}, UnsupportedError, "mamba_hidden_act 'gelu'"),
    ],
)
def test_bad_configs_are_refused_by_name(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        read_hparams(config_of(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_latent_size": 24}, "moe_latent_size 24 is not supported"),
        ({"n_shared_experts": 2}, "n_shared_experts is 2"),
        ({"mlp_hidden_act": "silu"}, "activation silu is not supported for the experts of"),
        ({"mlp_bias": True}, "mlp_bias is not supported with experts"),
    ],
)
def test_unsupported_experts_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        read_hparams(config_of(**{**CASES["experts"], **changes}))


def test_adapters_may_change_attention_and_dense_mlps() -> None:
    """Layers are numbered with their MLPs: M-, M, M-, *-, M."""
    shapes = linear_shapes(read_hparams(config_of()))
    assert "model.layers.3.self_attn.q_proj" in shapes
    assert "model.layers.0.mlp.down_proj" in shapes
    assert not any(".mamba." in name or "layers.1." in name for name in shapes)
