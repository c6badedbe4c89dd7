"""Runs one request of a batch through the endpoint of its URL, as if a client had sent it.

The endpoint reads the body, prepares it and formats the response. The request is marked with the
key that owns the batch, and with the lowest priority.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from windlass.errors import EngineError
from windlass.serve.batch.lines import BatchLine
from windlass.serve.batch.results import LineResult
from windlass.serve.keys import BATCH_OWNER
from windlass.serve.problems import Problem, problem_of, problem_of_status

_log = logging.getLogger("windlass.serve")

Endpoint = Callable[[Request], Awaitable[Response]]

_BUSY = (429, 503)  # a full queue, a tenant's limit, an engine that restarts or sleeps: it waits
_FAILED_STEP = 500  # may be due to another request of the same step
_MAX_FAILED_STEPS = 3
_FIRST_PAUSE_S = 0.1
_MAX_PAUSE_S = 5.0


class Dispatcher:
    """Maps URLs to endpoints. `limit` requests run at once, over all batches."""

    def __init__(self, endpoints: Mapping[str, Endpoint], limit: int) -> None:
        self.endpoints = endpoints
        self.limit = limit
        self._slots = asyncio.Semaphore(limit)

    async def run(self, line: BatchLine, owner: str) -> LineResult:
        """Run a request until it has a response that would not be better later."""
        pause_s, num_failed = _FIRST_PAUSE_S, 0
        while True:
            async with self._slots:  # not while it waits: perhaps only its tenant is at a limit
                status, body = await self._answer(line, owner)
            num_failed += status == _FAILED_STEP
            if status not in _BUSY and (status != _FAILED_STEP or num_failed == _MAX_FAILED_STEPS):
                return result_of(line, status, body)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    async def _answer(self, line: BatchLine, owner: str) -> tuple[int, bytes]:
        try:
            response = await self.endpoints[line.url](_request(line, owner))
        except EngineError as error:
            return _problem(problem_of(error))
        except Exception as error:  # as in app.py: no request may end the others
            _log.exception("a request of a batch failed")
            name = type(error).__name__
            return _problem(problem_of_status(500, f"an internal error: {name}."))
        return response.status_code, bytes(response.body)


def result_of(line: BatchLine, status: int, body: bytes) -> LineResult:
    """The line with the response to a request."""
    response = {
        "status_code": status,
        "request_id": f"req_{uuid.uuid4().hex}",
        "body": msgspec.Raw(body),
    }
    return _result(line, failed=status != 200, response=response, error=None)


def unfinished_result(line: BatchLine, code: str, message: str) -> LineResult:
    """The line of a request that was not run."""
    return _result(line, failed=True, response=None, error={"code": code, "message": message})


def _result(line: BatchLine, *, failed: bool, response: Any, error: Any) -> LineResult:
    fields = {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": line.custom_id,
        "response": response,
        "error": error,
    }
    return LineResult(line.index, failed, msgspec.json.encode(fields))


async def run_lines(
    indices: Iterable[int],
    *,
    read: Callable[[Sequence[int]], list[BatchLine]],
    run: Callable[[BatchLine], Awaitable[LineResult]],
    save: Callable[[Sequence[LineResult]], Awaitable[None]],
    limit: int,
) -> None:
    """Read, run and save requests, up to `limit` at once. Results are saved as they come.

    Other requests run while results are saved, so that slow disks make larger commits.
    """
    waiting = iter(indices)
    running: set[asyncio.Task[LineResult]] = set()
    finished: list[LineResult] = []
    try:
        while True:
            chosen = list(islice(waiting, limit - len(running)))
            if chosen:
                lines = await asyncio.to_thread(read, chosen)
                running |= {asyncio.ensure_future(run(line)) for line in lines}
            if finished:
                await save(finished)
            if not running:
                return
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            finished = [task.result() for task in done]
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _request(line: BatchLine, owner: str) -> Request:
    """The request as an endpoint sees it; its client never disconnects."""
    scope = {
        "type": "http",
        "method": "POST",
        "path": line.url,
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        BATCH_OWNER: owner,
    }
    messages = [{"type": "http.request", "body": line.body, "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()
        raise AssertionError

    return Request(scope, receive)


def _problem(problem: Problem) -> tuple[int, bytes]:
    return problem.status, msgspec.json.encode(problem.body())
