"""One HTTP answer: its completions run in the engine, and come as one body or as a stream.

A client that hangs up, in whatever phase, has its completions aborted at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from windlass.core.completion import Completion
from windlass.errors import EngineError
from windlass.serve.completion import Portion, Served, Stopwatch
from windlass.serve.cost import Cost
from windlass.serve.desk import Ticket
from windlass.serve.prepare import Prepared
from windlass.serve.problems import problem_of
from windlass.serve.protocol import Generation, StreamOptions
from windlass.serve.services import Services
from windlass.serve.shapes import Json, Shape, usage
from windlass.serve.storybook import Entry

T = TypeVar("T")

_DONE = b"data: [DONE]\n\n"


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


async def _next(portions: AsyncGenerator[Portion, None]) -> Portion:
    return await anext(portions)


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
        self._book = services.book
        self._owner = owner
        self._entry: Entry | None = None
        self._price = services.costs.price if services.costs and body.include_cost else None
        self._recorder = services.recorder
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
        interval = config.stream_interval if body.stream else None
        self._completions = [
            Completion(index, request, card.tokenizer)
            for index, request in enumerate(prepared.requests)
        ]
        self._served = [
            Served(completion, Stopwatch(services.metrics, ticket.began), interval)
            for completion in self._completions
        ]

    async def _portions(self) -> AsyncGenerator[Portion, None]:
        by_id = {each.completion.request.request_id: each for each in self._served}
        began = self._ticket.began
        entry = self._book.open(self._prepared.answer_id, self._owner, began, tuple(by_id))
        self._entry = entry
        try:
            async with aclosing(self._client.generate(*self._prepared.requests)) as outputs:
                async for output in outputs:
                    portion = by_id[output.request_id].feed(output)
                    if portion is None:
                        continue
                    if portion.finish_reason is not None and output.finish is None:
                        self._client.abort(output.request_id)  # a stop string, which only we see
                    yield portion
        except EngineError:
            self._book.give_up(entry)
            raise

    async def _cost(self) -> Cost | None:
        """What it cost, where that was asked for; known when the engine has told its story."""
        if self._price is None or self._entry is None:
            return None
        stories = await self._book.complete(self._entry)
        return None if stories is None else self._price.of(stories)

    def _record(self) -> None:
        if self._recorder is not None:
            self._recorder.answered(self._body, self._prepared, self._completions)

    # ---- in one piece ------------------------------------------------------------------------

    async def whole(self, request: Request) -> Response:
        body = await unless_gone(request.receive, self._collect())
        self._record()
        self._ticket.end("success")
        return Response(msgspec.json.encode(body), media_type="application/json")

    async def _collect(self) -> Json:
        async with aclosing(self._portions()) as portions:
            whole = {portion.index: portion async for portion in portions}
        choices = [self._shape.whole(whole[each.index], each) for each in self._completions]
        return {
            **self._envelope(self._shape.whole_object),
            "choices": choices,
            "usage": usage(self._prepared, self._served, await self._cost()),
            **self._shape.extra(self._completions),
        }

    # ---- as a stream -------------------------------------------------------------------------

    async def stream(self, request: Request) -> Response:
        """Answer with a stream once the first token is there: until then an error has a status."""
        portions = self._portions()
        first = await unless_gone(request.receive, _next(portions))
        return EventStream(self._events(first, portions), portions, self._ticket)

    async def _events(
        self, first: Portion, portions: AsyncGenerator[Portion, None]
    ) -> AsyncGenerator[bytes, None]:
        yield self._chunks(first)
        async for portion in portions:
            yield self._chunks(portion)
        if self._usage_at_end:
            yield self._event([], usage(self._prepared, self._served, await self._cost()))
        yield _DONE
        self._record()

    def _chunks(self, portion: Portion) -> bytes:
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


class EventStream(StreamingResponse):
    """Sends server-sent events until they end, fail, or nobody reads them; ends the ticket.

    `source` is what the events are made of; it is closed even if none of them was ever sent.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        source: AsyncGenerator[Portion, None],
        ticket: Ticket,
    ) -> None:
        # Proxies must not collect a stream before they pass it on.
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._events = events
        self._source = source
        self._ticket = ticket

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        try:
            async with aclosing(self._source):
                await unless_gone(receive, self._send_all(send))
        except ClientGone:
            self._ticket.end("aborted")
        finally:
            self._ticket.end("error")  # unless it has ended otherwise

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async with aclosing(self._with_errors()) as events:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _with_errors(self) -> AsyncGenerator[bytes, None]:
        """The events, and for an error in mid-stream one that tells it."""
        try:
            async with aclosing(self._events) as events:
                async for event in events:
                    yield event
        except EngineError as error:
            self._ticket.end_with(error)
            yield b"data: " + msgspec.json.encode(problem_of(error).body()) + b"\n\n"
        else:
            self._ticket.end("success")
