"""The names of metrics: ours, vLLM's or both, and which metrics there are."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.serve.conftest import Server, running
from windlass.core.types import AdapterStats, EngineStats
from windlass.serve.metrics import Metrics
from windlass.serve.vllm_metrics import VLLM_NAMES

# The names of vLLM that are dashboards' and autoscalers' favourites, as they are on the wire.
WIRE_NAMES = (
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info"),
    *("prompt_tokens_total", "generation_tokens_total", "request_success_total"),
    *("prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total"),
    *("time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket"),
    *("request_inference_time_seconds_bucket", "request_max_num_generation_tokens_bucket"),
    *("e2e_request_latency_seconds_count", "iteration_tokens_total_bucket"),
)


def names_of(text: str) -> set[str]:
    return set(re.findall(r"^([\w:]+)\{", text, re.MULTILINE))


def _families(text: str) -> dict[str, Metric]:
    return {each.name: each for each in text_string_to_metric_families(text)}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(metrics_prefix="both") as server:
        assert server.complete(max_tokens=4, n=2).status_code == 200
        yield server


def test_both_names_have_the_same_values(server: Server) -> None:
    text = server.http.get("/metrics").text
    assert {f"vllm:{name}" for name in WIRE_NAMES} <= names_of(text)
    families = _families(text)
    for name in VLLM_NAMES - {"num_requests_waiting_by_reason"}:
        ours, theirs = families[f"windlass:{name}"], families[f"vllm:{name}"]
        assert ours.type == theirs.type
        for mine, alias in zip(ours.samples, theirs.samples, strict=True):
            assert alias.name == mine.name.replace("windlass:", "vllm:")
            assert alias.labels == {**mine.labels, "engine": "0"}
            assert alias.value == mine.value


def test_vllms_names_replace_ours_where_there_are_two() -> None:
    text = Metrics("m", prefix="vllm").render([True]).decode()
    names = {each for each in _families(text) if not each.endswith("_created")}
    assert {each.removeprefix("vllm:") for each in names if each.startswith("vllm:")} == VLLM_NAMES
    ours = {each.removeprefix("windlass:") for each in names if each.startswith("windlass:")}
    assert not ours & VLLM_NAMES
    assert "requests_in_flight" in ours


def test_replicas_are_engines_of_vllm() -> None:
    metrics = Metrics("m", num_replicas=2, prefix="vllm")
    metrics.observe_stats(EngineStats(num_running=3), EngineStats(), replica=1)
    text = metrics.render([True, True]).decode()
    assert 'vllm:num_requests_running{engine="1",model_name="m"} 3.0' in text
    assert 'vllm:time_to_first_token_seconds_count{model_name="m"} 0.0' in text


def test_the_queue_has_reasons_and_vllm_two_of_them() -> None:
    metrics = Metrics("m", prefix="both")
    waiting = {"blocks": 2, "sequences": 1, "grammar": 3, "shared prefix": 4, "next step": 5}
    metrics.observe_stats(EngineStats(waiting_by_reason=waiting), EngineStats())
    text = metrics.render([True]).decode()
    for reason, count in waiting.items():
        labels = f'model_name="m",reason="{reason.replace(" ", "_")}"'
        assert f"windlass:num_requests_waiting_by_reason{{{labels}}} {count}.0" in text
    for reason, count in {"capacity": 8, "deferred": 7}.items():
        labels = f'engine="0",model_name="m",reason="{reason}"'
        assert f"vllm:num_requests_waiting_by_reason{{{labels}}} {count}.0" in text
    metrics.observe_stats(EngineStats(), EngineStats())
    assert 'by_reason{model_name="m",reason="blocks"} 0.0' in metrics.render([True]).decode()


def test_only_the_current_adapters_are_shown() -> None:
    metrics, last = Metrics("m"), EngineStats()

    def observe(running: tuple[str, ...], waiting: tuple[str, ...]) -> list[str]:
        adapters = AdapterStats(
            num_resident=1,
            num_in_memory=1,
            num_loaded=2,
            num_waiting=0,
            num_reads=1,
            num_slots=4,
            running=running,
            waiting=waiting,
        )
        metrics.observe_stats(EngineStats(adapters=adapters), last)
        text = metrics.render([True]).decode()
        return re.findall(r"^windlass:lora_requests_info\{(.*)\} [\d.e+]+$", text, re.MULTILINE)

    head = 'max_lora="4",model_name="m",'
    first = 'running_lora_adapters="a,b",waiting_lora_adapters="c"'
    assert observe(("a", "b"), ("c",)) == [head + first]
    assert observe((), ()) == [head + 'running_lora_adapters="",waiting_lora_adapters=""']


def test_requests_have_the_tokens_and_times_of_their_phases(server: Server) -> None:
    assert server.metric("cache_config_info", block_size="16", num_gpu_blocks="4096") == 1
    before = server.metric("request_max_num_generation_tokens_sum")
    assert server.complete(prompt=["a b", "c"], max_tokens=3, n=2).status_code == 200
    assert server.metric("request_max_num_generation_tokens_sum") == before + 2 * 3
    num_finished = server.metric("request_success_total")
    for name in ("request_inference_time_seconds", "request_num_preemptions"):
        assert server.metric(f"{name}_count") == num_finished
    inference_s = server.metric("request_inference_time_seconds_sum")
    phases = [server.metric(f"request_{each}_time_seconds_sum") for each in ("prefill", "decode")]
    assert inference_s == pytest.approx(sum(phases))
    num_prompt = server.metric("prompt_tokens_total")
    assert server.metric("prompt_tokens_by_source_total") == num_prompt
    computed = server.metric("prompt_tokens_by_source_total", source="local_compute")
    assert server.metric("request_prefill_kv_computed_tokens_sum") == computed
    assert computed == num_prompt - server.metric("prompt_tokens_cached_total")


def test_blocks_and_engine_time_are_accounted_for(server: Server) -> None:
    server.complete(max_tokens=20)
    assert server.metric("kv_cache_blocks") == 4096
    assert server.metric("kv_cache_blocks", state="used") == 0
    assert server.metric("kv_cache_blocks", state="cached") > 0
    assert server.metric("prompt_tokens_computed_total") > 0
    assert server.metric("engine_seconds_total", phase="decode") > 0
    assert server.metric("engine_seconds_total", phase="idle") > 0
