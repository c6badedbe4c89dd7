"""The scheduler's interface to compiled grammars."""

from __future__ import annotations

from typing import Protocol

from windlass.core.structured import StructuredOutputs
from windlass.core.types import GrammarFailure, GrammarStats
from windlass.errors import EngineError, UnsupportedError


class Grammars(Protocol):
    """Grammars of the requests in an engine. They compile concurrently with steps."""

    @property
    def state(self) -> object:
        """While this is unchanged, a request that was not ready is still not ready."""
        ...

    def enter(self, request_id: str, structured: StructuredOutputs) -> None:
        """Start to compile the grammar of a request that arrived."""
        ...

    def begin(self) -> None:
        """Start a plan: collect the grammars that were compiled since the last one."""
        ...

    def ready(self, request_id: str) -> bool:
        """Whether the request may start. Raises if its grammar was refused."""
        ...

    def acquire(self, request_id: str) -> str:
        """Return the grammar of a request that starts, and keep it until `leave`. Call in the plan in which
        `ready` was true.
        """
        ...

    def fail(self, failure: GrammarFailure) -> EngineError:
        """Note that a request's grammar failed in a step; returns the error that ends the request."""
        ...

    def leave(self, request_id: str) -> None:
        """Release the grammar of a request that ended."""
        ...

    def stats(self) -> GrammarStats | None: ...


class NoGrammars:
    """The grammars of an engine without structured outputs."""

    def __init__(self) -> None:
        self.state: object = None

    def enter(self, request_id: str, structured: StructuredOutputs) -> None:
        pass

    def begin(self) -> None:
        pass

    def ready(self, request_id: str) -> bool:
        raise UnsupportedError(f"{request_id}: this engine was built without structured outputs.")

    def acquire(self, request_id: str) -> str:
        raise AssertionError(f"{request_id} has no grammar")

    def fail(self, failure: GrammarFailure) -> EngineError:
        raise AssertionError(f"{failure.request_id} has no grammar")

    def leave(self, request_id: str) -> None:
        pass

    def stats(self) -> None:
        return None
