"""The deep health check: an engine generates one token, which detects a hang anywhere.

The endpoint needs no key, so a probe must be cheap, and it must not fail under load: one probe runs
at a time, all callers share its result, and it goes ahead of the queue.
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
from windlass.serve.handle import EngineReplica

_TIMEOUT_S = 10.0
_POLL_S = 0.1  # the interval of the engine's stats
_FRESH_S = 1.0  # a success is reused for this long


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """`seconds` until the token arrived; `error`: why no token arrived."""

    seconds: float
    error: str | None = None


class GenerateProbe:
    """Owns the probe in flight of one replica and the latest result."""

    def __init__(
        self,
        replica: EngineReplica,
        tokenizer: Tokenizer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replica = replica
        self._tokenizer = tokenizer
        self._clock = clock
        self._numbers = itertools.count()
        self._running: asyncio.Task[ProbeResult] | None = None
        self._fresh_until = float("-inf")

    async def run(self) -> ProbeResult:
        """Return the result of the running probe, of a recent success, or of a new probe."""
        task = self._running
        if task is None or (task.done() and self._clock() >= self._fresh_until):
            task = self._running = asyncio.create_task(self._probe())
        # A caller that disconnects must not cancel the probe for the others.
        return await asyncio.shield(task)

    async def _probe(self) -> ProbeResult:
        began, computed = self._clock(), _num_computed(self._replica.stats)
        token = asyncio.create_task(self._generate())
        try:
            while not token.done():
                await asyncio.wait({token}, timeout=_POLL_S)
                stats = self._replica.stats
                if stats.num_waiting and _num_computed(stats) > computed:
                    break  # the probe waits for a slot, but the engine computes other requests
                if self._clock() - began > _TIMEOUT_S:
                    return ProbeResult(_TIMEOUT_S, f"no token arrived within {_TIMEOUT_S:g} s")
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
            f"health-{self._replica.index}-{next(self._numbers)}",
            self._tokenizer.encode("Hi")[:8],
            SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True),
            priority=PROBE_PRIORITY,
        )
        async with aclosing(self._replica.generate(request, tracked=False)) as outputs:
            async for _ in outputs:
                pass


def _num_computed(stats: EngineStats) -> int:
    return stats.num_prompt_tokens_computed + stats.num_generated_tokens
