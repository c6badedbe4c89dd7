"""One HTTP response: runs its completions in the engine and sends them whole or as a stream.

When the client disconnects, in any phase, its completions are aborted at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from windlass.errors import EngineError
from windlass.serve.cost import Cost
from windlass.serve.desk import Ticket
from windlass.serve.formatters import Json, usage
from windlass.serve.generation_services import GenerationServices
from windlass.serve.inbox import Inbox
from windlass.serve.keys import Sender
from windlass.serve.prepare import Prepared
from windlass.serve.problems import Problem, problem_of
from windlass.serve.protocol import GenerationRequest
from windlass.serve.served_completion import ServedCompletion, TokenTimer
from windlass.serve.trace_store import Entry
from windlass.serve.transport import CONNECTION, LimitedProtocol
from windlass.text.completion import Completion, Delta

T = TypeVar("T")

_MAX_INLINE_LOGPROBS = 200  # tokens whose log probabilities are formatted on the event loop
_YIELD_EVERY = 32  # deltas sent before the event loop may serve other clients
_DIRECT_SEND = "windlass.send"  # scope key: the server's own `send`
_OUTPUT_BYTES = 256  # approximate size of one waiting token, in memory and as an event
_LOGPROB_BYTES = 64


def with_direct_send(app: ASGIApp) -> ASGIApp:
    """Let the streams of `app` call the server's `send` without the middleware in between."""

    async def outermost(scope: Scope, receive: Receive, send: Send) -> None:
        scope[_DIRECT_SEND] = send
        await app(scope, receive, send)

    return outermost


class ClientDisconnected(Exception):
    """The client disconnected; no response can be sent."""


