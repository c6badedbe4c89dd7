"""Compiles kernels in parallel before their first launch.

Triton compiles a kernel when it is first launched, one after the other. Most of the work is in LLVM and
ptxas, without Python's lock, so threads compile several at a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar

import triton

_MAX_THREADS = 16

_compiling: ContextVar[bool] = ContextVar("compiling", default=False)


def is_compiling() -> bool:
    """Whether launches of `fit(kernel)` only compile, and compute nothing."""
    return _compiling.get()


@contextmanager
def compiling() -> Iterator[None]:
    """Launches of `fit(kernel)` inside start to compile in threads. Leaving waits until all have."""
    threads = min(_MAX_THREADS, os.cpu_count() or 1)
    before = _compiling.set(True)
    try:
        with (
            ThreadPoolExecutor(threads, thread_name_prefix="compile") as pool,
            triton.AsyncCompileMode(pool, ignore_errors=True),  # the launch will report them
        ):
            yield
    finally:
        _compiling.reset(before)
