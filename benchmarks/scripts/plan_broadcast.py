"""Times the broadcast of a decode plan to another rank of this machine.

    python benchmarks/scripts/plan_broadcast.py [rows]

Prints the median microseconds of rank 0 (encoding, ring, link) and of the other rank (link, decoding).
"""

from __future__ import annotations

import socket
import statistics
import sys
import time

from windlass.core.types import Row, SlotId, StepPlan, StepResult
from windlass.errors import EngineError, WorkerDied
from windlass.parallel.channel import Receiver, Sender, make_ring
from windlass.runner.worker import Followers, Worker

_REPEATS = 500


class _OneRank:
    """Sends through a real ring and link."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender

    def send(self, message: bytes) -> None:
        self._sender.send(message, lambda: None)

    def ask(self, message: bytes) -> list[bytes]:
        raise AssertionError(f"no reply is awaited: {message!r}")

    def reply(self, rank: int) -> bytes:
        raise AssertionError(f"no result is awaited: {rank}")

    def lost(self, error: BaseException) -> EngineError:
        return WorkerDied(str(error))


class _NoRunner:
    """Computes nothing."""

    def run(self, plan: StepPlan) -> StepResult:
        del plan
        return StepResult([])


def main(num_rows: int) -> None:
    own, other = socket.socketpair()
    ring = make_ring(1)
    followers = Followers(_OneRank(Sender(ring, [own])))
    receiver, worker = Receiver(other, (ring, 1, 0)), Worker(_NoRunner())
    rows = [Row(f"r{i}", SlotId(i), 500 + i, 1, (), (), sample=True) for i in range(num_rows)]
    plan = StepPlan(rows)
    sent, received = [], []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        followers.announce(plan)
        between = time.perf_counter()
        message = receiver.receive()
        assert message is not None
        worker.handle(message)
        sent.append(between - began)
        received.append(time.perf_counter() - between)
    for name, seconds in (("rank 0", sent), ("other rank", received)):
        print(f"{name}: {statistics.median(seconds) * 1e6:.0f} us for {num_rows} rows")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 256)
