"""Reads a model's JSON files, such as config.json. Errors name the file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from windlass.errors import CheckpointError

_MAX_BYTES = 64 * 2**20  # the largest index of a real model has a fifth


def read_json(path: Path, opener: Callable[[str, int], int] | None = None) -> dict[str, Any]:
    """Read a file that contains a JSON object. `opener`: as that of `open`."""
    value = read_value(path, opener)
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path}: contains a JSON {type(value).__name__}, expected an object."
        )
    return value


def read_value(path: Path, opener: Callable[[str, int], int] | None = None) -> Any:
    """Read a file that contains any JSON; its size is limited."""
    try:
        with open(path, "rb", opener=opener) as file:
            raw = file.read(_MAX_BYTES + 1)
        if len(raw) > _MAX_BYTES:
            raise CheckpointError(f"{path}: is larger than {_MAX_BYTES // 2**20} MiB.")
        return json.loads(raw)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: is not valid JSON: {error}. Download the file again."
        ) from error


def read_json_if_there(path: Path) -> dict[str, Any]:
    """The file's object; empty if the file does not exist."""
    return read_json(path) if path.is_file() else {}


def path_inside(folder: Path, name: str, source: Path) -> Path:
    """The path of a file that `source` names; it must not lead out of the model's folder."""
    if not name or Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name:
        raise CheckpointError(
            f"{source}: names {name!r:.200}, which is not a path inside of the model's folder."
        )
    return folder / name


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `over` into `base`, recursively. Changes neither."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            value = merged(below, value)
        result[key] = value
    return result
