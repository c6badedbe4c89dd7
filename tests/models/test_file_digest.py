"""The digest by which machines see that they have the same model."""

from __future__ import annotations

import shutil
from pathlib import Path

from windlass.config import ModelConfig
from windlass.models.file_digest import file_digest
from windlass.models.source import resolve


def digest(folder: Path, **options: str) -> str:
    config = ModelConfig(model=str(folder), **options)
    return file_digest(resolve(config), config)


def test_the_same_files_elsewhere_have_the_same_digest(tmp_path: Path) -> None:
    first = tmp_path / "first"
    first.mkdir()
    (first / "config.json").write_text("{}")
    weights = first / "model.safetensors"
    weights.write_bytes(bytes(1000) + bytes(range(256)) * 4000)
    second = tmp_path / "second"
    shutil.copytree(first, second)
    want = digest(first)
    assert digest(second) == want
    (second / "README.md").write_text("not a part of the model")
    assert digest(second) == want
    (second / "tokenizer.json").write_text("{}")
    assert digest(second) != want
    assert digest(first, tokenizer=str(second)) == digest(second)
    (second / "tokenizer.json").unlink()
    (second / "config.json").write_text('{"rope_theta": 1}')
    assert digest(second) != want
    shutil.copy(first / "config.json", second)
    changed = bytearray(weights.read_bytes())
    changed[1000:] = bytes(len(changed) - 1000)
    (second / "model.safetensors").write_bytes(changed)
    assert digest(second) != want, "other weights of the same size"
