"""Granite 4 with Mamba-2 layers: the logits and tokens of transformers, GGUF files, states, and bad input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.models.comparison import TINY, check_logits, save_tiny
from tests.models.dense_gguf import TOKENIZER
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
from tests.models.test_deepseek import PROMPTS, run
from tests.models.tiny import Type, write_gguf
from tests.runner.test_windows import make
from windlass.cli.model_report import examine
from windlass.config import EngineConfig
from windlass.errors import CheckpointError, ConfigError, UnsupportedError
from windlass.lora.modules import linear_shapes
from windlass.models.families.registry import read_hparams
from windlass.models.gguf_file import GGUFCheckpoint
from windlass.models.network import block_size_of, kv_layout
from windlass.tools.plan.select import select_quantization

HYBRID: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "shared_intermediate_size": 40,
    "num_local_experts": 0,
    "num_experts_per_tok": 2,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
}
CASES: dict[str, dict[str, Any]] = {
    "dense": {"tie_word_embeddings": True},
    "experts": {"num_local_experts": 4},
    "groups": {"mamba_n_groups": 2, "mamba_d_conv": 3, "mamba_conv_bias": False},
    "rope": {"position_embedding_type": "rope", "mamba_proj_bias": True, "attention_bias": True},
}


def save(name: str, folder: Path) -> torch.nn.Module:
    return save_tiny("GraniteMoeHybrid", {**HYBRID, **CASES[name]}, folder)


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    check_logits("GraniteMoeHybrid", {**HYBRID, **CASES[name]}, tmp_path)


@pytest.mark.parametrize("options", PATHS, ids=str)
def test_tokens_equal_transformers_in_batches_after_preemption_and_with_prefixes(
    options: dict[str, Any], tmp_path: Path
) -> None:
    check_tokens(save("experts", tmp_path), tmp_path, 36, **options)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_step_that_fills_several_blocks_keeps_the_state_of_each(
    deterministic: bool, tmp_path: Path
) -> None:
    check_state_of_each_block(save("dense", tmp_path), tmp_path, deterministic)


def test_steps_are_one_native_call_with_the_bits_of_eager_steps(tmp_path: Path) -> None:
    save("experts", tmp_path)
    check_recorded_steps(tmp_path)


def gguf_tensors(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """The tensors as llama.cpp's converter writes them."""
    config, found = model.config, {}
    shared = config.shared_intermediate_size
    suffix = "_shexp" if config.num_local_experts else ""
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
        "input_layernorm.weight": "attn_norm.weight",
        "post_attention_layernorm.weight": "ffn_norm.weight",
        **{f"self_attn.{part}_proj.weight": f"attn_{part}.weight" for part in "v"},
        "self_attn.o_proj.weight": "attn_output.weight",
        "block_sparse_moe.router.weight": "ffn_gate_inp.weight",
        "block_sparse_moe.experts.down_proj": "ffn_down_exps.weight",
        "shared_mlp.output_linear.weight": f"ffn_down{suffix}.weight",
        "mamba.in_proj.weight": "ssm_in.weight",
        "mamba.out_proj.weight": "ssm_out.weight",
        "mamba.conv1d.bias": "ssm_conv1d.bias",
        "mamba.dt_bias": "ssm_dt.bias",
    }
    for name, parameter in model.named_parameters():
        _, _, own = name.rpartition("layers.")
        layer, _, own = own.partition(".")
        block, tensor = f"blk.{layer}.", parameter.detach()
        if not name.startswith("model.layers."):
            found[names[name]] = tensor
        elif own in names:
            found[block + names[own]] = tensor
        elif own in ("self_attn.q_proj.weight", "self_attn.k_proj.weight"):
            kind = own[len("self_attn.")]
            heads = config.num_attention_heads if kind == "q" else config.num_key_value_heads
            halves = tensor.unflatten(0, (heads, 2, -1))
            found[f"{block}attn_{kind}.weight"] = halves.transpose(1, 2).flatten(0, 2)
        elif own == "shared_mlp.input_linear.weight":
            found[f"{block}ffn_gate{suffix}.weight"] = tensor[:shared]
            found[f"{block}ffn_up{suffix}.weight"] = tensor[shared:]
        elif own == "block_sparse_moe.experts.gate_up_proj":
            gate, up = tensor.chunk(2, dim=1)
            found |= {f"{block}ffn_gate_exps.weight": gate, f"{block}ffn_up_exps.weight": up}
        elif own == "mamba.conv1d.weight":
            found[f"{block}ssm_conv1d.weight"] = tensor.squeeze(1)
        elif own == "mamba.norm.weight":
            found[f"{block}ssm_norm.weight"] = tensor[None]
        else:
            assert own in ("mamba.A_log", "mamba.D")
            is_decay = own == "mamba.A_log"
            found[block + ("ssm_a" if is_decay else "ssm_d")] = (
                -tensor.exp() if is_decay else tensor
            )[:, None]
    return {key: np.ascontiguousarray(value.numpy()) for key, value in found.items()}


