"""Sends requests to any OpenAI-compatible server and records their timings.

Uses the two completion endpoints with streaming and usage in the last chunk.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from windlass.errors import ConfigError
from windlass.tools.common.requests import TextRequest, Timing
from windlass.tools.load.server import Server
from windlass.tools.load.stream import ResponseStream, StreamBroken, error_text

_MAX_RETRY_WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Options that all requests of a run share."""

    model: str
    endpoint: str = "/v1/chat/completions"
    temperature: float | None = None
    ignore_eos: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 600.0
    max_retries: int = 0  # after status 429

    @property
    def is_chat(self) -> bool:
        return self.endpoint.rstrip("/").endswith("chat/completions")

    def check(self, requests: Sequence[TextRequest]) -> None:
        """Reject requests that this endpoint does not accept."""
        if self.is_chat and any(isinstance(request.prompt, tuple) for request in requests):
            raise ConfigError(
                "a chat endpoint does not accept prompts of token ids. "
                "Use --endpoint /v1/completions."
            )

    def body(self, request: TextRequest) -> bytes:
        text = (
            {"messages": request.as_messages()} if self.is_chat else {"prompt": request.as_prompt()}
        )
        body: dict[str, Any] = {
            "model": request.adapter or self.model,
            **text,
            "max_tokens": request.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.temperature is not None:
            body["temperature"] = self.temperature
        if self.ignore_eos:
            body["ignore_eos"] = True
        return msgspec.json.encode({**body, **self.extra})


class _Rejected(Exception):
    """The server responded with status 429."""

    def __init__(self, retry_after_s: float | None, message: str) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class _Failed(Exception):
    """The server responded with an error."""


class Client:
    """Sends to one server. `dead` is set when the server stops responding."""

    def __init__(self, server: Server, options: RequestOptions) -> None:
        self._server = server
        self._options = options
        self._url = server.url_of(options.endpoint)
        self.dead = asyncio.Event()
        self.num_chunks = 0  # chunks with tokens, over all responses

    async def send(self, request: TextRequest, due_at: float) -> Timing:
        """Send one request and wait for its end; errors are in the timing."""
        stream = ResponseStream()
        body = self._options.body(request)
        rejected = 0
        error: str | None = None
        sent_at = time.perf_counter()
        try:
            async with asyncio.timeout(self._options.timeout_s):
                while True:
                    try:
                        await self._stream(body, stream)
                        break
                    except _Rejected as rejection:
                        rejected += 1
                        if rejected > self._options.max_retries:
                            raise
                        wait_s = rejection.retry_after_s or 1.0
                        await asyncio.sleep(min(wait_s, _MAX_RETRY_WAIT_S))
        except aiohttp.ServerTimeoutError as slow:
            error = f"connection timed out: {_reason(slow)}"
        except TimeoutError:
            error = f"not done after {self._options.timeout_s:g} s"
        except (StreamBroken, _Rejected, _Failed) as failure:
            error = str(failure)
        except (aiohttp.ClientError, OSError) as lost:
            error = f"connection lost: {_reason(lost)}"
            await self._check_server()
        return Timing(
            due_at=due_at,
            sent_at=sent_at,
            ended_at=time.perf_counter(),
            num_prompt=stream.usage.prompt_tokens if stream.usage is not None else 0,
            num_output=stream.num_output,
            times=tuple(stream.times),
            tokens=stream.tokens(),
            error=error,
            num_rejected=rejected,
            num_cached=stream.num_cached,
            text="".join(stream.texts),
        )

    async def _stream(self, body: bytes, stream: ResponseStream) -> None:
        async with await self._post(body) as response:
            if response.status != 200:
                await _raise_error(response)
            if response.content_type == "application/json":
                raise _Failed("the server does not stream: it responded with plain JSON")
            async for data in response.content.iter_any():
                before = len(stream.times)
                stream.feed(data, time.perf_counter())
                self.num_chunks += len(stream.times) - before
        if not stream.is_done:
            raise StreamBroken("the stream ended before the response was complete")

    async def _post(self, body: bytes) -> aiohttp.ClientResponse:
        """Post, and retry once if the server closed an idle connection just before its reuse."""
        post, headers = self._server.session.post, {"Content-Type": "application/json"}
        try:
            return await post(self._url, data=body, headers=headers)
        except aiohttp.ClientConnectorError:
            raise
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            return await post(self._url, data=body, headers=headers)

    async def _check_server(self) -> None:
        """After a lost connection, end the run if the server is gone."""
        if not self.dead.is_set() and not await self._server.is_alive():
            self.dead.set()


async def _raise_error(response: aiohttp.ClientResponse) -> None:
    message = error_text(await response.read())
    if response.status != 429:
        raise _Failed(f"HTTP {response.status}: {message}")
    text = response.headers.get("Retry-After", "")
    try:
        retry_after_s = max(0.0, float(text))
    except ValueError:
        retry_after_s = None  # a date, or empty
    wait = f" (Retry-After: {text})" if text else ""
    raise _Rejected(retry_after_s, f"HTTP 429{wait}: {message}")


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__
