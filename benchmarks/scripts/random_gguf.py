"""Writes random weights in the shape of a Llama or Granite MoE model as a GGUF file.

    python benchmarks/scripts/random_gguf.py benchmarks/models/llama-3.2-1b --type Q4_0 -o 1b.gguf

The tokenizer and the size of the vocabulary are those of the default model. All layers have the same
weights: speed does not depend on the values.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, ReaderField
from gguf.quants import quantize
from numpy.typing import NDArray
from random_blocks import random_blocks

from windlass.config import ModelConfig
from windlass.errors import ConfigError
from windlass.models.card import load_hparams
from windlass.models.gguf_header import TENSOR_TYPES
from windlass.models.hparams import HParams
from windlass.models.source import resolve

_QUANTISABLE = ("F16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")  # with the gguf package
_ARCHITECTURES = {"LlamaForCausalLM": "llama", "GraniteMoeForCausalLM": "granitemoe"}
TYPES = tuple(kind.name for kind in TENSOR_TYPES.values() if kind.name not in ("F32", "BF16"))


@dataclass(frozen=True, slots=True)
class StorageTypes:
    """GGUF types of the layers' matrices, of their down projections, and of embedding and head."""

    layers: str
    head: str
    down: str | None = None  # None: as `layers`

    def __post_init__(self) -> None:
        options = {"--type": self.layers, "--head-type": self.head, "--down-type": self.down}
        for option, name in options.items():
            if name is not None and name not in TYPES:
                raise ConfigError(f"{option} {name!r} is not known. Known: {', '.join(TYPES)}.")


@dataclass(frozen=True, slots=True)
class Weights:
    """Selects the random weights. Files with the same seed share embeddings and layers.

    From layer `quiet_from` on, the layers' contribution to the residual stream is multiplied by
    `quiet`: the first layers alone then predict nearly what the whole model predicts.
    """

    num_layers: int | None = None  # only the first layers; None: all
    seed: int = 0
    quiet_from: int | None = None
    quiet: float = 0.02


def write_gguf(folder: str, types: StorageTypes, to: Path, weights: Weights | None = None) -> int:
    """Write the file; returns its size in bytes."""
    config = ModelConfig(model=folder, load_format="dummy")
    hparams = load_hparams(resolve(config), config)
    _check(hparams, folder, types)
    weights = weights or Weights()
    if weights.quiet_from is not None and types.layers not in _QUANTISABLE:
        raise ConfigError(
            f"quiet layers scale their weights, which works for --type {', '.join(_QUANTISABLE)}, "
            f"not {types.layers}."
        )
    if weights.num_layers is not None:
        if not 1 <= weights.num_layers <= hparams.num_layers:
            raise ConfigError(
                f"--layers must be between 1 and {hparams.num_layers}, got {weights.num_layers}."
            )
        hparams = replace(hparams, num_layers=weights.num_layers)
    vocabulary = _default_vocabulary()
    vocab_size = len(vocabulary["tokenizer.ggml.tokens"].data)
    writer = GGUFWriter(to, _ARCHITECTURES[hparams.architecture])
    _add_shape(writer, hparams, vocab_size)
    for name, field in vocabulary.items():
        if name.startswith("tokenizer."):
            is_list = field.types[0] == GGUFValueType.ARRAY
            of = field.types[-1] if is_list else None
            writer.add_key_value(name, field.contents(), field.types[0], of)
    _add_tensors(writer, hparams, vocab_size, types, weights)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    except OSError as error:
        raise ConfigError(f"-o {to}: {error.strerror or error}.") from error
    return to.stat().st_size


@cache  # reading takes seconds
def _default_vocabulary() -> dict[str, ReaderField]:
    return GGUFReader(resolve(ModelConfig()).path).fields


def _check(hparams: HParams, folder: str, types: StorageTypes) -> None:
    if hparams.architecture not in _ARCHITECTURES:
        raise ConfigError(
            f"{folder}: is a {hparams.architecture}. Supported: {', '.join(_ARCHITECTURES)}."
        )
    blocks = {item.name: item.block_size for item in TENSOR_TYPES.values()}
    sizes = (
        ("hidden_size", types.layers),
        ("hidden_size", types.head),
        ("intermediate_size", types.layers),
    )
    for name, kind in sizes:
        if getattr(hparams, name) % blocks[kind]:
            raise ConfigError(
                f"{folder}: {name} must be a multiple of {blocks[kind]}, the block size of {kind}."
            )


