"""The deep health check: the engine generates one token, so that a hang anywhere on the way shows.

Anybody may ask for it, so it must cost little and say nothing wrong under load: one probe runs at a
time, all callers share its result, and it goes ahead of the queue.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass

from windlass.core.sampling import SamplingParams
from windlass.core.tokenizer import Tokenizer
from windlass.core.types import PROBE_PRIORITY, EngineStats, NewRequest
from windlass.errors import EngineError
from windlass.serve.client import EngineClient

_TIMEOUT_S = 10.0
_POLL_S = 0.1  # the engine reports its counters as often
_FRESH_S = 1.0  # callers within this time after a success get the same result


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """`seconds` until a token came; `error` set: none came."""

    seconds: float
    error: str | None = None


class GenerateProbe:
    """Owns the probe in flight and the latest result."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._clock = clock
        self._numbers = itertools.count()
        self._running: asyncio.Task[ProbeResult] | None = None
        self._fresh_until = float("-inf")

    async def run(self) -> ProbeResult:
        """The result of the probe in flight, of one that has just succeeded, or of a new one."""
        task = self._running
        if task is None or (task.done() and self._clock() >= self._fresh_until):
            task = self._running = asyncio.create_task(self._probe())
        return await asyncio.shield(task)  # a caller that hangs up must not end it for the others

    async def _probe(self) -> ProbeResult:
        began, computed = self._clock(), _num_computed(self._client.stats)
        token = asyncio.create_task(self._generate())
        try:
            while not token.done():
                await asyncio.wait({token}, timeout=_POLL_S)
                stats = self._client.stats
                if stats.num_waiting and _num_computed(stats) > computed:
                    break  # no free slot for the probe, and the engine computes for others
                if self._clock() - began > _TIMEOUT_S:
                    return ProbeResult(_TIMEOUT_S, f"no token came within {_TIMEOUT_S:g} s")
            if token.done():
                token.result()
        except EngineError as error:
            return ProbeResult(self._clock() - began, str(error))
        finally:
            token.cancel()
        now = self._clock()
        self._fresh_until = now + _FRESH_S
        return ProbeResult(now - began)

    async def _generate(self) -> None:
        request = NewRequest(
            f"health-{next(self._numbers)}",
            self._tokenizer.encode("Hi")[:8],
            SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True),
            priority=PROBE_PRIORITY,
        )
        async with aclosing(self._client.generate(request, tracked=False)) as outputs:
            async for _ in outputs:
                pass


def _num_computed(stats: EngineStats) -> int:
    return stats.num_prompt_tokens_computed + stats.num_generated_tokens
