"""Files of a checkpoint: shards of weights, config.json, tokenizer, template."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save
from torch import Tensor

from windlass.errors import ConfigError, UnsupportedError
from windlass.models import gguf_tokenizer, tokenizer_files
from windlass.models.gguf_file import GGUFCheckpoint
from windlass.models.hparams import HParams
from windlass.models.json_file import read_json
from windlass.models.source import INDEX, ModelFiles
from windlass.models.tokenizer import TextSide
from windlass.tools import resumable
from windlass.tools.quantize.recipe import BLOCK, PER_CHANNEL, Recipe

SHARD_BYTES = 2**30
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


_ROUTERS = (r"re:.*\.mlp\.gate$", r"re:.*\.shared_expert_gate$")
T = TypeVar("T")


def write_shards(
    folder: Path, sizes: Mapping[T, int], load: Callable[[list[T]], dict[str, Tensor]]
) -> None:
    """Write items of these bytes to safetensors files of at most SHARD_BYTES, and an index for several.

    `load` reads the tensors of a shard's items; one shard is in memory at a time.
    """
    shards: list[list[T]] = [[]]
    shard_bytes = 0
    for item, size in sizes.items():
        if shards[-1] and shard_bytes + size > SHARD_BYTES:
            shards.append([])
            shard_bytes = 0
        shards[-1].append(item)
        shard_bytes += size
    weight_map: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        if len(shards) == 1:
            name = "model.safetensors"
        tensors = load(shard)
        resumable.write_durably(folder / name, save(tensors, metadata={"format": "pt"}))
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        resumable.write_durably(folder / INDEX, json.dumps(index, indent=2).encode())


def source_config(files: ModelFiles) -> dict[str, Any]:
    """Read the source's config.json, or convert its GGUF metadata; refuse a quantised source."""
    if files.kind == "gguf":
        return _gguf_config(GGUFCheckpoint(files.path))
    config = read_json(files.path / "config.json")
    already = config.get("quantization_config")
    if already:
        raise ConfigError(
            f"{files.path}: is quantised already ({already.get('quant_method', 'unnamed')}). "
            "Quantise the 16-bit original."
        )
    return config


def _gguf_config(checkpoint: GGUFCheckpoint) -> dict[str, Any]:
    config = checkpoint.hf_config()
    rope = dict(config["rope_parameters"])
    architecture = config["architectures"][0]
    if architecture not in _MODEL_TYPES:
        raise UnsupportedError(
            f"{checkpoint.header.path}: a GGUF of {architecture} cannot be converted. "
            f"Known: {', '.join(_MODEL_TYPES)}. Use the model's safetensors folder instead."
        )
    if rope.pop("rope_factors", None) is not None:
        raise UnsupportedError(
            f"{checkpoint.header.path}: has RoPE frequency factors, which a config.json cannot "
            "hold. Quantise the model's safetensors folder instead."
        )
    if rope["partial_rotary_factor"] == 1.0:
        del rope["partial_rotary_factor"]
    config["rope_parameters"] = rope
    # Readers that do not know rope_parameters read this key.
    config["rope_theta"] = rope["rope_theta"]
    config["model_type"] = _MODEL_TYPES[architecture]
    return {key: value for key, value in config.items() if value is not None}


def write_config(folder: Path, config: dict[str, Any], dtype: torch.dtype) -> None:
    """Write config.json; `dtype`: of the unquantised tensors."""
    key = "dtype" if "dtype" in config else "torch_dtype"
    write_json(folder / "config.json", {**config, key: _dtype_name(dtype)})


def quantization_config(recipe: Recipe, hparams: HParams) -> dict[str, Any]:
    if recipe.format == "awq":
        return {
            "quant_method": "awq",
            "bits": recipe.bits,
            "group_size": recipe.group_size,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": None,
        }
    if recipe.format == "gptq":
        return {
            "quant_method": "gptq",
            "bits": recipe.bits,
            "group_size": recipe.group_size,
            "sym": recipe.symmetric,
            "desc_act": recipe.method == "gptq" and recipe.act_order == "group",
            "static_groups": recipe.method == "gptq" and recipe.act_order == "static",
            "damp_percent": recipe.damping,
            "true_sequential": False,
            "lm_head": False,
            "checkpoint_format": "gptq",
        }
    if recipe.format == "bitsandbytes":
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": False,
            "bnb_4bit_compute_dtype": _dtype_name(recipe.dtype),
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_skip_modules": ["lm_head"],
        }
    return _compressed_tensors(recipe, hparams)


def _compressed_tensors(recipe: Recipe, hparams: HParams) -> dict[str, Any]:
    is_float = recipe.method == "fp8"
    weights: dict[str, Any] = {
        "num_bits": recipe.bits,
        "type": "float" if is_float else "int",
        "symmetric": recipe.symmetric,
        "dynamic": False,
        "strategy": "channel",
    }
    inputs: dict[str, Any] | None = None
    if recipe.method in ("fp8", "smoothquant"):
        inputs = {**weights, "strategy": "token", "dynamic": True}
    if recipe.scales == "block":
        weights |= {"strategy": "block", "block_structure": [BLOCK, BLOCK]}
        inputs = {**(inputs or {}), "strategy": "group", "group_size": BLOCK}
    elif recipe.group_size != PER_CHANNEL:
        weights |= {"strategy": "group", "group_size": recipe.group_size}
    form = {"fp8": "float-quantized", "smoothquant": "int-quantized"}
    kind = form.get(recipe.method, "pack-quantized")
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
        "format": kind,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", *(_ROUTERS if hparams.moe is not None else ())],
        "kv_cache_scheme": None,
    }


def write_text_files(folder: Path, files: ModelFiles, tokenizer: str | None) -> None:
    """Copy tokenizer, template and generation defaults, or convert those of a GGUF."""
    if tokenizer is not None:
        given = Path(tokenizer).expanduser()
        _copy(given if given.is_dir() else given.parent, folder, _TOKENIZER_FILES)
    elif files.kind == "folder":
        _copy(files.path, folder, _TOKENIZER_FILES)
    else:
        _write_tokenizer(folder, gguf_tokenizer.load_text(GGUFCheckpoint(files.path).header))
    if files.kind == "folder":
        _copy(files.path, folder, ("generation_config.json",))
    if not tokenizer_files.has_tokenizer(folder):
        raise ConfigError(f"{files.path}: has no tokenizer to copy. Give --tokenizer FOLDER.")


def _write_tokenizer(folder: Path, text: TextSide) -> None:
    text.backend.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **text.special_tokens,
        "clean_up_tokenization_spaces": False,
        "chat_template": text.chat_template,
    }
    write_json(
        folder / "tokenizer_config.json", {k: v for k, v in settings.items() if v is not None}
    )
    if text.eos_ids:
        write_json(folder / "generation_config.json", {"eos_token_id": list(text.eos_ids)})


def _copy(source: Path, target: Path, names: tuple[str, ...]) -> None:
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
