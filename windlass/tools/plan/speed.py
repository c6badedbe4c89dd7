"""Decode speed from what a step must read and compute, and what the device can: an estimate.

A step takes as long as reading its bytes, or as its products, whichever is longer, and some time for
every layer. Prompts are not estimated.
"""

from __future__ import annotations

import hashlib
import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import torch

from windlass.folders import cache_dir, check_private, make_private, write_atomically
from windlass.kernels.native.compiled import cpu_identity
from windlass.models.hparams import HParams
from windlass.tools.common.device import read_bandwidth, synchronise

# The share of the read bandwidth that steps reach, and the seconds that a layer costs beyond what it
# reads, where no model's steps were measured on the machine. CUDA: fitted to the records of 135M to 8B shapes on an H200, up to 64 requests; they are met
# within a fifth. CPU: a guess between what was seen on several.
_SHARE = {"cuda": 0.95, "cpu": 0.8}
_LAYER_SECONDS = {"cuda": 22e-6, "cpu": 100e-6}
_PRODUCT = {"cuda": (4096, 8192), "cpu": (64, 2048)}  # rows; inputs and outputs
_TRIES = 3
_KEPT_DAYS = 7  # how long what was measured is taken again


@dataclass(frozen=True, slots=True)
class Factor:
    """What steps of a model reached of the machine's limits."""

    share: float  # of the read bandwidth, by one row
    gemm_share: float  # of the rate of products, by many
    layer_seconds: float  # a layer, beside
    source: str  # "usual", "as steps of MODEL did on 2026-01-31"


@dataclass(frozen=True, slots=True)
class Machine:
    """What the device can do. `flops` None: not known, so products are taken to be free."""

    device: str  # "cpu" or "cuda"
    bandwidth: float  # bytes a second
    flops: float | None
    source: str  # "measured on 2026-01-31, kept in ...", "as given"
    factor: Factor

    def step_seconds(self, num_bytes: float, num_gemms: float, num_layers: int) -> float:
        """`num_gemms`: multiplications with a weight."""
        factor = self.factor
        reading = num_bytes / (self.bandwidth * factor.share)
        computing = self._computing(num_gemms) / factor.gemm_share
        return max(reading, computing) + num_layers * factor.layer_seconds

    def _computing(self, num_gemms: float) -> float:
        return 2 * num_gemms / self.flops if self.flops else 0.0

    def reached(self, one: Step, many: Step, source: str) -> Factor:
        """The factor that makes both steps come out as they were measured."""
        share = one.num_bytes / self.bandwidth / one.seconds
        gemm = self._computing(many.num_gemms) / many.seconds
        return Factor(round(share, 4), round(gemm, 4), 0.0, source)


@dataclass(frozen=True, slots=True)
class Step:
    """A decode step that was measured."""

    num_bytes: float
    num_gemms: float
    seconds: float


def usual(device: str) -> Factor:
    return Factor(_SHARE[device], 1.0, _LAYER_SECONDS[device], "usual")


def measure(device: torch.device, dtype: torch.dtype) -> Machine:
    """Read a large buffer and multiply two matrices, on the device itself; or some days ago."""
    path = _path(device, dtype)
    today = datetime.now(UTC).date()
    kept = _kept(path, device, today)
    if kept is not None:
        return kept
    bandwidth, flops = read_bandwidth(device), _product_rate(device, dtype)
    _keep(path, {"bandwidth": bandwidth, "flops": flops, "date": today.isoformat()})
    factor = _kept_factor(path) or usual(device.type)
    return Machine(device.type, bandwidth, flops, "measured now", factor)


def keep_factor(device: torch.device, dtype: torch.dtype, factor: Factor) -> None:
    """From now on plans on this machine count with it."""
    _keep(_factor_path(_path(device, dtype)), asdict(factor))


def _path(device: torch.device, dtype: torch.dtype) -> Path:
    folder = cache_dir() / "machine"
    check_private(folder.parent, folder)
    return folder / f"{_identity(device, dtype)}.json"


def _factor_path(path: Path) -> Path:
    return path.with_name(f"{path.stem}-factor.json")


def _keep(path: Path, values: dict[str, Any]) -> None:
    """Where nothing can be kept it is measured each time, which takes a second."""
    with suppress(OSError):
        make_private(path.parent)
        write_atomically(path, json.dumps(values))


def _kept_factor(path: Path) -> Factor | None:
    """What a model's steps reached here; None when none were measured, or the file is damaged."""
    try:
        values = json.loads(_factor_path(path).read_text(encoding="utf-8"))
        share, gemm, layer = (
            float(values[name]) for name in ("share", "gemm_share", "layer_seconds")
        )
        factor = Factor(share, gemm, layer, str(values["source"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return factor if min(factor.share, factor.gemm_share) > 0 else None


def _kept(path: Path, device: torch.device, today: date) -> Machine | None:
    """What was measured before; None when there is nothing, or it is old or damaged."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        day = date.fromisoformat(values["date"])
        bandwidth, flops = float(values["bandwidth"]), float(values["flops"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not 0 <= (today - day).days < _KEPT_DAYS or min(bandwidth, flops) <= 0:
        return None
    factor = _kept_factor(path) or usual(device.type)
    return Machine(device.type, bandwidth, flops, f"measured on {day}, kept in {path}", factor)


def _identity(device: torch.device, dtype: torch.dtype) -> str:
    """What the figures depend on."""
    about = cpu_identity() if device.type == "cpu" else torch.cuda.get_device_name(device)
    parts = (about, str(dtype), str(torch.get_num_threads()), torch.__version__)
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()


def given(device: torch.device, bandwidth: float) -> Machine:
    """Another machine, of which only this is known."""
    return Machine(device.type, bandwidth, None, "as given", usual(device.type))


def kv_tokens_read(hparams: HParams, context: int) -> float:
    """Tokens of one request that a step reads, as a mean over layers: some see only a window."""
    seen = [min(context, window or context) for window in hparams.sliding_windows]
    return sum(seen) / len(seen)


def _product_rate(device: torch.device, dtype: torch.dtype) -> float:
    rows, width = _PRODUCT[device.type]
    x = torch.ones(rows, width, dtype=dtype, device=device)
    weight = torch.ones(width, width, dtype=dtype, device=device)
    best = float("inf")
    for _ in range(_TRIES):
        synchronise(device)
        started = time.perf_counter()
        torch.nn.functional.linear(x, weight)
        synchronise(device)
        best = min(best, time.perf_counter() - started)
    return 2 * rows * width * width / best
