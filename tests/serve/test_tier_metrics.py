"""Metrics and explanations of KV tiers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from windlass.core.types import EngineStats, TierStats, Timeline
from windlass.serve.metrics import Metrics

HOST = TierStats(
    name="host",
    num_records=5,
    num_bytes=500,
    max_bytes=1000,
    num_saves=7,
    num_loads=4,
    num_failures=1,
    num_hit_tokens=64,
    record_s=0.002,
)
FIRST = EngineStats(
    prefix_queries=200, prefix_hits=100, tiers=(HOST,), tier_decisions={"no room": 1}
)


def sample(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"windlass:{name}", {"model_name": "m", **labels})


@pytest.fixture
def metrics() -> Metrics:
    metrics = Metrics("m")
    metrics.observe_stats(FIRST, EngineStats())
    return metrics


def test_a_tier_has_its_content_and_its_counters(metrics: Metrics) -> None:
    found = {
        name: sample(metrics, f"kv_tier_{name}", tier="host")
        for name in ("records", "bytes", "max_bytes", "load_seconds", "loads_total", "saves_total")
    }
    assert list(found.values()) == [5, 500, 1000, 0.002, 4, 7]
    assert sample(metrics, "kv_tier_load_failures_total", tier="host") == 1
    assert sample(metrics, "kv_tier_hit_tokens_total", tier="host") == 64
    assert sample(metrics, "kv_tier_decisions_total", decision="no_room") == 1
    # 36 tokens were on the device; the other 164 were looked up in the tier.
    assert sample(metrics, "external_prefix_cache_queries_total") == 164
    assert sample(metrics, "external_prefix_cache_hits_total") == 64


def test_counters_go_on_after_a_restart_of_the_engine(metrics: Metrics) -> None:
    metrics.observe_stats(replace(FIRST, tiers=(replace(HOST, num_loads=6, num_bytes=600),)), FIRST)
    metrics.observe_stats(FIRST, EngineStats())
    assert sample(metrics, "kv_tier_loads_total", tier="host") == 10
    assert sample(metrics, "kv_tier_bytes", tier="host") == 500


def test_an_engine_without_tiers_has_no_such_samples() -> None:
    metrics = Metrics("m")
    metrics.observe_stats(EngineStats(prefix_queries=5), EngineStats())
    assert sample(metrics, "kv_tier_loads_total", tier="host") is None
    assert sample(metrics, "external_prefix_cache_queries_total") is None


def test_prompt_tokens_are_counted_by_their_source(metrics: Metrics) -> None:
    line = Timeline(num_prompt=100, num_cached=80, num_loaded=64)
    metrics.first_token(0.1, line, "t")
    counts = [
        sample(metrics, "prompt_tokens_by_source_total", source=source)
        for source in ("local_compute", "local_cache_hit", "external_kv_transfer")
    ]
    assert counts == [20, 16, 64]
    assert sample(metrics, "prompt_tokens_cached_total") == 80
