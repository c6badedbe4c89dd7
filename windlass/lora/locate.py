"""Finds an adapter's folder from a path or a hub id. Opens no file; does not import torch."""

from __future__ import annotations

from pathlib import Path

from windlass.config import ModelConfig
from windlass.errors import CheckpointError
from windlass.models import hub


def locate(location: str, config: ModelConfig) -> Path:
    """The folder of an adapter given by path or hub id. Downloads from the hub if needed."""
    folder = Path(location).expanduser()
    if folder.exists():
        return folder.resolve()
    model = hub.parse(location)
    if model is not None and model.file is None and model.quant is None:
        return hub.fetch_adapter(model.repo, config)
    raise CheckpointError(
        f"adapter {location!r} was not found: no such folder (relative to {Path.cwd()}), and not a "
        "hub id of the form org/name."
    )
