"""Prometheus metrics of the KV tiers of one replica."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import Counter, Gauge

from windlass.core.types import EngineStats, TierStats

# Fields of TierStats by the name of their counter.
_COUNTERS = {
    "kv_tier_saves": ("num_saves", "KV records (a block of one rank) stored in a tier."),
    "kv_tier_loads": ("num_loads", "KV records loaded from a tier into the device."),
    "kv_tier_load_failures": ("num_failures", "Loads that failed: the tokens were computed."),
    "kv_tier_refused_saves": (
        "num_refused",
        "KV records that a tier did not store: no room, a full queue, or an error.",
    ),
    "kv_tier_corrupt_records": ("num_corrupt", "Damaged or foreign records, which are misses."),
    "kv_tier_evictions": ("num_evictions", "KV records evicted from a tier."),
    "kv_tier_hit_tokens": ("num_hit_tokens", "Prompt tokens whose KV was loaded from a tier."),
}
_GAUGES = {
    "kv_tier_records": ("num_records", "KV records in a tier."),
    "kv_tier_bytes": ("num_bytes", "Bytes of the KV records in a tier."),
    "kv_tier_max_bytes": ("max_bytes", "Size limit of a tier."),
    "kv_tier_load_seconds": ("record_s", "Measured seconds to load one KV record from a tier."),
}


class TierMetrics:
    """Adds differences of stats. `gauges` and `counters` make a metric from name, help and labels."""

    def __init__(
        self,
        *,
        gauges: Callable[..., Gauge],
        counters: Callable[..., Counter],
        labels: tuple[str, ...],
    ) -> None:
        self._labels = labels
        self._gauges = {
            field: gauges(name, help, "tier") for name, (field, help) in _GAUGES.items()
        }
        self._counters = {
            field: counters(name, help, "tier") for name, (field, help) in _COUNTERS.items()
        }
        self._decisions = counters(
            "kv_tier_decisions",
            "Prompts with more cached tokens in a tier than on the device: loaded, recomputed (expected to "
            "be faster), failed, or no_room.",
            "decision",
        )
        self._queries = counters(
            "external_prefix_cache_queries",
            "Prompt tokens that were not on the device and were looked up in KV tiers.",
        )
        self._hits = counters(
            "external_prefix_cache_hits", "Prompt tokens whose KV was loaded from a KV tier."
        )

    def observe(self, stats: EngineStats, last: EngineStats) -> None:
        """Add the difference of two stats; a new engine counts from zero."""
        before = {tier.name: tier for tier in last.tiers}
        num_hits = 0
        for tier in stats.tiers:
            old = before.get(tier.name) or TierStats(name=tier.name)
            labels = *self._labels, tier.name
            for field, gauge in self._gauges.items():
                gauge.labels(*labels).set(getattr(tier, field))
            for field, counter in self._counters.items():
                counter.labels(*labels).inc(max(0, getattr(tier, field) - getattr(old, field)))
            num_hits += tier.num_hit_tokens - old.num_hit_tokens
        for decision, count in stats.tier_decisions.items():
            added = count - last.tier_decisions.get(decision, 0)
            self._decisions.labels(*self._labels, decision.replace(" ", "_")).inc(added)
        num_queries = stats.prefix_queries - last.prefix_queries
        num_on_device = stats.prefix_hits - last.prefix_hits - num_hits
        self._queries.labels(*self._labels).inc(max(0, num_queries - num_on_device))
        self._hits.labels(*self._labels).inc(num_hits)
