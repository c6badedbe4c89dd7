"""Tasks that run beside a load: polling the server's metrics, probe requests, a progress line."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from windlass.tools.common.requests import TextRequest, Timing
from windlass.tools.common.summary import line_of, percentile, values_of
from windlass.tools.load.generator import LoadGenerator, Send
from windlass.tools.load.server import Server

# Names of the same metrics in Windlass, vLLM, SGLang and llama.cpp's server.
_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{[^}]*\})?\s+(\S+)", re.MULTILINE)
_PREFIXES = ("windlass:", "vllm:", "sglang:", "llamacpp:")
_RUNNING = ("num_requests_running", "num_running_reqs", "requests_processing")
_WAITING = ("num_requests_waiting", "num_queue_reqs", "requests_deferred")
_KV = ("kv_cache_usage_perc", "gpu_cache_usage_perc", "token_usage", "kv_cache_usage_ratio")
_COUNTERS = {
    "num_drafts": "spec_decode_num_drafts_total",
    "num_draft_tokens": "spec_decode_num_draft_tokens_total",
    "num_accepted_tokens": "spec_decode_num_accepted_tokens_total",
    "num_preemptions": "num_preemptions_total",
}
_PROBE = TextRequest(max_tokens=1, prompt="Yes or no?")
_REFRESH_S = 0.25
_RECENT_S = 5.0


@dataclass(frozen=True, slots=True)
class MetricsSample:
    """One read of /metrics; None: not reported."""

    at: float
    running: float | None = None
    waiting: float | None = None
    kv: float | None = None  # share of the cache in use, 0 to 1
    counters: dict[str, float] = field(default_factory=dict)


def parse(text: str, at: float) -> MetricsSample:
    """Parse Prometheus text. Over labels, request counts are summed and shares take the maximum."""
    by_prefix: dict[str, dict[str, list[float]]] = {prefix: {} for prefix in _PREFIXES}
    for name, value in _LINE.findall(text):
        prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), None)
        number = _as_number(value)
        if prefix is not None and not math.isnan(number):
            by_prefix[prefix].setdefault(name.removeprefix(prefix), []).append(number)
    found: dict[str, list[float]] = {}
    for values in reversed(by_prefix.values()):  # the same metric may have two names
        found |= values

    def first(names: tuple[str, ...]) -> list[float]:
        return next((found[name] for name in names if name in found), [])

    running, waiting, kv = first(_RUNNING), first(_WAITING), first(_KV)
    return MetricsSample(
        at=at,
        running=sum(running) if running else None,
        waiting=sum(waiting) if waiting else None,
        kv=max(kv) if kv else None,
        counters={key: sum(found[name]) for key, name in _COUNTERS.items() if name in found},
    )


def _as_number(text: str) -> float:
    """Parse a metric's value; NaN if it is not a number."""
    try:
        return float(text)
    except ValueError:
        return math.nan


class MetricsPoller:
    """Polls a server's /metrics and owns the samples. A server without it has no samples."""

    def __init__(self, server: Server, interval_s: float = 0.5) -> None:
        self._server = server
        self._interval_s = interval_s
        self.samples: list[MetricsSample] = []

    async def read(self) -> MetricsSample | None:
        text = await self._server.text("/metrics")
        if text is None:
            return None
        sample = parse(text, time.perf_counter())
        self.samples.append(sample)
        return sample

    async def run(self) -> None:
        """Poll until cancelled, or until the server has no metrics."""
        while await self.read() is not None:
            await asyncio.sleep(self._interval_s)


def speculation(samples: Sequence[MetricsSample]) -> dict[str, float]:
    """Acceptance between the first sample and the last, under vLLM's names."""
    if len(samples) < 2:
        return {}
    first, last = samples[0].counters, samples[-1].counters
    drafts, drafted, accepted = (
        last.get(key, 0) - first.get(key, 0)
        for key in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    )
    if drafts <= 0 or drafted <= 0:
        return {}
    return {
        "spec_decode_acceptance_rate": round(100 * accepted / drafted, 2),
        "spec_decode_acceptance_length": round(1 + accepted / drafts, 3),
        "spec_decode_num_drafts": drafts,
        "spec_decode_draft_tokens": drafted,
        "spec_decode_accepted_tokens": accepted,
    }


