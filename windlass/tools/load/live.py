"""A run while it goes on: one line in the terminal, made anew four times a second."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.live import Live
from rich.text import Text

from windlass.tools.common.summary import percentile
from windlass.tools.load.drive import Drive
from windlass.tools.load.gauges import Reading

_PAUSE_S = 0.25
_RECENT_S = 5.0


@dataclass(slots=True)
class View:
    """What there is to look at; owns the last seconds' counts of chunks."""

    title: str
    drive: Drive
    readings: Sequence[Reading]
    num_chunks: Callable[[], int]
    _counts: deque[tuple[float, int]] = field(default_factory=deque)

    def _chunks_a_second(self, now: float) -> float:
        self._counts.append((now, self.num_chunks()))
        while self._counts[0][0] < now - _RECENT_S:
            self._counts.popleft()
        (first_at, first), (last_at, last) = self._counts[0], self._counts[-1]
        return (last - first) / (last_at - first_at) if last_at > first_at else 0.0

    def line(self, now: float) -> str:
        """Requests, the last seconds' speed, and the server's own gauges."""
        ended = self.drive.timings
        num_bad = sum(not timing.is_good for timing in ended)
        parts = [self.title, f"{len(ended)}/{len(self.drive.requests)} done"]
        if num_bad:
            parts.append(f"{num_bad} failed")
        parts.append(f"{self.drive.num_running} running")
        parts.append(f"{self._chunks_a_second(now):.0f} chunks/s")
        recent = [timing for timing in ended if timing.ended_at > now - _RECENT_S]
        first = sorted(1e3 * timing.ttft for timing in recent if timing.ttft is not None)
        if first:
            parts.append(f"TTFT {percentile(first, 50):.0f} ms")
        if self.readings:
            last = self.readings[-1]
            if last.waiting is not None:
                parts.append(f"queue {last.waiting:g}")
            if last.kv is not None:
                parts.append(f"KV {last.kv:.0%}")
        return " · ".join([*parts, f"{now - self.drive.began:.0f} s"])


class Progress:
    """Owns the line. Nothing is shown where stderr is no terminal."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)

    async def follow(self, view: View) -> None:
        """Until cancelled."""
        if not self._console.is_terminal:
            return
        with Live(console=self._console, auto_refresh=False, transient=True) as live:
            while True:
                live.update(Text(view.line(time.perf_counter()), no_wrap=True), refresh=True)
                await asyncio.sleep(_PAUSE_S)
