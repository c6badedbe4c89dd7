"""Default machine prices in dollars per hour: rough list prices by GPU model and CPU core."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import torch

from windlass.errors import ConfigError

_USD_PER_CORE_HOUR = 0.05
# On-demand prices of one GPU with its share of a host. The first entry found in the device name counts.
_USD_PER_GPU_HOUR = (
    ("B200", 6.0),
    ("H200", 4.0),
    ("H100", 3.0),
    ("A100", 1.8),
    ("L40", 1.2),
    ("A10", 1.0),
    ("L4", 0.8),
    ("4090", 0.5),
    ("T4", 0.4),
)


@dataclass(frozen=True, slots=True)
class Price:
    """Dollars per hour (None: unknown) and the source of the number."""

    per_hour: float | None
    reason: str

    def per_million(self, tok_s: float) -> float | None:
        if self.per_hour is None or tok_s <= 0:
            return None
        return self.per_hour / 3600 / tok_s * 1e6


def price_of(given: float | None, device: str) -> Price:
    """Return the given price, or the default for this machine."""
    if given is not None:
        if not (given > 0 and math.isfinite(given)):
            raise ConfigError(f"--price-per-hour must be above 0, got {given:g}.")
        return Price(given, f"${given:g} per hour, from --price-per-hour")
    if device == "cpu":
        cores = os.cpu_count() or 1
        price = _USD_PER_CORE_HOUR * cores
        return Price(price, f"${price:.2f} per hour: {cores} cores at ${_USD_PER_CORE_HOUR}")
    return gpu_price(torch.cuda.get_device_name())


def gpu_price(name: str) -> Price:
    for part, price in _USD_PER_GPU_HOUR:
        if part in name:
            return Price(price, f"${price:g} per hour, a typical price of this GPU")
    return Price(None, f"the price of {name} is unknown: set --price-per-hour")
