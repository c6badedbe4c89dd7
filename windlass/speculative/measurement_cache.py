"""Keeps measurements of earlier starts: a small JSON file per machine, model and settings.

A file that cannot be read or written is no error: the engine measures again, and `problem` has the
reason. A file that another user could have written is an error.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from windlass.config import EngineConfig
from windlass.folders import cache_dir, check_private, make_private, write_atomically
from windlass.kernels.native.compiled import cpu_identity
from windlass.models.hparams import HParams
from windlass.models.source import ModelFiles
from windlass.version import __version__

_FORMAT = 4  # version of the file format: files of other versions are not found


class MeasurementCache:
    """Owns the contents of one file; without a path nothing is kept."""

    def __init__(self, path: Path | None = None) -> None:
        self.problem: str | None = None
        self._path = path
        self._values: dict[str, Any] = {}
        self._changed = False
        if path is None or not path.is_file():
            return
        check_private(path.parent, path)
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            self.problem = f"{path} cannot be read ({error}), measured again"
            return
        if isinstance(found, dict):
            self._values = found
        else:
            self.problem = f"{path} holds no JSON object, measured again"

    def get(self, name: str) -> Any:
        """The kept value; None: there is none."""
        return self._values.get(name)

    def put(self, name: str, value: Any) -> None:
        self._values[name] = value
        self._changed = True

    def drop(self, name: str) -> None:
        """Remove a value."""
        self._changed |= self._values.pop(name, None) is not None

    def save(self) -> None:
        """Write the file if a value changed. Another process may write it at the same time."""
        if self._path is None or not self._changed:
            return
        try:
            make_private(self._path.parent)
            write_atomically(self._path, json.dumps(self._values))
        except OSError as error:
            self.problem = f"{self._path} cannot be written ({error}), measured at every start"


def open_measurement_cache(
    config: EngineConfig,
    files: ModelFiles,
    hparams: HParams,
    device: torch.device,
    *,
    folder: str = "speculation",
    backend: str = "",
    proposer: object = None,
) -> MeasurementCache:
    """Open the cache for this machine, model, settings and versions; empty for dummy weights.

    `folder`: the subject of the measurements. `backend`: the kernels that compute. `proposer`: what
    decides the costs of --spec-model, independent of its path.
    """
    if config.model.load_format == "dummy":
        return MeasurementCache()
    weights = [files.path] if files.kind == "gguf" else files.weights
    stamps = [(path.stat().st_size, path.stat().st_mtime_ns) for path in weights]
    processor = cpu_identity() if device.type == "cpu" else torch.cuda.get_device_name(device)
    speculation = {**asdict(config.speculation), "spec_model": proposer}
    key = (
        *(_FORMAT, __version__, torch.__version__, backend),
        *(processor, os.cpu_count(), torch.get_num_threads()),
        *(files.name, str(files.path), stamps, repr(hparams)),
        *(repr(config.model), repr(config.cache), repr(config.scheduler), repr(speculation)),
    )
    digest = hashlib.blake2b(repr(key).encode(), digest_size=12).hexdigest()
    check_private(cache_dir())
    return MeasurementCache(cache_dir() / folder / f"{digest}.json")


def machine_load() -> int:
    """Runnable processes per core in the last minute, rounded: costs differ on a busy machine."""
    if not hasattr(os, "getloadavg"):
        return 0
    return round(os.getloadavg()[0] / (os.cpu_count() or 1))
