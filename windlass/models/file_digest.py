"""A short digest of a model's files, by which machines see that they have the same model."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from windlass.config import ModelConfig
from windlass.models.source import ModelFiles

_SAMPLES = 64  # per file of weights: other weights of the same shapes differ in any of them
_SAMPLE_BYTES = 4096


def file_digest(files: ModelFiles, config: ModelConfig) -> str:
    """A digest of the config, the tokenizer, and samples of the weights."""
    digest = hashlib.blake2b(digest_size=8)
    small = [files.path / "config.json", files.path / "tokenizer.json"]
    small = [file for file in small if file.is_file()]
    if config.tokenizer is not None:
        given = Path(config.tokenizer).expanduser()
        small.append(given / "tokenizer.json" if given.is_dir() else given)
    for file in small:
        digest.update(f"{file.name} {file.stat().st_size} ".encode() + file.read_bytes())
    for file in files.weights:
        # A single file may have any name.
        name = file.name if len(files.weights) > 1 else ""
        digest.update(name.encode() + sample(file))
    return digest.hexdigest()


def sample(file: Path, opener: Callable[[str, int], int] | None = None) -> bytes:
    """The size of a file, and parts of its content: those of other weights differ."""
    with open(file, "rb", opener=opener) as stream:
        size = os.fstat(stream.fileno()).st_size
        parts = [f" {size} ".encode()]
        for number in range(_SAMPLES):
            stream.seek(max(0, size - _SAMPLE_BYTES) * number // (_SAMPLES - 1))
            parts.append(stream.read(_SAMPLE_BYTES))
    return b"".join(parts)
