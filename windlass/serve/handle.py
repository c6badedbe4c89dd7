"""What the server needs of its engine, wherever the engine runs.

The endpoints, admission control and sleep mode use this protocol. client.py implements it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Protocol

from windlass.core.card import EngineReport
from windlass.core.memory import Memory
from windlass.core.trace import RequestTrace
from windlass.core.types import EngineStats, NewRequest, Output
from windlass.errors import EngineError
from windlass.serve.adapter_registry import AdapterRegistry, Change
from windlass.serve.health import Backlog, Health
from windlass.serve.inbox import Inbox


class EngineHandle(Protocol):
    """An engine as the HTTP process uses it. All methods belong to one event loop."""

    stats: EngineStats
    adapters: AdapterRegistry
    num_finished: int
    failed: asyncio.Event  # set when the engine is not restarted any more
    # Called with the current and the previous stats of one engine process.
    on_stats: Callable[[EngineStats, EngineStats], None] | None
    # Called with the traces of ended requests; None: the engine died with those it had.
    on_traces: Callable[[list[RequestTrace] | None], None] | None

    async def start(self) -> EngineReport:
        """Start the engine and wait until it is ready; raises the build's error."""
        ...

    async def close(self) -> None:
        """Stop the engine; requests still in flight end with an error."""

    def kill(self) -> None:
        """Kill the processes of the engine."""

    def generate(self, *requests: NewRequest, tracked: bool = True) -> AsyncGenerator[Output, None]:
        """Yield the outputs of all `requests`; closing the generator aborts the unfinished ones.

        An error of one request is raised and ends all. `Output.request_id` identifies the request.
        """
        ...

    def submit(self, requests: Sequence[NewRequest], tracked: bool = True) -> Inbox:
        """Send requests to the engine; read the outputs with `next` and call `drop` at the end.

        Untracked requests (the server's own probes) are never blocked.
        """
        ...

    async def next(self, inbox: Inbox) -> Output | None:
        """Wait for the next output; None: all requests have ended. Raises an error of any of them."""
        ...

    def drop(self, inbox: Inbox) -> None:
        """Abort the requests of the inbox that have not ended."""

    def abort(self, request_id: str, completed: bool = False) -> None:
        """Abort one request; it has no further outputs. Unknown ids are ignored.

        `completed`: the caller has all the output it needs, so the request counts as successful.
        """

    def abort_all(self, error: EngineError) -> None:
        """End every request in flight with `error`."""

    async def reset_prefix_cache(self) -> int:
        """Empty the prefix cache of unused blocks; returns their number."""
        ...

    async def trace(self, request_id: str) -> RequestTrace | None:
        """The trace so far of a running request; None: it has ended."""
        ...

    async def memory(self) -> Memory:
        """The engine's current memory report."""
        ...

    async def sleep(self) -> None:
        """Release the engine's memory and keep its process; no request may be in flight."""

    async def wake(self) -> None:
        """Undo `sleep`; an engine that was restarted since is awake already."""

    async def stop_process(self) -> None:
        """Stop the engine process until `start_process`; no request may be in flight."""

    async def start_process(self) -> None:
        """Start the engine again; on an error it stays stopped."""

    async def change_adapter(self, change: Change) -> int:
        """Load or unload an adapter; returns the number of running requests that still use it."""
        ...

    @property
    def report(self) -> EngineReport:
        """The engine's report of its last start."""
        ...

    @property
    def num_in_flight(self) -> int: ...

    @property
    def backlog(self) -> Backlog: ...

    def health(self) -> Health:
        """Whether the engine would answer a request now, and the reason if not."""
        ...
