"""The server under load: readiness, its models, its tokenizer's tokens per word."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp

from windlass.errors import ConfigError, EngineError
from windlass.tools.common.texts import KINDS, Kind, Scale, samples, scale_of
from windlass.tools.load.stream import error_text

_TIMEOUT_S = 10.0  # for requests that a healthy server completes at once
_PAUSE_S = 0.5
_ATTEMPTS = 3


class ServerError(EngineError):
    """The server under load is not ready, failed, or lacks a needed endpoint."""


class Server:
    """Owns the connections to one server. Use it with `async with`."""

    def __init__(self, base_url: str, headers: dict[str, str] | None = None) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigError(
                f"--base-url {base_url!r}: expected a URL such as http://127.0.0.1:8000."
            )
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self._headers = headers or {}

    async def __aenter__(self) -> Self:
        # limit=0: the load limits concurrency. Idle connections are closed before uvicorn closes
        # them after 5 s, since a request sent at that moment would be lost.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4)
        self.session = aiohttp.ClientSession(
            connector=connector,
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.session.close()

    def url_of(self, path: str) -> str:
        return self.base_url + path

    async def wait_until_ready(self, timeout_s: float) -> list[str]:
        """Wait until the server lists its models; returns their names."""
        end = time.monotonic() + timeout_s
        while True:
            try:
                return await self._models()
            except (aiohttp.ClientError, OSError, ServerError) as error:
                if time.monotonic() >= end:
                    reason = str(error) or type(error).__name__
                    raise ServerError(
                        f"no server is ready at {self.base_url}: {reason}. Start one, set "
                        "--base-url, or wait longer with --ready-check-timeout-sec "
                        f"(now {timeout_s:g})."
                    ) from error
            await asyncio.sleep(_PAUSE_S)

    async def _models(self) -> list[str]:
        status, value = await self._json("GET", "/v1/models")
        if status in (401, 403):
            raise ConfigError(
                f"{self.base_url} responds {status}: {value}. Set a key with --api-key."
            )
        entries = value.get("data") if isinstance(value, dict) else None
        if status != 200 or not isinstance(entries, list):
            raise ServerError(f"GET /v1/models responds {status}: {str(value)[:300]}")
        return [str(entry.get("id")) for entry in entries if isinstance(entry, dict)]

    async def _json(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        async with self.session.request(
            method, self.url_of(path), json=body, timeout=timeout
        ) as response:
            if response.content_type == "application/json" and response.status == 200:
                return response.status, await response.json()
            return response.status, error_text(await response.read())

    async def is_alive(self) -> bool:
        """Whether the server responds, after a few attempts."""
        for _ in range(_ATTEMPTS):
            try:
                await self._json("GET", "/v1/models")
            except TimeoutError:
                return True  # busy, not dead
            except (aiohttp.ClientError, OSError):
                await asyncio.sleep(_PAUSE_S)
            else:
                return True
        return False

    async def text(self, path: str) -> str | None:
        """The body of a GET; None if it fails."""
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        try:
            async with self.session.get(self.url_of(path), timeout=timeout) as response:
                return await response.text() if response.status == 200 else None
        except (aiohttp.ClientError, OSError):
            return None

    async def scale(self, model: str, endpoint: str) -> Scale:
        """Tokens per word, from /tokenize if the server has it, else from usage counts."""
        counts: dict[Kind, tuple[int, int]] = {}
        for kind in KINDS:
            short, long = samples(kind)
            counts[kind] = (
                await self._count(model, endpoint, short),
                await self._count(model, endpoint, long),
            )
        return scale_of(counts)

    async def _count(self, model: str, endpoint: str, text: str) -> int:
        # vLLM and Windlass read `prompt`, llama.cpp's server reads `content` and returns no count.
        for body in ({"model": model, "prompt": text}, {"content": text}):
            status, value = await self._json("POST", "/tokenize", body)
            tokens = value.get("tokens") if isinstance(value, dict) else None
            if status == 200 and isinstance(tokens, list) and tokens:
                return len(tokens)
        return await self._count_by_usage(model, endpoint, text)

    async def _count_by_usage(self, model: str, endpoint: str, text: str) -> int:
        body: dict[str, Any] = {"model": model, "max_tokens": 1}
        if endpoint.rstrip("/").endswith("chat/completions"):
            body["messages"] = [{"role": "user", "content": text}]
        else:
            body["prompt"] = text
        async with self.session.post(self.url_of(endpoint), json=body) as response:
            if response.status != 200:
                message = error_text(await response.read())
                raise ServerError(f"{endpoint} responds {response.status}: {message}")
            value = await response.json()
        count = value.get("usage", {}).get("prompt_tokens")
        if not isinstance(count, int):
            raise ServerError(
                f"{self.base_url} has no /tokenize and reports no usage, so prompt lengths are "
                "unknown. Set --tokens-per-word."
            )
        return count


def choose_model(requested: str | None, served: list[str], base_url: str) -> str:
    """Validate the requested model; default: the server's first."""
    if requested is None:
        if not served:
            raise ConfigError(f"{base_url} lists no model. Set one with --model.")
        return served[0]
    if served and requested not in served:
        raise ConfigError(f"{base_url} has no model {requested!r}. It has: {', '.join(served)}.")
    return requested
