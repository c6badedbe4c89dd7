"""DeepSeek networks against transformers: MLA, group-limited routing, correction bias, shared experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.comparison import check_logits, our_logits, save_tiny
from tests.models.tiny import add_value
from tests.quant.folders import loaded, logits
from tests.runner.test_windows import make, transformers_tokens
from tests.steps import generate
from windlass import LLM, SamplingParams
from windlass.build import Built
from windlass.cli.model_report import examine
from windlass.config import EngineConfig
from windlass.errors import UnsupportedError
from windlass.kernels.native.compiler import find_compilers
from windlass.layers.linear import Linear
from windlass.lora.modules import linear_shapes
from windlass.models.families.registry import read_hparams
from windlass.models.network import kv_layout

MLA: dict[str, Any] = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
}
GROUPS = {"n_group": 4, "topk_group": 2}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.9,
    "mscale_all_dim": 0.9,
}
SCALED = {**YARN, "mscale": 0.7}
V3 = {"q_lora_rank": 20, "rope_parameters": YARN, **GROUPS}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "V2 Lite": ("DeepseekV2", {"q_lora_rank": None, "topk_method": "greedy"}),
    "V2": (
        "DeepseekV2",
        {
            "q_lora_rank": 20,
            "topk_method": "group_limited_greedy",
            "rope_parameters": SCALED,
            **GROUPS,
        },
    ),
    "V3": ("DeepseekV3", V3),
    "GLM 4.7 Flash": ("Glm4MoeLite", {"q_lora_rank": 20}),
    "V3 in halves": ("DeepseekV3", {**V3, "rope_interleave": False, "norm_topk_prob": False}),
}
PROMPTS = [[3 + (5 + n) * i % 89 for i in range(30 - 7 * n)] for n in range(3)]
COUNT = 12


def run(built: Built, prompts: list[list[int]], **sampling: Any) -> list[list[int]]:
    """The tokens of greedy requests."""
    params = SamplingParams(temperature=0.0, max_tokens=COUNT, **sampling)
    return generate(built.engine, prompts, params)


def save(name: str, folder: Path) -> torch.nn.Module:
    family, changes = CASES[name]
    return save_tiny(family, {**MLA, **EXPERTS, **changes}, folder)


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    family, changes = CASES[name]
    check_logits(family, {**MLA, **EXPERTS, **changes}, tmp_path)


@pytest.mark.parametrize("name", ["V2 Lite", "V3"])
def test_tokens_equal_transformers_in_batches_after_preemption_and_with_prefixes(
    name: str, tmp_path: Path
) -> None:
    model = save(name, tmp_path)
    want = [transformers_tokens(model, prompt, COUNT) for prompt in PROMPTS]
    built = make(tmp_path, dtype="float32", num_blocks=200)
    assert run(built, PROMPTS) == want
    assert run(built, PROMPTS[:1]) == want[:1]
    assert built.engine.stats().prefix_hits > 0
    scarce = make(tmp_path, dtype="float32", plain_kernels=True, num_blocks=18)
    assert run(scarce, PROMPTS) == want
    assert scarce.engine.stats().num_preemptions > 0


def test_the_layout_has_one_vector_per_token(tmp_path: Path) -> None:
    save("V3", tmp_path)
    hparams = read_hparams(json.loads((tmp_path / "config.json").read_text()))
    layout = kv_layout(hparams, 4, torch.float16)
    assert layout.token_bytes == 3 * (24 + 8) * 2
    report = make(tmp_path, num_blocks=10, dtype="float32").report
    assert report.memory["KV cache"] == 10 * 4 * 3 * (24 + 8) * 4


def test_inspect_counts_latents(tmp_path: Path) -> None:
    save("V3", tmp_path)
    config = {"model": str(tmp_path), "device": "cpu", "load_format": "dummy", "dtype": "float32"}
    exact = examine(EngineConfig.of(**config))
    coded = examine(EngineConfig.of(**config, kv_cache_dtype="int8"))
    assert exact["estimate"]["kv_bytes_per_token"] == 3 * (24 + 8) * 4
    assert coded["estimate"]["kv_bytes_per_token"] == 3 * (24 + 8 + 4)


@pytest.mark.parametrize("name", ["V2 Lite", "V3"])
def test_adapters_change_the_projections_that_are_not_absorbed(name: str, tmp_path: Path) -> None:
    save(name, tmp_path)
    hparams = read_hparams(json.loads((tmp_path / "config.json").read_text()))
    network = loaded(tmp_path, device="cpu").network
    attention = network.model.layers[1].self_attn
    linears = [module for module in attention.modules() if isinstance(module, Linear)]
    prefix = "model.layers.1.self_attn."
    want = {
        f"{prefix}{part}": (count, linear.num_in)
        for linear in linears
        for part, count in linear.parts.items()
    }
    shapes = linear_shapes(hparams)
    assert {key: shape for key, shape in shapes.items() if key.startswith(prefix)} == want


@pytest.mark.parametrize(("kv", "bound"), [("int8", 0.05), ("fp8", 0.3)])
def test_logprobs_with_latent_codes_are_close(kv: str, bound: float, tmp_path: Path) -> None:
    save("V3", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)

    def scores(**options: Any) -> list[float]:
        llm = LLM(str(tmp_path), load_format="dummy", device="cpu", num_blocks=100, **options)
        results = llm.generate(PROMPTS, params)
        return [score.logprob for result in results for score in result.prompt_logprobs]

    want, got = scores(), scores(kv_cache_dtype=kv, max_num_batched_tokens=40)
    assert got == pytest.approx(want, abs=bound)
    assert got != pytest.approx(want, abs=1e-6), "nothing was rounded"


def test_deterministic_requests_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    save("V3", tmp_path)
    built = make(tmp_path, num_blocks=200)
    alone = run(built, PROMPTS[:1], deterministic=True)
    other = make(tmp_path, num_blocks=200, max_num_batched_tokens=23)
    assert run(other, PROMPTS, deterministic=True)[:1] == alone


@pytest.mark.skipif(not find_compilers()[0], reason="no C++ compiler")
@pytest.mark.parametrize("kv", ["auto", "int8"])
def test_the_recorded_program_gives_the_tokens_of_eager_steps(kv: str, tmp_path: Path) -> None:
    family, changes = CASES["V2 Lite"]
    save_tiny(family, {**MLA, **EXPERTS, **changes, "first_k_dense_replace": 3}, tmp_path)
    recorded, eager = (
        make(tmp_path, num_blocks=200, kv_cache_dtype=kv, enforce_eager=flag)
        for flag in (False, True)
    )
    how = next(choice for choice in recorded.report.choices if choice.what == "steps")
    assert how.value.startswith("one native call"), how.reason
    assert run(recorded, PROMPTS) == run(eager, PROMPTS)


def test_layers_that_predict_further_tokens_are_not_read(tmp_path: Path) -> None:
    save("V3", tmp_path)
    ids = PROMPTS[2]
    want = our_logits(tmp_path, ids, [len(ids)])
    tensors = load_file(tmp_path / "model.safetensors")
    names = ("eh_proj.weight", "mlp.shared_experts.up_proj.weight", "embed_tokens.weight")
    tensors |= {f"model.layers.3.{name}": torch.ones(2, 2) for name in names}
    save_file(tensors, tmp_path / "model.safetensors")
    assert torch.equal(our_logits(tmp_path, ids, [len(ids)]), want)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("V3", {"attention_bias": True}, "attention_bias"),
        ("V3", {"scoring_func": "softmax"}, "scoring_func"),
        ("V2", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("V2", {"topk_method": "noaux_tc"}, "topk_method"),
        ("GLM 4.7 Flash", {"mlp_layer_types": ["sparse", "dense", "sparse"]}, "mlp_layer_types"),
    ],
)
def test_unsupported_options_are_refused_by_name(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save(name, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(UnsupportedError, match=message):
        read_hparams({**config, **changes})


def in_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 codes, and a scale for each block of 128 x 128."""
    rows, columns = (-(-size // 128) for size in weight.shape)
    scales = torch.ones(rows, columns)
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for i in range(rows):
        for j in range(columns):
            at = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            scales[i, j] = weight[at].abs().max() / 448
            codes[at] = (weight[at] / scales[i, j]).to(torch.float8_e4m3fn)
    return codes, scales


def test_fp8_blocks_of_deepseek_checkpoints(tmp_path: Path) -> None:
    """kv_b_proj is dequantised; the router is not quantised, although the config does not say so."""
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "intermediate_size": 256}
    save_tiny("DeepseekV3", {**MLA, **EXPERTS, **V3, **sizes}, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    tensors = load_file(tmp_path / "model.safetensors")
    coded_weights, weights = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if name.endswith("_proj.weight") or name.endswith("kv_a_proj_with_mqa.weight"):
            codes, scales = in_blocks(weight)
            coded_weights |= {name: codes, f"{name}_scale_inv": scales}
            rows, columns = weight.shape
            wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
            weights[name] = codes.float() * wide
    got = {}
    method = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    for kind, stored in (("exact", weights), ("coded", coded_weights)):
        folder = tmp_path / kind
        folder.mkdir()
        save_file(
            {key: value.contiguous() for key, value in stored.items()},
            folder / "model.safetensors",
        )
        extra = {"quantization_config": method} if kind == "coded" else {}
        (folder / "config.json").write_text(json.dumps(config | extra))
        got[kind] = logits(loaded(folder, device="cpu"), PROMPTS[0])
    exact, coded = got.values()
    # The weights are equal, but rounded activations may choose other experts.
    assert (coded - exact).norm() < 0.3 * exact.norm()


GGUF_NAMES = {
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_proj": "attn_q",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    **{f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_tensors(model: torch.nn.Module, split: bool) -> dict[str, Tensor]:
    """The weights under llama.cpp's names; `split`: kv_b_proj in two tensors."""
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        module, _, kind = name.rpartition(".")
        if module in OUTER:
            tensors[f"{OUTER[module]}.weight"] = value
            continue
        _, _, layer, local = module.split(".", 3)
        block = f"blk.{layer}."
        if local == "mlp.experts":
            parts = {"down": value} if kind == "down_proj" else {}
            if kind == "gate_up_proj":
                parts = dict(zip(("gate", "up"), value.chunk(2, dim=1), strict=True))
            tensors |= {f"{block}ffn_{part}_exps.weight": each for part, each in parts.items()}
        elif kind == "e_score_correction_bias":
            tensors[f"{block}exp_probs_b.bias"] = value
        elif split and local == "self_attn.kv_b_proj":
            keys, values = value.unflatten(0, (6, -1)).split([16, 12], dim=1)
            tensors |= {f"{block}attn_k_b.weight": keys.mT, f"{block}attn_v_b.weight": values}
        else:
            tensors[f"{block}{GGUF_NAMES[local]}.weight"] = value
    return tensors


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", ["V2 Lite", "V3"])
def test_gguf_files_give_the_same_tokens(name: str, split: bool, tmp_path: Path) -> None:
    model = save(name, tmp_path)
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "deepseek2")
    values: dict[str, Any] = {
        "block_count": 3,
        "context_length": 128,
        "embedding_length": 48,
        "feed_forward_length": 80,
        "attention.head_count": 6,
        "attention.head_count_kv": 1 if split else 6,
        "attention.key_length": 32 if split else 24,
        "attention.value_length": 24 if split else 12,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.kv_lora_rank": 24,
        "rope.dimension_count": 8,
        "expert_count": 8,
        "expert_used_count": 3,
        "expert_feed_forward_length": 32,
        "expert_shared_count": 2,
        "leading_dense_block_count": 1,
        "expert_weights_scale": 1.7,
    }
    if split:
        values |= {"attention.key_length_mla": 24, "attention.value_length_mla": 12}
    if name == "V3":
        values |= {
            "attention.q_lora_rank": 20,
            "expert_gating_func": 2,
            "expert_weights_norm": True,
            "expert_group_count": 4,
            "expert_group_used_count": 2,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 32,
            "rope.scaling.yarn_log_multiplier": 0.09,
        }
    for key, value in values.items():
        add_value(writer, f"deepseek2.{key}", value)
    for key, tensor in gguf_tensors(model, split).items():
        writer.add_tensor(key, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    built = make(path, num_blocks=200, dtype="float32")
    (tokens,) = run(built, PROMPTS[:1])
    assert tokens == transformers_tokens(model, PROMPTS[0], COUNT)
