"""Metrics by tenant: of one process, and of HTTP workers; the number of labels is bounded."""

from __future__ import annotations

import re

import httpx
from prometheus_client import CollectorRegistry, generate_latest

from tests.serve.conftest import Server, running
from windlass.core.types import Timeline
from windlass.serve.metric_samples import MetricSample
from windlass.serve.tenant_metrics import TenantMetrics

KEYS = ("sk-alpha", "sk-beta", "sk-gamma")


def send(server: Server, key: str, **body: object) -> int:
    headers = {"Authorization": f"Bearer {key}"}
    request = {"prompt": f"Hi {key}", "max_tokens": 4, **body}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as http:
        return http.post("/v1/completions", json=request).status_code


def tenants_of(text: str) -> set[str]:
    return set(re.findall(r'^windlass:tenant_\w+\{.*tenant="(\w+)"', text, re.MULTILINE))


def test_tenants_of_all_workers_have_their_own_counts_up_to_a_limit() -> None:
    options = {"api_key": KEYS, "admin_key": ("boss",), "max_metric_tenants": 2}
    with running(http_workers=2, **options) as server:  # type: ignore[arg-type]
        server.http.headers["Authorization"] = "Bearer boss"
        for key in KEYS:
            assert [send(server, key) for _ in range(3)] == [200] * 3
            assert send(server, key, temperature=-1) == 400
        text = server.http.get("/metrics").text
        tenants = tenants_of(text)
        assert len(tenants) == 3
        assert "other" in tenants
        for tenant in tenants:
            outcomes = (
                server.metric("tenant_requests_total", tenant=tenant, outcome=outcome)
                for outcome in ("success", "rejected", "error", "aborted")
            )
            assert list(outcomes) == [3, 1, 0, 0]
            assert server.metric("tenant_generation_tokens_total", tenant=tenant) == 3 * 4
            assert server.metric("tenant_prompt_tokens_total", tenant=tenant) > 0
            for name in ("time_to_first_token_seconds", "queue_time_seconds"):
                assert server.metric(f"tenant_{name}_count", tenant=tenant) == 3
        for key in KEYS:
            assert key not in text


def test_a_tenant_keeps_its_label() -> None:
    registry = CollectorRegistry()
    metrics = TenantMetrics(registry, "m", max_tenants=1)
    metrics.ended("a", "success")
    metrics.first_token("b", 0.5, Timeline(num_prompt=3, num_cached=2, admitted=1.0))
    metrics.finished("c", 7)
    lines = generate_latest(registry).decode().splitlines()
    labels = 'model_name="m",tenant="other"'
    assert f"windlass:tenant_prompt_tokens_total{{{labels}}} 3.0" in lines
    assert f"windlass:tenant_generation_tokens_total{{{labels}}} 7.0" in lines
    sample = MetricSample("windlass:tenant_requests_total", {"tenant": "b"}, 1.0)
    assert metrics.relabelled(sample).labels == {"tenant": "other"}
    known = MetricSample("windlass:tenant_requests_total", {"tenant": "a"}, 1.0)
    assert metrics.relabelled(known) == known
