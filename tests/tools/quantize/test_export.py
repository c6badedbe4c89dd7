"""Export of unquantised weights: bit-exact in float32."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.tools.quantize.conftest import tiny_tensors
from windlass.build import open_model
from windlass.config import EngineConfig, ModelConfig
from windlass.errors import CheckpointError, ConfigError
from windlass.models.card import open_checkpoint
from windlass.models.source import resolve
from windlass.tools.quantize import checkpoint_files
from windlass.tools.quantize.export import export


def test_folder_with_several_shards(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_files, "SHARD_BYTES", 100_000)
    out = tmp_path / "out"
    export(ModelConfig(model=str(model)), out)
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 2
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    for name, tensor in tiny_tensors().items():
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], tensor.float())
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "float32"
    opened = open_model(EngineConfig.of(model=str(out)))
    assert opened.card.tokenizer.encode("wind") == [
        *open_model(EngineConfig.of(model=str(model))).card.tokenizer.encode("wind")
    ]
    assert set(open_checkpoint(opened.files, ModelConfig(model=str(out))).names()) == set(found)
    with pytest.raises(ConfigError, match="exists already"):
        export(ModelConfig(model=str(model)), out)


def test_float16_overflow_is_refused(model: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    wide = tmp_path / "wide"
    wide.mkdir()
    for file in model.iterdir():
        (wide / file.name).write_bytes(file.read_bytes())
    tensors = tiny_tensors()
    tensors["model.norm.weight"][0] = 1e6
    save_file(tensors, wide / "model.safetensors")
    out = tmp_path / "out"
    with pytest.raises(CheckpointError, match="float16 cannot hold"):
        export(ModelConfig(model=str(wide)), out, torch.float16)
    assert not out.exists()


@pytest.mark.model
def test_a_gguf_keeps_every_value(small_gguf: Path, tmp_path: Path) -> None:
    source = ModelConfig(model=str(small_gguf))
    out = tmp_path / "out"
    export(source, out)
    stored, plain = open_checkpoint(resolve(source), source), load_file(out / "model.safetensors")
    assert set(stored.names()) == set(plain)
    for name, tensor in plain.items():
        assert torch.equal(tensor, stored.read(name, tuple(tensor.shape))), name
