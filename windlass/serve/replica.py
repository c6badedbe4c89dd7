"""One engine as the HTTP process sees it: its stats, the calls it has to answer, its queue.

supervisor.py owns its process, client.py the requests of all replicas.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

from windlass.core.card import EngineReport
from windlass.core.memory import Memory
from windlass.core.trace import RequestTrace
from windlass.core.types import EngineStats, NewRequest, Output, PinnedPrefix
from windlass.errors import EngineError
from windlass.serve import messages
from windlass.serve.adapter_registry import AdapterCalls, Change
from windlass.serve.health import Backlog, Health
from windlass.serve.process import build_error, refusal_error
from windlass.serve.rpc import PendingCalls
from windlass.serve.supervisor import EngineLaunch, EngineSupervisor

T = TypeVar("T", bound=messages.Reply)

_REPLY_TIMEOUT_S = 10.0
_SLEEP_TIMEOUT_S = 600.0  # weights may be large, and a disk slow


class ReplicaOwner(Protocol):
    """What a replica reports to the owner of its requests."""

    def on_ready(self, replica: Replica, report: EngineReport) -> None: ...

    def on_outputs(self, replica: Replica, outputs: list[Output]) -> None: ...

    def on_handed_over(self, replica: Replica, handed: messages.HandedOver) -> None: ...

    def on_refused(self, replica: Replica, refused: messages.Refused) -> None: ...

    def on_step_failed(self, failed: messages.StepFailed) -> None: ...

    def on_stats_of(self, replica: Replica, stats: EngineStats, last: EngineStats) -> None: ...

    def on_traces_of(self, replica: Replica, traces: list[RequestTrace]) -> None: ...

    def on_adapter_reloaded(self, replica: Replica, reply: messages.AdapterReply) -> None:
        """The reply to a change that brought a restarted engine up to date."""

    def on_end(self, replica: Replica, how: str, running: frozenset[bytes]) -> None:
        """The engine died or hung while it ran the requests with these fingerprints."""

    def on_failed(self) -> None:
        """An engine is not restarted any more."""

    def generate(
        self, *requests: NewRequest, tracked: bool, replica: Replica | None
    ) -> AsyncGenerator[Output, None]: ...


class Replica:
    """Owns one engine. `index` numbers the replicas of a server from 0; `label` is for messages."""

    def __init__(self, index: int, launch: EngineLaunch, owner: ReplicaOwner, label: str) -> None:
        self.index = index
        self._owner = owner
        self.supervisor = EngineSupervisor(launch, self, label)
        self._report: EngineReport | None = None
        self._calls = PendingCalls()
        self._adapter_calls = AdapterCalls()
        # Requests sent to this engine process, and those that it has not reported as received.
        self._num_sent = 0
        self._unseen: deque[int] = deque()  # prompt lengths
        self.untraced: set[str] = set()  # requests whose traces have not arrived
        self.stats = EngineStats()
        self.num_ends = 0  # processes that died or hung
        self.num_launches = 0  # of processes; each begins with new stats

    # ---- events of the supervisor --------------------------------------------------------------

    def on_launch(self) -> None:
        self._num_sent = 0
        self._unseen.clear()
        self.num_launches += 1
        self.stats = EngineStats()

    def on_ready(self, report: EngineReport) -> None:
        self._report = report
        self._owner.on_ready(self, report)

    def on_message(self, message: messages.FromEngine) -> None:
        match message:
            case messages.Outputs(outputs):
                self._owner.on_outputs(self, outputs)
            case messages.HandedOver():
                self._owner.on_handed_over(self, message)
            case messages.Refused():
                self.untraced.discard(message.request_id)
                self._owner.on_refused(self, message)
            case messages.StepFailed():
                self._owner.on_step_failed(message)
            case messages.Stats(stats, num_adds):
                last, self.stats = self.stats, stats
                while len(self._unseen) > self._num_sent - num_adds:
                    self._unseen.popleft()
                self._owner.on_stats_of(self, stats, last)
            case messages.AdapterReply():
                if not self._adapter_calls.on_reply(message):
                    self._owner.on_adapter_reloaded(self, message)
            case messages.Traces(traces):
                self.untraced.difference_update(trace.request_id for trace in traces)
                self._owner.on_traces_of(self, traces)
            case (
                messages.CacheReset()
                | messages.TraceReply()
                | messages.MemoryReply()
                | messages.PinReply()
            ):
                self._calls.on_reply(message)

    def on_end(self, how: str, running: frozenset[bytes]) -> None:
        self.num_ends += 1
        self._owner.on_end(self, how, running)
        self._calls.fail(how)
        self._adapter_calls.fail(how)

    def on_failed(self) -> None:
        self._owner.on_failed()

    # ---- requests and calls ------------------------------------------------------------------

    def add(self, adds: Sequence[messages.Add]) -> None:
        """Send requests to the engine process, which must exist."""
        assert self.supervisor.process is not None
        self._num_sent += len(adds)
        self._unseen.extend(len(add.request.prompt) for add in adds)
        self.untraced.update(add.request.request_id for add in adds)
        self.supervisor.process.send(*adds)

    def abort(self, request_id: str) -> None:
        if self.supervisor.process is not None:
            self.supervisor.process.send(messages.Abort(request_id))

    def generate(self, request: NewRequest, tracked: bool) -> AsyncGenerator[Output, None]:
        """Yield the outputs of a request that this replica computes."""
        return self._owner.generate(request, tracked=tracked, replica=self)

    async def _call(
        self,
        make_call: Callable[[int], messages.Call],
        reply_type: type[T],
        timeout_s: float = _REPLY_TIMEOUT_S,
    ) -> T:
        send = self.supervisor.running.send
        return await self._calls.call(make_call, reply_type, send=send, timeout_s=timeout_s)

    async def reset_prefix_cache(self) -> int:
        return (await self._call(messages.ResetPrefixCache, messages.CacheReset)).num_blocks

    async def trace(self, request_id: str) -> RequestTrace | None:
        get = partial(messages.GetTrace, request_id=request_id)
        return (await self._call(get, messages.TraceReply)).trace

    async def memory(self) -> Memory:
        return (await self._call(messages.GetMemory, messages.MemoryReply)).memory

    async def pin_prefix(self, name: str, request: NewRequest, on_device: bool) -> PinnedPrefix:
        """Keep the cached blocks of a prompt from eviction; one that is not cached is not pinned."""
        return await self._pin(
            partial(messages.PinPrefix, name=name, request=request, on_device=on_device)
        )

    async def unpin_prefix(self, name: str) -> int:
        """Let the blocks of a prefix be evicted again; returns their number."""
        return (await self._pin(partial(messages.UnpinPrefix, name=name))).num_blocks

    async def _pin(self, make_call: Callable[[int], messages.Call]) -> PinnedPrefix:
        reply = await self._call(make_call, messages.PinReply)
        if reply.kind:
            raise refusal_error(reply.kind, reply.message, reply.param)
        return reply.prefix

    async def sleep(self) -> None:
        await self._sleep_or_wake(messages.Sleep)

    async def wake(self) -> None:
        await self._sleep_or_wake(messages.Wake)

    async def _sleep_or_wake(self, call: type[messages.Sleep] | type[messages.Wake]) -> None:
        with self.supervisor.expect_silence():
            reply = await self._call(call, messages.MemoryReply, _SLEEP_TIMEOUT_S)
        if reply.kind:
            raise build_error(reply.kind, reply.message)

    async def stop_process(self) -> None:
        """Stop the engine process until `start_process`; no request may be in flight."""
        await self.supervisor.stop_process()
        self._calls.fail(self.health().reason)

    async def change_adapter(self, change: Change) -> int:
        return await self._adapter_calls.call(change, self.supervisor.running.send)

    def send_change(self, change: Change) -> None:
        """Send a change without waiting; `on_adapter_reloaded` gets the reply."""
        self.supervisor.running.send(change)

    def configure(self, settings: messages.Configure) -> None:
        """Change settings now; while no process runs, the owner sends them again when one is ready."""
        self.supervisor.set_hang_timeout(settings.hang_timeout)
        if self.supervisor.process is not None:
            self.supervisor.process.send(settings)

    # ---- state -------------------------------------------------------------------------------

    @property
    def report(self) -> EngineReport:
        """The engine's report of its last start."""
        if self._report is None:
            raise EngineError(self.health().reason)
        return self._report

    @property
    def pid(self) -> int | None:
        """The engine's process id; None while no process runs."""
        return self.supervisor.pid

    @property
    def backlog(self) -> Backlog:
        stats = self.stats
        return Backlog(
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_unseen=len(self._unseen),
            num_tokens=stats.num_waiting_tokens + sum(self._unseen),
        )

    def health(self) -> Health:
        """Whether the engine would answer a request now, and the reason if not."""
        return self.supervisor.health()
