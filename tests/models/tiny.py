"""Tiny models on disk: a GGUF with random weights in a chosen format, a folder of safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import quantize
from safetensors.torch import save_file

from tests.quant.blocks import weights_of

Type = gguf.GGMLQuantizationType

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB, LAYERS = 256, 4, 2, 64, 512, 96, 2

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "intermediate_size": FFN,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}


TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": ["AB", *(chr(33 + i) for i in range(1, VOCAB))],
    "tokenizer.ggml.token_type": [1] * VOCAB,
    "tokenizer.ggml.merges": ["A B"],
    "tokenizer.ggml.eos_token_id": 0,
}


def config(**changes: Any) -> dict[str, Any]:
    return CONFIG | changes


def write_json(path: Path, value: object) -> Path:
    path.write_text(json.dumps(value))
    return path


def write_folder(folder: Path, tensors: Mapping[str, torch.Tensor], **changes: Any) -> Path:
    """A folder with config.json and one model.safetensors."""
    folder.mkdir(exist_ok=True)
    write_json(folder / "config.json", config(**changes))
    save_file(dict(tensors), folder / "model.safetensors")
    return folder


def gguf_tensors(architecture: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights under llama.cpp's names."""
    random = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCAB, HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        shapes |= {
            block + "attn_norm.weight": (HIDDEN,),
            block + "attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
            block + "attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            block + "attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            block + "attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
            block + "ffn_norm.weight": (HIDDEN,),
            block + "ffn_gate.weight": (FFN, HIDDEN),
            block + "ffn_up.weight": (FFN, HIDDEN),
            block + "ffn_down.weight": (HIDDEN, FFN),
        }
        if architecture == "qwen2":
            shapes |= {
                block + "attn_q.bias": (HEADS * HEAD_DIM,),
                block + "attn_k.bias": (KV_HEADS * HEAD_DIM,),
                block + "attn_v.bias": (KV_HEADS * HEAD_DIM,),
            }
        if architecture == "qwen3":
            shapes |= {
                block + "attn_q_norm.weight": (HEAD_DIM,),
                block + "attn_k_norm.weight": (HEAD_DIM,),
            }
    return {
        name: random.standard_normal(shape, dtype=np.float32) * 0.1
        for name, shape in shapes.items()
    }


def block_tensors(name: str, tied: bool = False) -> dict[str, np.ndarray]:
    """A tiny model whose matrices are all of one type."""
    tensors = gguf_tensors("llama")
    if not tied:
        tensors["output.weight"] = np.zeros((VOCAB, HIDDEN))
    return {
        tensor: weights_of(name, *values.shape, seed=seed) if values.ndim == 2 else values
        for seed, (tensor, values) in enumerate(tensors.items())
    }


def write_gguf(
    path: Path,
    architecture: str = "llama",
    kind: Type = Type.F32,
    tensors: Mapping[str, np.ndarray] | None = None,
    metadata: Mapping[str, Any] | None = None,
    kinds: Mapping[str, Type] | None = None,
) -> Path:
    """A small GGUF. Matrices are stored as `kind`, vectors as F32; `metadata` adds or replaces.

    `kinds` has other types for tensors whose names end like its keys. Tensors of bytes are blocks.
    """
    writer = gguf.GGUFWriter(path, architecture)
    values: dict[str, Any] = {
        "block_count": LAYERS,
        "context_length": 128,
        "embedding_length": HIDDEN,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 5000.0,
    }
    keyed = {f"{architecture}.{name}": value for name, value in values.items()}
    for key, value in (keyed | dict(metadata or {})).items():
        add_value(writer, key, value)
    for name, tensor in (tensors or gguf_tensors(architecture)).items():
        if tensor.ndim == 1:
            writer.add_tensor(name, tensor)
        else:
            own = next((k for end, k in (kinds or {}).items() if name.endswith(end)), kind)
            blocks = tensor if tensor.dtype == np.uint8 else quantize(tensor, own)
            writer.add_tensor(name, blocks, raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Write metadata under the type that fits the value; None is left out."""
    match value:
        case None:
            return
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)
