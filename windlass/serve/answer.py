"""One HTTP answer: its completions run in the engine, and come as one body or as a stream.

A client that hangs up, in whatever phase, has its completions aborted at once.
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
from windlass.serve.completion import Portion, Served, Stopwatch
from windlass.serve.cost import Cost
from windlass.serve.desk import Ticket
from windlass.serve.inbox import Inbox
from windlass.serve.prepare import Prepared
from windlass.serve.problems import problem_of
from windlass.serve.protocol import Generation, StreamOptions
from windlass.serve.services import Services
from windlass.serve.shapes import Json, Shape, usage
from windlass.serve.trace_store import Entry
from windlass.serve.transport import CONNECTION, LimitedProtocol
from windlass.text.completion import Completion

T = TypeVar("T")

_INLINE_SCORES = 200  # tokens whose log probabilities are spelled on the event loop
_FAIR_PORTIONS = 32  # sent in a row before other clients get their turn
_DONE = b"data: [DONE]\n\n"
_STRAIGHT = "windlass.send"  # in a scope: the server's own `send`
_OUTPUT_BYTES = 256  # about what one token takes in memory while it waits, and as an event
_LOGPROB_BYTES = 64
_MARK = "\0"
_MARK_JSON = msgspec.json.encode(_MARK)


def with_straight_send(app: ASGIApp) -> ASGIApp:
    """`app`, whose streams reach the server's `send` without its layers in between."""

    async def outermost(scope: Scope, receive: Receive, send: Send) -> None:
        scope[_STRAIGHT] = send
        await app(scope, receive, send)

    return outermost


