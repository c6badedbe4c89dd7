"""What a machine costs an hour where nobody says: rough list prices of its class, in dollars."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import torch

from windlass.errors import ConfigError

_CORE = 0.05
# On demand, one GPU with its share of a host. The first part of a name that fits counts.
_GPUS = (
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
    """Dollars an hour, and where the number comes from; None: not known."""

    per_hour: float | None
    why: str

    def per_million(self, tok_s: float) -> float | None:
        """Dollars for a million tokens at this speed."""
        if self.per_hour is None or tok_s <= 0:
            return None
        return self.per_hour / 3600 / tok_s * 1e6


def price_of(given: float | None, device: str) -> Price:
    """As set, or by the class of the machine."""
    if given is not None:
        if not (given > 0 and math.isfinite(given)):
            raise ConfigError(f"--price-per-hour must be above 0, got {given:g}.")
        return Price(given, f"${given:g} an hour, as set")
    if device == "cpu":
        cores = os.cpu_count() or 1
        return Price(_CORE * cores, f"${_CORE * cores:.2f} an hour: {cores} cores at ${_CORE}")
    name = torch.cuda.get_device_name()
    for part, price in _GPUS:
        if part in name:
            return Price(price, f"${price:g} an hour, a usual price of this GPU")
    return Price(None, f"no price of {name} is known: give --price-per-hour")
