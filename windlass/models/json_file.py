"""Small JSON files of a model: config.json and its neighbours. A broken one is named in the error."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from windlass.errors import CheckpointError


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that must hold a JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: is not valid JSON: {error}. Fetch the file again."
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a JSON {type(value).__name__}, expected an object.")
    return value


def read_json_if_there(path: Path) -> dict[str, Any]:
    """The file's object; empty when there is no such file."""
    return read_json(path) if path.is_file() else {}


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid on `base`, objects inside objects included. Changes neither."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            value = merged(below, value)
        result[key] = value
    return result
