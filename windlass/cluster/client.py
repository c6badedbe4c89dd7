"""The replicas of one model as the ingress sees them: the server's engine handle over Ray Serve.

Each request is one streaming call. Serve's router chooses the replica, and queues the call while there
is none. A request whose replica dies runs once more elsewhere if its client has seen nothing of it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextvars import Context
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from ray.exceptions import RayActorError
from ray.serve.exceptions import (
    DeploymentUnavailableError,
    ReplicaUnavailableError,
    RequestCancelledError,
)
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from windlass.cluster.adapters import AdapterResult, FleetAdapters
from windlass.cluster.fleet import Model
from windlass.cluster.replica import Frame, Snapshot
from windlass.cluster.routing import Call, routing_of
from windlass.core.card import EngineReport
from windlass.core.memory import Memory
from windlass.core.trace import RequestTrace
from windlass.core.types import EngineStats, NewRequest, Output
from windlass.errors import (
    EngineCrashed,
    EngineError,
    RanTwice,
    RequestBlocked,
    RequestError,
    UnsupportedError,
    WorkerDied,
)
from windlass.serve.adapter_registry import Change
from windlass.serve.handover import Handovers
from windlass.serve.health import Backlog, Health
from windlass.serve.inbox import Inbox, InboxReader
from windlass.serve.messages import Configure, HandedOver
from windlass.serve.quarantine import Suspects, fingerprint

_log = logging.getLogger("windlass.cluster")

_POLL_S = 1.0
_POLLED_PER_S = 10  # replicas that one ingress asks in a second
_POLL_TIMEOUT_S = 5.0
_IDLE_POLL_S = 0.1
_ADAPTER_TIMEOUT_S = 120.0
_MAX_RETRIES = 1  # of a request: one that ends every engine must not end all of them
_LOST = (RayActorError, ReplicaUnavailableError)
_ENDED = "an engine of the fleet ended"
_NO_SUCH_CALL = "replicas of a fleet start and stop with the load. Use `windlass cluster`"


class Slot:
    """One of the replicas that a model may have; replicas take free slots as they start."""

    def __init__(self, index: int, owner: FleetClient) -> None:
        self.index = index
        self._owner = owner
        self.stats = EngineStats()
        self.num_ends = 0  # replicas that left this slot, and engines that were restarted
        self.snapshot: Snapshot | None = None  # None: no replica is here

    def generate(self, request: NewRequest, tracked: bool) -> AsyncGenerator[Output, None]:
        """Yield the outputs of a request that this replica computes."""
        return self._owner.generate(
            request, tracked=tracked, replica=self.snapshot.replica if self.snapshot else ""
        )

    async def pin_prefix(
        self,
        name: str,
        request: NewRequest,  # noqa: ARG002
        on_device: bool,  # noqa: ARG002
    ) -> NoReturn:
        raise UnsupportedError(f"the prefix {name!r} cannot be kept: {_NO_SUCH_CALL}.")

    async def unpin_prefix(self, name: str) -> int:  # noqa: ARG002
        return 0  # none was pinned

    @property
    def report(self) -> EngineReport:
        return self._owner.report if self.snapshot is None else self.snapshot.report

    def health(self) -> Health:
        if self.snapshot is None:
            return Health(False, "no replica is here")
        return self.snapshot.health


class _ReplicaLost(WorkerDied):
    """A replica ended while it had this request."""


@dataclass(slots=True)
class _Flight:
    """A request in flight: `task` reads its outputs."""

    inbox: Inbox
    fingerprint: bytes  # b"": its strikes do not count
    task: asyncio.Task[None] | None = None
    stream: DeploymentResponseGenerator[Any] | None = None
    has_output: bool = False
    incident: str = ""  # the end of the engine that ran it last


class FleetClient(InboxReader):
    """Owns the requests of one ingress to one model. One event loop, one thread."""

    def __init__(self, model: Model, handle: DeploymentHandle[Any]) -> None:
        self._model = model
        self._handle = handle
        self._generate = handle.options(method_name="generate", stream=True)
        self._routing = routing_of(handle.deployment_name)
        # A rolling update has more replicas for a while.
        self.replicas = [Slot(index, self) for index in range(model.replicas.max + 1)]
        self._flights: dict[str, _Flight] = {}
        self._report: EngineReport | None = None
        self._poll: asyncio.Task[None] | None = None
        self.fleet_adapters = FleetAdapters(model.name, self._change_adapters)
        self.adapters = self.fleet_adapters.registry
        self.handovers: Handovers | None = None
        self.suspects = Suspects()  # requests that engines ran when they ended
        self.num_finished = 0
        self.failed = asyncio.Event()  # never set: Ray Serve goes on starting replicas
        self.on_stats: Callable[[int, EngineStats, EngineStats], None] | None = None
        self.on_traces: Callable[[int, list[RequestTrace]], None] | None = None
        self.on_cache_empty: Callable[[int], None] | None = None  # not called: no prefix is pinned
        self.on_traces_lost: Callable[[Collection[str]], None] | None = None
        self.on_handed: Callable[[HandedOver], None] | None = None  # not called: none hands over

    # ---- replicas ----------------------------------------------------------------------------

    async def start(self) -> EngineReport:
        """Wait for the first replica, which starts if there is none."""
        snapshot: Snapshot = await self._handle.snapshot.remote()
        report = self._report = snapshot.report
        num_blocks = report.capacity.num_blocks if report.prefix_caching else 0
        self._routing.configure(report.capacity.block_size, num_blocks)
        self._place(await self._on_all("snapshot") or [snapshot])
        self._poll = asyncio.create_task(self._poll_forever())
        return report

    async def idle(self, timeout_s: float) -> None:
        """Wait until no request is in flight, or for `timeout_s`."""
        end = time.monotonic() + timeout_s
        while self._flights and time.monotonic() < end:
            await asyncio.sleep(_IDLE_POLL_S)

    async def close(self) -> None:
        """End the requests in flight; the replicas go on."""
        self.abort_all(WorkerDied("the ingress is shutting down."))
        self.fleet_adapters.close()
        if self._poll is not None:
            self._poll.cancel()

    async def _poll_forever(self) -> None:
        while True:
            # All ingresses ask all replicas: the more there are, the less often.
            await asyncio.sleep(_POLL_S * max(1.0, len(self._up) / _POLLED_PER_S))
            self._place(await self._on_all("snapshot"))

    async def _change_adapters(self, changes: Sequence[Change]) -> list[AdapterResult]:
        return await self._on_all("change_adapters", changes, timeout_s=_ADAPTER_TIMEOUT_S)

    async def _on_all(
        self, method: str, *arguments: object, timeout_s: float = _POLL_TIMEOUT_S
    ) -> list[Any]:
        """Call all replicas; leaves out those that are gone. Without replicas, there are no results."""
        try:
            response = self._handle.broadcast(method, *arguments)
            results = await response.results_async(timeout_s=timeout_s, return_exceptions=True)
        except (DeploymentUnavailableError, TimeoutError):
            return []
        for each in results:
            if isinstance(each, Exception) and not isinstance(each, _LOST):
                _log.warning("%s of a replica of %s failed: %s", method, self._model.name, each)
        return [each for each in results if not isinstance(each, Exception)]

    def _place(self, snapshots: Sequence[Snapshot]) -> None:
        """Assign replicas to slots, and pass on their stats."""
        by_id = {each.replica: each for each in snapshots}
        self.fleet_adapters.sync(
            {each.replica: (each.adapters, each.adapter_roots) for each in snapshots}
        )
        for slot in self.replicas:
            if slot.snapshot is None:
                continue
            found = by_id.pop(slot.snapshot.replica, None)
            if found is None:
                slot.snapshot, slot.stats = None, EngineStats()
                slot.num_ends += 1
            else:
                slot.num_ends += found.num_ends - slot.snapshot.num_ends
                if found.num_launches != slot.snapshot.num_launches:
                    slot.stats = EngineStats()  # the new engine counts from zero
                self._update(slot, found)
        free = (slot for slot in self.replicas if slot.snapshot is None)
        for snapshot, slot in zip(by_id.values(), free, strict=False):
            self._update(slot, snapshot)

    def _update(self, slot: Slot, snapshot: Snapshot) -> None:
        slot.snapshot = snapshot
        last, slot.stats = slot.stats, snapshot.stats
        if self.on_stats is not None:
            self.on_stats(slot.index, slot.stats, last)
        self._routing.observe(snapshot.replica, snapshot.num_outstanding, is_up=snapshot.health.ok)

    @property
    def _up(self) -> list[Snapshot]:
        found = (slot.snapshot for slot in self.replicas)
        return [each for each in found if each is not None and each.health.ok]

    # ---- requests ----------------------------------------------------------------------------

    def generate(
        self, *requests: NewRequest, tracked: bool = True, replica: str = ""
    ) -> AsyncGenerator[Output, None]:
        """Yield the outputs of all `requests`; closing the generator aborts the unfinished ones."""
        inbox = Inbox(each.request_id for each in requests)
        return self._outputs_of(lambda: self._submit(requests, inbox, tracked, replica))

    def submit(
        self,
        requests: Sequence[NewRequest],
        tracked: bool = True,
        on_restart: Callable[[str], None] | None = None,
    ) -> Inbox:
        """Send requests to replicas; read the outputs with `next` and call `drop` at the end."""
        inbox = Inbox((each.request_id for each in requests), on_restart)
        return self._submit(requests, inbox, tracked, "")

    def _submit(
        self, requests: Sequence[NewRequest], inbox: Inbox, tracked: bool, replica: str
    ) -> Inbox:
        fingerprints = [fingerprint(request) if tracked else b"" for request in requests]
        self.suspects.check(fingerprints)
        for request in requests:
            if request.request_id in self._flights:
                raise RequestError(
                    f"request_id {request.request_id!r} is in use by a running request.",
                    "request_id",
                )
        for request, content in zip(requests, fingerprints, strict=True):
            flight = self._flights[request.request_id] = _Flight(inbox, content)
            call = Call(request, tracked=tracked, replica=replica)
            # Calls that Serve sees as parts of one HTTP request have one id, which its router cannot
            # tell apart: each gets a context without the HTTP request.
            flight.task = asyncio.create_task(self._run(flight, call), context=Context())
        return inbox

    async def _run(self, flight: _Flight, call: Call) -> None:
        """Read the outputs of a request, and run it once more if its replica is lost."""
        name, num_runs = call.request.request_id, 0
        for num_retries in range(_MAX_RETRIES + 1):
            error = await self._run_once(flight, call)
            replica_id = self._routing.replica_of(name) or ""
            self._routing.ended(name)
            if isinstance(error, EngineCrashed):
                self.suspects.strike([flight.fingerprint], _ENDED, flight.incident)
                error = self.suspects.blocked(flight.fingerprint) or error
            elif isinstance(error, RequestBlocked):
                # The replica has counted the strikes: its engine ended twice. No other model may
                # run this request while that engine is restarted.
                self.suspects.block(flight.fingerprint, _ENDED)
            if not isinstance(error, WorkerDied) or name not in self._flights:
                break
            num_runs += isinstance(error, EngineCrashed | _ReplicaLost)
            may_restart = not flight.has_output or flight.inbox.can_restart
            if num_runs > _MAX_RETRIES:
                error = RanTwice(f"{error} It has run twice, and is not sent to a third process.")
            if num_retries == _MAX_RETRIES or call.replica or not may_restart:
                break
            _log.warning("request %s runs again: %s", name, error)
            if flight.has_output:
                flight.inbox.restart(name)
                flight.has_output = False
            call = replace(call, avoid=replica_id)
        if error is not None and name in self._flights:
            if self.on_traces_lost is not None:
                self.on_traces_lost([name])
            flight.inbox.put(error)

    async def _run_once(self, flight: _Flight, call: Call) -> EngineError | None:
        """Read the outputs of one attempt; returns the error that ended it."""
        deadline = call.request.deadline
        if deadline is not None:
            call = replace(call, remaining_s=max(0.0, deadline - time.monotonic()))
        flight.stream = self._generate.remote(call)
        try:
            async for frame in flight.stream:
                flight.incident = frame.incident
                if self._on_frame(flight, frame, call.request.request_id):
                    return None if frame.error is None else frame.error.error()
        except _LOST as error:
            return _ReplicaLost(
                f"the replica that ran this request is gone ({type(error).__name__}). Send it again."
            )
        except DeploymentUnavailableError:
            return WorkerDied(
                f"no replica of {self._model.name} can be started. See the log of Ray."
            )
        except RequestCancelledError:  # by `ended`, or by Serve
            return WorkerDied("Ray Serve has cancelled this request. Send it again.")
        return WorkerDied("the replica ended this request without a reason. Send it again.")

    def _on_frame(self, flight: _Flight, frame: Frame, name: str) -> bool:
        """Pass on a frame; returns whether it is the last one of its request."""
        if frame.traces and self.on_traces is not None:
            self.on_traces(0, frame.traces)
        if frame.outputs and not flight.has_output:
            flight.has_output = True
            self._routing.prompt_computed(name)
        for output in frame.outputs:
            if output.finish is not None:
                timeline = None if output.pooled is not None else output.timeline
                self._routing.ended(name, None if timeline is None else timeline.num_output)
            flight.inbox.put(output)
        is_last = bool(frame.outputs) and frame.outputs[-1].finish is not None
        return is_last or frame.error is not None

    def _inbox_of(self, request_id: str) -> Inbox | None:
        flight = self._flights.get(request_id)
        return None if flight is None else flight.inbox

    def _tell_abort(self, _request_id: str, _completed: bool) -> None:
        """Do nothing: `ended` cancels the call to the replica."""

    def ended(self, request_id: str, completed: bool) -> None:
        """Forget a request; one that still runs is aborted."""
        flight = self._flights.pop(request_id)
        if completed:
            self.suspects.clear(flight.fingerprint)
        flight.inbox.open_ids.discard(request_id)
        self.num_finished += 1
        self._routing.ended(request_id)
        if flight.task is not None and not flight.task.done():
            flight.task.cancel()
            if flight.stream is not None:
                flight.stream.cancel()

    def abort_all(self, error: EngineError) -> None:
        """End every request in flight with `error`."""
        for inbox in {id(each.inbox): each.inbox for each in self._flights.values()}.values():
            inbox.put(error)

    # ---- state -------------------------------------------------------------------------------

    @property
    def adapter_names(self) -> Collection[str]:
        return self.adapters.folders.keys()

    @property
    def report(self) -> EngineReport:
        if self._report is None:
            raise WorkerDied(f"{self.health().reason}.")
        return self._report

    @property
    def max_num_seqs(self) -> int:
        """Requests that the replicas run at once; without any, those of the first to start."""
        return self.report.max_num_seqs * max(1, len(self._up))

    @property
    def backlog(self) -> Backlog:
        """Of the last poll; requests of this ingress that no replica had reported are unseen."""
        stats = [slot.stats for slot in self.replicas]
        num_running = sum(each.num_running for each in stats)
        num_waiting = sum(each.num_waiting for each in stats)
        return Backlog(
            num_running=num_running,
            num_waiting=num_waiting,
            num_unseen=max(0, len(self._flights) - num_running - num_waiting),
            num_tokens=sum(each.num_waiting_tokens for each in stats),
        )

    def health(self) -> Health:
        """A request is answered unless the first replica has not started yet: others are started."""
        if self._report is None:
            return Health(False, f"no replica of {self._model.name} has started yet")
        if not self._up and self._model.replicas.min:
            return Health(False, f"no replica of {self._model.name} is up; one is started")
        down = [slot.index for slot in self.replicas if slot.snapshot and not slot.health().ok]
        if down:
            return Health(True, f"the engines of replicas {down} are restarting", "degraded")
        return Health(True)

    async def reset_prefix_cache(self) -> int:
        """Empty the prefix caches of unused blocks; returns their number."""
        counts = await self._on_all("reset_prefix_cache")
        self._routing.caches_lost()
        return sum(counts)

    async def trace(self, request_id: str) -> RequestTrace | None:
        """The trace so far of a running request; None: it has ended."""
        found = await self._on_all("trace", request_id)
        return next((each for each in found if each is not None), None)

    async def memory(self) -> dict[int, Memory]:
        """The current memory report of each replica, by its slot."""
        found = dict(await self._on_all("memory"))
        return {
            slot.index: found[slot.snapshot.replica]
            for slot in self.replicas
            if slot.snapshot is not None and slot.snapshot.replica in found
        }

    # ---- what a fleet does not do --------------------------------------------------------------

    def kill(self) -> None:
        """Do nothing: the replicas are not this process's."""

    def configure(self, settings: Configure, retry_on_restart: bool) -> NoReturn:  # noqa: ARG002
        raise UnsupportedError(
            "settings of a fleet do not change while it runs: other replicas would not have them. "
            "Write them into the fleet file, and run `windlass cluster up` again."
        )

    def relay(self, requests: Sequence[NewRequest], inbox: Inbox) -> NoReturn:  # noqa: ARG002
        raise UnsupportedError(f"an ingress has no HTTP workers: {_NO_SUCH_CALL}.")

    async def sleep(self) -> None:
        raise UnsupportedError(f"a fleet does not sleep: {_NO_SUCH_CALL}.")

    wake = stop_process = start_process = sleep

    async def change_adapter(self, change: Change) -> int:
        """Load or unload an adapter in all replicas or none; replicas that start later get it, too."""
        return await self.fleet_adapters.change(change)
