"""From what a user calls a model to the files of it: a path, a hub id, or the default.

Finds and fetches; opens nothing but JSON. The hub's side is in hub.py.
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

INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pickle", "*.pkl", "*.ckpt")
_SPLIT_GGUF = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where a model lies. A folder has config.json and safetensors; a GGUF is one file."""

    name: str  # in the API
    kind: Literal["folder", "gguf"]
    path: Path
    weights: tuple[Path, ...]  # empty: dummy weights
    index: Path | None = None  # the safetensors index of a sharded folder


def resolve(config: ModelConfig) -> ModelFiles:
    """Find the model that the config names, downloading it with a progress bar when need be."""
    own_name, path = _locate(config)
    name = config.served_model_name or own_name
    if path.is_dir() and not (path / "config.json").is_file():
        path = _only_gguf(path)
    files = _folder(name, path, config) if path.is_dir() else _file(name, path, config)
    wrong = {"safetensors": "gguf", "gguf": "folder"}.get(config.load_format)
    if files.kind == wrong:
        found = "a GGUF file" if wrong == "gguf" else "a folder of safetensors"
        raise ConfigError(
            f"--load-format {config.load_format} does not fit {files.path}, which is {found}. "
            "Leave it at auto."
        )
    return files


def _locate(config: ModelConfig) -> tuple[str, Path]:
    """The model's own name, and an existing path."""
    model = config.model
    if model == "default":
        chosen = config.download_dir
        folder = Path(chosen).expanduser() if chosen else cache_folder("models")
        return default_model.NAME, default_model.fetch(folder)
    path = Path(model).expanduser()
    if path.exists():
        whole = path.resolve()
        folder = whole.parent if whole.name == "config.json" else whole
        return folder.stem if folder.suffix == ".gguf" else folder.name, path
    unfinished = path.with_name(f"{path.name}.partial")
    if unfinished.is_dir():
        raise CheckpointError(
            f"{path}: is not there yet; {unfinished} is what a windlass quantize or train-draft "
            "left that did not end. Run the same command again, which goes on from there."
        )
    wanted = hub.parse(model)
    if wanted is not None:
        name = Path(wanted.file).stem if wanted.file else wanted.repo
        return name, hub.fetch(wanted, config)
    raise CheckpointError(
        f"model {model!r} was not found: there is no such file or folder (seen from {Path.cwd()}), "
        "and it is not of the form of a hub id, org/name or org/name:FILE.gguf. "
        "Give one of these, or 'default'."
    )


def _only_gguf(folder: Path) -> Path:
    """The one GGUF file of a folder that has no config.json."""
    found = sorted(folder.glob("*.gguf"))
    if len(found) == 1:
        return found[0]
    if not found:
        _refuse_pickles(folder)
        raise CheckpointError(
            f"{folder}: has neither config.json nor a .gguf file; it holds "
            f"{', '.join(sorted(item.name for item in folder.iterdir())[:10]) or 'nothing'}."
        )
    for file in found:
        _refuse_split(file)
    raise CheckpointError(
        f"{folder}: holds {len(found)} GGUF files ({', '.join(file.name for file in found)}). "
        "Give the path of the one that you mean."
    )


def _file(name: str, path: Path, config: ModelConfig) -> ModelFiles:
    if path.name == "config.json":
        if config.load_format != "dummy":
            raise CheckpointError(
                f"{path}: is only a config. Give its folder, or --load-format dummy for random "
                "weights."
            )
        return ModelFiles(name, "folder", path.parent, ())
    if path.suffix != ".gguf":
        _refuse_pickles(path.parent, path.name)
        raise CheckpointError(
            f"{path}: is not a model. Give a .gguf file, or the folder that holds config.json and "
            "the .safetensors files."
        )
    _refuse_split(path)
    weights = () if config.load_format == "dummy" else (path,)
    return ModelFiles(name, "gguf", path, weights)


def _folder(name: str, folder: Path, config: ModelConfig) -> ModelFiles:
    if config.load_format == "dummy":
        return ModelFiles(name, "folder", folder, ())
    index = folder / INDEX
    if index.is_file():
        return ModelFiles(name, "folder", folder, _shards(index), index)
    single = folder / "model.safetensors"
    found = (single,) if single.is_file() else tuple(sorted(folder.glob("*.safetensors")))
    if not found:
        _refuse_pickles(folder)
        raise CheckpointError(
            f"{folder}: has config.json but no .safetensors file (pickled weights are never "
            "loaded). Fetch or convert the weights, or use --load-format dummy for random ones."
        )
    return ModelFiles(name, "folder", folder, found)


def _shards(index: Path) -> tuple[Path, ...]:
    shards = sorted(set(weight_map(index).values()))
    absent = [shard for shard in shards if not (index.parent / shard).is_file()]
    if absent:
        raise CheckpointError(
            f"{index}: {len(absent)} of {len(shards)} shards are missing: {', '.join(absent)}. "
            "Fetch them into the same folder."
        )
    return tuple(index.parent / shard for shard in shards)


def _refuse_split(path: Path) -> None:
    split = _SPLIT_GGUF.fullmatch(path.name)
    if split:
        raise UnsupportedError(
            f"{path}: is one of {int(split[2])} parts of a split GGUF, which this version cannot "
            f"read. Join them: llama-gguf-split --merge {path.name} {split[1]}.gguf"
        )


def _refuse_pickles(folder: Path, name: str = "*") -> None:
    pickles = sorted({file for kind in _PICKLES for file in folder.glob(kind) if file.match(name)})
    if pickles:
        raise UnsupportedError(
            f"{pickles[0]}: pickle is never loaded, since it can run any code. Convert the weights "
            "to safetensors (safetensors.torch.save_file, or the hub's convert space)."
        )
