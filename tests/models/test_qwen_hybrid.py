"""Qwen3-Next and Qwen 3.5: the logits and tokens of transformers, GGUF files, weight formats, and bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.models.comparison import (
    TINY,
    check_logits,
    our_logits,
    save_tiny,
)
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
    quantise_fp8,
)
from tests.models.test_dense_gguf import IDS
from tests.models.tiny import Type, write_gguf
from tests.quant.folders import loaded, logits
from tests.runner.test_windows import make
from windlass.cli.model_report import examine
from windlass.config import EngineConfig
from windlass.errors import CheckpointError, ConfigError, UnsupportedError
from windlass.lora.modules import linear_shapes
from windlass.models.checkpoint import SafetensorsCheckpoint
from windlass.models.families.registry import read_hparams
from windlass.models.gguf_file import GGUFCheckpoint
from windlass.models.network import block_size_of, kv_layout
from windlass.models.tensor_rules import Rows, Rule, mapped

HYBRID: dict[str, Any] = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
STATE = 6 * 8 * 16 + (6 * 8 + 2 * 2 * 16) * 3  # numbers of a layer's state
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "next": ("Qwen3Next", EXPERTS),
    "next, dense layers": ("Qwen3Next", {**EXPERTS, "mlp_only_layers": [0, 2]}),
    "3.5": ("Qwen3_5", {"tie_word_embeddings": True}),
    "3.5, one head per key": ("Qwen3_5", {"linear_num_key_heads": 6, "attention_bias": True}),
    "3.5 experts": ("Qwen3_5Moe", {**EXPERTS, "linear_conv_kernel_dim": 3}),
}


def save(name: str, folder: Path, **changes: Any) -> torch.nn.Module:
    family, own = CASES[name]
    return save_tiny(family, {**HYBRID, **own, **changes}, folder)


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    family, changes = CASES[name]
    check_logits(family, {**HYBRID, **changes}, tmp_path)


def test_every_fourth_layer_has_attention_by_default(tmp_path: Path) -> None:
    check_logits("Qwen3_5", {**HYBRID, "layer_types": None, "num_hidden_layers": 4}, tmp_path)
    kinds = read_hparams(json.loads((tmp_path / "config.json").read_text())).recurrent
    assert kinds is not None
    assert kinds.layers == (True, True, True, False)
    hparams = read_hparams(config_of(layer_types=None, full_attention_interval=3))
    assert [hparams.is_recurrent(layer) for layer in range(3)] == [True, True, False]


@pytest.mark.parametrize("options", PATHS, ids=str)
@pytest.mark.parametrize("name", ["next", "3.5"])
def test_tokens_equal_transformers_in_batches_after_preemption_and_with_prefixes(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    check_tokens(save(name, tmp_path), tmp_path, 36, **options)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_step_that_fills_several_blocks_keeps_the_state_of_each(
    deterministic: bool, tmp_path: Path
) -> None:
    check_state_of_each_block(save("3.5", tmp_path), tmp_path, deterministic)


def test_steps_are_one_native_call_with_the_bits_of_eager_steps(tmp_path: Path) -> None:
    save("next", tmp_path)
    check_recorded_steps(tmp_path)


@pytest.mark.parametrize("family", ["Qwen3_5", "Qwen3_5Moe"])
def test_the_text_part_of_models_with_images(family: str, tmp_path: Path) -> None:
    """As published: a prefix before the text model's names, stacked experts, tensors of the MTP layer."""
    kind = getattr(transformers, f"{family}ForConditionalGeneration")
    text = {**TINY, **HYBRID, **(EXPERTS if family.endswith("Moe") else {})}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 0], "mrope_interleaved": True}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
    vision |= {"out_hidden_size": 48, "patch_size": 14, "num_position_embeddings": 16}
    torch.manual_seed(1)
    config = kind.config_class(
        text_config={**text, "rope_parameters": {**rope, "rope_theta": 1e6}}, vision_config=vision
    )
    config.tie_word_embeddings = False
    model = kind(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in key else 0.0, 0.15)
        want = model(input_ids=IDS[None]).logits[0]
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    stored = {name: tensor for name, tensor in stored.items() if ".experts." not in name}
    stored |= {
        name: tensor.detach() for name, tensor in model.named_parameters() if ".experts." in name
    }
    assert any(name.startswith("model.language_model.layers.0.linear_attn") for name in stored)
    assert any(name.startswith("model.visual.") for name in stored)
    save_file(stored | {"mtp.fc.weight": torch.zeros(48, 96)}, tmp_path / "model.safetensors")
    for chunks in ([37], [5, 1, 1, 30]):
        got = our_logits(tmp_path, IDS.tolist(), chunks)
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


_GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    **{f"self_attn.{part}_proj.weight": f"attn_{part}.weight" for part in "qkv"},
    **{f"self_attn.{part}_norm.weight": f"attn_{part}_norm.weight" for part in "qk"},
    "self_attn.o_proj.weight": "attn_output.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.in_proj_ba.weight": "ssm_ba.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    **{f"mlp.{part}_proj.weight": f"ffn_{part}.weight" for part in ("gate", "up", "down")},
    **{
        f"mlp.shared_expert.{part}_proj.weight": f"ffn_{part}_shexp.weight"
        for part in ("gate", "up", "down")
    },
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
}

PER_HEAD = tuple(f"linear_attn.{name}" for name in ("A_log", "dt_bias", "in_proj_a.", "in_proj_b."))


def gguf_tensors(model: torch.nn.Module, tiled: bool) -> dict[str, np.ndarray]:
    """The tensors as llama.cpp's converter writes them."""
    config, found = model.config, {}
    groups, heads = config.linear_num_key_heads, config.linear_num_value_heads
    dim, keys = config.linear_value_head_dim, groups * config.linear_key_head_dim

    def sorted_heads(tensor: torch.Tensor, size: int) -> torch.Tensor:
        """One value head of each group, then the next ones."""
        if not tiled:
            return tensor
        return tensor.unflatten(0, (groups, heads // groups, size)).transpose(0, 1).flatten(0, 2)

    for name, parameter in model.named_parameters():
        tensor, own = parameter.detach(), name
        block = ""
        if name.startswith("model.layers."):
            _, _, layer, own = name.split(".", 3)
            block = f"blk.{layer}."
        if own.endswith("norm.weight") and own != "linear_attn.norm.weight":
            tensor = tensor + 1
        if own == "linear_attn.in_proj_qkvz.weight":
            shared = heads // groups * dim
            key = config.linear_key_head_dim
            parts = tensor.unflatten(0, (groups, -1)).split([key, key, shared, shared], dim=1)
            q, k, v, z = (part.flatten(0, 1) for part in parts)
            found |= {
                f"{block}attn_qkv.weight": torch.cat([q, k, v]),
                f"{block}attn_gate.weight": z,
            }
            continue
        if own == "mlp.experts.gate_up_proj":
            gate, up = tensor.chunk(2, dim=1)
            found |= {f"{block}ffn_gate_exps.weight": gate, f"{block}ffn_up_exps.weight": up}
            continue
        if own in ("linear_attn.in_proj_qkv.weight", "linear_attn.conv1d.weight"):
            tensor = tensor.squeeze(1)
            tensor = torch.cat([tensor[: 2 * keys], sorted_heads(tensor[2 * keys :], dim)])
        elif own == "linear_attn.in_proj_z.weight":
            tensor = sorted_heads(tensor, dim)
        elif own == "linear_attn.out_proj.weight":
            tensor = sorted_heads(tensor.T, dim).T
        elif own.startswith(PER_HEAD):
            tensor = sorted_heads(tensor, 1)
        if own == "linear_attn.A_log":
            tensor = -tensor.exp()
        found[block + _GGUF_NAMES[own]] = tensor
    return {key: np.ascontiguousarray(value.numpy()) for key, value in found.items()}


_ARCHITECTURES = {"next": "qwen3next", "3.5": "qwen35", "3.5 experts": "qwen35moe"}


def write(
    model: torch.nn.Module, name: str, folder: Path, kind: Type = Type.F32, **metadata: Any
) -> Path:
    config, architecture = model.config, _ARCHITECTURES[name]
    values = {
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "attention.head_count": 6,
        "attention.head_count_kv": 2,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 10000.0,
        "rope.dimension_count": config.head_dim // 4,
        "rope.dimension_sections": [1, 1, 0, 0],
        "full_attention_interval": 3,
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
    }
    if name == "3.5":
        values["feed_forward_length"] = config.intermediate_size
    else:
        values |= {
            "expert_count": 4,
            "expert_used_count": 2,
            "expert_feed_forward_length": config.moe_intermediate_size,
            "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
        }
    keyed = {f"{architecture}.{key}": value for key, value in {**values, **metadata}.items()}
    small = ("ssm_conv1d.weight", "_inp.weight", "_inp_shexp.weight", "ssm_a")
    small += ("ssm_alpha.weight", "ssm_beta.weight")
    return write_gguf(
        folder / "m.gguf",
        architecture,
        kind,
        gguf_tensors(model, tiled=name != "next"),
        keyed | TOKENIZER,
        dict.fromkeys(small, Type.F32),
    )


# llama.cpp's heads of keys and values have the same size.
GGUF_CHANGES = {
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}


@pytest.mark.parametrize("name", _ARCHITECTURES)
def test_gguf_gives_the_same_logits(name: str, tmp_path: Path) -> None:
    model = save(name, tmp_path, **GGUF_CHANGES)
    got = gguf_logits(write(model, name, tmp_path))
    torch.testing.assert_close(got, logits_by(model), atol=1e-4, rtol=1e-4)


@needs_llama_cpp
@pytest.mark.parametrize("name", _ARCHITECTURES)
def test_logits_equal_llama_cpp(name: str, tmp_path: Path) -> None:
    model = save(name, tmp_path, **GGUF_CHANGES)
    check_llama_cpp(model, write(model, name, tmp_path))


@pytest.mark.parametrize("name", ["next", "3.5"])
def test_quantised_projections_run_with_their_packed_weights(name: str, tmp_path: Path) -> None:
    """Also those that repeat in groups, as the projection of beta and dt in Qwen3-Next."""
    sizes = {"hidden_size": 96, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
    sizes |= {"intermediate_size": 64, "linear_value_head_dim": 16, "head_dim": 32}
    path = write(save(name, tmp_path, **{**GGUF_CHANGES, **sizes}), name, tmp_path, Type.Q8_0)
    made = loaded(path, device="cpu", dtype="float32", plain_kernels=True)
    mixer = made.network.get_submodule("model.layers.0.linear_attn")
    assert mixer.in_proj.method.name == ("Q8_0" if name == "next" else "Q8_0 + float32")
    assert mixer.o_proj.method.name == "Q8_0"
    got = logits(made, IDS.tolist())
    torch.testing.assert_close(got, gguf_logits(path), atol=1e-4, rtol=1e-4)


def test_drafting_layers_of_gguf_files_are_not_read(tmp_path: Path) -> None:
    model = save("3.5", tmp_path, **GGUF_CHANGES)
    with torch.inference_mode():
        want = model(IDS[None]).logits[0]
    tensors = gguf_tensors(model, tiled=True)
    tensors |= {f"blk.3.{name}": tensors[f"blk.2.{name}"] for name in ("attn_q.weight",)}
    tensors["blk.3.nextn.eh_proj.weight"] = np.zeros((48, 96), np.float32)
    write(model, "3.5", tmp_path)
    header = GGUFCheckpoint(tmp_path / "m.gguf").header
    metadata = {**header.metadata, "qwen35.block_count": 4, "qwen35.nextn_predict_layers": 1}
    kept = {key: value for key, value in metadata.items() if key.startswith("qwen35.")}
    path = write_gguf(tmp_path / "mtp.gguf", "qwen35", Type.F32, tensors, kept | TOKENIZER)
    torch.testing.assert_close(gguf_logits(path), want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["next, dense layers", "3.5"])
def test_formats_of_files_apply_to_the_parts_of_their_modules(name: str, tmp_path: Path) -> None:
    """Rows of fp8 in groups; modules that the config lists as unquantised have other names here."""
    model = save(name, tmp_path, mlp_only_layers=[0, 1, 2])
    quantise_fp8(model, tmp_path, ["in_proj_ba", "in_proj_a", "in_proj_b"])
    with torch.inference_mode():
        want = model(IDS[None]).logits[0]
    made = loaded(tmp_path, device="cpu", dtype="float32", plain_kernels=True)
    mixer = made.network.get_submodule("model.layers.0.linear_attn")
    assert mixer.in_proj.method.name == "compressed-tensors fp8 + not quantised"
    assert mixer.o_proj.method.name == "compressed-tensors fp8"
    got = logits(made, IDS.tolist())
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_parts_that_cut_stored_units_are_refused(tmp_path: Path) -> None:
    """Four entries of four outputs each; a group has two of them, and the part two outputs of each."""
    save_file({"in.codes": torch.zeros(4, 3)}, tmp_path / "model.safetensors")
    stored = SafetensorsCheckpoint([tmp_path / "model.safetensors"])
    rule = Rule(pattern=r"in\.codes", name="part.codes", rows=Rows(0, 2, 8, groups=2))
    with pytest.raises(
        UnsupportedError, match="in units of 4, which the parts of its 2 groups cut"
    ):
        mapped(stored, [rule]).read("part.codes", (1, 3))


def test_inspect_shows_the_state_of_a_sequence(tmp_path: Path) -> None:
    save("3.5", tmp_path)
    config = {"model": str(tmp_path), "device": "cpu", "load_format": "dummy", "block_size": 4}
    estimate = examine(EngineConfig.of(**config))["estimate"]
    assert estimate["state_bytes_per_sequence"] == 2 * 4 * STATE


@pytest.mark.parametrize(
    ("name", "changes"),
    [("next", {}), ("3.5", {"linear_num_key_heads": 1}), ("3.5 experts", {})],
)
def test_ranks_divide_the_heads(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Two ranks hold half of the heads each; one key head is on both."""
    check_ranks_and_stages(save(name, tmp_path, **changes), tmp_path)


def test_ranks_of_gguf_files_have_all_keys(tmp_path: Path) -> None:
    """The value heads that share a key are not neighbours."""
    model = save("3.5", tmp_path, **{**GGUF_CHANGES, "linear_num_value_heads": 8})
    check_ranks_and_stages(model, write(model, "3.5", tmp_path))


def config_of(**changes: Any) -> dict[str, Any]:
    return {**TINY, "architectures": ["Qwen3_5ForCausalLM"], **HYBRID, **changes}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"layer_types": ["full_attention"]}, CheckpointError, "layer_types has 1 layers"),
        ({"layer_types": ["rnn"] * 3}, UnsupportedError, "layer_types contains rnn"),
        ({"linear_num_value_heads": 5}, CheckpointError, r"linear_num_value_heads \(5\) is not"),
        ({"attn_output_gate": False}, UnsupportedError, "attn_output_gate is false"),
        ({"hidden_act": "gelu"}, UnsupportedError, "hidden_act 'gelu' is not supported with gated"),
        ({"linear_key_head_dim": 0}, CheckpointError, "linear_key_head_dim is 0"),
    ],
)
def test_bad_configs_are_refused_by_name(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        read_hparams(config_of(**changes))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"spec": "mtp"}, "--spec mtp: Qwen3_5ForCausalLM has recurrent states"),
        ({"spec": "ngram"}, "--spec ngram: Qwen3_5ForCausalLM has recurrent states"),
        ({"kv_cache_dtype": "int8"}, "--kv-cache-dtype int8: a model with recurrent states"),
    ],
)
def test_what_states_do_not_allow_is_refused_at_start(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save("3.5", tmp_path)
    with pytest.raises(ConfigError, match=message):
        make(tmp_path, num_blocks=100, **options)


def test_adapters_may_change_attention_and_mlp_and_not_the_mixer() -> None:
    shapes = linear_shapes(read_hparams(config_of()))
    assert shapes["model.layers.1.self_attn.q_proj"] == (2 * 6 * 16, 48)  # with the gates
    assert shapes["model.layers.1.self_attn.o_proj"] == (48, 6 * 16)
    assert "model.layers.0.mlp.down_proj" in shapes
    assert not any("linear_attn" in name or "layers.0.self_attn" in name for name in shapes)


def test_states_share_blocks_with_keys_and_values() -> None:
    hparams = read_hparams(config_of())
    layout = kv_layout(hparams, 4, torch.float16)
    kinds = {group.kind: group for group in layout.groups}
    assert kinds["full"].layers == (1,)
    assert 4 * STATE <= kinds["state"].layer_bytes < 4 * STATE + 64
    assert (
        block_size_of(None, hparams) == 64
    )  # 2 x 2 heads x 16 numbers x 2 bytes x 64 hold a state