class ClientGone(Exception):
    """The client hung up; there is nobody to answer."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled and raises ClientGone if the client hangs up."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_hang_up(receive))
    either: set[asyncio.Task[Any]] = {task, gone}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for each in either:
            each.cancel()
        await asyncio.gather(*either, return_exceptions=True)


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Answer:
    """The completions of one request. Owns them until their end, an error, or the hang-up."""

    def __init__(
        self,
        services: Services,
        prepared: Prepared,
        body: Generation,
        shape: Shape,
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
        self._shape = shape
        self._ticket = ticket
        self._created = int(time.time())
        options = body.stream_options or StreamOptions()
        always = config.enable_force_include_usage or self._price is not None
        self._usage_at_end = options.include_usage or always
        self._usage_always = options.continuous_usage_stats
        self._max_buffer_bytes = config.max_stream_buffer_bytes
        self._is_plain = shape.is_plain and not self._usage_always
        self._frames: dict[int, tuple[bytes, bytes]] = {}
        interval = config.stream_interval if body.stream else None
        self._completions = [
            Completion(index, request, card.tokenizer)
            for index, request in enumerate(prepared.requests)
        ]
        self._served = [
            Served(completion, Stopwatch(services.metrics, ticket.began), interval)
            for completion in self._completions
        ]
        self._by_id = {each.completion.request.request_id: each for each in self._served}

    async def _next(self) -> Portion | None:
        """What is to be sent next; None: that was all. Its requests start with the first call."""
        try:
            inbox = self._inbox or self._start()
            while (output := await self._client.next(inbox)) is not None:
                portion = self._by_id[output.request_id].feed(output)
                if portion is None:
                    continue
                if portion.finish_reason is not None and output.finish is None:
                    self._client.abort(output.request_id, completed=True)  # a stop string
                return portion
        except EngineError:
            if self._entry is not None:
                self._traces.give_up(self._entry)
            raise
        return None

    def _start(self) -> Inbox:
        ids, began = tuple(self._by_id), self._ticket.began
        self._entry = self._traces.open(self._prepared.answer_id, self._owner, began, ids)
        self._inbox = self._client.submit(self._prepared.requests)
        return self._inbox

    def limit_backlog(self, max_bytes: int, on_full: Callable[[], None]) -> None:
        """Call `on_full` while about `max_bytes` of outputs wait to be sent."""
        if self._inbox is not None:
            num_logprobs = self._prepared.sampling.logprobs or 0
            if num_logprobs == -1:
                num_logprobs = self._client.report.vocab_size
            per_output = _OUTPUT_BYTES + _LOGPROB_BYTES * num_logprobs
            self._inbox.limit(max_bytes // per_output, on_full)

    def close(self) -> None:
        """Abort what still runs; must come last, whatever happened."""
        if self._inbox is not None:
            self._client.drop(self._inbox)

    async def _cost(self) -> Cost | None:
        """What it cost, where that was asked for; known when the engine has told its story."""
        if self._price is None or self._entry is None:
            return None
        traces = await self._traces.complete(self._entry)
        return None if traces is None else self._price.of(traces)

    async def _record(self) -> None:
        if self._recorder is not None and self._recorder.chooses(self._prepared.answer_id):
            # Spelling prompts that came as token ids takes long, and a disk may be slow.
            await self._workers.releasing_gil(
                self._recorder.answered, self._body, self._prepared, self._completions
            )

    # ---- in one piece ------------------------------------------------------------------------

    async def whole(self, request: Request) -> Response:
        try:
            body = await unless_gone(request.receive, self._collect())
        finally:
            self.close()
        await self._record()
        self._ticket.end("success")
        return Response(body, media_type="application/json")

    async def _collect(self) -> bytes:
        whole = {}
        while (portion := await self._next()) is not None:
            whole[portion.index] = portion
        cost = await self._cost()
        num_scores = sum(len(portion.logprobs) for portion in whole.values())
        num_scores += sum(len(each.prompt_logprobs) for each in self._completions)
        if num_scores <= _INLINE_SCORES:
            return self._encode_whole(whole, cost)
        return await self._workers.releasing_gil(self._encode_whole, whole, cost)

    def _encode_whole(self, whole: dict[int, Portion], cost: Cost | None) -> bytes:
        choices = [self._shape.whole(whole[each.index], each) for each in self._completions]
        return msgspec.json.encode(
            {
                **self._envelope(self._shape.whole_object),
                "choices": choices,
                "usage": usage(self._prepared, self._served, cost),
                **self._shape.extra(self._completions),
            }
        )

    # ---- as a stream -------------------------------------------------------------------------

    async def stream(self, request: Request) -> Response:
        """Answer with a stream once the first token is there: until then an error has a status."""
        try:
            first = await unless_gone(request.receive, self._next())
        except BaseException:
            self.close()
            raise
        return EventStream(self, first, self._ticket, self._max_buffer_bytes)

    async def events(self, first: Portion | None, send: Send) -> None:
        """Send all events of the stream, the first of them made of `first`."""
        portion, num_sent = first, 0
        while portion is not None:
            await send(_body(self._chunks(portion)))
            num_sent += 1
            if num_sent % _FAIR_PORTIONS == 0:
                await asyncio.sleep(0)  # with a thousand choices, `_next` need not wait for long
            portion = await self._next()
        if self._usage_at_end:
            numbers = usage(self._prepared, self._served, await self._cost())
            await send(_body(self._event([], numbers)))
        await self._record()  # first: a client may hang up as soon as the stream is done
        await send(_body(_DONE))

    def _chunks(self, portion: Portion) -> bytes:
        """The events of a portion. In mid-stream they differ in nothing but the text."""
        if not self._is_plain or portion.first or portion.finish_reason or not portion.text:
            return self._made(portion)
        frame = self._frames.get(portion.index)
        if frame is None:
            # What is around the text is made once. Nothing that a client chose comes behind it.
            made = self._made(Portion(portion.index, _MARK))
            head, _, tail = made.rpartition(_MARK_JSON)
            frame = self._frames[portion.index] = head, tail
        return frame[0] + msgspec.json.encode(portion.text) + frame[1]

    def _made(self, portion: Portion) -> bytes:
        choices = self._shape.chunks(portion, self._completions[portion.index])
        numbers = usage(self._prepared, self._served) if self._usage_always else None
        return b"".join(self._event([choice], numbers) for choice in choices)

    def _event(self, choices: list[Json], numbers: Json | None) -> bytes:
        chunk = {**self._envelope(self._shape.chunk_object), "choices": choices}
        if self._usage_at_end or self._usage_always:
            chunk["usage"] = numbers
        return b"data: " + msgspec.json.encode(chunk) + b"\n\n"

    def _envelope(self, object_name: str) -> Json:
        return {
            "id": self._prepared.answer_id,
            "object": object_name,
            "created": self._created,
            "model": self._model,
        }


def _body(event: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": event, "more_body": more}


class EventStream(StreamingResponse):
    """Sends server-sent events until they end, fail, or nobody reads them; ends the ticket.

    `first` is the portion of `answer` that came before its status was known. The answer is closed
    at the end. A client that leaves more than `max_buffer_bytes` unread is cut off.
    """

    def __init__(
        self, answer: Answer, first: Portion | None, ticket: Ticket, max_buffer_bytes: int
    ) -> None:
        # Proxies must not collect a stream before they pass it on.
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__((), headers=headers, media_type="text/event-stream")
        self._answer = answer
        self._first = first
        self._ticket = ticket
        self._max_buffer_bytes = max_buffer_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection: LimitedProtocol = scope[CONNECTION]
        self._answer.limit_backlog(self._max_buffer_bytes, connection.cut_if_unread)
        try:
            sending = self._send_all(send, scope.get(_STRAIGHT, send), connection)
            await unless_gone(receive, sending)
        except ClientGone:
            self._ticket.end("aborted")
        finally:
            self._answer.close()
            self._ticket.end("error")  # unless it has ended otherwise

    async def _send_all(self, send: Send, straight: Send, connection: LimitedProtocol) -> None:
        """The events, and for an error in mid-stream one that tells it.

        The layers of the application look at a stream's start alone: its events go past them.
        """
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        try:
            await self._answer.events(self._first, straight)
        except EngineError as error:
            self._ticket.end_with(error)
            told = msgspec.json.encode(problem_of(error).body())
            await straight(_body(b"data: " + told + b"\n\n"))
        else:
            # Events for a closed connection are dropped without an error.
            self._ticket.end("aborted" if connection.is_closing else "success")
        await send(_body(b"", more=False))