class Probes:
    """Sends single-token requests at a constant rate to measure the latency of other clients.

    They are not counted as requests of the load, nor against its concurrency limit. Names are those
    of `vllm bench serve --probe-request-rate`.
    """

    def __init__(self, send: Send, rate: float) -> None:
        self._send = send
        self._interval_s = 1 / rate
        self._timings: list[Timing] = []

    async def run(self) -> None:
        """Send until cancelled; probes in flight at that time are not counted."""
        began, number = time.perf_counter(), 0
        async with asyncio.TaskGroup() as group:
            while True:
                due = began + number * self._interval_s
                await asyncio.sleep(due - time.perf_counter())
                group.create_task(self._send_one(due))
                number += 1

    async def _send_one(self, due: float) -> None:
        self._timings.append(await self._send(_PROBE, due))

    def row(self) -> dict[str, Any]:
        """Figures of the finished probes; empty without any."""
        if not self._timings:
            return {}
        times = values_of(self._timings, "e2el")
        row: dict[str, Any] = {
            "probe_completed": len(times),
            "probe_failed": len(self._timings) - len(times),
        }
        if times:
            row["probe_median_e2el_ms"] = round(percentile(times, 50), 4)
            row["probe_p99_e2el_ms"] = round(percentile(times, 99), 4)
            row["probe_max_e2el_ms"] = round(times[-1], 4)
        return row

    def lines(self) -> list[str]:
        titles = {
            "probe_completed": "Probe requests completed:",
            "probe_failed": "Probe requests failed:",
            "probe_median_e2el_ms": "Median probe E2EL (ms):",
            "probe_p99_e2el_ms": "P99 probe E2EL (ms):",
            "probe_max_e2el_ms": "Max probe E2EL (ms):",
        }
        return [line_of(titles[name], value) for name, value in self.row().items()]


@dataclass(slots=True)
class ProgressLine:
    """A line with the state of a run; owns the chunk counts of the last seconds."""

    title: str
    generator: LoadGenerator
    samples: Sequence[MetricsSample]
    num_chunks: Callable[[], int]
    _counts: deque[tuple[float, int]] = field(default_factory=deque)

    def _chunks_per_s(self, now: float) -> float:
        self._counts.append((now, self.num_chunks()))
        while self._counts[0][0] < now - _RECENT_S:
            self._counts.popleft()
        (first_at, first), (last_at, last) = self._counts[0], self._counts[-1]
        return (last - first) / (last_at - first_at) if last_at > first_at else 0.0

    def _line(self, now: float) -> str:
        """Requests, recent speed, and the server's queue and KV cache usage."""
        timings = self.generator.timings
        num_failed = sum(not timing.is_good for timing in timings)
        parts = [self.title, f"{len(timings)}/{len(self.generator.requests)} done"]
        if num_failed:
            parts.append(f"{num_failed} failed")
        parts.append(f"{self.generator.num_running} running")
        parts.append(f"{self._chunks_per_s(now):.0f} chunks/s")
        recent = [timing for timing in timings if timing.ended_at > now - _RECENT_S]
        ttfts = sorted(1e3 * timing.ttft for timing in recent if timing.ttft is not None)
        if ttfts:
            parts.append(f"TTFT {percentile(ttfts, 50):.0f} ms")
        if self.samples:
            last = self.samples[-1]
            if last.waiting is not None:
                parts.append(f"queue {last.waiting:g}")
            if last.kv is not None:
                parts.append(f"KV {last.kv:.0%}")
        return " · ".join([*parts, f"{now - self.generator.began:.0f} s"])

    async def show(self) -> None:
        """Refresh the line on stderr until cancelled, if that is a terminal."""
        console = Console(stderr=True)
        if not console.is_terminal:
            return
        with Live(console=console, auto_refresh=False, transient=True) as live:
            while True:
                live.update(Text(self._line(time.perf_counter()), no_wrap=True), refresh=True)
                await asyncio.sleep(_REFRESH_S)
