"""A small OpenAI-compatible server with configurable faults, in a thread of this process."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from aiohttp import web

RETRY_AFTER_S = 0.05  # of a busy server


@dataclass
class Faults:
    """The configured fault, and the received requests."""

    num_good: int = 10_000  # successful requests before the fault
    then: str = ""  # dies, busy, garbage, sends error, cuts, plain, hangs up (once)
    step_s: float = 0.002
    bodies: list[dict[str, object]] = field(default_factory=list)
    num_tried: int = 0


class FakeServer:
    """Streams the requested number of tokens, one per chunk."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._runner: web.AppRunner | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._work)

    def __enter__(self) -> FakeServer:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _work(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._start())
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(self._stop())
        self._loop.close()

    async def _start(self) -> None:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._answer)
        app.router.add_post("/v1/completions", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    async def _stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake"}]})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not body.get("stream"):
            return web.json_response({"usage": {"prompt_tokens": len(str(body).split())}})
        self.faults.bodies.append(body)
        self.faults.num_tried += 1
        fault = self.faults.then if self.faults.num_tried > self.faults.num_good else ""
        if fault == "busy":
            headers = {"Retry-After": str(RETRY_AFTER_S)}
            error = {"error": {"message": "the queue is full"}}
            return web.json_response(error, status=429, headers=headers)
        if fault == "hangs up" and self.faults.num_tried == self.faults.num_good + 1:
            assert request.transport is not None
            request.transport.abort()
        if fault == "plain":
            return web.json_response({"choices": []})
        return await self._stream(request, body["max_tokens"], fault)

    async def _stream(self, request: web.Request, count: int, fault: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await self._send(response, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for index in range(count):
            await asyncio.sleep(self.faults.step_s)
            if fault not in ("", "hangs up") and index == 1:
                await self._break(response, fault)
                return response
            await self._send(response, {"choices": [{"delta": {"content": f" {index}"}}]})
        await self._send(response, {"choices": [{"delta": {}, "finish_reason": "length"}]})
        usage = {"prompt_tokens": 10, "completion_tokens": count}
        await self._send(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _break(self, response: web.StreamResponse, fault: str) -> None:
        if fault == "garbage":
            await response.write(b"data: {half\n\n")
        elif fault == "sends error":
            await self._send(response, {"error": {"message": "out of memory"}})
        elif fault == "dies":
            assert self._runner is not None
            for site in list(self._runner.sites):
                await site.stop()
            for connection in self._runner.server.connections if self._runner.server else []:
                if connection.transport is not None:
                    connection.transport.abort()

    async def _send(self, response: web.StreamResponse, value: object) -> None:
        await response.write(b"data: " + json.dumps(value).encode() + b"\r\n\r\n")


@contextmanager
def fake_server(**faults: object) -> Iterator[FakeServer]:
    with FakeServer(Faults(**faults)) as server:  # type: ignore[arg-type]
        yield server
