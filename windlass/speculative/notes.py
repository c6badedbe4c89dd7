"""What was measured at an earlier start: a small JSON file for each machine, model and settings.

A file that cannot be read or written is no error: it is measured anew, and `problem` says why.
A file that another user could have written is an error.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from windlass.config import EngineConfig
from windlass.folders import cache_dir, check_private, make_private, write_atomically
from windlass.models.hparams import HParams
from windlass.models.source import ModelFiles

_FORMAT = 2  # of what is noted: files of another one are not found


class Notes:
    """Owns what one file holds; without a path nothing is kept."""

    def __init__(self, path: Path | None = None) -> None:
        self.problem: str | None = None
        self._path = path
        self._found: dict[str, Any] = {}
        self._changed = False
        if path is None or not path.is_file():
            return
        check_private(path.parent, path)
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            self.problem = f"{path} cannot be read ({error}), so it was measured anew"
            return
        if isinstance(found, dict):
            self._found = found
        else:
            self.problem = f"{path} holds no JSON object, so it was measured anew"

    def of(self, name: str) -> Any:
        """What was noted; None: nothing."""
        return self._found.get(name)

    def note(self, name: str, value: Any) -> None:
        self._found[name] = value
        self._changed = True

    def drop(self, name: str) -> None:
        """Forget what was noted."""
        self._changed |= self._found.pop(name, None) is not None

    def save(self) -> None:
        """Write the file, if there is anything new. Another process may do the same meanwhile."""
        if self._path is None or not self._changed:
            return
        try:
            make_private(self._path.parent)
            write_atomically(self._path, json.dumps(self._found))
        except OSError as error:
            self.problem = f"{self._path} cannot be written ({error}), so it is measured each time"


def notes_for(
    config: EngineConfig,
    files: ModelFiles,
    hparams: HParams,
    device: torch.device,
    folder: str = "speculation",
    backend: str = "",
    guesser: object = None,
) -> Notes:
    """The notes of this machine, model, settings and versions; none are kept of dummy weights.

    `folder`: what they are about. `backend`: the kernels that compute. `guesser`: what decides the
    costs of --spec-model, wherever it lies.
    """
    if config.model.load_format == "dummy":
        return Notes()
    weights = [files.path] if files.kind == "gguf" else files.weights
    stamps = [(path.stat().st_size, path.stat().st_mtime_ns) for path in weights]
    wish = {**asdict(config.speculation), "spec_model": guesser}
    key = (
        *(_FORMAT, _version(), torch.__version__, backend),
        *(_processor(device), os.cpu_count(), torch.get_num_threads()),
        *(files.name, str(files.path), stamps, repr(hparams)),
        *(repr(config.model), repr(config.cache), repr(config.scheduler), repr(wish)),
    )
    digest = hashlib.blake2b(repr(key).encode(), digest_size=12).hexdigest()
    check_private(cache_dir())
    return Notes(cache_dir() / folder / f"{digest}.json")


def load_of_machine() -> int:
    """Runnable processes per core in the last minute, rounded: costs differ on a busy machine."""
    if not hasattr(os, "getloadavg"):
        return 0
    return round(os.getloadavg()[0] / (os.cpu_count() or 1))


def _version() -> str:
    from importlib.metadata import version

    return version("windlass")


def _processor(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.is_file() else []
    kinds = ("model name", "CPU part", "CPU implementer", "Features", "flags")
    return repr(sorted({line for line in lines if line.startswith(kinds)})) + platform.machine()
