"""Metrics without a server: differences between the engine's stats."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from tests.serve.conftest import Server
from windlass.core.types import EngineStats, ExpertStats, StepResult, Timeline
from windlass.serve.fast_histogram import FastHistogram
from windlass.serve.messages import Stats, decode_from_engine, encode
from windlass.serve.metrics import Metrics


def test_executors_and_their_refusals_are_counted() -> None:
    metrics, before = Metrics("m"), EngineStats()
    refusals = (("decode graph", "no draft tokens"), ("mixed graph", "a row is deterministic"))
    before.count_executor(StepResult([], executor="decode graph"))
    after = EngineStats(num_steps=3, executors=dict(before.executors))
    for _ in range(2):
        after.count_executor(StepResult([], executor="eager", refusals=refusals))
    metrics.observe_stats(before, EngineStats())
    (message,) = decode_from_engine(encode([Stats(after, 0)]))
    metrics.observe_stats(message.stats, before)
    lines = metrics.render([True]).decode().splitlines()
    assert 'windlass:steps_total{executor="eager",model_name="m"} 2.0' in lines
    labels = 'executor="mixed graph",model_name="m",reason="a row is deterministic"'
    assert f"windlass:executor_refusals_total{{{labels}}} 2.0" in lines


def test_the_load_of_experts_has_gauges_by_layer() -> None:
    metrics, none = Metrics("m"), EngineStats()
    metrics.observe_stats(none, none)
    assert "imbalance{" not in metrics.render([True]).decode()
    after = EngineStats(experts=ExpertStats({3: 2.5}, {3: 1.25}))
    (message,) = decode_from_engine(encode([Stats(after, 0)]))
    metrics.observe_stats(message.stats, none)
    lines = metrics.render([True]).decode().splitlines()
    assert 'windlass:expert_imbalance{layer="3",model_name="m"} 2.5' in lines
    assert 'windlass:expert_rank_imbalance{layer="3",model_name="m"} 1.25' in lines


def test_draft_tokens_have_vllms_metric_names() -> None:
    metrics, before = Metrics("m"), EngineStats()
    before.count_draft(Timeline(), 2, 1)
    metrics.observe_stats(before, EngineStats())
    after = EngineStats(num_drafts=1, num_draft_tokens=2, num_accepted_tokens=1)
    after.accepted_per_position = [1, 0]
    after.count_draft(Timeline(), 3, 3)
    after.add([4, 1, 0], drafting_s=0.5)
    (message,) = decode_from_engine(encode([Stats(after, 0)]))
    metrics.observe_stats(message.stats, before)
    lines = metrics.render([True]).decode().splitlines()
    prefix, label = "windlass:spec_decode_num_", 'model_name="m"'
    assert f"{prefix}drafts_total{{{label}}} 2.0" in lines
    assert f"{prefix}draft_tokens_total{{{label}}} 5.0" in lines
    assert f"{prefix}accepted_tokens_total{{{label}}} 4.0" in lines
    assert f"{prefix}tokens_saved_total{{{label}}} 3.0" in lines
    assert f"windlass:spec_decode_draft_seconds_total{{{label}}} 0.5" in lines
    assert f"windlass:spec_decode_acceptance_length{{{label}}} 3.0" in lines
    for at, count in enumerate((2, 1, 1)):
        name = f"{prefix}accepted_tokens_per_pos_total"
        assert f'{name}{{{label},position="{at}"}} {count}.0' in lines


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 4))))
def test_a_fast_histogram_exports_like_a_histogram(seen: list[tuple[float, int]]) -> None:
    """Also for values on bucket bounds; only the creation time differs."""
    ours, reference = CollectorRegistry(), CollectorRegistry()
    bounds = (0.5, 1, 2.5, 40)
    fast = FastHistogram(
        "x:y_seconds", "Help.", label=("model_name", "m"), buckets=bounds, registry=ours
    )
    histogram = Histogram(
        "x:y_seconds", "Help.", ("model_name",), registry=reference, buckets=bounds
    )
    histogram.labels("m")
    for amount, times in [*seen, *((bound, 1) for bound in bounds)]:
        fast.observe(amount, times)
        for _ in range(times):
            histogram.labels("m").observe(amount)

    def read(registry: CollectorRegistry) -> tuple[list[bytes], list[float]]:
        lines = generate_latest(registry).splitlines()
        sums = [float(line.split()[-1]) for line in lines if line.startswith(b"x:y_seconds_sum")]
        return [each for each in lines if not re.search(rb"_(sum|created)\{", each)], sums

    (names, sums), (expected_names, expected_sums) = read(ours), read(reference)
    assert names == expected_names
    assert sums == pytest.approx(expected_sums)


def test_rendering_and_tokenizing_have_histograms(server: Server) -> None:
    def counts() -> tuple[float, float]:
        names = ("template", "tokenize")
        first, second = (server.metric(f"request_{name}_time_seconds_count") for name in names)
        return first, second

    templates, prompts = counts()
    assert server.complete(max_tokens=1).status_code == 200
    assert counts() == (templates, prompts + 1)
    assert server.chat(max_tokens=1).status_code == 200
    assert counts() == (templates + 1, prompts + 2)
    assert server.metric("request_tokenize_time_seconds_sum") > 0