@contextmanager
def ended_on_error(ticket: Ticket) -> Iterator[None]:
    """End the ticket of a request that fails, with the outcome of its error."""
    try:
        yield
    except EngineError as error:
        ticket.end_with(error)
        raise
    except (ClientDisconnected, ClientDisconnect):
        ticket.end_aborted()
        raise
    except asyncio.CancelledError:
        ticket.end_aborted("cancelled")
        raise
    except BaseException:
        ticket.end("error", status=500, reason="internal_error")
        raise


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`; if the client disconnects, cancel it and raise ClientDisconnected."""
    task = asyncio.create_task(work)
    disconnected = asyncio.create_task(_wait_for_disconnect(receive))
    either: set[asyncio.Task[Any]] = {task, disconnected}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnected
    finally:
        for each in either:
            each.cancel()
        await asyncio.gather(*either, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class ResponseFormat(Protocol):
    """Formats the responses of one API."""

    usage_in_events: bool  # whether each delta needs the usage so far
    media_type: str  # of a stream

    def whole(
        self, deltas: Mapping[int, Delta], completions: Sequence[Completion], usage: Json
    ) -> Json | list[Json]:
        """The body of a response that is not streamed."""
        ...

    def start(self, num_prompt: int) -> bytes:
        """The events before the first delta."""
        ...

    def delta(self, delta: Delta, completion: Completion, usage: Json | None) -> bytes:
        """The events of a delta."""
        ...

    def end(self, usage: Json) -> bytes:
        """The last events."""
        ...

    def error(self, problem: Problem) -> bytes:
        """The event of an error in mid-stream."""
        ...


class CompletionResponse:
    """Owns the completions of one HTTP request until they end, fail, or the client disconnects."""

    def __init__(
        self,
        services: GenerationServices,
        prepared: Prepared,
        *,
        body: GenerationRequest,
        response_format: ResponseFormat,
        ticket: Ticket,
        sender: Sender,
    ) -> None:
        config, card = services.config, services.card
        self._client = services.client
        self._admission = services.admission
        self._traces = services.traces
        self._metrics = services.metrics
        self._sender = sender
        self._entry: Entry | None = None
        self._inbox: Inbox | None = None
        self._price = services.price if body.include_cost else None
        self._recorder = services.recorder
        self._workers = services.workers
        self._prepared = prepared
        self._body = body
        self._format = response_format
        self._ticket = ticket
        self._max_buffer_bytes = config.max_stream_buffer_bytes
        interval = config.stream_interval if body.stream else None
        self._completions = [
            Completion(index, request, card.tokenizer)
            for index, request in enumerate(prepared.requests)
        ]
        self._served = [
            ServedCompletion(
                completion,
                TokenTimer(services.metrics, ticket.began, ticket.summary.tenant),
                interval,
            )
            for completion in self._completions
        ]
        self._by_id = {each.completion.request.request_id: each for each in self._served}
        ticket.served = self._served

    async def _next(self) -> Delta | None:
        """Wait for the next delta to send; None: all completions have ended.

        The first call submits the requests.
        """
        try:
            inbox = self._inbox or self._start()
            while (output := await self._client.next(inbox)) is not None:
                delta = self._by_id[output.request_id].feed(output)
                if delta is None:
                    continue
                if delta.finish_reason is not None and output.finish is None:
                    self._client.abort(output.request_id, completed=True)  # a stop string
                return delta
        except EngineError:
            if self._entry is not None:
                self._traces.mark_lost(self._entry)
            raise
        self._count_longest()
        return None

    def _count_longest(self) -> None:
        """Report the longest completion of each prompt."""
        n = self._prepared.sampling.n
        for start in range(0, len(self._served), n):
            longest = max(each.num_tokens for each in self._served[start : start + n])
            self._metrics.all_finished(longest)

    def _start(self) -> Inbox:
        # Since the request was checked first, others may have filled the queue.
        self._admission.check(len(self._prepared.requests), self._prepared.num_prompt_tokens)
        self._entry = Entry(
            response_id=self._prepared.response_id,
            owner=self._sender.tenant.name,
            key_id=self._sender.key_id,
            num_per_prompt=self._prepared.sampling.n,
            began=self._ticket.began,
            request_ids=tuple(self._by_id),
            path=self._ticket.path,
            adapter=self._prepared.requests[0].adapter,
            fallback=self._ticket.summary.fallback,
            fallback_model=self._ticket.summary.fallback_model,
        )
        self._ticket.entry = self._entry
        self._traces.open(self._entry)
        on_restart = None if self._body.stream else self._restart
        self._inbox = self._client.submit(self._prepared.requests, on_restart=on_restart)
        return self._inbox

    def _restart(self, request_id: str) -> None:
        """Void the output of a completion: its request starts again."""
        served = self._by_id[request_id].restarted()
        self._by_id[request_id] = served
        self._served[served.completion.index] = served
        self._completions[served.completion.index] = served.completion

    def limit_backlog(self, max_bytes: int, on_full: Callable[[], None]) -> None:
        """Call `on_full` when about `max_bytes` of outputs wait to be sent."""
        if self._inbox is not None:
            num_logprobs = self._prepared.sampling.logprobs or 0
            if num_logprobs == -1:
                num_logprobs = self._client.report.vocab_size
            per_output = _OUTPUT_BYTES + _LOGPROB_BYTES * num_logprobs
            self._inbox.limit(max_bytes // per_output, on_full)

    def close(self) -> None:
        """Abort the completions that still run. Must always be called at the end."""
        if self._inbox is not None:
            self._client.drop(self._inbox)

    async def _cost(self) -> Cost | None:
        """The cost if it was requested; waits for the traces of the completions."""
        if self._price is None or self._entry is None:
            return None
        traces = await self._traces.wait_closed(self._entry)
        return None if traces is None else self._price.of(traces)

    async def _record(self) -> None:
        if self._recorder is not None and self._recorder.chooses(self._prepared.response_id):
            # Decoding prompts of token ids is slow, and so may be the disk.
            await self._workers.releasing_gil(
                self._recorder.record, self._body, self._prepared, self._completions
            )

    # ---- without streaming --------------------------------------------------------------------

    async def send_whole(self, request: Request) -> Response:
        """Wait for all completions and return one JSON body."""
        try:
            body = await cancel_on_disconnect(request.receive, self._collect())
        finally:
            self.close()
        await self._record()
        self._ticket.keep_response(body)
        self._ticket.end("success")
        return Response(body, media_type="application/json")

    async def _collect(self) -> bytes:
        whole = {}  # without an interval, all of a completion is one delta
        while (delta := await self._next()) is not None:
            whole[delta.index] = delta
        cost = await self._cost()
        num_logprobs = sum(len(delta.logprobs) for delta in whole.values())
        num_logprobs += sum(len(each.prompt_logprobs) for each in self._completions)
        if num_logprobs <= _MAX_INLINE_LOGPROBS:
            return self._encode_whole(whole, cost)
        return await self._workers.releasing_gil(self._encode_whole, whole, cost)

    def _encode_whole(self, whole: dict[int, Delta], cost: Cost | None) -> bytes:
        numbers = usage(self._prepared, self._served, cost)
        completions = self._completions
        if self._prepared.num_choices < self._prepared.sampling.n:
            whole, completions = self._choose_best(whole)
        return msgspec.json.encode(self._format.whole(whole, completions, numbers))

    def _choose_best(self, whole: dict[int, Delta]) -> tuple[dict[int, Delta], list[Completion]]:
        """Keep the completions of each prompt with the highest log probability per token."""
        n = self._prepared.sampling.n
        deltas: dict[int, Delta] = {}
        completions: list[Completion] = []
        for start in range(0, len(whole), n):
            ranked = sorted(range(start, start + n), key=lambda i: _mean_logprob(whole[i]))
            for i in reversed(ranked[-self._prepared.num_choices :]):
                deltas[len(deltas)] = delta = whole[i]
                completions.append(self._completions[i])
                delta.index = completions[-1].index = len(completions) - 1
        return deltas, completions

    # ---- as a stream -------------------------------------------------------------------------

    async def stream(self, request: Request) -> Response:
        """Wait for the first token, then stream; an error before it still has an HTTP status."""
        try:
            first = await cancel_on_disconnect(request.receive, self._next())
        except BaseException:
            self.close()
            raise
        return EventStream(
            self, first, ticket=self._ticket, max_buffer_bytes=self._max_buffer_bytes
        )

    async def events(self, first: Delta | None, send: Send) -> None:
        """Send all events of the stream, beginning with those of `first`."""
        delta, num_sent = first, 0
        head = self._format.start(sum(len(prompt.tokens) for prompt in self._prepared.prompts))
        while delta is not None:
            if delta.first and self._has_long_echo(delta):
                events = await self._workers.releasing_gil(self._events_of, delta)
            else:
                events = self._events_of(delta)
            await send(_body(head + events))
            head = b""
            num_sent += 1
            if num_sent % _YIELD_EVERY == 0:
                await asyncio.sleep(0)  # with a thousand choices, `_next` may never wait
            delta = await self._next()
        numbers = usage(self._prepared, self._served, await self._cost())
        await self._record()  # before the end: a client may disconnect right after it
        await send(_body(self._format.end(numbers)))

    def _has_long_echo(self, delta: Delta) -> bool:
        """Whether the first delta carries many log probabilities of the prompt."""
        return len(self._completions[delta.index].prompt_logprobs) > _MAX_INLINE_LOGPROBS

    def _events_of(self, delta: Delta) -> bytes:
        numbers = None
        if self._format.usage_in_events:
            numbers = usage(self._prepared, self._served)
        return self._format.delta(delta, self._completions[delta.index], numbers)

    @property
    def media_type(self) -> str:
        return self._format.media_type

    def error_event(self, error: EngineError) -> bytes:
        return self._format.error(problem_of(error))


def _mean_logprob(delta: Delta) -> float:
    scores = [each.logprob for each in delta.logprobs]
    return sum(scores) / len(scores) if scores else 0.0


def _body(event: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": event, "more_body": more}


class EventStream(StreamingResponse):
    """Sends server-sent events until they end, fail, or the client disconnects; ends the ticket.

    `first` is the delta that was awaited before the status line. The completion is closed at the
    end. A client that leaves more than `max_buffer_bytes` unread is disconnected.
    """

    def __init__(
        self,
        completion: CompletionResponse,
        first: Delta | None,
        *,
        ticket: Ticket,
        max_buffer_bytes: int,
    ) -> None:
        # Proxies must not buffer a stream.
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__((), headers=headers, media_type=completion.media_type)
        self._completion = completion
        self._first = first
        self._ticket = ticket
        self._max_buffer_bytes = max_buffer_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection: LimitedProtocol = scope[CONNECTION]
        self._completion.limit_backlog(self._max_buffer_bytes, connection.cut_if_unread)
        try:
            sending = self._send_all(send, scope.get(_DIRECT_SEND, send), connection)
            await cancel_on_disconnect(receive, sending)
        except ClientDisconnected:
            self._ticket.end_aborted(connection.cut_reason or "client_disconnected")
        finally:
            self._completion.close()
            self._ticket.end("error", reason="internal_error")  # unless it has ended already

    async def _send_all(self, send: Send, direct_send: Send, connection: LimitedProtocol) -> None:
        """Send the events; an error in mid-stream becomes an event.

        The middleware needs only the start of a stream, so the events bypass it.
        """
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        self._ticket.summary.status = 200
        direct_send = self._ticket.keeping(direct_send)
        try:
            await self._completion.events(self._first, direct_send)
        except EngineError as error:
            self._ticket.end_with(error)
            await direct_send(_body(self._completion.error_event(error)))
        else:
            # uvicorn drops events for a closed connection without an error.
            if connection.is_closing:
                self._ticket.end_aborted(connection.cut_reason or "client_disconnected")
            else:
                self._ticket.end("success")
        await send(_body(b"", more=False))
