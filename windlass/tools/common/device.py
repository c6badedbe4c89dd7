"""What the device gives: its read bandwidth, measured, and the memory that a run took."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass

import psutil
import torch
from torch import nn

from windlass.models.network import Network
from windlass.runner.device import free_bytes

# Far more than any cache holds.
_BUFFER = {"cuda": 2**30, "cpu": 2**28}
_READS = 8


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a decode step must read at least."""

    weight_bytes: int
    kv_bytes_per_token: float

    def step_bytes(self, mean_kv: float) -> float:
        """`mean_kv`: tokens whose keys and values are read, all rows together."""
        return self.weight_bytes + mean_kv * self.kv_bytes_per_token


def device_of(network: nn.Module) -> torch.device:
    return next(network.parameters()).device


def traffic_of(network: Network, kv_bytes_per_token: float) -> Traffic:
    """All weights, but of an embedding's own table only some rows: too few to count."""
    return Traffic(network.weight_bytes - network.table_bytes, kv_bytes_per_token)


def read_bandwidth(device: torch.device) -> float:
    """Bytes a second that summing a large buffer reads; the best of some tries."""
    count = min(_BUFFER[device.type], free_bytes(device) // 2) // 4
    buffer = torch.ones(count, dtype=torch.float32, device=device)
    best = float("inf")
    for _ in range(_READS):
        synchronise(device)
        started = time.perf_counter()
        buffer.sum()
        synchronise(device)
        best = min(best, time.perf_counter() - started)
    return buffer.nbytes / best


def synchronise(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def forget_peak(device: torch.device) -> None:
    """Start anew: what was taken before does not count. A CPU's process has no such mark."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def memory_bytes(device: torch.device) -> int:
    """The most that was allocated on a GPU; on a CPU, what the process holds now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return psutil.Process().memory_info().rss


def release_memory() -> None:
    """Give back what dead engines held: the next one sizes its cache by what is free."""
    gc.unfreeze()  # an engine that was built was meant to stay
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