def _add_shape(writer: GGUFWriter, hparams: HParams, vocab_size: int) -> None:
    writer.add_name("random weights")
    writer.add_embedding_length(hparams.hidden_size)
    writer.add_block_count(hparams.num_layers)
    writer.add_feed_forward_length(hparams.intermediate_size)
    writer.add_head_count(hparams.num_heads)
    writer.add_head_count_kv(hparams.num_kv_heads)
    writer.add_key_length(hparams.head_dim)
    writer.add_value_length(hparams.head_dim)
    writer.add_rope_dimension_count(hparams.head_dim)
    writer.add_rope_freq_base(hparams.rope.theta)
    writer.add_context_length(hparams.max_positions)
    writer.add_layer_norm_rms_eps(hparams.norm_eps)
    writer.add_vocab_size(vocab_size)
    if hparams.moe is not None:
        writer.add_expert_count(hparams.moe.routing.num_experts)
        writer.add_expert_used_count(hparams.moe.routing.top_k)
        writer.add_embedding_scale(hparams.embedding_scale)
        writer.add_residual_scale(hparams.residual_scale)
        writer.add_attention_scale(hparams.attention_scale or hparams.head_dim**-0.5)
        writer.add_logit_scale(1 / hparams.logit_scale)


def _add_tensors(
    writer: GGUFWriter,
    hparams: HParams,
    vocab_size: int,
    types: StorageTypes,
    weights: Weights,
) -> None:
    random, width = np.random.default_rng(weights.seed), hparams.hidden_size
    own, shared = hparams.num_heads * hparams.head_dim, hparams.num_kv_heads * hparams.head_dim
    matrices = {
        "attn_q": (own, width),
        "attn_k": (shared, width),
        "attn_v": (shared, width),
        "attn_output": (width, own),
    }
    inner, experts, suffix = hparams.intermediate_size, 1, ""
    if hparams.moe is not None:
        inner, experts = hparams.moe.intermediate_size, hparams.moe.routing.num_experts
        suffix = "_exps"  # the experts' matrices are stacked
    matrices |= {
        f"ffn_gate{suffix}": (experts * inner, width),
        f"ffn_up{suffix}": (experts * inner, width),
        f"ffn_down{suffix}": (experts * width, inner),
    }

    def numbers(shape: tuple[int, int]) -> NDArray[Any]:
        return random.standard_normal(shape, dtype=np.float32) / shape[1] ** 0.5

    def quantised(values: NDArray[Any], name: str) -> tuple[NDArray[Any], GGMLQuantizationType]:
        kind = GGMLQuantizationType[name]
        return quantize(values, kind), kind

    def matrix(shape: tuple[int, int], name: str) -> tuple[NDArray[Any], GGMLQuantizationType]:
        if name in _QUANTISABLE:
            return quantised(numbers(shape), name)
        kind = GGMLQuantizationType[name]
        return random_blocks(kind, *shape, spread=shape[1] ** -0.5), kind

    def add(name: str, tensor: tuple[NDArray[Any], GGMLQuantizationType]) -> None:
        data, kind = tensor
        if name.endswith("_exps"):
            data = data.reshape(experts, -1, data.shape[-1])
        writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)

    def type_of(name: str) -> str:
        return types.down if types.down and name.startswith("ffn_down") else types.layers

    ones = (np.ones(width, dtype=np.float32), GGMLQuantizationType.F32)
    add("token_embd", matrix((vocab_size, width), types.head))
    if not hparams.tie_embeddings:
        add("output", matrix((vocab_size, width), types.head))
    if types.layers in _QUANTISABLE:
        values = {name: numbers(shape) for name, shape in matrices.items()}
        layer = {name: quantised(each, type_of(name)) for name, each in values.items()}
    else:
        values = {}
        layer = {name: matrix(shape, type_of(name)) for name, shape in matrices.items()}
    layer |= {"attn_norm": ones, "ffn_norm": ones}
    if hparams.moe is not None:
        router = numbers((experts, width))
        layer["ffn_gate_inp"] = (router, GGMLQuantizationType.F32)
    residual = ("attn_output", "ffn_down")  # matrices whose outputs are added to the residual
    scaled = {name: weights.quiet * values[name] for name in residual if name in values}
    quiet = layer | {name: quantised(each, types.layers) for name, each in scaled.items()}
    for number in range(hparams.num_layers):
        is_quiet = weights.quiet_from is not None and number >= weights.quiet_from
        for name, tensor in (quiet if is_quiet else layer).items():
            add(f"blk.{number}.{name}", tensor)
    add("output_norm", ones)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="folder with a config.json, as in benchmarks/models")
    parser.add_argument("--type", default="Q4_0", help="type of the layers: " + ", ".join(TYPES))
    parser.add_argument("--head-type", default="Q8_0", help="type of embedding and head")
    parser.add_argument("--down-type", help="type of down projections; default: as --type")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE")
    args = parser.parse_args()
    size = write_gguf(
        args.folder, StorageTypes(args.type, args.head_type, args.down_type), args.output
    )
    print(f"written to {args.output}: {size / 2**20:,.0f} MiB")


if __name__ == "__main__":
    main()
