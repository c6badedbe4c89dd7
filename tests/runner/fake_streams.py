"""Streams without a GPU: their work is done later, in any order that the marks allow."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random

from windlass.runner.cuda.kv_copies import Event, Streams


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.passed = False

    def done(self) -> bool:
        return self.passed

    def wait(self) -> None:
        while not self.passed:
            self._device.advance()


class FakeStream:
    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        # A function to call, or an event to wait for.
        self.queue: deque[Callable[[], None] | FakeEvent] = deque()

    def run(self, work: Callable[[], None]) -> None:
        self.queue.append(work)

    def record_event(self) -> FakeEvent:
        event = FakeEvent(self._device)
        self.queue.append(lambda: setattr(event, "passed", True))
        return event

    def wait(self, event: Event) -> None:
        assert isinstance(event, FakeEvent)
        self.queue.append(event)


class FakeDevice:
    """Owns the streams, and does one piece of their work at a time, of a random stream."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self.compute, self.reads, self.writes = (FakeStream(self) for _ in range(3))
        self.streams = Streams(self.compute, self.reads, self.writes)

    def advance(self) -> bool:
        """Do one piece of work; False: none is left."""
        streams = [self.compute, self.reads, self.writes]
        self._random.shuffle(streams)
        for stream in streams:
            while stream.queue and isinstance(head := stream.queue[0], FakeEvent) and head.passed:
                stream.queue.popleft()
            if stream.queue and not isinstance(stream.queue[0], FakeEvent):
                work = stream.queue.popleft()
                assert not isinstance(work, FakeEvent)
                work()
                return True
        assert not any(stream.queue for stream in streams), "the streams wait for each other"
        return False

    def finish(self) -> None:
        while self.advance():
            pass
