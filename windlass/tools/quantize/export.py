"""A model's weights without quantisation, as safetensors: what a GGUF holds, for those who want it plain.

In float32 nothing is lost that the source still had.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from windlass.config import ModelConfig
from windlass.errors import EngineError
from windlass.models.card import load_hparams, open_checkpoint
from windlass.models.checkpoint import Checkpoint
from windlass.models.json_file import merged
from windlass.models.source import INDEX, resolve
from windlass.tools.quantize import described
from windlass.tools.quantize.layer import rounded_to
from windlass.tools.quantize.partial import SHARD_BYTES
from windlass.tools.resumable import check_output


def export(model: ModelConfig, output: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write safetensors, config.json and tokenizer into a new folder, which appears when whole."""
    check_output(output)
    files = resolve(model)
    config = merged(described.source_config(files), model.hf_overrides)
    tied = load_hparams(files, model).tie_embeddings
    checkpoint = open_checkpoint(files, model)
    # What a killed run left there is worth nothing: the whole is written within minutes.
    made = output.with_name(f"{output.name}.unfinished")
    shutil.rmtree(made, ignore_errors=True)
    try:
        made.mkdir(parents=True)
        _write_weights(made, checkpoint, dtype, tied)
        described.write_plain_config(made, config, dtype)
        described.write_text_files(made, files, model.tokenizer)
        with suppress(FileNotFoundError):
            output.rmdir()  # an empty one was allowed
        os.rename(made, output)
    except OSError as error:
        raise EngineError(
            f"{output}: cannot be written: {error.strerror or error}. Make room, or choose another "
            "folder."
        ) from error


def _write_weights(folder: Path, checkpoint: Checkpoint, dtype: torch.dtype, tied: bool) -> None:
    from safetensors.torch import save_file

    names = [n for n in checkpoint.names() if not (tied and n == "lm_head.weight")]
    shards = list(_shards(checkpoint, names, dtype.itemsize))
    weight_map: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        if len(shards) == 1:
            file = "model.safetensors"
        tensors = {name: _read(checkpoint, name, dtype) for name in shard}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")


def _shards(checkpoint: Checkpoint, names: list[str], width: int) -> Iterator[list[str]]:
    """Names whose tensors go into one file; one file is in memory at a time."""
    shard: list[str] = []
    size = 0
    for name in names:
        num_bytes = width * torch.Size(checkpoint.stored(name).shape).numel()
        if shard and size + num_bytes > SHARD_BYTES:
            yield shard
            shard, size = [], 0
        shard.append(name)
        size += num_bytes
    yield shard


def _read(checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> Tensor:
    return rounded_to(checkpoint.read(name, checkpoint.stored(name).shape), dtype, name)
