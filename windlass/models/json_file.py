"""Reads a model's JSON files, such as config.json. Errors name the file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from windlass.errors import CheckpointError


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that contains a JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: is not valid JSON: {error}. Download the file again."
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path}: contains a JSON {type(value).__name__}, expected an object."
        )
    return value


def read_json_if_there(path: Path) -> dict[str, Any]:
    """The file's object; empty if the file does not exist."""
    return read_json(path) if path.is_file() else {}


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `over` into `base`, recursively. Changes neither."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            value = merged(below, value)
        result[key] = value
    return result
