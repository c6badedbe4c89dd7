"""The native library and the thread pool of one engine.

The pool also holds the two modes of a forward pass: the active recorder and the prompt tokens. An engine
computes in one thread and shares its pool with no other engine, so no mode leaks into another engine.
"""

from __future__ import annotations

import ctypes
import logging
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from windlass.errors import OutOfMemory, WorkerDied
from windlass.kernels.native.commands import Call, Command, Step
from windlass.kernels.native.compiled import Native, load
from windlass.kernels.native.compiler import NativeUnavailable

_log = logging.getLogger("windlass.kernels")

_NO_STEP = Step()
_LOST = 2  # windlass_run: a collective waited for a rank that is gone
_SPIN_US = 50  # an idle worker spins this long before it sleeps


class Recorder(Protocol):
    """Receives calls instead of running them."""

    def add(self, call: Call) -> None: ...


class Timer(Protocol):
    """Receives the commands of recorded programs with their start and duration."""

    def add(self, command: Command, start: float, seconds: float) -> None: ...


class Pool:
    """Owns the library's functions, its threads and the active recorder, if any."""

    def __init__(
        self, native: Native, num_threads: int, cpus: Sequence[Sequence[int]] | None = None
    ) -> None:
        """`cpus`: those that each thread may run on; the caller, thread 0, is not bound here."""
        self.native = native
        self.functions = _declare(native.functions)
        self.num_threads = num_threads
        self._recorder: Recorder | None = None
        self._step: Step | None = None
        self.timer: Timer | None = None
        self.handle = self.functions.windlass_pool_new(num_threads, _SPIN_US)
        if not self.handle:
            raise NativeUnavailable(f"the system refused {num_threads} threads")
        weakref.finalize(self, self.functions.windlass_pool_free, self.handle)
        for thread, of_thread in enumerate(cpus or ()):
            if thread > 0:
                self._bind(thread, of_thread)

    def _bind(self, thread: int, cpus: Sequence[int]) -> None:
        array = (ctypes.c_int32 * len(cpus))(*cpus)
        failed = self.functions.windlass_pool_bind(self.handle, thread, array, len(cpus))
        if failed:  # a sandbox may forbid it; results are the same, memory may be of another node
            _log.warning("thread %d is not bound to its NUMA node: %s", thread, os.strerror(failed))

    def run(self, call: Call, step: Step | None = None) -> None:
        """Run one call, or pass it to the active recorder."""
        if self._recorder is not None:
            self._recorder.add(call)
            return
        self.replay(ctypes.byref(call.command()), 1, step or self._step or _NO_STEP)

    def replay(self, commands: object, count: int, step: Step) -> None:
        """Run `count` commands."""
        failed = self.functions.windlass_run(self.handle, commands, count, ctypes.byref(step))
        if failed == _LOST:
            raise WorkerDied("another rank is lost.")
        if failed:
            raise OutOfMemory(f"no memory for a step of {step.num_tokens} tokens")

    def multiply_int8(self, rounds: int) -> int:
        """Multiply int8 codes in the L1 cache on all threads; return the number of multiply-adds."""
        return int(self.functions.windlass_multiply_int8(self.handle, rounds))

    @property
    def is_recording(self) -> bool:
        return self._recorder is not None

    @property
    def has_step(self) -> bool:
        """Whether GEMMs belong to the layers of a model, so that prompt rows are known."""
        return self._step is not None

    @contextmanager
    def use_step(self, step: Step) -> Iterator[None]:
        """Use `step` for calls without a step of their own inside the context."""
        outer, self._step = self._step, step
        try:
            yield
        finally:
            self._step = outer

    @contextmanager
    def timed_by(self, timer: Timer) -> Iterator[None]:
        """Run recorded programs command by command inside the context, and time each."""
        self.timer = timer
        try:
            yield
        finally:
            self.timer = None

    @contextmanager
    def recorded_by(self, recorder: Recorder) -> Iterator[None]:
        """Pass calls to `recorder` inside the context, without running them."""
        self._recorder = recorder
        try:
            yield
        finally:
            self._recorder = None


class Workers:
    """An engine's pool, created at first use, or the reason why there is none.

    The kernels of one engine, and of its draft model, get the same workers: threads of two pools would
    compete for the cores. Without `num_threads` the pool has as many threads as torch uses. `cpus`: those of
    each thread.
    """

    def __init__(
        self,
        num_threads: int | None = None,
        pool: Pool | None = None,
        cpus: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self._num_threads = num_threads
        self._cpus = cpus
        self._pool = pool
        self._unavailable: str | None = None
        self.compile_s = 0.0  # seconds for which the kernels were compiled

    def refuse(self) -> str | None:
        """Return why there is no pool, after one attempt to create it."""
        if self._pool is None and self._unavailable is None:
            try:
                native = load()
                self.compile_s = native.compile_s
                num_threads = self._num_threads or torch.get_num_threads()
                self._pool = Pool(native, num_threads, self._cpus)
            except NativeUnavailable as error:
                self._unavailable = str(error)
        return self._unavailable

    @property
    def pool(self) -> Pool:
        why = self.refuse()
        if self._pool is None:
            raise NativeUnavailable(str(why))
        return self._pool


def _declare(functions: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the signatures of src/api.h."""
    pointer, int32 = ctypes.c_void_p, ctypes.c_int32
    functions.windlass_has_prompt_gemm.restype = int32
    functions.windlass_has_prompt_gemm.argtypes = (pointer,)
    functions.windlass_reads_nonfinite.restype = int32
    functions.windlass_reads_nonfinite.argtypes = (int32,)
    functions.windlass_pool_new.restype = pointer
    functions.windlass_pool_new.argtypes = (int32, int32)
    functions.windlass_pool_bind.restype = int32
    functions.windlass_pool_bind.argtypes = (pointer, int32, pointer, int32)
    functions.windlass_pool_free.restype = None
    functions.windlass_pool_free.argtypes = (pointer,)
    functions.windlass_multiply_int8.restype = ctypes.c_int64
    functions.windlass_multiply_int8.argtypes = (pointer, ctypes.c_int64)
    functions.windlass_packed_bytes.restype = ctypes.c_uint64
    functions.windlass_packed_bytes.argtypes = (pointer,)
    functions.windlass_pack.restype = None
    functions.windlass_pack.argtypes = (pointer,) * 7
    functions.windlass_run.restype = int32
    functions.windlass_run.argtypes = (pointer, pointer, int32, pointer)
    return functions
