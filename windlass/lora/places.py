"""From what a user calls an adapter to its folder: a path, or a hub id. Opens nothing; no torch."""

from __future__ import annotations

from pathlib import Path

from windlass.config import ModelConfig
from windlass.errors import CheckpointError
from windlass.models import hub


def locate(place: str, config: ModelConfig) -> Path:
    """The folder of an adapter that is named by a path or a hub id, fetched if need be."""
    folder = Path(place).expanduser()
    if folder.exists():
        return folder.resolve()
    wanted = hub.parse(place)
    if wanted is not None and wanted.file is None:
        return hub.fetch_adapter(wanted.repo, config)
    raise CheckpointError(
        f"adapter {place!r} was not found: there is no such folder (seen from {Path.cwd()}), and it "
        "is not of the form of a hub id, org/name."
    )
