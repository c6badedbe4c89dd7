"""Exports a model's weights without quantisation, as safetensors: for example those of a GGUF file.

float32 keeps every value of the source.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from windlass.config import ModelConfig
from windlass.errors import EngineError
from windlass.models.card import load_hparams, open_checkpoint
from windlass.models.checkpoint import Checkpoint, SafetensorsCheckpoint
from windlass.models.families.registry import family_of
from windlass.models.hparams import HParams
from windlass.models.json_file import merged
from windlass.models.source import resolve
from windlass.models.tensor_rules import FileNames, before_reading
from windlass.tools.quantize.checkpoint_files import (
    source_config,
    write_config,
    write_shards,
    write_text_files,
)
from windlass.tools.quantize.layer import cast_checked
from windlass.tools.resumable import check_output


def export(model: ModelConfig, output: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write safetensors, config.json and tokenizer to a new folder, which appears when complete."""
    check_output(output)
    files = resolve(model)
    config = merged(source_config(files), model.hf_overrides)
    hparams = load_hparams(files, model)
    checkpoint = open_checkpoint(files, model)
    # Files of an interrupted run are discarded: an export takes only minutes.
    new = output.with_name(f"{output.name}.unfinished")
    shutil.rmtree(new, ignore_errors=True)
    try:
        new.mkdir(parents=True)
        stored = SafetensorsCheckpoint(files.weights).names() if files.kind == "folder" else ()
        _write_weights(new, checkpoint, dtype, hparams=hparams, stored=stored)
        write_config(new, config, dtype)
        write_text_files(new, files, model.tokenizer)
        with suppress(FileNotFoundError):
            output.rmdir()  # check_output allows an empty folder
        os.rename(new, output)
    except OSError as error:
        raise EngineError(
            f"{output}: cannot be written: {error.strerror or error}. Make room, or choose another "
            "folder."
        ) from error


def _write_weights(
    folder: Path,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    *,
    hparams: HParams,
    stored: Collection[str],
) -> None:
    """`stored`: the names of the source's tensors, which they keep."""
    tied, rules = hparams.tie_embeddings, family_of(hparams.architecture).rules(hparams)
    file_names = FileNames(stored, rules)
    names = [n for n in checkpoint.names() if not (tied and n == "lm_head.weight")]
    shapes = {name: checkpoint.stored(name).shape for name in names}
    sizes = {name: dtype.itemsize * torch.Size(shapes[name]).numel() for name in names}

    def load(shard: list[str]) -> dict[str, Tensor]:
        read = {n: before_reading(n, checkpoint.read(n, shapes[n]), rules) for n in shard}
        cast = {n: cast_checked(tensor, dtype, n).contiguous() for n, tensor in read.items()}
        return {file_names.of(n): tensor for n, tensor in cast.items()}

    write_shards(folder, sizes, load)
