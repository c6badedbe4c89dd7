"""Finds the files of a model from a path, a hub id, or "default".

Downloads if needed; opens JSON files only. hub.py downloads from the hub.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from windlass.config import ModelConfig
from windlass.errors import CheckpointError, ConfigError, UnsupportedError
from windlass.folders import cache_folder
from windlass.models import default_model, hub
from windlass.models.checkpoint import weight_map
from windlass.models.json_file import path_inside

INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pickle", "*.pkl", "*.ckpt")
_SPLIT_GGUF = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of a model: a folder with config.json and safetensors, or one GGUF file."""

    name: str  # in the API
    kind: Literal["folder", "gguf"]
    path: Path
    weights: tuple[Path, ...]  # empty: dummy weights
    index: Path | None = None  # the safetensors index of a sharded folder


def resolve(config: ModelConfig) -> ModelFiles:
    """Find the model that the config names; downloads it, with a progress bar, if needed."""
    own_name, path = _locate(config)
    name = next(iter(config.served_model_name), own_name)
    if path.is_dir() and not (path / "config.json").is_file():
        path = _only_gguf(path)
    files = _folder(name, path, config) if path.is_dir() else _file(name, path, config)
    mismatch = {"safetensors": "gguf", "gguf": "folder"}.get(config.load_format)
    if files.kind == mismatch:
        found = "a GGUF file" if mismatch == "gguf" else "a folder of safetensors"
        raise ConfigError(
            f"--load-format {config.load_format} does not match {files.path}, which is {found}. "
            "Use auto."
        )
    return files


def _locate(config: ModelConfig) -> tuple[str, Path]:
    """The model's default name and an existing path."""
    model = config.model
    if model == "default":
        download_dir = config.download_dir
        folder = Path(download_dir).expanduser() if download_dir else cache_folder("models")
        return default_model.NAME, default_model.fetch(folder)
    path = Path(model).expanduser()
    if path.exists():
        resolved = path.resolve()
        folder = resolved.parent if resolved.name == "config.json" else resolved
        return folder.stem if folder.suffix == ".gguf" else folder.name, path
    unfinished = path.with_name(f"{path.name}.partial")
    if unfinished.is_dir():
        raise CheckpointError(
            f"{path}: does not exist; {unfinished} is the partial output of an interrupted windlass "
            "quantize or train-draft. Run the same command again to resume it."
        )
    hub_model = hub.parse(model)
    if hub_model is not None:
        found = hub.fetch(hub_model, config)
        return found.stem if found.suffix == ".gguf" else hub_model.repo, found
    raise CheckpointError(
        f"model {model!r} was not found: no such file or folder (relative to {Path.cwd()}), and not "
        "a hub id of the form org/name, org/name:FILE.gguf or org/name:Q4_K_M. Give one of these, or 'default'."
    )


def _only_gguf(folder: Path) -> Path:
    """The only GGUF file of a folder without config.json."""
    found = sorted(folder.glob("*.gguf"))
    if len(found) == 1:
        return found[0]
    if not found:
        _refuse_pickles(folder)
        raise CheckpointError(
            f"{folder}: has neither config.json nor a .gguf file; it contains "
            f"{', '.join(sorted(item.name for item in folder.iterdir())[:10]) or 'nothing'}."
        )
    for file in found:
        _refuse_split(file)
    raise CheckpointError(
        f"{folder}: contains {len(found)} GGUF files ({', '.join(file.name for file in found)}). "
        "Give the path of one file."
    )


def _file(name: str, path: Path, config: ModelConfig) -> ModelFiles:
    if path.name == "config.json":
        if config.load_format != "dummy":
            raise CheckpointError(
                f"{path}: is only a config. Give its folder, or use --load-format dummy for "
                "random weights."
            )
        return ModelFiles(name=name, kind="folder", path=path.parent, weights=())
    if path.suffix != ".gguf":
        _refuse_pickles(path.parent, path.name)
        raise CheckpointError(
            f"{path}: is not a model. Give a .gguf file, or a folder with config.json and "
            ".safetensors files."
        )
    _refuse_split(path)
    weights = () if config.load_format == "dummy" else (path,)
    return ModelFiles(name=name, kind="gguf", path=path, weights=weights)


def _folder(name: str, folder: Path, config: ModelConfig) -> ModelFiles:
    if config.load_format == "dummy":
        return ModelFiles(name=name, kind="folder", path=folder, weights=())
    index = folder / INDEX
    if index.is_file():
        return ModelFiles(
            name=name, kind="folder", path=folder, weights=_shards(index), index=index
        )
    single = folder / "model.safetensors"
    found = (single,) if single.is_file() else tuple(sorted(folder.glob("*.safetensors")))
    if not found:
        _refuse_pickles(folder)
        raise CheckpointError(
            f"{folder}: has config.json but no .safetensors file (pickled weights are never "
            "loaded). Download or convert the weights, or use --load-format dummy for random weights."
        )
    return ModelFiles(name=name, kind="folder", path=folder, weights=found)


def _shards(index: Path) -> tuple[Path, ...]:
    shards = sorted(set(weight_map(index).values()))
    paths = tuple(path_inside(index.parent, shard, index) for shard in shards)
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise CheckpointError(
            f"{index}: {len(missing)} of {len(shards)} shards are missing: {', '.join(missing)}. "
            "Download them to the same folder."
        )
    return paths


def _refuse_split(path: Path) -> None:
    split = _SPLIT_GGUF.fullmatch(path.name)
    if split:
        raise UnsupportedError(
            f"{path}: is one of {int(split[2])} parts of a split GGUF, which is not "
            f"supported. Merge them: llama-gguf-split --merge {path.name} {split[1]}.gguf"
        )


def _refuse_pickles(folder: Path, name: str = "*") -> None:
    pickles = sorted({file for kind in _PICKLES for file in folder.glob(kind) if file.match(name)})
    if pickles:
        raise UnsupportedError(
            f"{pickles[0]}: pickle is never loaded, since it can run any code. Convert the weights "
            "to safetensors (safetensors.torch.save_file, or the hub's convert space)."
        )
