"""Pipeline stages as threads of one process, for tests that need no processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from torch import Tensor

from tests.quant.ranks import thread_groups
from windlass import build
from windlass.build import Built, open_model
from windlass.build_rank import BuildLog, Source, build_rank
from windlass.config import EngineConfig
from windlass.core.types import StepPlan, StepResult
from windlass.parallel.mesh import Mesh
from windlass.speculative.registry import PRELAUNCHES


class Sent:
    def wait(self) -> None:
        pass


@dataclass
class Line:
    """A rank of a pipeline; `queues[i]` leads to stage i."""

    rank: int
    queues: list[SimpleQueue[Tensor]]

    @property
    def size(self) -> int:
        return len(self.queues)

    def send(self, x: Tensor, to: int) -> Sent:
        self.queues[to].put(x)
        return Sent()

    def receive(self, into: Tensor, source: int) -> None:
        assert source == self.rank - 1
        into.copy_(self.queues[self.rank].get(timeout=60))


class Followers:
    """The later stages, as the first one sees them."""

    def __init__(self, runners: list[Any]) -> None:
        self._plans: list[SimpleQueue[StepPlan | None]] = [SimpleQueue() for _ in runners]
        self._results: SimpleQueue[StepResult] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._follow, args=(index, runner))
            for index, runner in enumerate(runners)
        ]
        for thread in self._threads:
            thread.start()

    def _follow(self, index: int, runner: Any) -> None:
        while (plan := self._plans[index].get()) is not None:
            result = runner.run(plan)
            if index == len(self._plans) - 1:
                self._results.put(result)

    def announce(self, plan: StepPlan) -> None:
        for queue in self._plans:
            queue.put(plan)

    def start_call(self, name: str, *arguments: str) -> None:
        """Do nothing: `staged` has attached the drafters of all stages."""

    def result(self) -> Followers:
        return self

    def wait(self) -> StepResult:
        return self._results.get(timeout=60)

    def close(self) -> None:
        for queue in self._plans:
            queue.put(None)
        for thread in self._threads:
            thread.join()


def together(calls: list[Callable[[], Any]]) -> list[Any]:
    """Results of calls that wait for each other; the first error is raised."""
    found: list[Any] = [None] * len(calls)

    def call(index: int) -> None:
        try:
            found[index] = calls[index]()
        except Exception as error:  # raised below
            found[index] = error

    threads = [threading.Thread(target=call, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    for each in found:
        if isinstance(each, Exception):
            raise each
    return found


@contextmanager
def staged(
    config: EngineConfig, count: int, source: Source | None = None
) -> Iterator[tuple[Built, list[Any]]]:
    """An engine of `count` stages, and the runners of all stages."""
    source = source or open_model(config).source
    queues = [SimpleQueue[Tensor]() for _ in range(count)]
    meshes = [
        Mesh(pp=Line(rank, queues), world=world)  # type: ignore[arg-type]
        for rank, world in enumerate(thread_groups(count))
    ]
    log = BuildLog()
    ranks = together(
        [lambda mesh=mesh: build_rank(config, source, log, mesh=mesh) for mesh in meshes]
    )
    runners = [rank.made.runner for rank in ranks]
    followers = Followers(runners[1:])
    try:
        if config.speculation.spec in PRELAUNCHES:  # drafters inside the step
            for rank in ranks[1:]:
                rank.speculation._loader.start(rank.made)
        runners[0].lead(followers)
        yield build._finish(ranks[0], source, log, config.speculation.spec), runners
    finally:
        followers.close()
