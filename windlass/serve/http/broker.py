"""The server's side of one HTTP worker: runs its requests in the engine and returns the outputs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec

from windlass.core.types import NewRequest, Output
from windlass.errors import EngineError
from windlass.serve.handle import EngineHandle
from windlass.serve.http import messages
from windlass.serve.http.messages import ErrorMessage
from windlass.serve.inbox import Inbox, Item
from windlass.serve.problems import RateLimited, TraceNotFound
from windlass.serve.services import Services
from windlass.serve.summary import RequestSummary
from windlass.serve.tenant_limits import Hold
from windlass.serve.trace_store import Entry


class _RelayInbox(Inbox):
    """The requests of one response; its items go to the worker at once."""

    __slots__ = ("_forward", "client")

    def __init__(
        self,
        requests: Sequence[NewRequest],
        client: EngineHandle,
        forward: Callable[[_RelayInbox, Item], None],
        on_restart: Callable[[str], None] | None,
    ) -> None:
        super().__init__((request.request_id for request in requests), on_restart)
        self.client = client  # that runs them
        self._forward = forward

    def put(self, item: Item) -> None:
        self._forward(self, item)


class Broker:
    """Owns the requests of one worker. `send` sends messages to it.

    Outputs of one step are sent together, after the engine's frame was handled: calls of `put` only
    collect them, since they come from inside the client.
    """

    def __init__(self, services: Services, send: Callable[[list[messages.ToWorker]], None]) -> None:
        self._services = services
        self._send = send
        self._inboxes: dict[str, _RelayInbox] = {}
        self._entries: dict[str, Entry] = {}  # of requests to report, by their first engine request
        self._searches: dict[str, Entry] = {}  # beam searches that run, by the first of them
        self._holds: dict[int, Hold] = {}
        self._outputs: list[Output] = []
        self._failed: list[tuple[_RelayInbox, EngineError]] = []
        self._flush_is_due = False
        self._replies: set[asyncio.Task[None]] = set()

    def on_message(self, message: messages.FromWorker) -> None:
        match message:
            case messages.Open():
                entry = Entry(**msgspec.structs.asdict(message))
                self._services.traces.open(entry)
                if self._services.reports.is_wanted:
                    self._entries[entry.request_ids[0]] = entry
                if entry.more_rounds:
                    self._searches[entry.request_ids[0]] = entry
            case messages.EndRounds(first_id):
                if first_id in self._searches:  # else the server is closing
                    self._services.traces.end_rounds(self._searches.pop(first_id))
            case messages.Ended(summary, first_id):
                self._services.reports.report(summary, self._entries.pop(first_id, None))
            case messages.Submit():
                self._submit(message)
            case messages.Abort(request_id, completed):
                if request_id in self._inboxes:  # else it had ended already
                    self._inboxes[request_id].client.abort(request_id, completed)
                    self._forget(request_id)
            case messages.Admit():
                self._send([self._admit(message)])
            case messages.Release(number):
                hold = self._holds.pop(number, None)
                if hold is not None:  # else it was refused
                    hold.release()
            case messages.GetTraces():
                self._reply(self._reply_traces(message))
            case messages.GetForecasts():
                self._reply(self._reply_forecasts(message))

    def _reply(self, work: Coroutine[Any, Any, None]) -> None:
        reply = asyncio.create_task(work)
        self._replies.add(reply)
        reply.add_done_callback(self._replies.discard)

    def _admit(self, message: messages.Admit) -> messages.Admitted:
        """Count a request with the limits of its tenant now; one that is gone has none."""
        table = self._services.keys.table
        tenant = None if table is None else table.tenants.get(message.tenant)
        if tenant is None:
            return messages.Admitted(message.number, {}, None)
        try:
            hold = self._services.limits.take(tenant, message.num_tokens)
        except RateLimited as error:
            return messages.Admitted(message.number, {}, ErrorMessage.of(error))
        self._holds[message.number] = hold
        return messages.Admitted(message.number, dict(hold.headers), None)

    def _submit(self, message: messages.Submit) -> None:
        services, requests = self._services, message.requests
        client, admission = services.engines[message.engine]
        on_restart = self._restarted if message.can_restart else None
        inbox = _RelayInbox(requests, client, self._forward, on_restart)
        self._inboxes |= dict.fromkeys(inbox.open_ids, inbox)
        services.desk.hold()
        try:
            services.desk.check_open()
            num_tokens = sum(len(request.prompt) for request in requests)
            admission.check(len(requests), num_tokens)
            client.relay(requests, inbox)
        except EngineError as error:
            self._forward(inbox, error)

    def _forward(self, inbox: _RelayInbox, item: Item) -> None:
        if isinstance(item, EngineError):
            self._failed.append((inbox, item))
        else:
            self._outputs.append(item)
        if not self._flush_is_due:
            self._flush_is_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _restarted(self, request_id: str) -> None:
        self._outputs = [each for each in self._outputs if each.request_id != request_id]
        self._send([messages.Restarted(request_id)])

    def _flush(self) -> None:
        """Send what was collected, and forget the requests that have ended."""
        self._flush_is_due = False
        outputs = [each for each in self._outputs if each.request_id in self._inboxes]
        failed, self._outputs, self._failed = self._failed, [], []
        batch: list[messages.ToWorker] = [messages.Outputs(outputs)] if outputs else []
        for output in outputs:
            if output.finish is not None:
                client = self._inboxes[output.request_id].client
                client.ended(output.request_id, output.finish in ("stop", "length"))
                self._forget(output.request_id)
        for inbox, error in failed:
            if lost := list(inbox.open_ids):
                batch.append(messages.RequestsFailed(lost, ErrorMessage.of(error)))
                self._services.traces.lose(lost)
                self._drop(inbox)
        if batch:
            self._send(batch)

    def _drop(self, inbox: _RelayInbox) -> None:
        for request_id in list(inbox.open_ids):
            inbox.client.abort(request_id)
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        inbox = self._inboxes.pop(request_id, None)
        if inbox is not None:  # else it had ended already
            inbox.open_ids.discard(request_id)
            if not inbox.open_ids:
                self._services.desk.release()

    async def _reply_traces(self, call: messages.GetTraces) -> None:
        store = self._services.traces
        try:
            traces = await store.wait_closed(store.find(call.response_id, call.owner))
        except TraceNotFound:  # a thousand others have ended since
            traces = None
        self._send([messages.TracesReply(call.number, traces)])

    async def _reply_forecasts(self, call: messages.GetForecasts) -> None:
        assert self._services.fallbacks is not None
        forecasts = await self._services.fallbacks.forecast(call.num_requests)
        self._send([messages.Forecasts(call.number, list(forecasts))])

    def report_lost(self) -> None:
        """Report the requests that the worker has not reported: it has died."""
        entries, self._entries = self._entries, {}
        for entry in entries.values():
            summary = RequestSummary(
                path=entry.path,
                began=entry.began,
                ended=time.monotonic(),
                tenant=entry.owner,
                response_id=entry.response_id,
                adapter=entry.adapter,
                reason="http_worker_died",
            )
            self._services.reports.report(summary, entry)

    def close(self) -> None:
        """Abort all requests: the worker has ended."""
        while self._searches:
            self._services.traces.end_rounds(self._searches.popitem()[1])
        for hold in self._holds.values():
            hold.release()
        self._holds.clear()
        for inbox in list({id(each): each for each in self._inboxes.values()}.values()):
            self._drop(inbox)
