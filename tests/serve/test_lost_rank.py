"""The engine process ends when another rank is lost, and says so once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serve.test_expert_load import Engine, running
from windlass.core.types import EngineStats
from windlass.errors import WorkerDied


class FailingEngine(Engine):
    """Has work, and fails every step."""

    has_work = True

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error
        self.num_steps = 0

    def step(self) -> None:
        self.num_steps += 1
        raise self.error

    def fail(self, message: str) -> list[None]:
        del message
        return []

    def stats(self) -> EngineStats:
        return EngineStats(num_steps=self.num_steps)


def lost(cause: Exception | None) -> WorkerDied:
    error = WorkerDied("rank 1 was ended by signal 9.")
    error.__cause__ = cause
    return error


def test_a_lost_rank_ends_the_engine_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FailingEngine(lost(WorkerDied("another rank is lost.")))
    with running(engine, tmp_path) as (running_loop, _):
        assert running_loop.run() == 1
    assert engine.num_steps == 1
    assert [record.message for record in caplog.records] == [
        "the engine process exits: rank 1 was ended by signal 9."
    ]


@pytest.mark.parametrize(
    ("error", "num_steps", "last"),
    [
        (lost(RuntimeError("a CUDA error")), 1, "exits: rank 1 was ended by signal 9."),
        (RuntimeError("a bug"), 3, "exits: 3 steps in a row failed."),
    ],
)
def test_the_cause_of_a_failed_step_is_logged(
    error: Exception,
    num_steps: int,
    last: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = FailingEngine(error)
    with running(engine, tmp_path) as (running_loop, _):
        assert running_loop.run() == 1
    assert engine.num_steps == num_steps
    *steps, end = caplog.records
    assert [record.exc_info is not None for record in steps] == [True] * num_steps
    assert end.message.endswith(last)
