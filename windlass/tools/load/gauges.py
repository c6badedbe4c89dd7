"""What a server says of itself while it is under load: requests running and waiting, KV in use.

Reads Prometheus text under the names of Windlass, vLLM, SGLang and llama.cpp's server. A server
without /metrics is measured all the same; then there is nothing to show.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from dataclasses import dataclass, field

from windlass.tools.load.server import Server, as_number

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


@dataclass(frozen=True, slots=True)
class Reading:
    """One look at /metrics; None: it does not say."""

    at: float
    running: float | None = None
    waiting: float | None = None
    kv: float | None = None  # share of the cache in use, 0 to 1
    counters: dict[str, float] = field(default_factory=dict)


def parse(text: str, at: float) -> Reading:
    """The gauges of all labels together: requests are added, of shares the largest counts."""
    found: dict[str, list[float]] = {}
    for name, value in _LINE.findall(text):
        prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), None)
        number = as_number(value)
        if prefix is not None and not math.isnan(number):
            found.setdefault(name.removeprefix(prefix), []).append(number)

    def first(names: tuple[str, ...]) -> list[float]:
        return next((found[name] for name in names if name in found), [])

    running, waiting, kv = first(_RUNNING), first(_WAITING), first(_KV)
    return Reading(
        at,
        sum(running) if running else None,
        sum(waiting) if waiting else None,
        max(kv) if kv else None,
        {key: sum(found[name]) for key, name in _COUNTERS.items() if name in found},
    )


class Gauges:
    """Looks at a server's metrics again and again. Owns the readings."""

    def __init__(self, server: Server, pause_s: float = 0.5) -> None:
        self._server = server
        self._pause_s = pause_s
        self.readings: list[Reading] = []

    async def read(self) -> Reading | None:
        text = await self._server.text("/metrics")
        if text is None:
            return None
        reading = parse(text, time.perf_counter())
        self.readings.append(reading)
        return reading

    async def watch(self) -> None:
        """Until cancelled; a server that has no metrics at first is not asked again."""
        while await self.read() is not None:
            await asyncio.sleep(self._pause_s)


def speculation(readings: list[Reading]) -> dict[str, float]:
    """What guessing gave between the first reading and the last, under vLLM's names."""
    if len(readings) < 2:
        return {}
    first, last = readings[0].counters, readings[-1].counters
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
