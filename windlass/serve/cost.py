"""Converts engine time to dollars: in total, per API key, and per request.

A step's time is split evenly among the tokens that it computes, prompt and generated tokens alike.
Time without computation, or spent on requests that had ended, is idle and charged to no request.
Savings of the prefix cache are an estimate: cached tokens times the mean time of a computed token.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge

from windlass.core.trace import RequestTrace
from windlass.core.types import Account, EngineStats

_WINDOW_S = 60.0
_PER_MILLION = 1e6
_PHASES = ("prefill", "decode", "idle")
NO_KEY = "none"  # key name of requests to a server without keys


@dataclass(frozen=True, slots=True)
class Cost:
    """Dollars of one request, or of all requests of a key."""

    prefill: float = 0.0
    decode: float = 0.0
    saved: float = 0.0  # by the prefix cache; not part of the total

    @property
    def total(self) -> float:
        return self.prefill + self.decode

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            prefill=self.prefill + other.prefill,
            decode=self.decode + other.decode,
            saved=self.saved + other.saved,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    """Sums since the start: dollars by phase, and tokens."""

    at: float
    prefill: float = 0.0
    decode: float = 0.0
    idle: float = 0.0
    num_prompt: int = 0
    num_output: int = 0
    num_cached: int = 0


class Price:
    """The price of engine time: replicas share the price of the machine."""

    def __init__(self, per_hour: float, num_replicas: int = 1) -> None:
        self.per_hour = per_hour
        self.per_second = per_hour / 3600 / num_replicas  # of one replica

    def of(self, traces: Iterable[RequestTrace]) -> Cost:
        """The cost of requests, from their shares of the step time."""
        cost = Cost()
        for trace in traces:
            cost += Cost(
                prefill=trace.prefill_s * self.per_second,
                decode=trace.decode_s * self.per_second,
                saved=trace.saved_s * self.per_second,
            )
        return cost


class CostTracker:
    """Owns the sums: totals from the engine's accounting, sums per key from request traces."""

    def __init__(
        self, price: Price, model: str, *, registry: CollectorRegistry, clock: Callable[[], float]
    ) -> None:
        self.price = price
        self._model = model
        self._clock = clock
        self._samples: deque[_Sample] = deque([_Sample(at=clock())])
        self._began = self._samples[0].at
        self._seen_at: dict[int, float] = {}  # time of each replica's last stats
        self._saved_usd = 0.0
        self._by_key: defaultdict[str, Cost] = defaultdict(Cost)
        self._create_metrics(registry)

    def _create_metrics(self, registry: CollectorRegistry) -> None:
        def name(rest: str) -> str:
            return f"windlass:cost_{rest}"

        label = ("model_name",)
        self._hourly = Gauge(
            name("usd_per_hour"), "Price per hour.", label, registry=registry
        ).labels(self._model)
        self._hourly.set(self.price.per_hour)
        self._usd = Counter(
            name("usd"),
            "Dollars by phase; the phases sum up to the total.",
            (*label, "phase"),
            registry=registry,
        )
        self._saved = Counter(
            name("saved_usd"),
            "Estimated cost of computing the cached prompt tokens.",
            label,
            registry=registry,
        ).labels(self._model)
        self._per_key = Counter(
            name("usd_by_key"),
            "Dollars of ended requests by key name.",
            (*label, "key"),
            registry=registry,
        )
        self._rate = Gauge(
            name("usd_per_million_tokens"),
            "Over the last minute; all: all tokens, idle time included; prefill: computed prompt "
            "tokens; decode: generated tokens.",
            (*label, "phase"),
            registry=registry,
        )
        for phase in _PHASES:
            self._usd.labels(self._model, phase)

    # ---- input -------------------------------------------------------------------------------

    def set_price(self, price: Price) -> None:
        """Change the price of the time from now on; there may have been none until now."""
        self.price = price
        self._hourly.set(price.per_hour)
        self._began = self._clock()
        self._seen_at.clear()

    def observe(self, stats: EngineStats, last: EngineStats, replica: int = 0) -> None:
        """Add the engine time between two stats of a replica."""
        rate, now, then = self.price.per_second, stats.account, last.account
        before = self._samples[-1]
        prefill = (now.prefill_s - then.prefill_s) * rate
        decode = (now.decode_s - then.decode_s) * rate
        idle = (now.idle_s - then.idle_s) * rate
        if then == Account():  # a new engine: the time in which it was loading or asleep is idle
            known_s = now.prefill_s + now.decode_s + now.idle_s
            idle += (
                max(0.0, self._clock() - self._seen_at.get(replica, self._began) - known_s) * rate
            )
        self._seen_at[replica] = self._clock()
        for phase, dollars in zip(_PHASES, (prefill, decode, idle), strict=True):
            # Rounding can make differences of long sums slightly negative.
            self._usd.labels(self._model, phase).inc(max(0.0, dollars))
        saved = max(0.0, (now.saved_s - then.saved_s) * rate)
        self._saved.inc(saved)
        self._saved_usd += saved
        self._samples.append(
            _Sample(
                at=self._clock(),
                prefill=before.prefill + prefill,
                decode=before.decode + decode,
                idle=before.idle + idle,
                num_prompt=before.num_prompt
                + stats.num_prompt_tokens_computed
                - last.num_prompt_tokens_computed,
                num_output=before.num_output
                + stats.num_generated_tokens
                - last.num_generated_tokens,
                num_cached=before.num_cached + stats.prefix_hits - last.prefix_hits,
            )
        )
        while len(self._samples) > 2 and self._samples[1].at < self._clock() - _WINDOW_S:
            self._samples.popleft()
        for phase, value in self.last_minute().items():
            self._rate.labels(self._model, phase).set(math.nan if value is None else value)

    def charge(self, key: str, trace: RequestTrace) -> None:
        """Add an ended request to the sum of its key; "": the server's own probes."""
        cost = self.price.of([trace])
        self._by_key[key or "server"] += cost
        self._per_key.labels(self._model, key or "server").inc(max(0.0, cost.total))

    # ---- output ------------------------------------------------------------------------------

    def last_minute(self) -> dict[str, float | None]:
        """Dollars per million tokens over the last minute; None: there were no such tokens."""
        first, last = self._samples[0], self._samples[-1]
        prefill, decode = last.prefill - first.prefill, last.decode - first.decode
        num_prompt = last.num_prompt - first.num_prompt
        num_output = last.num_output - first.num_output
        num_all = num_prompt + num_output + last.num_cached - first.num_cached
        dollars = prefill + decode + last.idle - first.idle
        parts = {
            "all": (dollars, num_all),
            "prefill": (prefill, num_prompt),
            "decode": (decode, num_output),
        }
        return {
            name: _PER_MILLION * usd / count if count else None
            for name, (usd, count) in parts.items()
        }

    def summary_of(self, key: str) -> dict[str, Any]:
        """The summary for one key: its own sum."""
        own = cost_json(self._by_key.get(key, Cost()))
        return {"price_per_hour": self.price.per_hour, "by_key": {key: own}}

    def summary(self) -> dict[str, Any]:
        """The costs of the whole server and of every key."""
        last = self._samples[-1]
        return {
            "price_per_hour": self.price.per_hour,
            "usd": {
                "total": last.prefill + last.decode + last.idle,
                "prefill": last.prefill,
                "decode": last.decode,
                "idle": last.idle,
            },
            "saved_usd": self._saved_usd,
            "usd_per_million_tokens_last_minute": self.last_minute(),
            "by_key": {name: cost_json(cost) for name, cost in self._by_key.items()},
        }


