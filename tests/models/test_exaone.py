"""EXAONE 3, which transformers lacks, as a Llama model of transformers under its own names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.comparison import our_logits, save_tiny
from tests.models.test_deepseek import COUNT, PROMPTS, run
from tests.models.test_networks import LLAMA3_ROPE
from tests.runner.test_windows import make, transformers_tokens

IDS = torch.randint(3, 97, (37,), generator=torch.Generator().manual_seed(2))
NAMES = {
    "model.embed_tokens": "transformer.wte",
    "model.norm": "transformer.ln_f",
    "model.layers": "transformer.h",
    "self_attn.o_proj": "attn.attention.out_proj",
    "self_attn": "attn.attention",
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "mlp.gate_proj": "mlp.c_fc_0",
    "mlp.up_proj": "mlp.c_fc_1",
    "mlp.down_proj": "mlp.c_proj",
}


def save(folder: Path, **changes: Any) -> torch.nn.Module:
    """A Llama model, and in the folder the same as an EXAONE 3 model."""
    sizes = {"head_dim": 16, "rope_scaling": LLAMA3_ROPE, "rms_norm_eps": 1e-5, **changes}
    model = save_tiny("Llama", sizes, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["ExaoneForCausalLM"], "model_type": "exaone"}
    for old, new in (
        ("num_hidden_layers", "num_layers"),
        ("rms_norm_eps", "layer_norm_epsilon"),
        ("hidden_act", "activation_function"),
    ):
        config[new] = config.pop(old)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    for old, new in NAMES.items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    return model


@pytest.mark.parametrize("tied", [False, True])
def test_logits_equal_those_of_the_llama_model(tied: bool, tmp_path: Path) -> None:
    model = save(tmp_path, tie_word_embeddings=tied)
    with torch.inference_mode():
        want = model(IDS[None]).logits[0]
    for chunks in ([37], [5, 1, 1, 30]):
        got = our_logits(tmp_path, IDS.tolist(), chunks)
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_tokens_in_batches_and_with_prefixes(tmp_path: Path) -> None:
    model = save(tmp_path)
    want = [transformers_tokens(model, prompt, COUNT) for prompt in PROMPTS]
    built = make(tmp_path, dtype="float32", num_blocks=200)
    assert run(built, PROMPTS) == want
    assert run(built, PROMPTS[:1]) == want[:1]
    assert built.engine.stats().prefix_hits > 0
