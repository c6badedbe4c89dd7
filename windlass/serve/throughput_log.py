"""Logs the rates of the engines at intervals, as long as requests run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from windlass.core.types import EngineStats
from windlass.serve.live_config import LiveConfig

_log = logging.getLogger("windlass.serve")

# Counters of EngineStats, which a restarted engine counts from zero.
_COUNTERS = (
    *("num_prompt_tokens_computed", "num_generated_tokens", "prefix_queries", "prefix_hits"),
    *("num_draft_tokens", "num_accepted_tokens"),
)
_TEXT = (
    "prompts %(prompt_tokens_per_s).1f tok/s, generation %(generated_tokens_per_s).1f tok/s, "
    "%(running)d running, %(waiting)d queued, KV cache %(kv_cache_percent).1f %% used, "
    "prefix cache hits %(prefix_hit_percent).1f %%"
)
_DRAFTS = ", accepted draft tokens %(accepted_draft_percent).1f %%"


class _HasStats(Protocol):
    @property
    def stats(self) -> EngineStats: ...


class ThroughputLog:
    """Owns the counters of the last line."""

    def __init__(self, num_replicas: int) -> None:
        self._last = [EngineStats()] * num_replicas
        self._was_busy = False

    async def run(self, replicas: Sequence[_HasStats], config: LiveConfig) -> None:
        """Log a line every --log-stats-interval seconds; never returns."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            if await config.changed(config.value.log_stats_interval or None):
                continue
            now = loop.time()
            fields = self.rates([replica.stats for replica in replicas], now - began)
            began = now
            if fields is not None:
                text = _TEXT + (_DRAFTS if "accepted_draft_percent" in fields else "")
                _log.info(text, fields, extra={"fields": fields})

    def rates(self, stats: Sequence[EngineStats], seconds: float) -> dict[str, float] | None:
        """Rates since the last call; None: the engines were idle now and at the last call."""
        done = dict.fromkeys(_COUNTERS, 0)
        for now, last in zip(stats, self._last, strict=True):
            for name in _COUNTERS:
                count, before = getattr(now, name), getattr(last, name)
                done[name] += count - before if count >= before else count
        self._last = list(stats)
        running = sum(each.num_running for each in stats)
        waiting = sum(each.num_waiting for each in stats)
        blocks = sum(each.num_blocks for each in stats)
        is_busy = bool(running or waiting or any(done.values()))
        was_busy, self._was_busy = self._was_busy, is_busy
        if not (is_busy or was_busy):
            return None
        rates = {
            "prompt_tokens_per_s": done["num_prompt_tokens_computed"] / seconds,
            "generated_tokens_per_s": done["num_generated_tokens"] / seconds,
            "running": running,
            "waiting": waiting,
            "kv_cache_percent": _percent(sum(each.num_used_blocks for each in stats), blocks),
            "prefix_hit_percent": _percent(done["prefix_hits"], done["prefix_queries"]),
        }
        if done["num_draft_tokens"]:
            accepted = _percent(done["num_accepted_tokens"], done["num_draft_tokens"])
            rates["accepted_draft_percent"] = accepted
        return {name: round(rate, 1) for name, rate in rates.items()}


def _percent(part: int, whole: int) -> float:
    return 100 * part / whole if whole else 0.0
