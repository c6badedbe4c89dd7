"""Thread pools for work that would block the event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_MAX_NATIVE_THREADS = 4


class Workers:
    """Owns the threads until `close`.

    `holding_gil` has one thread: JSON parsers hold the GIL for up to 100 ms at a time, and with two
    of them the event loop could wait for one after the other. `releasing_gil` has several, for
    tokenizers and grammar compilers, and for Python code, which gives the GIL back every 5 ms.
    """

    def __init__(self) -> None:
        self._holding = ThreadPoolExecutor(1, thread_name_prefix="windlass-json")
        self._releasing = ThreadPoolExecutor(
            min(_MAX_NATIVE_THREADS, os.cpu_count() or 1), thread_name_prefix="windlass-text"
        )

    async def holding_gil(self, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        return await _run(self._holding, work, *args, **options)

    async def releasing_gil(self, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        return await _run(self._releasing, work, *args, **options)

    def close(self) -> None:
        """Cancel waiting work; running work ends in the background."""
        for pool in (self._holding, self._releasing):
            pool.shutdown(wait=False, cancel_futures=True)


async def _run(
    pool: ThreadPoolExecutor, work: Callable[P, T], *args: P.args, **options: P.kwargs
) -> T:
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(pool, lambda: work(*args, **options))
