"""Compiled grammars as the scheduler sees them: who has one, and whether it is ready."""

from __future__ import annotations

from typing import Protocol

from windlass.core.structured import StructuredOutputs
from windlass.core.types import GrammarStats
from windlass.errors import EngineError, UnsupportedError


class Grammars(Protocol):
    """Grammars of the requests in an engine. Compiling happens elsewhere, and blocks no step."""

    failed: dict[str, EngineError]  # requests whose grammar cannot be followed any further

    @property
    def state(self) -> object:
        """While it stays equal, a request that was not ready still is not."""
        ...

    def enter(self, request_id: str, form: StructuredOutputs) -> None:
        """A request has arrived; its grammar is compiled from now on."""
        ...

    def begin(self) -> None:
        """A plan begins: take in what was compiled since the last."""
        ...

    def ready(self, request_id: str) -> bool:
        """Whether the request may start. A grammar that was refused raises its reason."""
        ...

    def acquire(self, request_id: str) -> None:
        """The request starts, in the plan in which it was ready; keep its grammar until `leave`."""
        ...

    def leave(self, request_id: str) -> None:
        """The request has ended."""
        ...

    def stats(self) -> GrammarStats | None: ...


class NoGrammars:
    """An engine that was built without structured outputs."""

    def __init__(self) -> None:
        self.failed: dict[str, EngineError] = {}
        self.state: object = None

    def enter(self, request_id: str, form: StructuredOutputs) -> None:
        pass

    def begin(self) -> None:
        pass

    def ready(self, request_id: str) -> bool:
        raise UnsupportedError(f"{request_id}: this engine was built without structured outputs.")

    def acquire(self, request_id: str) -> None:
        pass

    leave = acquire

    def stats(self) -> None:
        return None
