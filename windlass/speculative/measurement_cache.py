"""Which measurements of earlier starts an engine may use: a file per machine, model and settings."""

from __future__ import annotations

import hashlib
import os
from dataclasses import asdict

import torch

from windlass.config import EngineConfig
from windlass.folders import cache_dir, check_private
from windlass.kernels.native.compiled import cpu_identity
from windlass.measurement_cache import MeasurementCache
from windlass.models.hparams import HParams
from windlass.models.source import ModelFiles
from windlass.version import __version__

_FORMAT = 4  # version of the file format: files of other versions are not found


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
