"""Test servers: real HTTP, real processes, a counting model."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import httpx
import pytest
from openai import OpenAI

from tests.serve.fakes import CARD, Options, counting
from windlass.config import EngineConfig, ServeConfig
from windlass.core.card import ModelCard
from windlass.serve.client import EngineClient
from windlass.serve.event_loop import run_loop
from windlass.serve.handover import SplitPolicy
from windlass.serve.health import RestartPolicy
from windlass.serve.launch import FallbackParts, ServerParts, serve_until
from windlass.serve.listener import bind
from windlass.serve.live_config import LiveConfig, StartConfig
from windlass.serve.loop import Build
from windlass.serve.prefill_listener import PrefillListener

# Every client would read all root certificates, which takes longer than most requests of a test.
for _client in ("httpx", "httpx2"):
    if (_default := sys.modules.get(f"{_client}._transports.default")) is not None:
        _default.create_ssl_context = cache(_default.create_ssl_context)

QUICK_RESTARTS = RestartPolicy(first_pause_s=0.05)


@dataclass
class Server:
    """A running server as a test sees it."""

    url: str
    http: httpx.Client
    client: EngineClient
    stop: Callable[[], int]

    @property
    def openai(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def chat(self, **body: object) -> httpx.Response:
        request = {"messages": [{"role": "user", "content": "Hi"}], **body}
        return self.http.post("/v1/chat/completions", json=request)

    def complete(self, **body: object) -> httpx.Response:
        return self.http.post("/v1/completions", json={"prompt": "Hi", **body})

    def metric(self, name: str, headers: dict[str, str] | None = None, **labels: str) -> float:
        """The sum of a metric's samples that have these labels."""
        total = 0.0
        for line in self.http.get("/metrics", headers=headers).text.splitlines():
            head, _, value = line.rpartition(" ")
            matches = all(f'{key}="{text}"' in head for key, text in labels.items())
            if head.partition("{")[0] == f"windlass:{name}" and matches:
                total += float(value)
        return total


def wait_until(condition: Callable[[], bool], timeout_s: float = 280.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "timeout: the condition is still false"
        time.sleep(0.02)


@contextmanager
def running(
    build: Build | None = None,
    card: ModelCard = CARD,
    restarts: RestartPolicy = QUICK_RESTARTS,
    verify: bool = True,
    send_buffer: int | None = None,
    num_replicas: int = 1,
    builds: Sequence[Build] = (),
    split: SplitPolicy | None = None,
    prefill_servers: Sequence[str] = (),
    secret: bytes = b"",
    prefill: PrefillListener | None = None,
    engine: EngineConfig | None = None,
    sources: dict[str, str] | None = None,
    fallbacks: Sequence[FallbackParts] = (),
    **options: object,
) -> Iterator[Server]:
    """Run a server in a thread of this process, with its engines in separate processes.

    `verify` False: the client accepts any certificate. `send_buffer`: size of the kernel's send
    buffer. `engine` and `sources`: see `StartConfig`. `fallbacks`: the steps of --fallback. `builds`: of
    each replica, instead of `build`. `prefill_servers` and `secret`: of --role decode; `prefill`: of --role
    prefill.
    """
    config = ServeConfig(port=0, **options)  # type: ignore[arg-type]
    listener = bind(config)
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    client = EngineClient(
        build or counting(Options()),
        config.hang_timeout,
        restarts,
        num_replicas=len(builds) or num_replicas,
        retry_on_restart=config.retry_on_restart,
        split=split,
        prefill_servers=prefill_servers,
        secret=secret,
    )
    if builds:
        client.build_with(*builds)
    ready: list[str] = []
    result: list[int | BaseException] = []
    holder: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def main() -> int:
        stop = asyncio.Event()
        holder.append((asyncio.get_running_loop(), stop))
        parts = ServerParts(
            client=client,
            open_card=lambda: card,
            config=LiveConfig(config),
            started=StartConfig(engine=engine or EngineConfig(), sources=sources or {}),
            listener=listener,
            on_ready=lambda _report, url: ready.append(url),
            fallbacks=fallbacks,
            prefill=prefill,
        )
        return await serve_until(stop, parts)

    def body() -> None:
        try:
            result.append(run_loop(main()))
        except BaseException as error:
            result.append(error)

    # A server that does not start must not keep pytest from ending.
    thread = threading.Thread(target=body, daemon=True)
    thread.start()

    def stop() -> int:
        if thread.is_alive() and holder:
            loop, event = holder[0]
            loop.call_soon_threadsafe(event.set)
            thread.join(60)
        assert result, "the server did not stop"
        assert isinstance(result[0], int), result
        return result[0]

    try:
        wait_until(lambda: bool(ready or result))
    except BaseException:
        stop()
        raise
    if not ready:
        raise AssertionError("the server did not start") from result[0]  # type: ignore[misc]

    with httpx.Client(base_url=ready[0], timeout=120, verify=verify) as http:
        try:
            yield Server(url=ready[0], http=http, client=client, stop=stop)
        finally:
            stop()
            listener.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server shared by the tests of a module."""
    with running() as server:
        yield server
