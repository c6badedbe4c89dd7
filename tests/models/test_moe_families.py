"""Families with mixtures of experts: GGUF files, MXFP4, the engine, and bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.comparison import TINY, logits_of, our_logits, save_tiny
from tests.models.test_deepseek import COUNT, PROMPTS, run
from tests.models.test_networks import CASES
from tests.models.tiny import TOKENIZER, write_gguf
from tests.runner.test_windows import make, transformers_tokens
from windlass.errors import CheckpointError, UnsupportedError
from windlass.lora.modules import linear_shapes
from windlass.models.checkpoint import SafetensorsCheckpoint
from windlass.models.families.registry import family_of, read_hparams
from windlass.models.gguf_file import GGUFCheckpoint
from windlass.models.rope import frequencies
from windlass.models.tensor_rules import mapped

IDS = torch.randint(3, 97, (37,), generator=torch.Generator().manual_seed(2))
NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
    "self_attn.o_proj": "attn_output",
    "self_attn": "attn",  # its parameter: sinks
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{f"mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
}
NAMES |= {name: f"nextn.{name}" for name in ("eh_proj", "enorm", "hnorm", "embed_tokens")}
NAMES |= {f"shared_head.{name}": f"nextn.shared_head_{name}" for name in ("norm", "head")}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
# Our case, llama.cpp's architecture, metadata beside the common keys.
GGUF_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("llama", {"expert_count": 6, "expert_used_count": 2, "rope.freq_base": 1e6}),
    "qwen2-moe": (
        "qwen2moe",
        {"expert_feed_forward_length": 32, "expert_shared_feed_forward_length": 24},
    ),
    "qwen3-moe": ("qwen3moe", {"expert_feed_forward_length": 32, "attention.key_length": 16}),
    "phimoe": (
        "phimoe",
        {
            "expert_count": 6,
            "expert_used_count": 2,
            "rope.scaling.original_context_length": 128,
            "rope.scaling.attn_factor": 1.2,
        },
    ),
    "granite-moe": (
        "granitemoe",
        {
            "expert_count": 6,
            "expert_used_count": 2,
            "embedding_scale": 3.0,
            "attention.scale": 0.2,
            "residual_scale": 0.5,
            "logit_scale": 2.0,
        },
    ),
    "gpt-oss": (
        "gpt-oss",
        {
            "block_count": 2,
            "expert_count": 6,
            "expert_used_count": 2,
            "expert_feed_forward_length": 80,
            "attention.key_length": 16,
            "attention.sliding_window": 8,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 32,
        },
    ),
    "glm-4.5-moe": (
        "glm4moe",
        {
            "expert_feed_forward_length": 32,
            "expert_shared_count": 2,
            "leading_dense_block_count": 1,
            "expert_weights_scale": 1.5,
            "expert_weights_norm": True,
            "attention.key_length": 16,
            "rope.dimension_count": 8,
        },
    ),
}


def network_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors under the names of the network."""
    hparams = read_hparams(json.loads((folder / "config.json").read_text()))
    files = SafetensorsCheckpoint(sorted(folder.glob("*.safetensors")))
    checkpoint = mapped(files, family_of(hparams.architecture).rules(hparams))
    return {
        name: checkpoint.read(name, checkpoint.stored(name).shape) for name in checkpoint.names()
    }


