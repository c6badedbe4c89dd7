"""Shows metrics under vLLM's names, for dashboards and autoscalers that read those."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, Metric

PREFIX = "windlass:"
VLLM_PREFIX = "vllm:"
MetricsPrefix = Literal["windlass", "vllm", "both"]

# Metrics that mean the same in vLLM, without prefix and `_total`.
VLLM_NAMES = frozenset(
    {
        *("num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason"),
        *("kv_cache_usage_perc", "engine_sleep_state", "lora_requests_info", "cache_config_info"),
        *("prompt_tokens", "prompt_tokens_by_source", "prompt_tokens_cached", "generation_tokens"),
        *("request_success", "num_preemptions", "prefix_cache_queries", "prefix_cache_hits"),
        *("external_prefix_cache_queries", "external_prefix_cache_hits"),
        *("admission_rejections", "spec_decode_num_drafts", "spec_decode_num_draft_tokens"),
        *("spec_decode_num_accepted_tokens", "spec_decode_num_accepted_tokens_per_pos"),
        *("time_to_first_token_seconds", "inter_token_latency_seconds"),
        *("request_time_per_output_token_seconds", "e2e_request_latency_seconds"),
        *("request_queue_time_seconds", "request_inference_time_seconds"),
        *("request_prefill_time_seconds", "request_decode_time_seconds"),
        *("request_prompt_tokens", "request_generation_tokens", "request_num_preemptions"),
        *("request_max_num_generation_tokens", "request_prefill_kv_computed_tokens"),
        *("request_params_n", "request_params_max_tokens", "iteration_tokens_total"),
    }
)
_BY_REASON = "num_requests_waiting_by_reason"
# Reasons for which vLLM passes over a request; it calls all others a lack of capacity.
_DEFERRED = ("adapter", "grammar", "shared_prefix", "sample")


@dataclass(frozen=True, slots=True)
class Naming:
    """Which names `/metrics` shows."""

    prefix: MetricsPrefix
    num_replicas: int

    def apply(self, registry: CollectorRegistry) -> CollectorRegistry:
        return registry if self.prefix == "windlass" else _RenamedRegistry(registry, self)

    def as_vllm(self, metric: Metric) -> Metric | None:
        """The metric under vLLM's name and with its label `engine`; None: vLLM has no such metric."""
        name = metric.name.removeprefix(PREFIX)
        if name not in VLLM_NAMES:
            return None
        renamed = Metric(VLLM_PREFIX + name, metric.documentation, metric.type)
        for sample in metric.samples:
            labels = dict(sample.labels)
            if "replica" in labels:
                labels["engine"] = labels.pop("replica")
            elif self.num_replicas == 1:
                labels["engine"] = "0"
            renamed.add_sample(VLLM_PREFIX + sample.name.removeprefix(PREFIX), labels, sample.value)
        return _with_vllm_reasons(renamed) if name == _BY_REASON else renamed


def _with_vllm_reasons(metric: Metric) -> Metric:
    """Add up the reasons to vLLM's two."""
    sums: dict[tuple[tuple[str, str], ...], float] = {}
    for sample in metric.samples:
        reason = "deferred" if sample.labels["reason"] in _DEFERRED else "capacity"
        key = tuple({**sample.labels, "reason": reason}.items())
        sums[key] = sums.get(key, 0.0) + sample.value
    added = Metric(metric.name, metric.documentation, metric.type)
    for labels, value in sums.items():
        added.add_sample(metric.name, dict(labels), value)
    return added


class _RenamedRegistry(CollectorRegistry):
    """Shows another registry with vLLM's names, instead of or beside its own."""

    def __init__(self, registry: CollectorRegistry, naming: Naming) -> None:
        super().__init__()
        self._registry = registry
        self._naming = naming

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            renamed = self._naming.as_vllm(metric)
            if renamed is None or self._naming.prefix == "both":
                yield metric
            if renamed is not None:
                yield renamed
