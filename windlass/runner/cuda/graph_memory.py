"""Estimates the memory of captured graphs, so that the KV cache can be allocated before they are captured."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from windlass.runner.executor import Executor

_SAMPLES = 2  # sizes of each executor that are captured to measure what another graph adds
_DRIVER_BYTES = 2 * 2**20  # the driver takes memory in pieces of so many bytes


def bytes_of_others(executors: Iterable[Executor], free: Callable[[], int]) -> int:
    """An upper estimate of what the graphs that are not captured yet will take; captures a few of them.

    The largest graph of an executor has the memory that smaller ones use as well: each adds its input
    buffers and what the driver keeps of it. The next largest ones, which are captured here, add the most.
    `free`: returns the free bytes of the device.
    """
    total = 0
    for executor in executors:
        before, missing = free(), executor.num_missing
        for _ in range(_SAMPLES):
            executor.capture_next()
        if captured := missing - executor.num_missing:
            added = max(0, before - free()) + _DRIVER_BYTES
            total += executor.num_missing * -(-added // captured)
    return total
