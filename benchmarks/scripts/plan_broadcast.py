"""Times the broadcast of a decode plan to a rank of this machine, and of another one over TCP.

    python benchmarks/scripts/plan_broadcast.py --rows 256 -o benchmarks/plan-broadcast.json

Prints the median microseconds of rank 0 (encoding, ring, link), of the other machine's process, which
relays the plan to its ranks, and of the other rank (link, ring, decoding), one after another in one
thread. TCP is that of the loopback address, so the time on the wire is not contained.
"""

from __future__ import annotations

import argparse
import itertools
import shlex
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from windlass.core.types import Row, SlotId, StepPlan, StepResult
from windlass.errors import EngineError, WorkerDied
from windlass.parallel.channel import Receiver, Sender, make_ring
from windlass.runner.worker import Followers, Worker
from windlass.sockets import keep_alive
from windlass.tools.common.record import Record

_WARM_UP, _REPEATS = 50, 1000


class _OneSender:
    """Sends through a real channel."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self.num_bytes = 0

    def send(self, message: bytes) -> None:
        self.num_bytes = len(message)
        self._sender.send(message, lambda: None)

    def ask(self, message: bytes) -> list[bytes]:
        raise AssertionError(f"no reply is awaited: {message!r}")

    def reply(self, rank: int) -> bytes:
        raise AssertionError(f"no result is awaited: {rank}")

    def check(self) -> None:
        pass

    def lost(self, error: BaseException) -> EngineError:
        return WorkerDied(str(error))


class _NoRunner:
    """Computes nothing."""

    def run(self, plan: StepPlan) -> StepResult:
        del plan
        return StepResult([])


@dataclass(frozen=True)
class _Machine:
    """A ring with one rank, and the end of the rank."""

    sender: Sender
    receiver: Receiver

    @classmethod
    def make(cls) -> _Machine:
        own, other = socket.socketpair()
        ring = make_ring(1)
        return cls(Sender(ring, [own]), Receiver(other, (ring, 1, 0)))


def _tcp() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        own = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    for link in (own, other):
        keep_alive(link)
    return own, other


def measure(plan: StepPlan, remote: bool) -> dict[str, Any]:
    """The medians of rank 0, of the relay if the rank is `remote`, and of the rank."""
    machine, worker = _Machine.make(), Worker(_NoRunner())
    sender, relayed = machine.sender, None
    if remote:
        own, other = _tcp()
        sender, relayed = Sender(make_ring(0), [], [own]), Receiver(other)
    ranks = _OneSender(sender)
    followers = Followers(ranks)
    times: list[list[float]] = []
    for _ in range(_WARM_UP + _REPEATS):
        marks = [time.perf_counter()]
        followers.announce(plan)
        marks.append(time.perf_counter())
        if relayed is not None:
            message = relayed.receive()
            assert message is not None
            machine.sender.send(message, lambda: None)
        marks.append(time.perf_counter())
        message = machine.receiver.receive()
        assert message is not None
        worker.handle(message)
        marks.append(time.perf_counter())
        times.append([end - begin for begin, end in itertools.pairwise(marks)])
    rank_0, relay, rank = (
        round(median(each) * 1e6, 1) for each in zip(*times[_WARM_UP:], strict=True)
    )
    return {
        "path": "TCP, then shared memory" if remote else "shared memory",
        "rows": len(plan.rows),
        "bytes": ranks.num_bytes,
        "rank_0_us": rank_0,
        "relay_us": relay if remote else None,
        "rank_us": rank,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    rows = [Row(f"r{i}", SlotId(i), 500 + i, 1, (), (), sample=True) for i in range(options.rows)]
    found = [measure(StepPlan(rows), remote) for remote in (False, True)]
    for row in found:
        print(row)
    if options.output is not None:
        notes = f"Medians of {_REPEATS} plans in microseconds; TCP through the loopback address."
        command = shlex.join(["python", "benchmarks/scripts/plan_broadcast.py", *sys.argv[1:]])
        Record("plan_broadcast", found, notes, command=command).save(options.output)


if __name__ == "__main__":
    main()