def write_moe_gguf(folder: Path, architecture: str, metadata: dict[str, Any]) -> Path:
    """The model as llama.cpp's converter stores it: stacked experts, gate and up apart."""
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    stacks: dict[str, list[np.ndarray[Any, Any]]] = {}
    names = NAMES | (
        {"post_attention_layernorm": "post_attention_norm"}
        if architecture in ("gpt-oss", "glm4moe")
        else {}
    )
    for name, tensor in sorted(network_tensors(folder).items()):
        module, _, kind = name.rpartition(".")
        values = tensor.float().contiguous().numpy()
        if module in OUTER:
            tensors[f"{OUTER[module]}.{kind}"] = values
            continue
        _, _, layer, local = module.split(".", 3)
        block = f"blk.{layer}."
        if kind == "e_score_correction_bias":
            tensors[f"{block}exp_probs_b.bias"] = values
        elif kind == "sinks":
            tensors[f"{block}attn_sinks.weight"] = values
        elif local.startswith("mlp.experts."):
            part = local.rpartition(".")[2].removesuffix("_proj")
            pairs = {part: values}
            if part == "gate_up":
                pairs = {"gate": values[0::2], "up": values[1::2]}
            for each, rows in pairs.items():
                stacks.setdefault(f"{block}ffn_{each}_exps.{kind}", []).append(rows)
        else:
            if architecture in ("llama", "granitemoe") and local[-6:] in ("q_proj", "k_proj"):
                heads = 6 if local.endswith("q_proj") else 2
                values = values.reshape(heads, 2, -1, 48).swapaxes(1, 2).reshape(values.shape)
            tensors[f"{block}{names[local]}.{kind}"] = values
    tensors |= {name: np.stack(rows) for name, rows in stacks.items()}
    if architecture == "phimoe":
        rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
        for kind in ("short", "long"):
            factors = np.array(rope[f"{kind}_factor"], dtype=np.float32)
            tensors[f"rope_factors_{kind}.weight"] = factors
    values = {
        "block_count": 3,
        "context_length": 128,
        "embedding_length": 48,
        "feed_forward_length": 80,
        "attention.head_count": 6,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5 if architecture in _EPS else 1e-6,
        "rope.freq_base": 10000.0,
        "expert_count": 8,
        "expert_used_count": 3,
        "attention.key_length": 8,
        **metadata,
    }
    values["attention.value_length"] = values["attention.key_length"]
    keyed = {f"{architecture}.{key}": value for key, value in values.items()}
    path = folder / "model.gguf"
    return write_gguf(path, architecture, tensors=tensors, metadata=keyed | TOKENIZER)


_EPS = ("llama", "gpt-oss", "glm4moe", "phimoe")  # whose default epsilon is 1e-5


@pytest.mark.parametrize("name", GGUF_CASES)
def test_gguf_gives_the_same_logits(name: str, tmp_path: Path) -> None:
    family, changes = CASES[name]
    if name == "qwen2-moe":
        changes = {**changes, "norm_topk_prob": False}
    model = save_tiny(family, changes, tmp_path)
    with torch.inference_mode():
        want = model(IDS[None]).logits[0]
    path = write_moe_gguf(tmp_path, *GGUF_CASES[name])
    checkpoint = GGUFCheckpoint(path)
    hparams = read_hparams(checkpoint.hf_config(), str(path))
    rules = family_of(hparams.architecture).gguf.rules(hparams)
    got = logits_of(hparams, mapped(checkpoint, rules), IDS.tolist(), chunks=[20, 17])
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "phimoe"])
def test_tokens_equal_transformers_in_batches_after_preemption_and_with_prefixes(
    name: str, tmp_path: Path
) -> None:
    model = save_tiny(*CASES[name], tmp_path)
    want = [transformers_tokens(model, prompt, COUNT) for prompt in PROMPTS]
    built = make(tmp_path, dtype="float32", num_blocks=200)
    assert run(built, PROMPTS) == want
    assert run(built, PROMPTS[:1]) == want[:1]
    assert built.engine.stats().prefix_hits > 0


