"""The requests in flight: sends them to engines, and gives their outputs to the responses.

One engine, or several replicas of it (replica_set.py), of which routing.py chooses one for each
request. When an engine ends, requests that it had not started go to another replica once, and the
others fail. With `retry_on_restart`, all requests of which the client has seen nothing run once more,
on another replica or in the restarted engine; quarantine.py decides which requests may run again. This
module does not know HTTP.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import (
    AsyncGenerator,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, replace

from windlass.core.card import EngineReport
from windlass.core.handover import HandedBlocks
from windlass.core.memory import Memory
from windlass.core.trace import RequestTrace
from windlass.core.types import EngineStats, NewRequest, Output
from windlass.errors import (
    EngineCrashed,
    EngineError,
    RequestBlocked,
    RequestError,
    WorkerDied,
)
from windlass.handshake import Identity
from windlass.serve import messages
from windlass.serve.adapter_registry import Change
from windlass.serve.handover import PREFILL_DIED, PREFILL_REFUSED, Handovers, SplitPolicy
from windlass.serve.health import Backlog, Health, RestartPolicy
from windlass.serve.inbox import Inbox, InboxReader
from windlass.serve.loop import Build, Prepare
from windlass.serve.prefill_server import PrefillServer
from windlass.serve.process import refusal_error
from windlass.serve.quarantine import Quarantine, Suspects, fingerprint
from windlass.serve.replica import Replica
from windlass.serve.replica_set import ReplicaSet
from windlass.serve.routing import PrefixRouter
from windlass.serve.supervisor import EngineLaunch

_log = logging.getLogger("windlass.serve")


def _no_preparation() -> None:
    """Do nothing: the build needs no slow imports."""


@dataclass(slots=True)
class _Flight:
    """A request in flight."""

    add: messages.Add
    inbox: Inbox
    replica: Replica | PrefillServer | None = None  # None: the quarantine holds it back
    has_output: bool = False
    has_finished: bool = False  # its last output is in the inbox
    was_resent: bool = False
    is_pinned: bool = False  # must run on this replica


class EngineClient(InboxReader):
    """Owns the replicas and the requests in flight. One event loop, one thread.

    `build` is pickled and called in each engine process; it returns the engine and its report.
    None: `build_with` sets it later, while the processes that `start` started run `prepare`.
    `prefill_servers`: HOST:PORT of servers on other hosts, whose roles in `split` follow those of the replicas.
    """

    def __init__(
        self,
        build: Build | None,
        hang_timeout: float = 120.0,
        restarts: RestartPolicy | None = None,
        prepare: Prepare = _no_preparation,
        num_replicas: int = 1,
        retry_on_restart: bool = False,
        split: SplitPolicy | None = None,
        prefill_servers: Sequence[str] = (),
        secret: bytes = b"",
    ) -> None:
        launch = EngineLaunch(build, prepare, hang_timeout, restarts or RestartPolicy())
        self._replica_set = ReplicaSet(num_replicas, launch, self)
        self.replicas = self._replica_set.replicas
        self.adapters = self._replica_set.adapters
        self.prefill_servers = [
            PrefillServer(
                num_replicas + number,
                address,
                self,
                lambda: Identity(self.report.kv_facts, secret),
            )
            for number, address in enumerate(prefill_servers)
        ]
        self._flights: dict[str, _Flight] = {}
        self._router: PrefixRouter | None = None  # None: there is one replica
        # None: every replica computes prompts and outputs.
        self.handovers = None if split is None else Handovers(split)
        self._quarantine = Quarantine()
        self._retry_on_restart = retry_on_restart
        self._waiting: dict[str, messages.Add] = {}  # until an engine is up again, by request id
        self.num_finished = 0
        self.failed = asyncio.Event()
        self.on_stats: Callable[[int, EngineStats, EngineStats], None] | None = None
        self.on_traces: Callable[[int, list[RequestTrace]], None] | None = None
        self.on_cache_empty: Callable[[int], None] | None = None
        self.on_traces_lost: Callable[[Collection[str]], None] | None = None
        self.on_handed: Callable[[messages.HandedOver], None] | None = None

    # ---- processes ---------------------------------------------------------------------------

    async def start(self) -> EngineReport:
        """Start all engines and wait until they are ready; raises the first error of a build."""
        report = await self._replica_set.start()
        try:
            await asyncio.gather(*(each.start() for each in self.prefill_servers))
        except BaseException:
            await self.close()
            raise
        return report

    def build_with(self, *builds: Build) -> None:
        """Set the build functions of the replicas, which were not known at construction."""
        self._replica_set.build_with(*builds)

    async def close(self) -> None:
        """Stop the engine processes; requests still in flight end with an error."""
        self.abort_all(WorkerDied("the server is shutting down."))
        await asyncio.gather(*(each.close() for each in self.prefill_servers))
        await self._replica_set.close()

    def kill(self) -> None:
        self._replica_set.kill()

    def configure(self, settings: messages.Configure, retry_on_restart: bool) -> None:
        self._retry_on_restart = retry_on_restart
        self._replica_set.configure(settings)

    def on_ready(self, replica: Replica, report: EngineReport) -> None:
        self._replica_set.sync_after_start(replica, report)  # before any request
        max_blocks = report.capacity.num_blocks if report.prefix_caching else 0
        if self._router is not None:
            self._router.cache_lost(replica.index, max_blocks)
        elif len(self.replicas) + len(self.prefill_servers) > 1:
            sizes = [max_blocks] * (len(self.replicas) + len(self.prefill_servers))
            self._router = PrefixRouter(report.capacity.block_size, sizes)
        waiting, self._waiting = self._waiting, {}
        self._send([add for add in waiting.values() if self._quarantine.enter(add)])
        if self.on_cache_empty is not None:
            self.on_cache_empty(replica.index)

    def on_failed(self) -> None:
        if all(each.supervisor.has_failed for each in self.replicas):
            self.failed.set()
            waiting, self._waiting = self._waiting, {}
            for inbox in _inboxes(self._flights[name] for name in waiting):
                inbox.put(WorkerDied(f"{self.health().reason}."))

    def on_end(self, replica: Replica, how: str, running: frozenset[bytes]) -> None:
        """Resend or fail the requests of an engine that ended."""
        quarantine = self._quarantine
        self.suspects.strike(running, how)
        if self.handovers is not None and self._up:
            for request_id in self.handovers.in_transfer(replica.index):
                self._decode(request_id, None, PREFILL_DIED)
        started = {
            name
            for name, flight in self._flights.items()
            if flight.replica is replica and flight.add.fingerprint in running
        }
        blocked = quarantine.blocked_in_flight()
        others_up = bool(self._up)
        lost = {
            name: flight
            for name, flight in self._flights.items()
            if not flight.has_finished
            and (
                flight.replica is replica
                or (flight.replica is None and (name in blocked or not others_up))
            )
        }
        _log.error("%s; %d requests were running", how, len(started))
        for request_id in blocked:
            _log.error("request %s is blocked: the engine failed again while it ran", request_id)
        released = quarantine.engine_ended(lost)
        resent = self._fail(lost, how, started=started, blocked=blocked)
        untraced = replica.untraced - {each.request.request_id for each in resent}
        if self.handovers is not None:
            self.handovers.lose(untraced)
        if self.on_traces_lost is not None:
            self.on_traces_lost(untraced)
        replica.untraced.clear()
        if self._up:
            released += [add for add in resent if quarantine.enter(add)]
        else:
            self._waiting |= {add.request.request_id: add for add in resent}
        self._send(released)

    def _fail(
        self,
        lost: Mapping[str, _Flight],
        how: str,
        *,
        started: Collection[str],
        blocked: Mapping[str, EngineError],
    ) -> list[messages.Add]:
        """Fail the responses of lost requests; returns the requests to run once more."""
        others_up = bool(self._up)
        resent = []
        for inbox in _inboxes(lost.values()):
            mine = {name: lost[name] for name in inbox.open_ids if name in lost}
            may_resend = (others_up or self._retry_on_restart) and not any(
                name in blocked
                or each.was_resent
                or each.is_pinned
                or (name in started and not self._retry_on_restart)
                or (each.has_output and not (self._retry_on_restart and inbox.can_restart))
                for name, each in mine.items()
            )
            for flight in mine.values():
                flight.replica = None
                if self._router is not None:
                    self._router.ended(flight.add.request.request_id)
            if may_resend:
                for name, flight in mine.items():
                    if flight.has_output:
                        inbox.restart(name)
                    flight.was_resent, flight.has_output = True, False
                    resent.append(flight.add)
            else:
                inbox.put(_end_error(mine, how, started=started, blocked=blocked))
        return resent

    # ---- requests ----------------------------------------------------------------------------

    def generate(
        self, *requests: NewRequest, tracked: bool = True, replica: Replica | None = None
    ) -> AsyncGenerator[Output, None]:
        """Yield the outputs of all `requests`; closing the generator aborts the unfinished ones.

        An error of one request is raised and ends all. `Output.request_id` identifies the request.
        """
        return self._outputs_of(lambda: self.submit(requests, tracked, replica=replica))

    def submit(
        self,
        requests: Sequence[NewRequest],
        tracked: bool = True,
        on_restart: Callable[[str], None] | None = None,
        *,
        replica: Replica | None = None,
    ) -> Inbox:
        """Send requests to an engine; read the outputs with `next` and call `drop` at the end.

        Untracked requests (the server's own probes) are never blocked. `on_restart` is called with
        the id of a request that starts again after a restart of the engine: its outputs so far are
        void. None: a request with outputs fails instead. `replica` None: the router chooses one.
        """
        inbox = Inbox((request.request_id for request in requests), on_restart)
        self._submit(requests, inbox, tracked=tracked, replica=replica)
        return inbox

    def relay(self, requests: Sequence[NewRequest], inbox: Inbox) -> None:
        """Send requests whose outputs another process reads: `inbox` forwards them.

        The caller calls `ended` for each request that has finished, and `drop` after an error.
        """
        self._submit(requests, inbox, tracked=True, replica=None)

    def _submit(
        self,
        requests: Sequence[NewRequest],
        inbox: Inbox,
        *,
        tracked: bool,
        replica: Replica | None,
    ) -> None:
        adds = [
            messages.Add(request, fingerprint(request) if tracked else b"") for request in requests
        ]
        self.suspects.check(add.fingerprint for add in adds)
        if replica is not None:
            replica.supervisor.check_running()
        elif not self._up:
            raise WorkerDied(f"{self.health().reason}. Try again in a moment.")
        for request in requests:
            if request.request_id in self._flights:
                raise RequestError(
                    f"request_id {request.request_id!r} is in use by a running request.",
                    "request_id",
                )
        for add in adds:
            flight = _Flight(add, inbox, is_pinned=replica is not None)
            self._flights[add.request.request_id] = flight
        self._send([add for add in adds if self._quarantine.enter(add)], replica)

    def _send(self, adds: Sequence[messages.Add], to: Replica | None = None) -> None:
        """Send requests to the replicas that the router chooses; without any, they fail."""
        if not adds:
            return
        up = self._up if to is None else [to]
        batches: dict[int, list[messages.Add]] = {}
        for add in adds:
            flight = self._flights[add.request.request_id]
            if not up:
                flight.inbox.put(WorkerDied(f"{self.health().reason}. Try again in a moment."))
                continue
            candidates = [each.index for each in up]
            if self.handovers is not None and to is None:
                add, candidates = self._split(add, candidates)
            chosen = candidates[0]
            if self._router is not None:
                chosen = self._router.route(add.request, candidates)
            flight.replica = self._engine(chosen)
            batches.setdefault(chosen, []).append(add)
        for index, batch in batches.items():
            self._engine(index).add(batch)

    def _engine(self, index: int) -> Replica | PrefillServer:
        num_replicas = len(self.replicas)
        if index < num_replicas:
            return self.replicas[index]
        return self.prefill_servers[index - num_replicas]

    def _split(self, add: messages.Add, candidates: list[int]) -> tuple[messages.Add, list[int]]:
        """Decide whether a prefill engine begins a request; returns what to send, and to which replicas."""
        assert self.handovers is not None
        assert self._router is not None
        candidates = candidates + [each.index for each in self.prefill_servers if each.health().ok]
        decode = self.handovers.policy.decode(candidates)
        num_cached = self._router.num_cached(add.request, decode)
        request, version = add.request, ""
        if request.adapter and self.prefill_servers:
            version = self.adapters.versions.get(request.adapter, "")
        own_adapter = bool(request.adapter and self.prefill_servers and not version)
        request, candidates = self.handovers.begin(
            request, candidates, num_cached, own_adapter=own_adapter
        )
        if version and candidates[0] >= len(self.replicas):
            request = replace(request, adapter_version=version)
        return messages.Add(request, add.fingerprint), candidates

    def on_handed_over(self, engine: Replica | PrefillServer, handed: messages.HandedOver) -> None:
        flight = self._flights.get(handed.request_id)
        if flight is None or flight.replica is not engine:  # the client has gone
            return
        if self.handovers is not None:
            self._decode(handed.request_id, handed.blocks)
        elif self.on_handed is not None:
            self.on_handed(handed)

    def on_prefill_up(self, server: PrefillServer) -> None:
        if self._router is not None:
            self._router.cache_lost(server.index)

    def on_prefill_lost(self, server: PrefillServer) -> None:
        """Compute the requests of a prefill server here."""
        for request_id, flight in list(self._flights.items()):
            if flight.replica is server and not flight.has_finished:
                self._compute_here(request_id, PREFILL_DIED)
        self._lose_traces(server)

    def _lose_traces(self, server: PrefillServer) -> None:
        """Forget the traces of ended requests that a lost prefill server has not sent."""
        flights = self._flights
        untraced = {
            name
            for name in server.untraced
            if name not in flights or flights[name].replica is server
        }
        server.untraced.clear()
        if self.handovers is not None:
            self.handovers.lose(untraced)
        if self.on_traces_lost is not None:
            self.on_traces_lost(untraced)

    def on_prefill_refused(self, server: PrefillServer, refused: messages.Refused) -> None:
        """Compute a request here that a prefill server refused, or could not compute.

        One that was running when its engine died is suspect here as well.
        """
        flight = self._flights.get(refused.request_id)
        if flight is None or flight.replica is not server:
            return
        if refused.kind == RequestBlocked.__name__:
            flight.inbox.put(RequestBlocked(refused.message))
            return
        _log.info(
            "%s refuses a prompt, which is computed here: %s", server.address, refused.message
        )
        if refused.kind == EngineCrashed.__name__ and not flight.has_output:
            self._suspect(refused.request_id, refused.message)
        else:
            has_died = refused.kind in (EngineCrashed.__name__, WorkerDied.__name__)
            self._compute_here(refused.request_id, PREFILL_DIED if has_died else PREFILL_REFUSED)

    def _suspect(self, request_id: str, how: str) -> None:
        """Give a request a strike that was running when the engine of a prefill server died."""
        quarantine, flight = self._quarantine, self._flights[request_id]
        quarantine.suspects.strike([flight.add.fingerprint], how)
        blocked = quarantine.blocked_in_flight().get(request_id)
        released = quarantine.engine_ended([request_id])
        if blocked is not None:
            flight.inbox.put(blocked)
        elif quarantine.enter(flight.add):
            self._compute_here(request_id, PREFILL_DIED)
        else:
            flight.replica = None
        self._send(released)

    def _compute_here(self, request_id: str, reason: str) -> None:
        """Go on with a request that a prefill server does not finish."""
        assert self.handovers is not None
        state, flight = self.handovers.find(request_id), self._flights[request_id]
        if state is not None and state.stage == "transfer":
            self._decode(request_id, None, reason)
        elif flight.has_output:  # of its prompt, for example: they cannot be taken back
            flight.replica = None
            flight.inbox.put(WorkerDied(f"the prefill server failed: {reason}. Send it again."))
        else:
            self._decode(request_id, None, reason)

    def _decode(self, request_id: str, blocks: HandedBlocks | None, reason: str = "") -> None:
        """Send a request to a decode engine, with its first token if it has one, or to any if there is none."""
        assert self.handovers is not None
        assert self._router is not None
        flight = self._flights[request_id]
        request = self.handovers.decode(flight.add.request, blocks, reason)
        self._router.ended(request_id)
        up = [each.index for each in self._up]
        candidates = self.handovers.policy.decode(up) or up
        if not candidates:
            flight.replica = None
            flight.inbox.put(WorkerDied(f"{self.health().reason}. Try again in a moment."))
            return
        chosen = self._router.route(request, candidates)
        if request.generated:
            self._router.prompt_computed(request_id)
        replica = flight.replica = self.replicas[chosen]
        replica.add([messages.Add(request, flight.add.fingerprint, blocks)])

    def _inbox_of(self, request_id: str) -> Inbox | None:
        flight = self._flights.get(request_id)
        return None if flight is None else flight.inbox

    def _tell_abort(self, request_id: str, _completed: bool) -> None:
        flight = self._flights[request_id]
        if flight.replica is None and self.on_traces_lost is not None:
            self.on_traces_lost([request_id])  # no engine has it, so no trace will arrive
        if flight.replica is not None and not flight.has_finished:
            flight.replica.abort(request_id)

    def abort_all(self, error: EngineError) -> None:
        """End every request in flight with `error`."""
        for inbox in _inboxes(self._flights.values()):
            inbox.put(error)

    def ended(self, request_id: str, completed: bool) -> None:
        """Forget a request whose last output was read."""
        flight = self._flights.pop(request_id)
        if self.handovers is not None and (trace := self.handovers.end(request_id)) is not None:
            self._report_traces(flight.replica, [trace])
        self._waiting.pop(request_id, None)
        flight.inbox.open_ids.discard(request_id)
        self.num_finished += 1
        if self._router is not None:
            self._router.ended(request_id)
        self._send(self._quarantine.leave(request_id, completed))

    def on_outputs(self, engine: Replica | PrefillServer, outputs: list[Output]) -> None:
        flights = self._flights
        for output in outputs:
            flight = flights.get(output.request_id)
            # Else the request was aborted while the step ran, or was sent to another replica.
            if flight is not None and flight.replica is engine:
                if not flight.has_output:
                    flight.has_output = True
                    if self._router is not None:
                        self._router.prompt_computed(output.request_id)
                if self.handovers is not None:
                    output = self.handovers.on_output(output, engine.index)
                if output.finish not in (None, "handover"):  # else its blocks follow
                    self._finished(flight, output)
                flight.inbox.put(output)

    def _finished(self, flight: _Flight, output: Output) -> None:
        flight.has_finished = True
        if self._router is not None:
            num_output = None
            if output.timeline is not None and output.pooled is None:
                num_output = output.timeline.num_output
            self._router.ended(output.request_id, num_output)

    def on_refused(self, replica: Replica, refused: messages.Refused) -> None:
        flight = self._flights.get(refused.request_id)
        if flight is not None and flight.replica is replica:
            flight.inbox.put(refusal_error(refused.kind, refused.message, refused.param))

    def on_step_failed(self, failed: messages.StepFailed) -> None:
        """Give the requests of a failed step a strike; the engine reports the error of its own ones."""
        self.suspects.strike(failed.fingerprints, f"a step failed with {failed.error}")
        for request_id, blocked in self._quarantine.blocked_in_flight().items():
            if self._quarantine.is_held(request_id):
                self._flights[request_id].inbox.put(blocked)

    def on_stats_of(self, replica: Replica, stats: EngineStats, last: EngineStats) -> None:
        if self.on_stats is not None:
            self.on_stats(replica.index, stats, last)

    def on_traces_of(self, engine: Replica | PrefillServer, traces: list[RequestTrace]) -> None:
        if self.handovers is not None:
            joined = map(self.handovers.on_trace, traces)
            traces = [each for each in joined if each is not None]
        self._report_traces(engine, traces)

    def _report_traces(
        self, engine: Replica | PrefillServer | None, traces: list[RequestTrace]
    ) -> None:
        if self.on_traces is not None and engine is not None and traces:
            self.on_traces(engine.index, traces)

    # ---- all replicas ------------------------------------------------------------------------

    async def reset_prefix_cache(self) -> int:
        """Empty the prefix caches of unused blocks; returns their number."""
        num_blocks = await self._replica_set.reset_prefix_cache()
        self._caches_lost()
        return num_blocks

    def _caches_lost(self) -> None:
        if self._router is not None:
            for replica in self.replicas:
                self._router.cache_lost(replica.index)

    async def trace(self, request_id: str) -> RequestTrace | None:
        return await self._replica_set.trace(request_id)

    async def memory(self) -> dict[int, Memory]:
        return await self._replica_set.memory()

    async def sleep(self) -> None:
        """Release the memory of all engines and keep the processes; no request may be in flight."""
        await self._replica_set.sleep()
        self._caches_lost()

    async def wake(self) -> None:
        """Undo `sleep`; an engine that was restarted since is awake already."""
        await self._replica_set.wake()
        if self.on_cache_empty is not None:
            for replica in self._up:
                self.on_cache_empty(replica.index)

    async def stop_process(self) -> None:
        """Stop the engine processes until `start_process`; no request may be in flight."""
        await self._replica_set.stop_process()

    async def start_process(self) -> None:
        """Start the engines again; on an error all stay stopped."""
        await self._replica_set.start_process()

    async def change_adapter(self, change: Change) -> int:
        return await self._replica_set.change_adapter(change)

    def on_adapter_reloaded(self, replica: Replica, reply: messages.AdapterReply) -> None:
        self._replica_set.on_adapter_reloaded(replica, reply)

    # ---- state -------------------------------------------------------------------------------

    @property
    def suspects(self) -> Suspects:
        return self._quarantine.suspects

    @suspects.setter
    def suspects(self, shared: Suspects) -> None:
        self._quarantine.suspects = shared

    @property
    def adapter_names(self) -> Collection[str]:
        return self.adapters.folders.keys()

    @property
    def report(self) -> EngineReport:
        return self._replica_set.report

    @property
    def max_num_seqs(self) -> int:
        """Requests that all replicas together run at once."""
        generating = self._replica_set.restartable
        if self.handovers is not None:
            decode = self.handovers.policy.decode([each.index for each in generating])
            generating = [self.replicas[index] for index in decode] or generating
        return self._replica_set.max_num_seqs(generating)

    @property
    def _up(self) -> list[Replica]:
        return self._replica_set.up

    @property
    def num_in_flight(self) -> int:
        return len(self._flights)

    @property
    def _num_remote(self) -> int:
        """Requests that servers of prompts compute."""
        if not self.prefill_servers:
            return 0
        return sum(isinstance(each.replica, PrefillServer) for each in self._flights.values())

    @property
    def backlog(self) -> Backlog:
        all_backlogs = [each.backlog for each in self.replicas]
        quarantine = self._quarantine
        return Backlog(
            num_running=sum(each.num_running for each in all_backlogs) + self._num_remote,
            num_waiting=sum(each.num_waiting for each in all_backlogs),
            num_unseen=sum(each.num_unseen for each in all_backlogs)
            + quarantine.num_held
            + len(self._waiting),
            num_tokens=sum(each.num_tokens for each in all_backlogs)
            + quarantine.num_held_tokens
            + sum(len(add.request.prompt) for add in self._waiting.values()),
        ).at_most(len(self._flights))

    def health(self) -> Health:
        """Whether a request would be answered now, and why not, or which replicas are down."""
        own = [each.health() for each in self.replicas]
        all_health = own + [each.health() for each in self.prefill_servers]
        reason = "; ".join(each.reason for each in all_health if not each.ok)
        if all(each.ok for each in all_health):
            return Health(True)
        if any(each.ok for each in own):
            return Health(True, reason, "degraded")
        return Health(False, reason)


def _inboxes(flights: Iterable[_Flight]) -> list[Inbox]:
    return list({id(flight.inbox): flight.inbox for flight in flights}.values())


def _end_error(
    lost: Collection[str], how: str, *, started: Collection[str], blocked: Mapping[str, EngineError]
) -> EngineError:
    """The error that ends the lost requests of one response after their engine has ended."""
    for request_id in lost:
        if request_id in blocked:
            return blocked[request_id]
    if any(request_id in started for request_id in lost):
        return EngineCrashed(
            f"{how} while this request was running. Send it again; if the engine fails once more "
            "while it is running, it will be blocked."
        )
    return WorkerDied(f"{how} before this request was started. Send it again.")
