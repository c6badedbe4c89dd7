"""A rank beside rank 0: runs the plans that rank 0 announces, with its own runner.

All ranks compute the same logits and draw the same noise, so every rank samples the same tokens and
none are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from windlass.core.types import StepPlan, StepResult
from windlass.errors import EngineError


class RunPlan(msgspec.Struct, tag="run", array_like=True, frozen=True):
    """Compute a plan with one of the rank's runners: 0 is the model's, others are draft runners."""

    runner: int
    plan: StepPlan


class Call(msgspec.Struct, tag="call", array_like=True, frozen=True):
    """Call one of the rank's functions by its name, and reply when it is done."""

    name: str
    arguments: tuple[str, ...] = ()


Command = RunPlan | Call

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)


class OtherRanks(Protocol):
    """The ranks beside this one; parallel/launch.py:Ranks."""

    def send(self, message: bytes) -> None: ...

    def ask(self, message: bytes) -> list[bytes]: ...

    def lost(self, error: BaseException) -> EngineError: ...


class Followers:
    """Announces what rank 0's runner does to the other ranks, before it does it."""

    def __init__(self, ranks: OtherRanks, runner: int = 0) -> None:
        self._ranks = ranks
        self._runner = runner

    def announce(self, plan: StepPlan) -> None:
        self._ranks.send(_encoder.encode(RunPlan(self._runner, plan)))

    def lost(self, error: BaseException) -> EngineError:
        """The error to raise after a step failed here: the other ranks are in the middle of it."""
        return self._ranks.lost(error)

    def call(self, name: str, *arguments: str) -> list[bytes]:
        """Call a function of every other rank, and wait for it."""
        return self._ranks.ask(_encoder.encode(Call(name, arguments)))


class Runs(Protocol):
    """A runner."""

    def run(self, plan: StepPlan) -> StepResult: ...


class Worker:
    """Handles the commands of rank 0."""

    def __init__(self, runner: Runs, calls: Mapping[str, Callable[..., bytes | None]]) -> None:
        self.runners = {0: runner}
        self._calls = calls

    def handle(self, message: bytes) -> bytes | None:
        """Run one command; its reply, if it has one."""
        command = _decoder.decode(message)
        if isinstance(command, RunPlan):
            self.runners[command.runner].run(command.plan)
            return None
        return self._calls[command.name](*command.arguments) or b""
