"""InternLM 2 and 3, which transformers lacks, as Llama models of transformers under their own names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.comparison import our_logits, save_tiny
from tests.models.test_deepseek import COUNT, PROMPTS, run
from tests.runner.test_windows import make, transformers_tokens
from windlass.errors import CheckpointError

IDS = torch.randint(3, 97, (37,), generator=torch.Generator().manual_seed(2))
DYNAMIC = {"rope_type": "dynamic", "factor": 6.0, "rope_theta": 1e6}
HEADS, DIM = 2, 16  # KV heads
NAMES = {
    "model.embed_tokens": "model.tok_embeddings",
    "lm_head": "output",
    "self_attn.o_proj": "attention.wo",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}


def save(name: str, folder: Path, **changes: Any) -> torch.nn.Module:
    """A Llama model, and in the folder the same as an InternLM model."""
    sizes = {"head_dim": DIM, "rope_parameters": DYNAMIC, "num_key_value_heads": HEADS, **changes}
    model = save_tiny("Llama", sizes, folder)
    config = json.loads((folder / "config.json").read_text())
    bias, mlp_bias = config.pop("attention_bias"), config.pop("mlp_bias")
    config |= {"architectures": [f"{name}ForCausalLM"], "model_type": name.lower()}
    tensors = load_file(folder / "model.safetensors")
    if name == "InternLM2":
        tensors, config["bias"] = renamed(tensors), bias
    else:
        config |= {"qkv_bias": bias, "bias": mlp_bias}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return model


def renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found = dict(tensors)
    for name in tensors:
        if ".q_proj." in name:
            parts = [found.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
            heads = [part.unflatten(0, (HEADS, -1)) for part in parts]
            fused = torch.cat(heads, dim=1).flatten(0, 1).contiguous()
            found[name.replace("self_attn.q_proj", "attention.wqkv")] = fused
    for old, new in NAMES.items():
        found = {name.replace(old, new): tensor for name, tensor in found.items()}
    return found


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "2": ("InternLM2", {}),
    "2 with biases": ("InternLM2", {"attention_bias": True}),
    "3": ("InternLM3", {}),
    "3 with biases": ("InternLM3", {"attention_bias": True, "mlp_bias": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_the_llama_model(case: str, tmp_path: Path) -> None:
    name, changes = CASES[case]
    model = save(name, tmp_path, **changes)
    with torch.inference_mode():
        want = model(IDS[None]).logits[0]
    for chunks in ([37], [5, 1, 1, 30], [1] * 37):
        got = our_logits(tmp_path, IDS.tolist(), chunks)
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["InternLM2", "InternLM3"])
def test_tokens_in_batches_and_with_prefixes(name: str, tmp_path: Path) -> None:
    model = save(name, tmp_path)
    want = [transformers_tokens(model, prompt, COUNT) for prompt in PROMPTS]
    built = make(tmp_path, dtype="float32", num_blocks=200)
    assert run(built, PROMPTS) == want
    assert run(built, PROMPTS[:1]) == want[:1]
    assert built.engine.stats().prefix_hits > 0


def test_biases_of_the_qkv_projections_alone(tmp_path: Path) -> None:
    """InternLM 3 may have biases of q, k and v without one of the output."""
    model = save("InternLM3", tmp_path, attention_bias=True)
    file = tmp_path / "model.safetensors"
    with pytest.raises(CheckpointError, match=r"3 tensors .* unknown.*o_proj\.bias"):
        our_logits(tmp_path, [3, 4], [2])
    kept = {name: t for name, t in load_file(file).items() if not name.endswith("o_proj.bias")}
    save_file(kept, file)
    with torch.inference_mode():
        for layer in model.model.layers:
            layer.self_attn.o_proj.bias.zero_()
        want = model(IDS[None]).logits[0]
    got = our_logits(tmp_path, IDS.tolist(), [20, 17])
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
