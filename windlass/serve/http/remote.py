"""The engine, the queue and the traces as an HTTP worker sees them: all are in the server's process."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from typing import Generic, TypeVar

from windlass.core.card import EngineReport
from windlass.core.trace import RequestTrace
from windlass.core.types import NewRequest, Output
from windlass.errors import WorkerDied
from windlass.serve import admission
from windlass.serve.fallback import Forecast
from windlass.serve.http import messages
from windlass.serve.inbox import Inbox, InboxReader
from windlass.serve.live_config import LiveConfig
from windlass.serve.metrics import Metrics, Outcome
from windlass.serve.summary import RequestSummary
from windlass.serve.tenant_limits import Hold
from windlass.serve.tenants import Tenant
from windlass.serve.trace_store import Entry

_REPLY_TIMEOUT_S = 10.0

Reply = TypeVar("Reply")


class RemoteClient(InboxReader):
    """Owns the requests of one worker to one engine. `send` sends a message to the server's process."""

    def __init__(
        self, state: messages.State, send: Callable[[messages.FromWorker], None], engine: int = 0
    ) -> None:
        """`engine`: its index in the state."""
        self.state = state
        self._send = send
        self._engine = engine
        self._inboxes: dict[str, Inbox] = {}

    @property
    def adapter_names(self) -> Collection[str]:
        return self.state.engines[self._engine].adapters

    @property
    def report(self) -> EngineReport:
        return self.state.engines[self._engine].report

    @property
    def max_num_seqs(self) -> int:
        return self.state.engines[self._engine].max_num_seqs

    def check_open(self) -> None:
        """Raise if the server is draining or asleep."""
        if self.state.refusal is not None:
            raise self.state.refusal.error()

    def generate(self, *requests: NewRequest, tracked: bool = True) -> AsyncGenerator[Output, None]:
        return self._outputs_of(lambda: self.submit(requests, tracked))

    def submit(
        self,
        requests: Sequence[NewRequest],
        tracked: bool = True,
        on_restart: Callable[[str], None] | None = None,
    ) -> Inbox:
        assert tracked, "the server's process sends its own probes"
        inbox = Inbox((request.request_id for request in requests), on_restart)
        self._inboxes |= dict.fromkeys(inbox.open_ids, inbox)
        self._send(messages.Submit(list(requests), inbox.can_restart, self._engine))
        return inbox

    def _inbox_of(self, request_id: str) -> Inbox | None:
        return self._inboxes.get(request_id)

    def _tell_abort(self, request_id: str, completed: bool) -> None:
        self._send(messages.Abort(request_id, completed))

    def ended(self, request_id: str, _completed: bool) -> None:
        self._inboxes.pop(request_id).open_ids.discard(request_id)

    def on_outputs(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            inbox = self._inboxes.get(output.request_id)
            if inbox is not None:  # else it was aborted meanwhile
                inbox.put(output)

    def on_restarted(self, request_id: str) -> None:
        inbox = self._inboxes.get(request_id)
        if inbox is not None:
            inbox.restart(request_id)

    def on_failed(self, failed: messages.RequestsFailed) -> None:
        found = (self._inboxes.get(request_id) for request_id in failed.request_ids)
        for inbox in {id(each): each for each in found if each is not None}.values():
            inbox.put(failed.error.error())


class RemoteAdmission:
    """Refuses what can never run; the server's process knows the queue and refuses the rest."""

    def __init__(self, client: RemoteClient, config: LiveConfig) -> None:
        self._client = client
        self._config = config

    def check_possible(self, num_requests: int) -> None:
        max_queued = self._config.value.max_num_queued_reqs
        admission.check_possible(num_requests, self._client.max_num_seqs, max_queued)

    def check(self, num_requests: int, num_tokens: int) -> None:
        """Leave it to the server's process, which checks when the requests arrive there."""


class RemoteMetrics(Metrics):
    """The metrics of a worker. The server's process counts requests: it survives the worker."""

    def __init__(
        self,
        model_name: str,
        max_tenants: int,
        send: Callable[[messages.FromWorker], None],
    ) -> None:
        super().__init__(model_name, max_tenants=max_tenants)
        self._send = send

    def received(self) -> None:
        self._send(messages.Received())

    def ended(self, outcome: Outcome, tenant: str) -> None:
        self._send(messages.Finished(outcome, tenant))


class _Calls(Generic[Reply]):
    """Questions to the server's process, each with a number that its reply repeats."""

    def __init__(self, send: Callable[[messages.FromWorker], None]) -> None:
        self._send = send
        self._numbers = itertools.count()
        self._pending: dict[int, asyncio.Future[Reply]] = {}

    async def ask(self, question: Callable[[int], messages.FromWorker]) -> Reply:
        """Send the question with the next number, and wait for the reply."""
        number = next(self._numbers)
        reply = self._pending[number] = asyncio.get_running_loop().create_future()
        self._send(question(number))
        try:
            return await asyncio.wait_for(reply, _REPLY_TIMEOUT_S)
        except TimeoutError:
            raise WorkerDied(f"the server did not answer in {_REPLY_TIMEOUT_S:g} s.") from None
        finally:
            del self._pending[number]

    def answer(self, number: int, reply: Reply) -> None:
        pending = self._pending.get(number)
        if pending is not None and not pending.done():
            pending.set_result(reply)


class RemoteTraces:
    """Announces responses to the trace store of the server's process."""

    def __init__(self, send: Callable[[messages.FromWorker], None]) -> None:
        self._send = send
        self._calls: _Calls[list[RequestTrace] | None] = _Calls(send)

    def open(self, entry: Entry) -> None:
        self._send(
            messages.Open(
                response_id=entry.response_id,
                owner=entry.owner,
                began=entry.began,
                request_ids=entry.request_ids,
                path=entry.path,
                adapter=entry.adapter,
                fallback=entry.fallback,
                fallback_model=entry.fallback_model,
                more_rounds=entry.more_rounds,
                key_id=entry.key_id,
                num_per_prompt=entry.num_per_prompt,
            )
        )

    def mark_lost(self, entry: Entry) -> None:
        """Do nothing: the server's process closes the entry when it sends the error."""

    def end_rounds(self, entry: Entry) -> None:
        self._send(messages.EndRounds(entry.request_ids[0]))

    async def wait_closed(self, entry: Entry) -> list[RequestTrace] | None:
        return await self._calls.ask(
            lambda number: messages.GetTraces(number, entry.response_id, entry.owner)
        )

    def on_reply(self, reply: messages.TracesReply) -> None:
        self._calls.answer(reply.number, reply.traces)


class RemoteReports:
    """Sends the summaries of requests to the server's process, which has their traces and the log."""

    def __init__(
        self,
        send: Callable[[messages.FromWorker], None],
        config: LiveConfig,
        *,
        exports_traces: bool,
    ) -> None:
        self._send = send
        self._config = config
        self._exports_traces = exports_traces

    @property
    def is_wanted(self) -> bool:
        return self._exports_traces or self._config.value.logs_requests

    def report(self, summary: RequestSummary, entry: Entry | None) -> None:
        self._send(messages.Ended(summary, "" if entry is None else entry.request_ids[0]))


class RemoteLimits:
    """Asks the server's process, which counts the requests of all workers."""

    def __init__(self, send: Callable[[messages.FromWorker], None]) -> None:
        self._send = send
        self._calls: _Calls[messages.Admitted] = _Calls(send)

    async def admit(self, tenant: Tenant, num_tokens: int) -> Hold:
        asked: list[int] = []

        def question(number: int) -> messages.Admit:
            asked.append(number)
            return messages.Admit(number, tenant.name, num_tokens)

        def release() -> None:
            self._send(messages.Release(asked[0]))

        try:
            admitted = await self._calls.ask(question)
        except (WorkerDied, asyncio.CancelledError):
            release()
            raise
        if admitted.error is not None:
            raise admitted.error.error()
        return Hold(release, admitted.headers)

    def on_reply(self, reply: messages.Admitted) -> None:
        self._calls.answer(reply.number, reply)


class RemoteForecasts:
    """Asks the server's process how requests would fare with the models of --fallback."""

    def __init__(self, send: Callable[[messages.FromWorker], None]) -> None:
        self._calls: _Calls[list[Forecast]] = _Calls(send)

    async def get(self, num_requests: int) -> Sequence[Forecast]:
        return await self._calls.ask(lambda number: messages.GetForecasts(number, num_requests))

    def on_reply(self, reply: messages.Forecasts) -> None:
        self._calls.answer(reply.number, reply.forecasts)
