"""A rank that dies or hangs takes its replica down with one clear error, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tests.parallel.ranks import rank_processes
from tests.parallel.test_tensor_parallel import GREEDY, PROMPTS, folder, make, tokens
from windlass.async_llm import AsyncLLM
from windlass.core.types import StepResult
from windlass.errors import EngineError, WorkerDied
from windlass.parallel.groups import connect
from windlass.parallel.mesh import Mesh
from windlass.parallel.place import Place
from windlass.runner.executor import CompletedStep
from windlass.runner.worker import Followers

__all__ = ["folder"]


def children(pid: int) -> list[int]:
    """The ranks that a process has started."""
    files = Path(f"/proc/{pid}/task").glob("*/children")
    found = [int(child) for file in files for child in file.read_text().split()]
    return [child for child in found if is_spawned(child)]


def own_children() -> list[int]:
    return [each.pid for each in multiprocessing.active_children() if each.pid is not None]


def is_spawned(pid: int) -> bool:
    """Whether the process exists, and is not the one of shared resources."""
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return b"spawn_main" in command or b"warm_start" in command
    return False


def wait_until_gone(pid: int) -> None:
    while is_spawned(pid):  # the test's time limit ends this
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (signal.SIGKILL, r"rank 1 was ended by signal 9\."),
        (signal.SIGSTOP, r"rank 1 hangs: no heartbeat for \d\.\d s\."),
    ],
)
def test_a_lost_rank_ends_the_step(
    folder: Path, number: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted = threading.Event()

    def connect_and_watch(place: Place) -> Mesh:
        mesh = connect(place)
        mesh.interrupts.append(interrupted.set)
        return mesh

    monkeypatch.setattr("windlass.parallel.groups.connect", connect_and_watch)
    llm = make(folder, 2)
    want = tokens(make(folder, 1))
    assert tokens(llm) == want
    (rank,) = rank_processes()
    assert rank.pid is not None
    os.kill(rank.pid, number)
    with pytest.raises(WorkerDied, match=message):
        llm.generate(PROMPTS, GREEDY)
    with pytest.raises(WorkerDied, match=message):
        llm.generate(PROMPTS, GREEDY)
    assert interrupted.wait(10)
    while rank_processes():  # the test's time limit ends this
        time.sleep(0.05)


class Ranks:
    """The other ranks, of which one may be lost."""

    failure: EngineError | None = None

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def lost(self, error: BaseException) -> EngineError:
        return WorkerDied(f"after {error}")


def test_results_are_not_valid_once_a_rank_is_lost() -> None:
    ranks: Any = Ranks()
    step = Followers(ranks).shared(CompletedStep(StepResult([])))
    assert step.wait() == StepResult([])
    ranks.failure = WorkerDied("rank 1 was lost.")
    with pytest.raises(WorkerDied, match="rank 1 was lost"):
        step.wait()
    own: Any = SimpleNamespace(wait=Mock(side_effect=RuntimeError("a CUDA error")))
    with pytest.raises(WorkerDied, match="after a CUDA error"):
        Followers(ranks).shared(own).wait()


_PARENT = """
import sys, time
from tests.parallel.test_tensor_parallel import make
from pathlib import Path

if __name__ == "__main__":
    llm = make(Path(sys.argv[1]), 2)
    print("ready", flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_a_rank_ends_with_its_parent(folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(_PARENT)
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    start = [sys.executable, str(script), str(folder)]
    with subprocess.Popen(start, stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        ranks = children(parent.pid)
        assert ranks
        os.kill(ranks[0], signal.SIGSTOP)  # a stopped rank ends as well
        parent.kill()
    for rank in ranks:
        wait_until_gone(rank)


def test_the_server_restarts_a_replica_that_lost_a_rank(folder: Path) -> None:
    options = {"num_blocks": 64, "dtype": "float32", "load_format": "dummy", "device": "cpu"}

    async def run() -> None:
        async with AsyncLLM(str(folder), tensor_parallel_size=2, **options) as llm:
            want = (await llm.generate(PROMPTS[0], GREEDY)).outputs[0].token_ids
            (engine,) = own_children()
            (rank,) = children(engine)
            os.kill(rank, signal.SIGKILL)
            errors, found = 0, None
            while not errors or found is None:  # until the loss was noticed, and repaired
                try:
                    found = await llm.generate(PROMPTS[0], GREEDY)
                except EngineError:
                    errors, found = errors + 1, None
                    await asyncio.sleep(0.1)
            assert found.outputs[0].token_ids == want
            wait_until_gone(engine)
            last = [pid for child in own_children() for pid in children(child)]
        for pid in last:
            wait_until_gone(pid)

    asyncio.run(run())
