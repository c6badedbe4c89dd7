"""The engine process records the load of experts when it ends, and in between."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from windlass.core.types import EngineStats
from windlass.serve import loop, messages
from windlass.serve.journal import Journal


class Engine:
    """Has nothing to compute; counts the readings of the load."""

    has_work = False

    def __init__(self, error: OSError | None = None) -> None:
        self.num_updates = 0
        self._error = error

    def update_expert_load(self) -> None:
        self.num_updates += 1
        if self._error is not None:
            raise self._error

    def stats(self) -> EngineStats:
        return EngineStats()

    def traces(self) -> list[Any]:
        return []

    is_handing_over = False

    def capture_next(self) -> bool:
        return False

    def handed_over(self) -> list[Any]:
        return []

    def close(self) -> None:
        """Stores nothing."""


@contextmanager
def running(engine: Any, folder: Path) -> Iterator[tuple[loop._EngineLoop, zmq.Socket[bytes]]]:
    """The loop of an engine process, and the other end of its socket."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as own, context.socket(zmq.PAIR) as end:
        own.bind("inproc://engine")
        end.connect("inproc://engine")
        journal = Journal(folder / "journal")
        yield loop._EngineLoop(engine, own, journal, hang_timeout=0), end
        journal.close()


@pytest.mark.parametrize("error", [None, OSError("the disk is full")])
def test_the_load_is_recorded_at_the_end(
    error: OSError | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(error)
    with running(engine, tmp_path) as (running_loop, socket):
        socket.send(messages.encode([messages.Stop()]))
        assert running_loop.run() == 0
    assert engine.num_updates == 1
    assert ("the disk is full" in caplog.text) == (error is not None)


def test_the_load_is_recorded_at_intervals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    with running(engine, tmp_path) as (running_loop, _):
        running_loop._send(force=True)
        assert engine.num_updates == 0
        monkeypatch.setattr(loop, "_EXPERT_LOAD_INTERVAL_S", 0.0)
        running_loop._send(force=True)
        assert engine.num_updates == 1