def write(model: torch.nn.Module, folder: Path, kind: Type = Type.F32, **metadata: Any) -> Path:
    config = model.config
    values = {
        "block_count": 3,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size
        if config.num_local_experts
        else config.shared_intermediate_size,
        "attention.head_count": 6,
        "attention.head_count_kv": [0, 2, 0],
        "attention.key_length": config.hidden_size // 6,
        "attention.value_length": config.hidden_size // 6,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.scaling.finetuned": False,
        "rope.dimension_count": config.hidden_size // 6,
        "embedding_scale": 3.0,
        "attention.scale": 0.2,
        "residual_scale": 0.5,
        "logit_scale": 2.0,
        "ssm.conv_kernel": 4,
        "ssm.state_size": 16,
        "ssm.group_count": 1,
        "ssm.inner_size": 6 * config.mamba_d_head,
        "ssm.time_step_rank": 6,
    }
    if config.num_local_experts:
        values |= {"expert_count": 4, "expert_used_count": 2}
        values["expert_shared_feed_forward_length"] = config.shared_intermediate_size
    keyed = {f"granitehybrid.{key}": value for key, value in {**values, **metadata}.items()}
    path = folder / "m.gguf"
    tensors = gguf_tensors(model)
    small = ("ssm_a", "ssm_d", "ssm_norm.weight", "ssm_conv1d.weight", "_inp.weight")
    return write_gguf(
        path, "granitehybrid", kind, tensors, keyed | TOKENIZER, dict.fromkeys(small, Type.F32)
    )


@pytest.mark.parametrize("name", ["dense", "experts"])
def test_gguf_gives_the_same_logits(name: str, tmp_path: Path) -> None:
    model = save(name, tmp_path)
    got = gguf_logits(write(model, tmp_path))
    torch.testing.assert_close(got, logits_by(model), atol=1e-4, rtol=1e-4)


@needs_llama_cpp
@pytest.mark.parametrize("name", ["dense", "experts"])
def test_logits_equal_llama_cpp(name: str, tmp_path: Path) -> None:
    model = save(name, tmp_path)
    check_llama_cpp(model, write(model, tmp_path))


def test_quantised_projections_run_with_their_packed_weights(tmp_path: Path) -> None:
    sizes = {"hidden_size": 96, "mamba_d_head": 32, "shared_intermediate_size": 64}
    model = save_tiny("GraniteMoeHybrid", {**HYBRID, **CASES["dense"], **sizes}, tmp_path)
    path = write(model, tmp_path, Type.Q8_0)
    with torch.inference_mode():
        want = model(torch.tensor([PROMPTS[0]])).logits[0, -1].argmax()
    built = make(path, num_blocks=100)
    mixer = built.weights.network.get_submodule("model.layers.0.mamba")
    assert {mixer.in_proj.method.name, mixer.o_proj.method.name} == {"Q8_0"}
    (tokens,) = run(built, PROMPTS[:1])
    assert tokens[0] == want


