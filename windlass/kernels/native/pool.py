"""The native library with its threads, which all engines of a process share."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Protocol

import torch

from windlass.errors import OutOfMemory
from windlass.kernels.native.commands import Call, Step
from windlass.kernels.native.compiled import Native, NativeUnavailable, load

_NO_STEP = Step()
_SPIN_US = 50  # how long an idle worker waits for the next command before it sleeps


class Recorder(Protocol):
    """Takes calls instead of computing them."""

    def add(self, call: Call) -> None: ...


class Pool:
    """The library's functions, its threads, and who records calls, if anybody."""

    def __init__(self, native: Native, num_threads: int) -> None:
        self.native = native
        self.functions = _declare(native.functions)
        self.num_threads = num_threads
        self._recorder: Recorder | None = None
        self._network_step: Step | None = None
        self.handle = self.functions.windlass_pool_new(num_threads, _SPIN_US)
        if not self.handle:
            raise NativeUnavailable(f"the system did not give {num_threads} threads")
        weakref.finalize(self, self.functions.windlass_pool_free, self.handle)

    def run(self, call: Call, step: Step | None = None) -> None:
        """Compute one call now, or note it down while somebody records."""
        if self._recorder is not None:
            self._recorder.add(call)
            return
        self.replay(ctypes.byref(call.command()), 1, step or self._network_step or _NO_STEP)

    def replay(self, commands: object, count: int, step: Step) -> None:
        """Compute `count` commands from a place on."""
        failed = self.functions.windlass_run(self.handle, commands, count, ctypes.byref(step))
        if failed:
            raise OutOfMemory(f"no memory for a step of {step.num_tokens} tokens")

    @property
    def is_recording(self) -> bool:
        return self._recorder is not None

    @property
    def is_in_network(self) -> bool:
        """Whether products are those of a network's layers, not of its head."""
        return self._network_step is not None

    @contextmanager
    def in_network(self, step: Step) -> Iterator[None]:
        """While it lasts that is so, and calls without a step of their own are of this one."""
        self._network_step = step
        try:
            yield
        finally:
            self._network_step = None

    @contextmanager
    def recorded_by(self, recorder: Recorder) -> Iterator[None]:
        """While it lasts, calls go to `recorder` and nothing is computed."""
        self._recorder = recorder
        try:
            yield
        finally:
            self._recorder = None


class Workers:
    """A pool that is made when it is first asked for, or the reason why there is none."""

    def __init__(self, num_threads: int, pool: Pool | None = None) -> None:
        self._num_threads = num_threads
        self._pool = pool
        self._unavailable: str | None = None

    def refuse(self) -> str | None:
        """Why there is no pool; tries to make one, but only once."""
        if self._pool is None and self._unavailable is None:
            try:
                self._pool = Pool(load(), self._num_threads)
            except NativeUnavailable as error:
                self._unavailable = str(error)
        return self._unavailable

    @property
    def pool(self) -> Pool:
        why = self.refuse()
        if self._pool is None:
            raise NativeUnavailable(str(why))
        return self._pool


@cache
def workers(num_threads: int) -> Workers:
    """Those of this process: two engines with threads of their own would only disturb each other."""
    return Workers(num_threads)


def shared_pool() -> Pool:
    """With as many threads as torch uses."""
    return workers(torch.get_num_threads()).pool


def _declare(functions: ctypes.CDLL) -> ctypes.CDLL:
    """The signatures of src/api.h."""
    pointer, number = ctypes.c_void_p, ctypes.c_int32
    functions.windlass_prompts_apart.restype = number
    functions.windlass_prompts_apart.argtypes = ()
    functions.windlass_takes_nonfinite_halves.restype = number
    functions.windlass_takes_nonfinite_halves.argtypes = ()
    functions.windlass_pool_new.restype = pointer
    functions.windlass_pool_new.argtypes = (number, number)
    functions.windlass_pool_free.restype = None
    functions.windlass_pool_free.argtypes = (pointer,)
    functions.windlass_packed_bytes.restype = ctypes.c_uint64
    functions.windlass_packed_bytes.argtypes = (pointer,)
    functions.windlass_pack.restype = None
    functions.windlass_pack.argtypes = (pointer,) * 7
    functions.windlass_run.restype = number
    functions.windlass_run.argtypes = (pointer, pointer, number, pointer)
    return functions
