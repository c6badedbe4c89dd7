"""Sends requests to an OpenAI-compatible server and notes when what came back.

Makes no assumption about whose server it is: two endpoints, streams, usage at their end.
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
from windlass.tools.common.requests import TextRequest
from windlass.tools.common.timing import Timing
from windlass.tools.load.server import Server
from windlass.tools.load.stream import AnswerStream, StreamBroken, error_text

_LONGEST_WAIT_S = 60.0  # that a Retry-After can ask for


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What every request of a run has in common."""

    model: str
    endpoint: str = "/v1/chat/completions"
    temperature: float | None = None
    ignore_eos: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 600.0
    max_retries: int = 0  # after answers of 429

    @property
    def is_chat(self) -> bool:
        return self.endpoint.rstrip("/").endswith("chat/completions")

    def check(self, requests: Sequence[TextRequest]) -> None:
        """Refuse what this endpoint cannot take."""
        if self.is_chat and any(isinstance(request.prompt, tuple) for request in requests):
            raise ConfigError(
                "a prompt of token ids cannot go to a chat endpoint. Use --endpoint /v1/completions."
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
    """The server said 429."""

    def __init__(self, retry_after_s: float | None, said: str) -> None:
        super().__init__(said)
        self.retry_after_s = retry_after_s


class _Refused(Exception):
    """The server answered with an error."""


class Client:
    """Sends to one server. `dead` is set when the server does not answer any more."""

    def __init__(self, server: Server, options: RequestOptions) -> None:
        self._server = server
        self._options = options
        self._url = server.url_of(options.endpoint)
        self.dead = asyncio.Event()
        self.num_chunks = 0  # that brought tokens, of all answers

    async def send(self, request: TextRequest, asked_at: float) -> Timing:
        """Send one and wait for its end; whatever goes wrong is in the timing."""
        stream = AnswerStream()
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
                    except _Rejected as said:
                        rejected += 1
                        if rejected > self._options.max_retries:
                            raise
                        await asyncio.sleep(min(said.retry_after_s or 1.0, _LONGEST_WAIT_S))
        except aiohttp.ServerTimeoutError as slow:
            error = f"connection not made in time: {_reason(slow)}"
        except TimeoutError:
            error = f"not done after {self._options.timeout_s:g} s"
        except (StreamBroken, _Rejected, _Refused) as broken:
            error = str(broken)
        except (aiohttp.ClientError, OSError) as lost:
            error = f"connection lost: {_reason(lost)}"
            await self._look_after()
        return Timing(
            asked_at,
            sent_at,
            time.perf_counter(),
            stream.usage.prompt_tokens if stream.usage is not None else 0,
            stream.num_output,
            tuple(stream.times),
            stream.tokens(),
            error,
            rejected,
            stream.num_cached,
            "".join(stream.texts),
        )

    async def _stream(self, body: bytes, stream: AnswerStream) -> None:
        async with await self._post(body) as response:
            if response.status != 200:
                await _refuse(response)
            if response.content_type == "application/json":
                raise _Refused("the server does not stream: it answered with plain JSON")
            async for data in response.content.iter_any():
                before = len(stream.times)
                stream.feed(data, time.perf_counter())
                self.num_chunks += len(stream.times) - before
        if not stream.is_done:
            raise StreamBroken("the stream ended before the answer did")

    async def _post(self, body: bytes) -> aiohttp.ClientResponse:
        """A server may close an idle connection in the moment it is used again: then once more."""
        post, headers = self._server.session.post, {"Content-Type": "application/json"}
        try:
            return await post(self._url, data=body, headers=headers)
        except aiohttp.ClientConnectorError:
            raise
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            return await post(self._url, data=body, headers=headers)

    async def _look_after(self) -> None:
        """A lost connection may be one request's; a server that is gone ends the run."""
        if not self.dead.is_set() and not await self._server.is_alive():
            self.dead.set()


async def _refuse(response: aiohttp.ClientResponse) -> None:
    said = error_text(await response.read())
    if response.status != 429:
        raise _Refused(f"HTTP {response.status}: {said}")
    text = response.headers.get("Retry-After", "")
    try:
        retry_after_s = max(0.0, float(text))
    except ValueError:
        retry_after_s = None  # a date, or nothing
    wait = f" (Retry-After: {text})" if text else ""
    raise _Rejected(retry_after_s, f"HTTP 429{wait}: {said}")


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__