def test_inspect_and_plan_show_the_state_of_a_sequence(tmp_path: Path) -> None:
    save("dense", tmp_path)
    config = {"model": str(tmp_path), "device": "cpu", "load_format": "dummy", "block_size": 4}
    estimate = examine(EngineConfig.of(**config))["estimate"]
    state = 2 * 4 * (6 * 16 * 16 + (6 * 16 + 2 * 16) * 3)
    assert estimate["state_bytes_per_sequence"] == state
    found = select_quantization(**config, bandwidth=1e11, memory=2**30, concurrency=2)
    assert {item.state_bytes_per_sequence for item in found.candidates} == {state}
    assert "recurrent states" in found.refused["int8 KV"]


@pytest.mark.parametrize("name", ["experts", "groups"])
def test_ranks_divide_the_heads(name: str, tmp_path: Path) -> None:
    """Two ranks hold half of the heads each; one group of B and C is on both."""
    check_ranks_and_stages(save(name, tmp_path), tmp_path)


def config_of(**changes: Any) -> dict[str, Any]:
    return {**TINY, "architectures": ["GraniteMoeHybridForCausalLM"], **HYBRID, **changes}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"layer_types": ["mamba"]}, CheckpointError, "layer_types has 1 layers"),
        ({"layer_types": ["rnn"] * 3}, UnsupportedError, "layer_types contains rnn"),
        ({"mamba_n_heads": 7}, CheckpointError, r"mamba_n_heads \(7\) times mamba_d_head \(16\)"),
        ({"mamba_n_groups": 4}, CheckpointError, r"not a multiple of mamba_n_groups \(4\)"),
        ({"time_step_limit": [0.1, 2.0]}, UnsupportedError, r"time_step_limit \[0.1, 2.0\]"),
        ({"position_embedding_type": "alibi"}, UnsupportedError, "position_embedding_type 'alibi'"),
        ({"hidden_act": "gelu"}, UnsupportedError, "hidden_act 'gelu' is not supported with Mamba"),
        ({"mamba_d_state": 0}, CheckpointError, "mamba_d_state is 0"),
    ],
)
def test_bad_configs_are_refused_by_name(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        read_hparams(config_of(**changes))


def test_gguf_with_several_groups_is_refused(tmp_path: Path) -> None:
    path = write(save("dense", tmp_path), tmp_path, **{"ssm.group_count": 2})
    with pytest.raises(UnsupportedError, match=r"ssm\.group_count is 2"):
        GGUFCheckpoint(path).hf_config()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"spec": "ngram"}, "--spec ngram: GraniteMoeHybridForCausalLM has recurrent states"),
        ({"kv_cache_dtype": "int8"}, "--kv-cache-dtype int8: a model with recurrent states"),
    ],
)
def test_what_states_do_not_allow_is_refused_at_start(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save("dense", tmp_path)
    with pytest.raises(ConfigError, match=message):
        make(tmp_path, num_blocks=100, **options)


def test_adapters_may_change_attention_and_mlp_and_not_the_mixer() -> None:
    shapes = linear_shapes(read_hparams(config_of()))
    assert "model.layers.1.self_attn.q_proj" in shapes
    assert "model.layers.0.mlp.down_proj" in shapes
    assert not any(".mamba." in name or "layers.0.self_attn" in name for name in shapes)


def test_states_share_blocks_with_keys_and_values() -> None:
    """A state is in float32, whatever the KV cache is, and attention's blocks are as large."""
    hparams = read_hparams(config_of())
    state = 6 * 16 * 16 + (6 * 16 + 2 * 16) * 3
    layout = kv_layout(hparams, 4, torch.float16)
    kinds = {group.kind: group for group in layout.groups}
    assert kinds["state"].layer_bytes == 4 * state
    assert kinds["full"].layers == (1,)
    size = block_size_of(None, hparams)
    assert size == 128  # 2 layers x 2 heads x 8 numbers x 2 bytes x 128 tokens hold a state
    assert block_size_of(8, hparams) == 8
    assert block_size_of(None, read_hparams(config_of(layer_types=["attention"] * 3))) == 16
