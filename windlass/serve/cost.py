"""What tokens cost: the engine's seconds at a price per hour, in all, by key, and for one request.

The rule: a step's time is split evenly among the tokens that it computes, prompts' and others'
alike. Time in which nothing was computed, or only for requests that had ended, is idle, and no
request's. What the cache saved is an estimate: cached tokens times the mean time of a computed one.
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
NOBODY = "none"  # the name of who sends no key


@dataclass(frozen=True, slots=True)
class Cost:
    """Dollars of a request, or of all of a key's."""

    prefill: float = 0.0
    decode: float = 0.0
    saved: float = 0.0  # by the prefix cache: not part of the total

    @property
    def total(self) -> float:
        return self.prefill + self.decode

    def __add__(self, other: Cost) -> Cost:
        saved = self.saved + other.saved
        return Cost(self.prefill + other.prefill, self.decode + other.decode, saved)


@dataclass(frozen=True, slots=True)
class _Sample:
    at: float
    prefill: float
    decode: float
    idle: float
    num_prompt: int
    num_output: int
    num_cached: int


class Price:
    """What a second of the engine costs."""

    def __init__(self, per_hour: float) -> None:
        self.per_hour = per_hour
        self.per_second = per_hour / 3600

    def of(self, traces: Iterable[RequestTrace]) -> Cost:
        """What requests have cost, by their shares of the steps."""
        cost, each = Cost(), self.per_second
        for trace in traces:
            parts = (trace.prefill_s, trace.decode_s, trace.saved_s)
            cost += Cost(*(seconds * each for seconds in parts))
        return cost


class CostBook:
    """Owns the sums. Counters come from the engine's own account, sums by key from its stories."""

    def __init__(
        self, price: Price, model: str, registry: CollectorRegistry, clock: Callable[[], float]
    ) -> None:
        self.price = price
        self._model = model
        self._clock = clock
        self._samples: deque[_Sample] = deque([_Sample(clock(), 0.0, 0.0, 0.0, 0, 0, 0)])
        self._saved_usd = 0.0
        self._by_key: defaultdict[str, Cost] = defaultdict(Cost)
        self._metrics(registry)

    def _metrics(self, registry: CollectorRegistry) -> None:
        def name(rest: str) -> str:
            return f"windlass:cost_{rest}"

        label = ("model_name",)
        hourly = Gauge(name("usd_per_hour"), "The price.", label, registry=registry)
        hourly.labels(self._model).set(self.price.per_hour)
        self._usd = Counter(
            name("usd"),
            "Dollars by phase; together, all of them.",
            (*label, "phase"),
            registry=registry,
        )
        self._saved = Counter(
            name("saved_usd"),
            "What cached prompt tokens would have cost.",
            label,
            registry=registry,
        ).labels(self._model)
        self._per_key = Counter(
            name("usd_by_key"),
            "Dollars of ended requests by the name of their key.",
            (*label, "key"),
            registry=registry,
        )
        self._rate = Gauge(
            name("usd_per_million_tokens"),
            "Over the last minute: of all tokens, idle time included; of computed prompt tokens; "
            "of generated ones.",
            (*label, "phase"),
            registry=registry,
        )
        for phase in _PHASES:
            self._usd.labels(self._model, phase)

    # ---- what comes in -----------------------------------------------------------------------

    def observe(self, stats: EngineStats, last: EngineStats) -> None:
        """Add what an engine's time was used for between two of its reports."""
        each, now, then = self.price.per_second, stats.account, last.account
        before = self._samples[-1]
        prefill = (now.prefill_s - then.prefill_s) * each
        decode = (now.decode_s - then.decode_s) * each
        idle = (now.idle_s - then.idle_s) * each
        if then == Account():  # the time without an engine is paid for too: it is loaded, or asleep
            known_s = now.prefill_s + now.decode_s + now.idle_s
            idle += max(0.0, self._clock() - before.at - known_s) * each
        for phase, dollars in zip(_PHASES, (prefill, decode, idle), strict=True):
            # Differences of long sums may come out a hair below zero.
            self._usd.labels(self._model, phase).inc(max(0.0, dollars))
        saved = max(0.0, (now.saved_s - then.saved_s) * each)
        self._saved.inc(saved)
        self._saved_usd += saved
        self._samples.append(
            _Sample(
                self._clock(),
                before.prefill + prefill,
                before.decode + decode,
                before.idle + idle,
                before.num_prompt
                + stats.num_prompt_tokens_computed
                - last.num_prompt_tokens_computed,
                before.num_output + stats.num_generated_tokens - last.num_generated_tokens,
                before.num_cached + stats.prefix_hits - last.prefix_hits,
            )
        )
        while len(self._samples) > 2 and self._samples[1].at < self._clock() - _WINDOW_S:
            self._samples.popleft()
        for phase, value in self.last_minute().items():
            self._rate.labels(self._model, phase).set(math.nan if value is None else value)

    def charge(self, key: str, trace: RequestTrace) -> None:
        """Add an ended request to what its sender has cost; "": the server's own probes."""
        cost = self.price.of([trace])
        self._by_key[key or "server"] += cost
        self._per_key.labels(self._model, key or "server").inc(max(0.0, cost.total))

    # ---- what is asked -----------------------------------------------------------------------

    def last_minute(self) -> dict[str, float | None]:
        """Dollars per million tokens; None: there were no such tokens."""
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
        """What one key may see: its own sum."""
        own = cost_json(self._by_key.get(key, Cost()))
        return {"price_per_hour": self.price.per_hour, "by_key": {key: own}}

    def summary(self) -> dict[str, Any]:
        """The costs of the whole server, and of every key."""
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


def make_cost_book(
    price_per_hour: float | None, model: str, registry: CollectorRegistry
) -> CostBook | None:
    """None: no price is known."""
    if price_per_hour is None:
        return None
    return CostBook(Price(price_per_hour), model, registry, time.monotonic)
