"""Threads of the pool stay on the CPUs that they are given."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import pytest

from windlass.kernels.native.compiled import load
from windlass.kernels.native.compiler import NativeUnavailable
from windlass.kernels.native.pool import Pool, Workers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def threads() -> set[int]:
    return {int(path.name) for path in Path("/proc/self/task").iterdir()}


def new_pool(cpus: list[tuple[int, ...]]) -> tuple[Pool, set[int]]:
    """A pool of a thread per entry, and the ids of its workers."""
    try:
        native = load()
    except NativeUnavailable as error:
        pytest.skip(str(error))
    before = threads()
    pool = Pool(native, len(cpus), cpus)
    return pool, threads() - before


def test_workers_are_bound_and_the_caller_is_not() -> None:
    allowed = os.sched_getaffinity(0)
    last = (max(allowed),)
    _pool, workers = new_pool([tuple(allowed), last, last])
    assert len(workers) == 2
    assert [os.sched_getaffinity(worker) for worker in workers] == [set(last)] * 2
    assert os.sched_getaffinity(0) == allowed


def test_a_cpu_that_does_not_exist_is_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "windlass.kernels"):
        _pool, workers = new_pool([(0,), (5000,)])
    assert "thread 1 is not bound to its NUMA node: Invalid argument" in caplog.text
    assert [os.sched_getaffinity(worker) for worker in workers] == [os.sched_getaffinity(0)]


def test_an_engines_workers_get_their_cpus() -> None:
    last = max(os.sched_getaffinity(0))
    workers = Workers(2, cpus=[(last,), (last,)])
    if (why := workers.refuse()) is not None:
        pytest.skip(why)
    before = threads()
    assert workers.pool.num_threads == 2
    assert {last} in [os.sched_getaffinity(worker) for worker in before]
