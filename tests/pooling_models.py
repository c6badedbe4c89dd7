"""Tiny models with embedding and classification heads, and their vectors as transformers computes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

HIDDEN, VOCAB, CONTEXT = 64, 97, 128
TINY = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "head_dim": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def save_model(folder: Path, kind: str = "Qwen3ForCausalLM", **changes: Any) -> torch.nn.Module:
    """A model of transformers with random weights and a tokenizer of the words t0, t1, ..., no, yes.

    The tokenizer ends every text with t2, as those of embedding models do.
    """
    torch.manual_seed(1)
    made = getattr(transformers, kind)
    model = made(made.config_class(**{**TINY, **changes})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = "norm" in name
            parameter.normal_(1.0 if is_norm else 0.0, 0.1 if is_norm else 0.15)
    model.save_pretrained(folder)
    words = {f"t{i}": i for i in range(VOCAB - 2)} | {"no": VOCAB - 2, "yes": VOCAB - 1}
    tokenizer = Tokenizer(WordLevel(words, "t0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(
        single="$A t2", pair="$A t3 $B t2", special_tokens=[("t2", 2), ("t3", 3)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return model


def hidden_states(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    """The last hidden states, behind the last norm: [tokens, hidden]."""
    body = getattr(model, "model", model)
    with torch.inference_mode():
        return body(torch.tensor([tokens])).last_hidden_state[0].float()


def vector(model: torch.nn.Module, tokens: list[int], pooling_type: str = "last") -> torch.Tensor:
    """The embedding of unit length."""
    hidden = hidden_states(model, tokens)
    pooled = hidden[-1] if pooling_type == "last" else hidden.mean(0)
    return torch.nn.functional.normalize(pooled, dim=0)


def add_modules(
    folder: Path, pooling: str = "mean_tokens", dense: int | None = None, normalize: bool = True
) -> torch.nn.Linear | None:
    """Files of sentence-transformers: pooling, optionally a linear layer with tanh, a normalisation."""
    kinds = ["Transformer", "Pooling", *["Dense"] * (dense is not None), *["Normalize"] * normalize]
    modules = [
        {
            "idx": i,
            "name": str(i),
            "path": "" if i == 0 else f"{i}_{kind}",
            "type": f"sentence_transformers.models.{kind}",
        }
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    modes = dict.fromkeys(("cls_token", "mean_tokens", "max_tokens", "lasttoken"), False)
    modes[pooling] = True
    _write(folder / "1_Pooling", {f"pooling_mode_{mode}": on for mode, on in modes.items()})
    if dense is None:
        return None
    layer = torch.nn.Linear(HIDDEN, dense)
    _write(
        folder / "2_Dense",
        {
            "in_features": HIDDEN,
            "out_features": dense,
            "bias": True,
            "activation_function": "torch.nn.modules.activation.Tanh",
        },
    )
    tensors = {"linear.weight": layer.weight.data, "linear.bias": layer.bias.data}
    save_file(tensors, folder / "2_Dense" / "model.safetensors")
    return layer


def _write(folder: Path, values: dict[str, Any]) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
