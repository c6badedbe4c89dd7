"""Sends the requests of a load at their arrival times and keeps all timings, however the run ends.

Independent of HTTP: `send` may be a client or an in-process engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from windlass.tools.common.requests import TextRequest, Timing

Send = Callable[[TextRequest, float], Awaitable[Timing]]

INTERRUPTED = "interrupted"
DEAD = "the server stopped responding"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished run. `num_left` requests were not sent, or were in flight when it stopped."""

    timings: list[Timing]  # in the order in which the requests finished
    began: float
    duration: float
    num_left: int = 0
    stopped: str | None = None  # why it ended early


class LoadGenerator:
    """One run of one load. Owns its timings, which can be read while it runs."""

    def __init__(
        self, requests: Sequence[TextRequest], send: Send, max_concurrency: int | None = None
    ) -> None:
        self.requests = requests
        self.timings: list[Timing] = []
        self.num_sent = 0
        self.began = 0.0
        self._send = send
        self._slots = asyncio.Semaphore(max_concurrency or max(1, len(requests)))
        self._ended = [asyncio.Event() for _ in requests]

    @property
    def num_running(self) -> int:
        return self.num_sent - len(self.timings)

    async def run(self, dead: asyncio.Event | None = None) -> Outcome:
        """Run until all requests have finished, `dead` is set, or ctrl-C; returns in all cases."""
        self.began = time.perf_counter()
        tasks = [
            asyncio.create_task(self._send_one(i, request))
            for i, request in enumerate(self.requests)
        ]
        everything: asyncio.Future[object] = asyncio.ensure_future(asyncio.gather(*tasks))
        death: asyncio.Future[object] = asyncio.ensure_future((dead or asyncio.Event()).wait())
        stopped: str | None = None
        try:
            await asyncio.wait({everything, death}, return_when=asyncio.FIRST_COMPLETED)
            if everything.done():
                everything.result()
            else:
                stopped = DEAD
        except asyncio.CancelledError:
            current = asyncio.current_task()
            # Cancelling twice ends everything, not only this run.
            if current is None or current.uncancel():
                raise
            stopped = INTERRUPTED
        finally:
            everything.cancel()
            death.cancel()
            await asyncio.gather(*tasks, everything, death, return_exceptions=True)
        if dead is not None and dead.is_set():
            stopped = DEAD
        last = max((timing.ended_at for timing in self.timings), default=time.perf_counter())
        left = len(self.requests) - len(self.timings)
        return Outcome(
            timings=self.timings,
            began=self.began,
            duration=last - self.began,
            num_left=left,
            stopped=stopped,
        )

    async def _send_one(self, index: int, request: TextRequest) -> None:
        due = self.began + request.at
        await asyncio.sleep(due - time.perf_counter())
        if request.follows is not None:
            await self._ended[request.follows].wait()
            due = max(due, time.perf_counter())
        async with self._slots:
            self.num_sent += 1
            self.timings.append(await self._send(request, due))
        self._ended[index].set()
