"""What the server needs of its engine, wherever the engine runs.

The endpoints, admission control and sleep mode use this protocol. client.py implements it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from typing import Protocol

from windlass.core.card import EngineReport
from windlass.core.memory import Memory
from windlass.core.trace import RequestTrace
from windlass.core.types import EngineStats, NewRequest, Output, PinnedPrefix
from windlass.errors import EngineError
from windlass.serve.adapter_registry import AdapterRegistry, Change
from windlass.serve.handover import Handovers
from windlass.serve.health import Backlog, Health
from windlass.serve.inbox import Inbox
from windlass.serve.messages import Configure, HandedOver
from windlass.serve.quarantine import Suspects


class EngineReplica(Protocol):
    """One engine of a handle."""

    index: int
    stats: EngineStats
    num_ends: int  # processes that died or hung

    def generate(self, request: NewRequest, tracked: bool) -> AsyncGenerator[Output, None]:
        """Yield the outputs of a request that this replica computes."""
        ...

    async def pin_prefix(self, name: str, request: NewRequest, on_device: bool) -> PinnedPrefix:
        """Keep the cached blocks of a prompt from eviction; one that is not cached is not pinned.

        `on_device` False: only KV tiers keep them.
        """
        ...

    async def unpin_prefix(self, name: str) -> int:
        """Let the blocks of a prefix be evicted again; returns their number."""
        ...

    @property
    def report(self) -> EngineReport: ...

    def health(self) -> Health: ...


class GenerationClient(Protocol):
    """What the endpoints that generate text need of an engine. One event loop calls all methods."""

    @property
    def adapter_names(self) -> Collection[str]:
        """The adapters that requests may use now."""
        ...

    @property
    def report(self) -> EngineReport:
        """The limits that hold for all replicas."""
        ...

    @property
    def max_num_seqs(self) -> int:
        """Requests that all replicas together run at once."""
        ...

    def generate(self, *requests: NewRequest, tracked: bool = True) -> AsyncGenerator[Output, None]:
        """Yield the outputs of all `requests`; closing the generator aborts the unfinished ones.

        An error of one request is raised and ends all. `Output.request_id` identifies the request.
        """
        ...

    def submit(
        self,
        requests: Sequence[NewRequest],
        tracked: bool = True,
        on_restart: Callable[[str], None] | None = None,
    ) -> Inbox:
        """Send requests to the engine; read the outputs with `next` and call `drop` at the end.

        Untracked requests (the server's own probes) are never blocked. `on_restart` is called with
        the id of a request that starts again after a restart of the engine: its outputs so far are
        void. None: a request with outputs fails instead.
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


class EngineHandle(GenerationClient, Protocol):
    """One engine, or several replicas of it, as the server uses them."""

    adapters: AdapterRegistry
    handovers: Handovers | None  # None: every replica computes prompts and outputs
    num_finished: int
    failed: asyncio.Event  # set when no replica is restarted any more
    # Called with a replica's index, and the current and the previous stats of its engine process.
    on_stats: Callable[[int, EngineStats, EngineStats], None] | None
    # Called with a replica's index, and the traces of requests that it has ended.
    on_traces: Callable[[int, list[RequestTrace]], None] | None
    # Called with the index of a replica that started or woke: its KV cache is empty.
    on_cache_empty: Callable[[int], None] | None
    # Called with the blocks of a request of `relay` that ended with "handover".
    on_handed: Callable[[HandedOver], None] | None
    # Called with the ids of requests whose traces were lost with their engine.
    on_traces_lost: Callable[[Collection[str]], None] | None

    @property
    def suspects(self) -> Suspects:
        """The requests that were running when an engine ended."""
        ...

    @suspects.setter
    def suspects(self, shared: Suspects) -> None:
        """Share those of another handle, before any request."""

    @property
    def replicas(self) -> Sequence[EngineReplica]: ...

    async def start(self) -> EngineReport:
        """Start the engine and wait until it is ready; raises the build's error."""
        ...

    async def close(self) -> None:
        """Stop the engine; requests still in flight end with an error."""

    def kill(self) -> None:
        """Kill the processes of the engine."""

    def configure(self, settings: Configure, retry_on_restart: bool) -> None:
        """Change settings of all engines, also of those that are restarted later."""

    def relay(self, requests: Sequence[NewRequest], inbox: Inbox) -> None:
        """Send requests whose outputs another process reads: `inbox` forwards them.

        The caller calls `ended` for each request that has finished, and `drop` after an error.
        """

    def ended(self, request_id: str, completed: bool) -> None:
        """Forget a request of `relay` whose last output was forwarded."""

    def abort_all(self, error: EngineError) -> None:
        """End every request in flight with `error`."""

    async def reset_prefix_cache(self) -> int:
        """Empty the prefix cache of unused blocks; returns their number."""
        ...

    async def trace(self, request_id: str) -> RequestTrace | None:
        """The trace so far of a running request; None: it has ended."""
        ...

    async def memory(self) -> dict[int, Memory]:
        """The current memory report of each replica that is up, by its index."""
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
        """Load or unload an adapter in all replicas or none.

        Returns the number of running requests that still use it.
        """
        ...

    @property
    def backlog(self) -> Backlog: ...

    def health(self) -> Health:
        """Whether a request would be answered now, and why not, or which replicas are down."""
        ...