def test_mxfp4_experts_equal_their_dequantised_weights(tmp_path: Path) -> None:
    """The blocks of a checkpoint, and the same values as a bf16 checkpoint would have them."""
    family, changes = CASES["gpt-oss"]
    sizes = {**changes, "hidden_size": 64, "intermediate_size": 96}
    save_tiny(family, sizes, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = torch.cat((values, -values))
    packed = {key: value for key, value in stored.items() if not key.endswith("_proj")}
    plain = dict(stored)
    generator = torch.Generator().manual_seed(5)
    for key in [key for key in stored if key.endswith("_proj")]:
        experts, inputs, outputs = stored[key].shape
        shape = (experts, outputs, inputs // 32)
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(122, 126, shape, dtype=torch.uint8, generator=generator)
        codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2).long()
        weights = values[codes] * 2.0 ** (scales.float() - 127).unsqueeze(-1)
        plain[key] = weights.flatten(2).mT.contiguous()
        packed |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
    got = []
    for kind, tensors in (("plain", plain), ("packed", packed)):
        folder = tmp_path / kind
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        extra = {"quantization_config": {"quant_method": "mxfp4"}} if kind == "packed" else {}
        (folder / "config.json").write_text(json.dumps(config | extra))
        got.append(run(make(folder, dtype="float32", num_blocks=100), PROMPTS))
    assert got[0] == got[1]


def moe_config(**changes: Any) -> dict[str, Any]:
    base = {**TINY, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8}
    return {**base, "num_experts_per_tok": 2, "moe_intermediate_size": 32, **changes}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"num_experts_per_tok": 9},
            CheckpointError,
            "num_experts_per_tok is 9, but num_experts is 8",
        ),
        ({"num_experts": None}, CheckpointError, "'num_experts' is missing"),
        ({"moe_intermediate_size": 0}, CheckpointError, "moe_intermediate_size is 0"),
        ({"hidden_act": "tanh"}, UnsupportedError, "hidden_act 'tanh' is not supported"),
        (
            {"hidden_act": "gelu"},
            UnsupportedError,
            "activation gelu is not supported for the experts of Qwen3MoeForCausalLM, only silu",
        ),
        (
            {"per_layer_config": {"0": {"num_key_value_heads": 1}}},
            UnsupportedError,
            "per_layer_config, settings that differ between layers",
        ),
        ({"rope_scaling": {"type": "spiral", "factor": 2}}, UnsupportedError, "'spiral'"),
        ({"architectures": ["Qwen3MoForCausalLM"]}, UnsupportedError, "closest name is Qwen3Moe"),
    ],
)
def test_bad_configs_are_refused_by_name(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        read_hparams(moe_config(**changes))


def test_groups_must_divide_the_experts() -> None:
    config = moe_config(architectures=["Glm4MoeForCausalLM"], n_routed_experts=8, n_group=3)
    with pytest.raises(CheckpointError, match="3 groups do not divide 8 experts"):
        read_hparams(config | {"num_experts": None, "topk_group": 1})


def test_missing_experts_are_named(tmp_path: Path) -> None:
    save_tiny(*CASES["qwen3-moe"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    gone = [name for name in tensors if ".experts.5." in name]
    save_file({k: v for k, v in tensors.items() if k not in gone}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks 9 tensors.*experts\.5\."):
        our_logits(tmp_path, [3, 4, 5], [3])


def test_adapters_may_change_attention_and_not_experts() -> None:
    shapes = linear_shapes(read_hparams(moe_config()))
    assert "model.layers.0.self_attn.q_proj" in shapes
    assert not any("mlp" in name for name in shapes)


def test_published_files_of_phimoe_name_it_in_another_case(tmp_path: Path) -> None:
    save_tiny(*CASES["phimoe"], tmp_path)
    file, ids = tmp_path / "config.json", IDS.tolist()
    want = our_logits(tmp_path, ids, [37])
    config = json.loads(file.read_text()) | {"architectures": ["PhiMoEForCausalLM"]}
    file.write_text(json.dumps(config))
    assert torch.equal(our_logits(tmp_path, ids, [37]), want)


def test_sparsemixer_chooses_two_experts() -> None:
    config = moe_config(architectures=["PhimoeForCausalLM"], num_experts_per_tok=3)
    with pytest.raises(UnsupportedError, match="num_experts_per_tok is 3; sparsemixer"):
        read_hparams(config)


def test_phimoe_scales_rotations_by_the_length_of_the_context() -> None:
    """Beyond the original context, transformers keeps the short factors; the model's own code does not."""
    rope = read_hparams({**TINY, **CASES["phimoe"][1], "architectures": ["PhimoeForCausalLM"]}).rope
    base = 1 / 10000.0 ** (torch.arange(0, 8, 2) / 8)
    for longest, factors, scale in ((128, rope.short_factors, 1.2), (129, rope.long_factors, 1.3)):
        got, got_scale = frequencies(rope, longest)
        torch.testing.assert_close(got, base / torch.tensor(factors))
        assert got_scale == scale