def cost_json(cost: Cost) -> dict[str, float]:
    return {
        "usd": cost.total,
        "prefill_usd": cost.prefill,
        "decode_usd": cost.decode,
        "saved_usd": cost.saved,
    }


class LiveCosts:
    """Owns the tracker, which begins with the first price. Without a price, no cost is counted."""

    def __init__(self, model: str, registry: CollectorRegistry, num_replicas: int) -> None:
        self.tracker: CostTracker | None = None  # None: there is no price now
        self._begun: CostTracker | None = None
        self._model = model
        self._registry = registry
        self._num_replicas = num_replicas

    def set_price(self, per_hour: float | None) -> None:
        if per_hour is None:
            self.tracker = None
        elif self._begun is None:
            self._begun = self.tracker = make_cost_tracker(
                per_hour, self._model, self._registry, self._num_replicas
            )
        elif self.tracker is None or per_hour != self.tracker.price.per_hour:
            self._begun.set_price(Price(per_hour, self._num_replicas))
            self.tracker = self._begun

    def observe(self, stats: EngineStats, last: EngineStats, replica: int) -> None:
        if self.tracker is not None:
            self.tracker.observe(stats, last, replica)

    def charge(self, key: str, trace: RequestTrace) -> None:
        if self.tracker is not None:
            self.tracker.charge(key, trace)


def make_cost_tracker(
    price_per_hour: float, model: str, registry: CollectorRegistry, num_replicas: int = 1
) -> CostTracker:
    price = Price(price_per_hour, num_replicas)
    return CostTracker(price, model, registry=registry, clock=time.monotonic)
