"""Arrival times of requests: Poisson, constant, bursts, all at once, a ramp, or a trace."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Literal, get_args

from windlass.errors import ConfigError
from windlass.tools.common.requests import TextRequest

Pattern = Literal["poisson", "constant", "burst", "trace"]
RampStrategy = Literal["linear", "exponential"]

BURST_SIZE = 8


@dataclass(frozen=True, slots=True)
class Ramp:
    """A request rate that changes from the first request to the last."""

    strategy: RampStrategy
    start: float
    end: float

    def __post_init__(self) -> None:
        if self.strategy not in get_args(RampStrategy):
            known = ", ".join(get_args(RampStrategy))
            raise ConfigError(f"--ramp-up-strategy {self.strategy!r} is not known. Known: {known}.")
        for name, value in (("start", self.start), ("end", self.end)):
            if not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"--ramp-up-{name}-rps must be above 0, got {value:g}.")

    def rate(self, progress: float) -> float:
        """Requests per second; `progress` is 0 at the first request, 1 at the last."""
        if self.strategy == "linear":
            return self.start + (self.end - self.start) * progress
        rate: float = self.start * (self.end / self.start) ** progress
        return rate


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Arrival pattern. With an infinite rate all requests arrive at once."""

    pattern: Pattern = "poisson"
    rate: float = math.inf  # requests per second
    burstiness: float = 1.0  # for poisson: below 1 is burstier, above 1 more even
    burst_size: int = BURST_SIZE  # for burst: requests per burst
    ramp: Ramp | None = None  # replaces the rate
    speed: float = 1.0  # for trace: 2 replays it in half the time

    def __post_init__(self) -> None:
        if self.pattern not in get_args(Pattern):
            known = ", ".join(get_args(Pattern))
            raise ConfigError(f"--arrivals {self.pattern!r} is not known. Known: {known}.")
        for flag, value in (("--request-rate", self.rate), ("--burstiness", self.burstiness)):
            if not value > 0:
                raise ConfigError(f"{flag} must be above 0, got {value:g}.")
        if self.burst_size < 1:
            raise ConfigError(f"--burst-size must be at least 1, got {self.burst_size}.")
        if not (self.speed > 0 and math.isfinite(self.speed)):
            raise ConfigError(f"--trace-speed must be above 0, got {self.speed:g}.")
        if self.ramp is not None and (math.isfinite(self.rate) or self.pattern == "trace"):
            raise ConfigError("--ramp-up-strategy sets the rate; leave --request-rate out.")
        self._reject_unused()

    def _reject_unused(self) -> None:
        """Reject options that the pattern does not use."""
        has_rate = math.isfinite(self.rate) or self.ramp is not None
        if self.pattern == "trace" and has_rate:
            raise ConfigError("--request-rate has no effect with --arrivals trace. Remove it.")
        if self.pattern in ("constant", "burst") and not has_rate:
            raise ConfigError(f"--arrivals {self.pattern} needs --request-rate.")
        is_poisson = self.pattern == "poisson" and has_rate
        for flag, is_set, is_used, needed in (
            ("--burstiness", self.burstiness != 1.0, is_poisson, "poisson and a finite rate"),
            ("--burst-size", self.burst_size != BURST_SIZE, self.pattern == "burst", "burst"),
            ("--trace-speed", self.speed != 1.0, self.pattern == "trace", "trace"),
        ):
            if is_set and not is_used:
                raise ConfigError(f"{flag} has an effect only with --arrivals {needed}.")

    @property
    def title(self) -> str:
        """4 req/s, 1 to 8 req/s, all at once, trace"""
        if self.ramp is not None:
            return f"{self.ramp.start:g} to {self.ramp.end:g} req/s"
        if math.isfinite(self.rate):
            return f"{self.rate:g} req/s"
        return "trace" if self.pattern == "trace" else "all at once"

    def times(self, count: int, random: Random) -> list[float]:
        """Arrival times in seconds, starting at 0. Not for `trace`, whose requests have times."""
        if self.ramp is None and not math.isfinite(self.rate):
            return [0.0] * count
        times, now = [], 0.0
        for index in range(count):
            times.append(now)
            rate = self.rate if self.ramp is None else self.ramp.rate(index / max(1, count - 1))
            now += self._gap(index, rate, random)
        if self.pattern == "poisson" and self.ramp is None and count > 1:
            # The sum of a few dozen random gaps varies; scale it so that the mean rate is exact.
            stretch = (count - 1) / self.rate / times[-1]
            return [at * stretch for at in times]
        return times

    def _gap(self, index: int, rate: float, random: Random) -> float:
        if self.pattern == "constant":
            return 1 / rate
        if self.pattern == "burst":
            is_last = (index + 1) % self.burst_size == 0
            return self.burst_size / rate if is_last else 0.0
        return random.gammavariate(self.burstiness, 1 / (rate * self.burstiness))

    def set(self, requests: Sequence[TextRequest], seed: str) -> list[TextRequest]:
        if self.pattern == "trace":
            first = min((request.at for request in requests), default=0.0)
            return [replace(request, at=(request.at - first) / self.speed) for request in requests]
        times = self.times(len(requests), Random(f"arrivals {seed}"))
        return [replace(request, at=at) for request, at in zip(requests, times, strict=True)]

    def rate_changes(self, requests: Sequence[TextRequest]) -> list[dict[str, float]]:
        """Times at which a ramp passed each whole number of requests per second."""
        if self.ramp is None:
            return []
        events: list[dict[str, float]] = []
        for index, request in enumerate(requests):
            rps = int(self.ramp.rate(index / max(1, len(requests) - 1)))
            if not events or events[-1]["rps"] != rps:
                events.append({"rps": rps, "at": round(request.at, 4)})
        return events
