"""Compiles kernels in parallel before their first launch.

Triton compiles a kernel when it is first launched, one after the other. Most of the work is in LLVM and
ptxas, without Python's lock, so threads compile several at a time.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import Any, ClassVar

import torch
import triton
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton.runtime import JITFunction

from windlass.kernels.compile_only import compile_only

logger = logging.getLogger(__name__)

_MAX_THREADS = 16


class _Compilers(ThreadPoolExecutor):
    """Threads that log why a kernel does not compile. Its first launch compiles it, or raises the error."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return super().submit(_logged, fn, *args, **kwargs)


def _logged(compile_kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return compile_kernel(*args, **kwargs)
    except Exception as error:
        logger.warning("a kernel is not compiled before its first launch: %r", error)
        raise


@contextmanager
def compiling() -> Iterator[Callable[[], None]]:
    """Launches of `fit(kernel)` inside start to compile in threads. Leaving waits until all have.

    The function that it yields waits for the first one, which a cache has at once.
    """
    threads = min(_MAX_THREADS, os.cpu_count() or 1)
    with (
        compile_only(),
        _Compilers(threads, thread_name_prefix="compile") as pool,
        triton.AsyncCompileMode(pool, ignore_errors=True) as mode,
    ):
        yield partial(_wait_for_first, mode)


def _wait_for_first(mode: triton.AsyncCompileMode) -> None:
    wait(mode.raw_futures, return_when=FIRST_COMPLETED)


@contextmanager
def only_compiling() -> Iterator[Callable[[], None]]:
    """All launches of Triton kernels inside start to compile in threads, and compute nothing.

    Whole steps can run so. What a kernel would have written is 0, a valid index for the operations that
    read it. Leaving waits until all have compiled, and the function that it yields for the first one.
    """
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        del warmup
        return launch(self, *args, grid=grid, warmup=True, **kwargs)

    JITFunction.run = compile_only
    try:
        with compiling() as wait_for_first, _ZeroFilled():
            yield wait_for_first
    finally:
        JITFunction.run = launch


class _ZeroFilled(TorchFunctionMode):
    """Allocates zeros where torch would leave memory as it was."""

    _zeros: ClassVar[dict[Callable[..., Tensor], Callable[..., Tensor]]] = {
        torch.empty: torch.zeros,
        torch.empty_like: torch.zeros_like,
        Tensor.new_empty: Tensor.new_zeros,
    }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        return self._zeros.get(func, func)(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the Triton kernels that are compiled or found in the cache while the block runs."""
    counts: Counter[str] = Counter()
    lock = Lock()

    knobs = triton.knobs.compilation
    before = knobs.listener

    def listen(*, cache_hit: bool, **other: Any) -> None:
        with lock:  # threads compile
            counts["found" if cache_hit else "compiled"] += 1
        if before is not None:
            before(cache_hit=cache_hit, **other)

    knobs.listener = listen
    try:
        yield counts
    finally:
        knobs.listener = before
