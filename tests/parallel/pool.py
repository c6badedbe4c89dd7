"""Processes that serve as ranks of one engine after another, since starting a process takes seconds."""

from __future__ import annotations

import gc
import multiprocessing
import socket
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import pytest

from windlass.build import import_torch
from windlass.parallel import launch
from windlass.parallel.rank_process import run_rank

_NUM_RANKS = 3  # beside rank 0


def _serve(sessions: Connection) -> None:
    import_torch()
    while (session := sessions.recv()) is not None:
        sessions.send("received")
        with suppress(SystemExit):  # the rank's error was reported to rank 0
            run_rank(*session)
        del session
        gc.collect()
        sessions.send("ended")


class Pool:
    """Owns the processes."""

    def __init__(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._sessions: list[Connection] = []
        self.processes: list[BaseProcess] = []
        for _ in range(_NUM_RANKS):
            own, other = spawn.Pipe()
            process = spawn.Process(target=_serve, args=(other,), daemon=True)
            process.start()
            self._sessions.append(own)
            self.processes.append(process)

    def start(self, index: int, session: Sequence[Any]) -> None:
        self._sessions[index].send(tuple(session))
        assert self._sessions[index].recv() == "received"

    def wait(self, index: int) -> None:
        assert self._sessions[index].recv() == "ended"

    def close(self) -> None:
        for own, process in zip(self._sessions, self.processes, strict=True):
            own.send(None)
            process.join(30)
            assert process.exitcode == 0


@contextmanager
def pooled_ranks() -> Iterator[pytest.MonkeyPatch]:
    """Inside, engines use the processes of one pool."""
    pool = Pool()

    class PooledRanks(launch.Ranks):
        """Ranks in the pool's processes. The last engine's end first, if it still exists."""

        last: weakref.ref[PooledRanks] | None = None

        def start(self, prepare: Callable[[], None], ends: Sequence[socket.socket]) -> None:
            last = None if PooledRanks.last is None else PooledRanks.last()
            if last is not None:
                last.close()
            PooledRanks.last = weakref.ref(self)
            for index, end in enumerate(ends):
                receiver, pipe = multiprocessing.get_context("spawn").Pipe(duplex=False)
                self._pipes.append(pipe)
                with receiver, end:
                    pool.start(index, self.session(prepare, receiver, end, index))
                process = pool.processes[index]
                self.watch_link(launch._Link(self._near[index], f"rank {index + 1}", process))

        def end_processes(self) -> None:
            for index in range(len(self._near)):
                pool.wait(index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "Ranks", PooledRanks)
        yield patch
    gc.collect()
    pool.close()
