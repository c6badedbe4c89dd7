"""Forwards requests of an HTTP worker to the HTTP server of the server's process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import aiohttp
import yarl
from starlette.types import ASGIApp, Receive, Scope, Send

from windlass.serve.problems import problem_of_status
from windlass.serve.transport import CONNECTION, LimitedProtocol

_HOP_BY_HOP = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"te", b"upgrade"})
_OWN_HEADERS = _HOP_BY_HOP | {b"date"}  # the worker's HTTP server adds them to responses
_ORIGIN = "http://windlass"  # the Host header is the client's
_MAX_CHUNKS = 4  # of a body that wait for the server's process


class Dispatch:
    """Calls `app` for its own paths, and forwards all others."""

    def __init__(self, app: ASGIApp, forward: Forwarder, paths: frozenset[str]) -> None:
        self._app = app
        self._forward = forward
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_local = scope["type"] != "http" or scope["path"] in self._paths
        await (self._app if is_local else self._forward)(scope, receive, send)


class _Incoming:
    """Reads what the client sends: first the body, then nothing until it disconnects."""

    def __init__(self, receive: Receive, connection: LimitedProtocol | None) -> None:
        self.receive = receive
        self._connection = connection
        self._chunks: asyncio.Queue[bytes | None] = asyncio.Queue(_MAX_CHUNKS)

    async def read_until_disconnect(self) -> None:
        while (message := await self.receive())["type"] != "http.disconnect":
            await self._chunks.put(message.get("body", b""))
            if not message.get("more_body"):
                await self._chunks.put(None)

    async def body(self) -> AsyncGenerator[bytes, None]:
        while (chunk := await self._chunks.get()) is not None:
            yield chunk
            if self._connection is not None:
                self._connection.release_body(len(chunk))


class Forwarder:
    """An ASGI application that repeats a request at the unix socket `path`.

    Neither process checks a forwarded request twice: the receiver applies keys, hosts and limits.
    """

    def __init__(self, path: str) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(path, limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent", "Content-Type"),
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def close(self) -> None:
        await self._session.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        incoming = _Incoming(receive, scope.get(CONNECTION))
        reading = asyncio.create_task(incoming.read_until_disconnect())
        forwarding = asyncio.create_task(self._forward(scope, incoming, send))
        try:
            await asyncio.wait({reading, forwarding}, return_when=asyncio.FIRST_COMPLETED)
            if forwarding.done():
                await forwarding
        finally:
            for task in (reading, forwarding):
                task.cancel()
            await asyncio.gather(reading, forwarding, return_exceptions=True)

    async def _forward(self, scope: Scope, incoming: _Incoming, send: Send) -> None:
        headers = [(name, value) for name, value in scope["headers"] if name not in _HOP_BY_HOP]
        names = {name for name, _ in scope["headers"]}
        has_body = bool(names & {b"content-length", b"transfer-encoding"})
        target = scope["raw_path"].decode("ascii")
        if scope["query_string"]:
            target += "?" + scope["query_string"].decode("ascii")
        has_started = False
        try:
            async with self._session.request(
                scope["method"],
                yarl.URL(_ORIGIN + target, encoded=True),
                headers=[
                    (name.decode("latin-1"), value.decode("latin-1")) for name, value in headers
                ],
                data=incoming.body() if has_body else None,
                allow_redirects=False,
            ) as response:
                raw = [each for each in response.raw_headers if each[0].lower() not in _OWN_HEADERS]
                start = {"type": "http.response.start", "status": response.status, "headers": raw}
                has_started = True
                await send(start)
                async for chunk in response.content.iter_any():
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except aiohttp.ClientError as error:
            if has_started:
                raise  # the client sees an incomplete response
            message = f"the server's process did not answer: {error}. Try again."
            await problem_of_status(503, message).response(scope["path"])(
                scope, incoming.receive, send
            )
            return
        await send({"type": "http.response.body", "body": b""})
