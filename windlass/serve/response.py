"""One HTTP response: runs its completions in the engine and sends them whole or as a stream.

When the client disconnects, in any phase, its completions are aborted at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from windlass.errors import EngineError
from windlass.serve.cost import Cost
from windlass.serve.desk import Ticket
from windlass.serve.formatters import Formatter, Json, usage
from windlass.serve.inbox import Inbox
from windlass.serve.prepare import Prepared
from windlass.serve.problems import problem_of
from windlass.serve.protocol import GenerationRequest, StreamOptions
from windlass.serve.served_completion import ServedCompletion, TokenTimer
from windlass.serve.services import Services
from windlass.serve.trace_store import Entry
from windlass.serve.transport import CONNECTION, LimitedProtocol
from windlass.text.completion import Completion, Delta

T = TypeVar("T")

_MAX_INLINE_LOGPROBS = 200  # tokens whose log probabilities are formatted on the event loop
_YIELD_EVERY = 32  # deltas sent before the event loop may serve other clients
_DONE = b"data: [DONE]\n\n"
_DIRECT_SEND = "windlass.send"  # scope key: the server's own `send`
_OUTPUT_BYTES = 256  # approximate size of one waiting token, in memory and as an event
_LOGPROB_BYTES = 64
_PLACEHOLDER = "\0"
_PLACEHOLDER_JSON = msgspec.json.encode(_PLACEHOLDER)


def with_direct_send(app: ASGIApp) -> ASGIApp:
    """Let the streams of `app` call the server's `send` without the middleware in between."""

    async def outermost(scope: Scope, receive: Receive, send: Send) -> None:
        scope[_DIRECT_SEND] = send
        await app(scope, receive, send)

    return outermost


class ClientDisconnected(Exception):
    """The client disconnected; no response can be sent."""


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


class CompletionResponse:
    """Owns the completions of one HTTP request until they end, fail, or the client disconnects."""

    def __init__(
        self,
        services: Services,
        prepared: Prepared,
        *,
        body: GenerationRequest,
        formatter: Formatter,
        ticket: Ticket,
        owner: str,
    ) -> None:
        config, card = services.config, services.card
        self._client = services.client
        self._traces = services.traces
        self._owner = owner
        self._entry: Entry | None = None
        self._inbox: Inbox | None = None
        self._price = services.costs.price if services.costs and body.include_cost else None
        self._recorder = services.recorder
        self._workers = services.workers
        self._model = prepared.requests[0].adapter or card.name
        self._prepared = prepared
        self._body = body
        self._formatter = formatter
        self._ticket = ticket
        self._created = int(time.time())
        options = body.stream_options or StreamOptions()
        forced = config.enable_force_include_usage or self._price is not None
        self._usage_at_end = options.include_usage or forced
        self._usage_in_chunks = options.continuous_usage_stats
        self._max_buffer_bytes = config.max_stream_buffer_bytes
        self._is_plain = formatter.is_plain and not self._usage_in_chunks
        self._frames: dict[int, tuple[bytes, bytes]] = {}  # JSON around the text, per choice
        interval = config.stream_interval if body.stream else None
        self._completions = [
            Completion(index, request, card.tokenizer)
            for index, request in enumerate(prepared.requests)
        ]
        self._served = [
            ServedCompletion(completion, TokenTimer(services.metrics, ticket.began), interval)
            for completion in self._completions
        ]
        self._by_id = {each.completion.request.request_id: each for each in self._served}

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
        return None

    def _start(self) -> Inbox:
        self._entry = self._traces.open(
            self._prepared.response_id,
            owner=self._owner,
            began=self._ticket.began,
            request_ids=tuple(self._by_id),
        )
        self._inbox = self._client.submit(self._prepared.requests)
        return self._inbox

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
        choices = [self._formatter.whole(whole[each.index], each) for each in self._completions]
        return msgspec.json.encode(
            {
                **self._envelope(self._formatter.whole_object),
                "choices": choices,
                "usage": usage(self._prepared, self._served, cost),
                **self._formatter.extra(self._completions),
            }
        )

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
        while delta is not None:
            await send(_body(self._chunks(delta)))
            num_sent += 1
            if num_sent % _YIELD_EVERY == 0:
                await asyncio.sleep(0)  # with a thousand choices, `_next` may never wait
            delta = await self._next()
        if self._usage_at_end:
            numbers = usage(self._prepared, self._served, await self._cost())
            await send(_body(self._event([], numbers)))
        await self._record()  # before [DONE]: a client may disconnect right after it
        await send(_body(_DONE))

    def _chunks(self, delta: Delta) -> bytes:
        """Encode the events of a delta. In mid-stream, events differ only in their text."""
        if not self._is_plain or delta.first or delta.finish_reason or not delta.text:
            return self._encode_chunks(delta)
        frame = self._frames.get(delta.index)
        if frame is None:
            # The JSON around the text is encoded once. No client-chosen value follows the text.
            encoded = self._encode_chunks(Delta(delta.index, _PLACEHOLDER))
            head, _, tail = encoded.rpartition(_PLACEHOLDER_JSON)
            frame = self._frames[delta.index] = head, tail
        return frame[0] + msgspec.json.encode(delta.text) + frame[1]

    def _encode_chunks(self, delta: Delta) -> bytes:
        choices = self._formatter.chunks(delta, self._completions[delta.index])
        numbers = usage(self._prepared, self._served) if self._usage_in_chunks else None
        return b"".join(self._event([choice], numbers) for choice in choices)

    def _event(self, choices: list[Json], numbers: Json | None) -> bytes:
        chunk = {**self._envelope(self._formatter.chunk_object), "choices": choices}
        if self._usage_at_end or self._usage_in_chunks:
            chunk["usage"] = numbers
        return b"data: " + msgspec.json.encode(chunk) + b"\n\n"

    def _envelope(self, object_name: str) -> Json:
        return {
            "id": self._prepared.response_id,
            "object": object_name,
            "created": self._created,
            "model": self._model,
        }


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
        super().__init__((), headers=headers, media_type="text/event-stream")
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
            self._ticket.end("aborted")
        finally:
            self._completion.close()
            self._ticket.end("error")  # unless it has ended already

    async def _send_all(self, send: Send, direct_send: Send, connection: LimitedProtocol) -> None:
        """Send the events; an error in mid-stream becomes an event.

        The middleware needs only the start of a stream, so the events bypass it.
        """
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        try:
            await self._completion.events(self._first, direct_send)
        except EngineError as error:
            self._ticket.end_with(error)
            body = msgspec.json.encode(problem_of(error).body())
            await direct_send(_body(b"data: " + body + b"\n\n"))
        else:
            # uvicorn drops events for a closed connection without an error.
            self._ticket.end("aborted" if connection.is_closing else "success")
        await send(_body(b"", more=False))
