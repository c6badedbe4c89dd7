"""Estimates decode speed with a roofline model of the device.

A step takes the longer of its memory reads and its GEMMs, plus a fixed time per layer. Prefill is
not estimated.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import asdict, dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import torch

from windlass.folders import cache_dir, check_private
from windlass.kernels.native.compiled import cpu_identity
from windlass.measurement_cache import MeasurementCache
from windlass.tools.common.device import read_bandwidth, synchronise

# Defaults until the steps of a model are measured on this machine: the share of the read bandwidth
# that steps reach, and the seconds per layer beyond its reads. CUDA: fitted to the records of 135M
# to 8B shapes on an H200 with up to 64 requests; the fit is within a fifth. CPU: not fitted, between
# the values seen on several CPUs.
_SHARE = {"cuda": 0.95, "cpu": 0.8}
_LAYER_SECONDS = {"cuda": 22e-6, "cpu": 100e-6}
_GEMM_SHAPE = {"cuda": (4096, 8192), "cpu": (64, 2048)}  # rows; inputs and outputs
_REPEATS = 3
_MAX_AGE_DAYS = 7  # of cached measurements


@dataclass(frozen=True, slots=True)
class Factor:
    """Shares of the machine's limits that a model's decode steps reached."""

    share: float  # of the read bandwidth, with one row
    gemm_share: float  # of the GEMM rate, with many rows
    layer_seconds: float  # per layer, in addition
    source: str  # "default", "as steps of MODEL did on 2026-01-31"


@dataclass(frozen=True, slots=True)
class Machine:
    """Limits of the device. `flops` None: unknown, and GEMMs take no time in estimates."""

    device: str  # "cpu" or "cuda"
    bandwidth: float  # bytes per second
    flops: float | None
    source: str  # "measured on 2026-01-31, cached in ...", "as given"
    factor: Factor

    def step_seconds(self, num_bytes: float, num_macs: float, num_layers: int) -> float:
        """Estimate a step that reads `num_bytes` and computes `num_macs` multiply-adds."""
        factor = self.factor
        reading = num_bytes / (self.bandwidth * factor.share)
        computing = self.gemm_seconds(num_macs) / factor.gemm_share
        return max(reading, computing) + num_layers * factor.layer_seconds

    def gemm_seconds(self, num_macs: float) -> float:
        return 2 * num_macs / self.flops if self.flops else 0.0


def default_factor(device: str) -> Factor:
    return Factor(
        share=_SHARE[device],
        gemm_share=1.0,
        layer_seconds=_LAYER_SECONDS[device],
        source="default",
    )


def given_machine(device: torch.device, bandwidth: float) -> Machine:
    """Describe a device of which only the bandwidth is known."""
    return Machine(
        device=device.type,
        bandwidth=bandwidth,
        flops=None,
        source="as given",
        factor=default_factor(device.type),
    )


def measure_machine(device: torch.device, dtype: torch.dtype) -> Machine:
    """Measure read bandwidth and GEMM rate, or return a cached measurement of the last week."""
    path = _cache_path(device, dtype)
    cache = MeasurementCache(path)
    today = datetime.now(UTC).date()
    limits = _read_limits(cache.get("limits"), today)
    if limits is None:
        bandwidth, flops = read_bandwidth(device), _gemm_rate(device, dtype)
        found = {"bandwidth": bandwidth, "flops": flops, "date": today.isoformat()}
        cache.put("limits", found)
        cache.save()  # without a writable cache, every run measures again, in about 1 s
        source = "measured now"
    else:
        bandwidth, flops, day = limits
        source = f"measured on {day}, cached in {path}"
    return Machine(
        device=device.type,
        bandwidth=bandwidth,
        flops=flops,
        source=source,
        factor=_read_factor(cache.get("factor")) or default_factor(device.type),
    )


def save_factor(device: torch.device, dtype: torch.dtype, factor: Factor) -> None:
    """Cache the factor for later plans on this machine."""
    cache = MeasurementCache(_cache_path(device, dtype))
    cache.put("factor", asdict(factor))
    cache.save()


def _cache_path(device: torch.device, dtype: torch.dtype) -> Path:
    folder = cache_dir() / "machine"
    check_private(folder.parent, folder)
    name = cpu_identity() if device.type == "cpu" else torch.cuda.get_device_name(device)
    key = (name, str(dtype), str(torch.get_num_threads()), torch.__version__)
    digest = hashlib.blake2b("\0".join(key).encode(), digest_size=8).hexdigest()
    return folder / f"{digest}.json"


def _read_factor(found: Any) -> Factor | None:
    """Parse a cached factor; None if there is none or it is damaged."""
    try:
        factor = Factor(
            share=float(found["share"]),
            gemm_share=float(found["gemm_share"]),
            layer_seconds=float(found["layer_seconds"]),
            source=str(found["source"]),
        )
    except (ValueError, KeyError, TypeError):
        return None
    return factor if min(factor.share, factor.gemm_share) > 0 else None


def _read_limits(found: Any, today: date) -> tuple[float, float, date] | None:
    """Parse cached bandwidth, GEMM rate and date; None if they are missing, old or damaged."""
    try:
        day = date.fromisoformat(found["date"])
        bandwidth, flops = float(found["bandwidth"]), float(found["flops"])
    except (ValueError, KeyError, TypeError):
        return None
    is_fresh = 0 <= (today - day).days < _MAX_AGE_DAYS
    return (bandwidth, flops, day) if is_fresh and min(bandwidth, flops) > 0 else None


def _gemm_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Measure floating-point operations per second of one large GEMM; the best of three runs."""
    rows, width = _GEMM_SHAPE[device.type]
    x = torch.ones(rows, width, dtype=dtype, device=device)
    weight = torch.ones(width, width, dtype=dtype, device=device)
    best = float("inf")
    for _ in range(_REPEATS):
        synchronise(device)
        started = time.perf_counter()
        torch.nn.functional.linear(x, weight)
        synchronise(device)
        best = min(best, time.perf_counter() - started)
    return 2 * rows * width * width / best
