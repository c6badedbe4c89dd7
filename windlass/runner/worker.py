"""A rank beside rank 0: runs the plans that rank 0 announces, with its own runner.

All ranks of the last pipeline stage compute the same logits and draw the same noise, so every one of
them samples the same tokens. If rank 0 is not among them, the first one sends it the results.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import msgspec

from windlass.core.types import StepPlan, StepResult
from windlass.errors import EngineError

if TYPE_CHECKING:
    from windlass.runner.executor import PendingStep


class RunPlan(msgspec.Struct, tag="run", array_like=True, frozen=True):
    """Compute a plan with one of the rank's runners: 0 is the model's, others are draft runners."""

    runner: int
    plan: StepPlan


class Call(msgspec.Struct, tag="call", array_like=True, frozen=True):
    """Call one of the rank's functions by name. With `replies`, answer when it has returned."""

    name: str
    arguments: tuple[str, ...]
    replies: bool


Command = RunPlan | Call

_decode_result = msgspec.msgpack.Decoder(StepResult).decode
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)


class OtherRanks(Protocol):
    """Messages to the other ranks; parallel/launch.py:Ranks implements it."""

    def send(self, message: bytes) -> None: ...

    def ask(self, message: bytes) -> list[bytes]: ...

    def reply(self, rank: int) -> bytes: ...

    def check(self) -> None: ...

    def lost(self, error: BaseException) -> EngineError: ...


class Followers:
    """Sends each plan and command of rank 0's runner to the other ranks, before rank 0 runs it."""

    def __init__(self, ranks: OtherRanks, runner: int = 0, last: int = 0) -> None:
        """`last`: the first rank of the last pipeline stage, which sends results unless it is rank 0."""
        self._ranks = ranks
        self._runner = runner
        self._last = last
        self._arriving: deque[ArrivingStep] = deque()  # whose results were not received yet

    def announce(self, plan: StepPlan) -> None:
        self._ranks.send(_encoder.encode(RunPlan(self._runner, plan)))

    def result(self) -> ArrivingStep:
        """A pending step for the plan announced last; the last stage will send its result."""
        step = ArrivingStep(self)
        self._arriving.append(step)
        return step

    def shared(self, own: PendingStep) -> SharedStep:
        """A pending step of this rank that checks that no other rank was lost."""
        return SharedStep(own, self)

    def receive_until(self, step: ArrivingStep | None) -> None:
        """Receive results in the order of the plans; None: of all plans."""
        while self._arriving and (step is None or step.received is None):
            oldest = self._arriving.popleft()
            oldest.received = _decode_result(self._ranks.reply(self._last))

    def lost(self, error: BaseException) -> EngineError:
        """The error to raise after a step failed on this rank, when the other ranks have started it."""
        return self._ranks.lost(error)

    def check(self) -> None:
        """Raise if a rank is lost."""
        self._ranks.check()

    def call(self, name: str, *arguments: str) -> list[bytes]:
        """Call a function of every other rank, and wait for it."""
        self.receive_until(None)
        return self._ranks.ask(_encoder.encode(Call(name, arguments, replies=True)))

    def start_call(self, name: str, *arguments: str) -> None:
        """Start a function of every other rank without waiting, for functions that run on all ranks at once."""
        self._ranks.send(_encoder.encode(Call(name, arguments, replies=False)))

    def for_runner(self, runner: int) -> Followers:
        """The followers of another runner of rank 0."""
        return Followers(self._ranks, runner)


class ArrivingStep:
    """A step that the other pipeline stages compute."""

    def __init__(self, followers: Followers) -> None:
        self._followers = followers
        self.received: StepResult | None = None

    def wait(self) -> StepResult:
        self._followers.receive_until(self)
        assert self.received is not None
        return self.received


class SharedStep:
    """A step of all ranks. If a rank was lost meanwhile, the results are invalid."""

    def __init__(self, own: PendingStep, followers: Followers) -> None:
        self._own = own
        self._followers = followers

    def wait(self) -> StepResult:
        try:
            result = self._own.wait()
        except Exception as error:
            raise self._followers.lost(error) from error
        self._followers.check()
        return result


class PlanRunner(Protocol):
    """A runner, as far as workers use it."""

    def run(self, plan: StepPlan) -> StepResult: ...


class Worker:
    """Handles the commands of rank 0. `sends_results`: rank 0 has no results of its own."""

    def __init__(self, runner: PlanRunner, sends_results: bool = False) -> None:
        self._runners = {0: runner}
        self._sends_results = sends_results
        self.calls: dict[str, Callable[..., object]] = {}  # by the names that rank 0 uses

    def add(self, number: int, runner: PlanRunner) -> None:
        """Add a draft runner, or replace it."""
        self._runners[number] = runner

    def handle(self, message: bytes) -> bytes | None:
        """Run one command. Returns the reply to send, or None."""
        command = _decoder.decode(message)
        if isinstance(command, RunPlan):
            result = self._runners[command.runner].run(command.plan)
            return _encoder.encode(result) if self._sends_results else None
        reply = self.calls[command.name](*command.arguments)
        if not command.replies:
            return None
        return reply if isinstance(reply, bytes) else b""
