"""Decode speed from what a step must read and compute, and what the device can: an estimate.

A step takes as long as reading its bytes, or as its products, whichever is longer, and some time for
every layer. Prompts are not estimated.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from windlass.models.spec import ModelSpec
from windlass.tools.bench.device import read_bandwidth, synchronise

# The share of the read bandwidth that steps reach, and the seconds that a layer costs beyond what it
# reads. CUDA: fitted to the records of 135M to 8B shapes on an H200, up to 64 requests; they are met
# within a fifth. CPU: a guess between what was seen on several.
_SHARE = {"cuda": 0.95, "cpu": 0.8}
_LAYER_SECONDS = {"cuda": 22e-6, "cpu": 100e-6}
_PRODUCT = {"cuda": (4096, 8192), "cpu": (64, 2048)}  # rows; inputs and outputs
_TRIES = 3


@dataclass(frozen=True, slots=True)
class Machine:
    """What the device can do. `flops` None: not known, so products are taken to be free."""

    device: str  # "cpu" or "cuda"
    bandwidth: float  # bytes a second
    flops: float | None
    source: str  # "measured", "as given"

    @property
    def share(self) -> float:
        return _SHARE[self.device]

    @property
    def layer_seconds(self) -> float:
        return _LAYER_SECONDS[self.device]

    def step_seconds(self, num_bytes: float, num_products: float, num_layers: int) -> float:
        """`num_products`: multiplications with a weight."""
        reading = num_bytes / (self.bandwidth * self.share)
        computing = 2 * num_products / self.flops if self.flops else 0.0
        return max(reading, computing) + num_layers * self.layer_seconds


def measure(device: torch.device, dtype: torch.dtype) -> Machine:
    """Read a large buffer and multiply two matrices, on the device itself."""
    return Machine(device.type, read_bandwidth(device), _product_rate(device, dtype), "measured")


def given(device: torch.device, bandwidth: float) -> Machine:
    """Another machine, of which only this is known."""
    return Machine(device.type, bandwidth, None, "as given")


def kv_tokens_read(spec: ModelSpec, context: int) -> float:
    """Tokens of one request that a step reads, as a mean over layers: some see only a window."""
    seen = [min(context, window or context) for window in spec.sliding_windows]
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
