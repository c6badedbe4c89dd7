"""Requests of one token beside a load, at a steady rate: how long somebody else waits meanwhile.

They count neither as requests of the load nor against its limit of concurrency. Fields and lines
have the names of `vllm bench serve --probe-request-rate`.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from windlass.tools.common.requests import TextRequest
from windlass.tools.common.summary import line_of, percentile, values_of
from windlass.tools.common.timing import Timing
from windlass.tools.load.drive import Send

_PROBE = TextRequest(max_tokens=1, prompt="Yes or no?")


class Probes:
    """Owns the timings of those that have ended."""

    def __init__(self, send: Send, rate: float) -> None:
        self._send = send
        self._pause_s = 1 / rate
        self._timings: list[Timing] = []

    async def watch(self) -> None:
        """Until cancelled; those under way then are not counted."""
        began, number = time.perf_counter(), 0
        async with asyncio.TaskGroup() as group:
            while True:
                due = began + number * self._pause_s
                await asyncio.sleep(due - time.perf_counter())
                group.create_task(self._one(due))
                number += 1

    async def _one(self, due: float) -> None:
        self._timings.append(await self._send(_PROBE, due))

    def row(self) -> dict[str, Any]:
        """Nothing where no probe has ended."""
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
        row = self.row()
        return [line_of(titles[name], value) for name, value in row.items()]
