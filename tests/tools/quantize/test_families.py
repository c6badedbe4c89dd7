"""Families other than Llama: what is written loads again, and computes what the source does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.models.comparison import save_tiny
from tests.models.test_dense_families import CASES as DENSE
from tests.models.test_networks import CASES as NETWORKS
from tests.tools.quantize.conftest import Quantize, write_tokenizer
from tests.tools.quantize.test_loading import scores
from windlass.config import ModelConfig
from windlass.tools.quantize.export import export

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ONE_KV_HEAD_EACH = ("gpt2", "gpt-neox")
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("Gemma2", GEMMA),
    "gemma3": ("Gemma3", GEMMA),
    **{
        name: DENSE[name]
        for name in (
            "cohere",
            "glm4",
            "gpt-neox",
            "gpt2",
            "granite-bias",
            "olmo2",
            "phi3-window",
            "stablelm",
            "stablelm-12b",
        )
    },
}
LLAMA4 = {
    "head_dim": 16,
    "intermediate_size_mlp": 128,
    "num_local_experts": 4,
    "no_rope_layers": [1, 0],
    "moe_layers": [1],
    "attention_chunk_size": 16,
    "floor_scale": 16,
}
FEW = ("--samples", "6", "--sample-tokens", "48")
EXPERTS = ("mixtral", "gpt-oss", "qwen2-moe", "glm-4.5-moe", "granite-moe", "phimoe", "llama4")
GROUP = ("--group-size", "32", "--bits", "8")
METHODS: dict[str, tuple[str, ...]] = {
    "rtn": ("--method", "rtn", *GROUP),
    "fp8": ("--method", "fp8"),
    "gptq": ("--method", "gptq", "--format", "gptq", *GROUP),
    "awq": ("--method", "awq", *GROUP),
}
# RMS change of log probabilities, relative to their standard deviation; a wrong network has about 1.
# Tokens near a tie between experts change most. e4m3 has 3 bits of mantissa.
MAX_RMS = {"rtn": 0.06, "gptq": 0.06, "awq": 0.06, "fp8": 0.2}
MAX_RMS_OF_EXPERTS = 0.25


def save(name: str, folder: Path) -> Path:
    family, changes = ({**NETWORKS, **CASES, "llama4": ("Llama4", LLAMA4)})[name]
    sizes = SIZES | ({"num_key_value_heads": 4} if name in ONE_KV_HEAD_EACH else {})
    own = {key: value for key, value in changes.items() if key not in ("layer_types", *sizes)}
    if "layer_types" in changes:
        own["layer_types"] = changes["layer_types"][:2]
    if "moe_intermediate_size" in own:
        own["moe_intermediate_size"] = 64
    if name == "qwen2-moe":
        own["shared_expert_intermediate_size"] = 64
    if name == "gpt2":
        own["n_inner"] = 128
    if name == "phimoe":
        factors = {"short_factor": [1.0] * 8, "long_factor": [1.5] * 8}
        own["rope_parameters"] = {**own["rope_parameters"], **factors}
    save_tiny(family, own | sizes, folder)
    return write_tokenizer(folder)


def distance(one: Path, other: Path) -> float:
    want, got = torch.tensor(scores(one)), torch.tensor(scores(other))
    return float((got - want).square().mean().sqrt() / want.std())


def bound(name: str, method: str) -> float:
    return MAX_RMS_OF_EXPERTS if name in EXPERTS else MAX_RMS[method]


def run(quantize: Quantize, source: Path, out: Path, method: str, texts: Path) -> str:
    more = ("--calibration", texts, *FEW) if method in ("gptq", "awq") else ()
    return quantize(source, "-o", out, *METHODS[method], *more)


@pytest.mark.parametrize("name", [*CASES, *EXPERTS])
def test_rounded_weights_load_again(name: str, tmp_path: Path, quantize: Quantize) -> None:
    source = save(name, tmp_path / "source")
    run(quantize, source, tmp_path / "out", "rtn", tmp_path)
    assert distance(source, tmp_path / "out") < bound(name, "rtn")


@pytest.mark.parametrize("name", ["glm4", "gpt2", "mixtral"])
def test_exported_weights_are_the_same(name: str, tmp_path: Path) -> None:
    """The norms of GLM 4 have names that other norms have in the network."""
    source = save(name, tmp_path / "source")
    export(ModelConfig(model=str(source)), tmp_path / "out")
    assert scores(tmp_path / "out") == scores(source)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        *((name, "fp8") for name in ("olmo2", "stablelm", "glm-4.5-moe")),
        *((name, "gptq") for name in ("glm4", "gpt2", "qwen2-moe", "llama4")),
        *((name, "awq") for name in ("gemma2", "cohere", "mixtral")),
    ],
)
def test_other_methods(
    name: str, method: str, texts: Path, tmp_path: Path, quantize: Quantize
) -> None:
    source = save(name, tmp_path / "source")
    run(quantize, source, tmp_path / "out", method, texts)
    assert distance(source, tmp_path / "out") < bound(name, method)
    report = json.loads((tmp_path / "out" / "quality.json").read_text())
    assert ("output_error" in report["mean"]) == (method != "fp8")


def test_routers_and_their_biases_are_not_quantised(tmp_path: Path, quantize: Quantize) -> None:
    source = save("glm-4.5-moe", tmp_path / "source")
    run(quantize, source, tmp_path / "out", "rtn", tmp_path)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    kept = load_file(source / "model.safetensors")
    own = "model.layers.1.mlp."
    assert torch.equal(tensors[f"{own}gate.weight"], kept[f"{own}gate.weight"].half())
    bias = tensors[f"{own}gate.e_score_correction_bias"]
    assert torch.equal(bias, kept[f"{own}gate.e_score_correction_bias"])
    packed = {name.rpartition(".")[0] for name in tensors if name.endswith("weight_packed")}
    assert {f"{own}experts.7.gate_proj", f"{own}shared_experts.up_proj"} <= packed


def test_experts_without_calibration_tokens_are_reported(
    texts: Path, tmp_path: Path, quantize: Quantize
) -> None:
    source = save("mixtral", tmp_path / "source")
    few = tmp_path / "few.jsonl"
    few.write_text("".join(texts.read_text().splitlines(keepends=True)[1:2]))
    options = ("--calibration", few, "--samples", "1", "--sample-tokens", "16")
    shown = quantize(source, "-o", tmp_path / "out", *METHODS["gptq"], *options)
    assert "belong to experts that no calibration token" in shown.replace("\n", " ")
    assert distance(source, tmp_path / "out") < MAX_RMS_OF_EXPERTS


@pytest.mark.parametrize(
    ("name", "method", "message"),
    [
        ("deepseek", "rtn", "its latent attention (MLA)"),
        ("images", "rtn", "its files have a vision part"),
        ("cohere", "smoothquant", "has layers without a norm of their own"),
        ("mixtral", "smoothquant", "has layers without a norm of their own"),
    ],
)
def test_refusals_name_the_reason(
    name: str, method: str, message: str, texts: Path, tmp_path: Path, quantize: Quantize
) -> None:
    if name == "deepseek":
        save_tiny("DeepseekV3", {"n_routed_experts": 8, "n_group": 1, "topk_group": 1}, tmp_path)
        source = write_tokenizer(tmp_path)
    elif name == "images":
        source = save("gemma3", tmp_path / "source")
        text = json.loads((source / "config.json").read_text())
        whole = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
        (source / "config.json").write_text(json.dumps(whole))
    else:
        source = save(name, tmp_path / "source")
    more = ("--calibration", texts, *FEW) if method == "smoothquant" else ()
    shown = quantize(source, "-o", tmp_path / "out", "--method", method, *more, code=2)
    assert message in " ".join(shown.split())
