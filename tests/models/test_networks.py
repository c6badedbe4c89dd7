"""Tiny random networks of every architecture against transformers: the same logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.models.comparison import CPU, check_logits, our_logits, save_tiny
from windlass.kernels.batch import Heads
from windlass.kernels.select import Need, select

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
GRANITE = {
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
}
GLM_MOE = {
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "head_dim": 16,
    "attention_bias": True,
    "routed_scaling_factor": 1.5,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
}
GPT_OSS = {
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "head_dim": 16,
    "sliding_window": 8,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {
        **YARN_ROPE,
        "rope_theta": 10000.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
}
PHIMOE = {
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "attention_bias": True,
    "lm_head_bias": True,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 128,
        "factor": 2.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.5, 1.7, 1.9, 2.1],
        "short_mscale": 1.2,
        "long_mscale": 1.3,
    },
}
CASES = {
    "llama2": ("Llama", {"num_key_value_heads": 6}),
    "llama3": ("Llama", {"rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE}),
    "llama-linear": ("Llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "smollm2": ("Llama", {"tie_word_embeddings": True, "rope_theta": 100000.0}),
    "mistral-window": ("Mistral", {"sliding_window": 8}),
    "mistral-head-dim": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-yarn": ("Qwen2", {"rope_scaling": YARN_ROPE}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-moe": ("Qwen3Moe", {**MOE, "head_dim": 16, "norm_topk_prob": True}),
    "qwen3-moe-dense-layer": ("Qwen3Moe", {**MOE, "head_dim": 16, "mlp_only_layers": [1]}),
    "mixtral": ("Mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "granite-moe": ("GraniteMoe", GRANITE),
    "gpt-oss": ("GptOss", GPT_OSS),
    "phimoe": ("Phimoe", PHIMOE),
    "phimoe-many-candidates": (
        "Phimoe",
        {"num_local_experts": 8, "router_jitter_noise": 0.8, "sliding_window": 8},
    ),
    "glm-4.5-moe": ("Glm4Moe", GLM_MOE),
    "glm-4.5-moe-norms": ("Glm4Moe", {**GLM_MOE, "use_qk_norm": True, "n_group": 2}),
    "qwen2-moe": ("Qwen2Moe", {**MOE, "shared_expert_intermediate_size": 24}),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    check_logits(*CASES[name], tmp_path)


def test_reference_attention_gives_the_same_logits(tmp_path: Path) -> None:
    model = save_tiny(*CASES["mistral-window"], tmp_path)
    ids = torch.arange(3, 40)
    with torch.inference_mode():
        want = model(ids[None]).logits[0]
    got = our_logits(tmp_path, ids.tolist(), [20, 17], plain=True)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_kernels_report_why_they_are_unsupported() -> None:
    need = Need(CPU, torch.float32, Heads(4, 2, 12), soft_cap=30.0)
    chosen = select("attention", need)
    assert chosen.name == "plain"
    assert "soft cap" in chosen.reason
    assert "CUDA" in chosen.refusals["triton"]
