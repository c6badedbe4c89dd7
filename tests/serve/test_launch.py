"""The server process: signals, draining, addresses."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests import warm_start
from tests.serve.conftest import wait_until
from tests.serve.fakes import CARD, endless_build
from windlass.config import ServeConfig
from windlass.core.card import ModelCard
from windlass.errors import CheckpointError, ConfigError
from windlass.serve.client import EngineClient
from windlass.serve.launch import ExitDeadline, OpenCard, ServerParts, serve_until
from windlass.serve.listener import bind, url_of
from windlass.serve.live_config import LiveConfig

ROOT = Path(__file__).parents[2]

PROGRAM = """
import asyncio
import sys
from tests.serve.fakes import CARD, counting
from windlass.config import ServeConfig
from windlass.serve.client import EngineClient
from windlass.serve.launch import serve

def block():
    print("blocked", flush=True)
    while True:
        pass

def ready(report, url):
    print(url, client.replicas[0].pid, flush=True)
    if "block" in sys.argv:
        asyncio.get_running_loop().call_later(0.1, block)

if __name__ == "__main__":
    config = ServeConfig(port=0, shutdown_timeout=float(sys.argv[1]))
    client = EngineClient(counting())
    sys.exit(serve(client, lambda: CARD, config, ready))
"""


class Process:
    """A server process, its address, and its engine's process id."""

    def __init__(self, program: Path, *arguments: str) -> None:
        self._process = warm_start.start(
            [sys.executable, str(program), *arguments],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert self._process.stdout is not None
        self.url, pid = self._process.stdout.readline().split()
        self.engine_pid = int(pid)

    def read_line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self) -> int:
        return self._process.wait(60)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


@contextmanager
def process(tmp_path: Path, shutdown_timeout: float, *arguments: str) -> Iterator[Process]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    server = Process(program, str(shutdown_timeout), *arguments)
    try:
        yield server
    finally:
        server.kill()


def _status(url: str, path: str) -> int:
    try:
        return httpx.get(url + path).status_code
    except httpx.TransportError:
        return 0


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _start_slow(url: str, **body: object) -> Future[str]:
    """Start a request that gets at most 100 tokens per second; waits until it is running."""
    pool = ThreadPoolExecutor(1)
    request = {"prompt": "SLOW", **body}
    response = pool.submit(
        lambda: httpx.post(url + "/v1/completions", json=request, timeout=20).text
    )
    pool.shutdown(wait=False)
    wait_until(lambda: httpx.get(url + "/load").json()["num_requests_running"] == 1)
    return response


def test_sigterm_lets_running_requests_finish(tmp_path: Path) -> None:
    with process(tmp_path, 20) as server:
        response = _start_slow(server.url, max_tokens=120, stream=True)
        server.signal(signal.SIGTERM)
        wait_until(lambda: _status(server.url, "/health/ready") == 503)
        refused = httpx.post(server.url + "/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert refused.json()["error"]["code"] == "shutting_down"
        text = response.result(20)
        assert text.endswith("data: [DONE]\n\n")
        assert text.count('"text"') == 120
        assert server.wait() == 0
        assert not _is_alive(server.engine_pid)


def test_unfinished_requests_get_an_error(tmp_path: Path) -> None:
    with process(tmp_path, 0.3) as server:
        response = _start_slow(server.url, max_tokens=2000, stream=True)
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        text = response.result(20)
        assert '"error"' in text
        assert "shut down" in text


def test_a_second_signal_exits_at_once(tmp_path: Path) -> None:
    with process(tmp_path, 60) as server:
        response = _start_slow(server.url, max_tokens=2000)
        server.signal(signal.SIGINT)
        wait_until(lambda: _status(server.url, "/health/ready") == 503)
        server.signal(signal.SIGINT)
        assert server.wait() == 1
        with pytest.raises(httpx.TransportError):
            response.result(20)
        wait_until(lambda: not _is_alive(server.engine_pid))


def test_a_second_signal_ends_a_server_whose_event_loop_is_blocked(tmp_path: Path) -> None:
    with process(tmp_path, 60, "block") as server:
        assert server.read_line() == "blocked"
        server.signal(signal.SIGTERM)
        time.sleep(0.3)
        server.signal(signal.SIGTERM)
        assert server.wait() == 1
        wait_until(lambda: not _is_alive(server.engine_pid))


def test_the_exit_is_forced_after_the_deadline() -> None:
    ended = threading.Event()
    deadline = ExitDeadline(lambda: 0.05, ended.set)
    assert not ended.wait(0.3)  # no signal has arrived
    deadline.on_signal()
    assert ended.wait(20)


def test_a_second_signal_does_not_wait_for_the_deadline() -> None:
    ended = threading.Event()
    deadline = ExitDeadline(lambda: 3600.0, ended.set)
    deadline.on_signal()
    assert not ended.wait(0.3)
    deadline.on_signal()
    assert ended.wait(20)


def test_sigterm_ends_a_server_whose_engine_is_stopped(tmp_path: Path) -> None:
    with process(tmp_path, 0.2) as server:
        response = _start_slow(server.url, max_tokens=2000)
        os.kill(server.engine_pid, signal.SIGSTOP)
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        assert "shut down" in response.result(20)
        assert not _is_alive(server.engine_pid)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel must end a stopped process")
def test_a_stopped_engine_ends_with_a_server_that_was_killed(tmp_path: Path) -> None:
    with process(tmp_path, 60) as server:
        os.kill(server.engine_pid, signal.SIGSTOP)
        server.signal(signal.SIGKILL)
        server.wait()
        wait_until(lambda: not _is_alive(server.engine_pid))


def test_the_engine_ends_with_a_server_that_was_killed(tmp_path: Path) -> None:
    with process(tmp_path, 60) as server:
        server.signal(signal.SIGKILL)
        server.wait()
        wait_until(lambda: not _is_alive(server.engine_pid))


def _parts(
    client: EngineClient, open_card: OpenCard, config: ServeConfig, listener: socket.socket
) -> ServerParts:
    return ServerParts(
        client=client,
        open_card=open_card,
        config=LiveConfig(config),
        listener=listener,
        on_ready=lambda _report, _url: None,
    )


def test_stop_during_loading_exits_at_once() -> None:
    config = ServeConfig(port=0)

    async def main() -> int:
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(0.3, stop.set)
        with bind(config) as listener:
            client = EngineClient(endless_build)
            return await serve_until(stop, _parts(client, lambda: CARD, config, listener))

    assert asyncio.run(main()) == 0


@pytest.mark.parametrize("option", ["ssl_certfile", "data_dir"])
def test_a_bad_option_of_the_server_leaves_no_process(tmp_path: Path, option: str) -> None:
    (tmp_path / "file").write_text("no certificate, and no folder")
    options = {option: str(tmp_path / "file"), "ssl_keyfile": str(tmp_path / "file")}
    if option == "data_dir":
        del options["ssl_keyfile"]
    config = ServeConfig(port=0, **options)  # type: ignore[arg-type]

    async def main() -> int:
        with bind(config) as listener:
            parts = _parts(EngineClient(None), lambda: CARD, config, listener)
            return await serve_until(asyncio.Event(), parts)

    before = set(multiprocessing.active_children())
    with pytest.raises(ConfigError):
        asyncio.run(main())
    assert set(multiprocessing.active_children()) <= before


def test_an_error_in_open_card_ends_the_engine_process() -> None:
    config = ServeConfig(port=0)

    def no_card() -> ModelCard:
        raise CheckpointError("no tokenizer")

    async def main() -> int:
        client = EngineClient(None)
        with bind(config) as listener:
            parts = _parts(client, no_card, config, listener)
            return await serve_until(asyncio.Event(), parts)

    with pytest.raises(CheckpointError, match="no tokenizer"):
        asyncio.run(main())
    assert multiprocessing.active_children() == []


def test_the_server_needs_no_torch() -> None:
    code = "import sys, windlass.serve.server; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_a_port_in_use_is_a_config_error() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port}.*in use.*--port"):
            bind(ServeConfig(port=port))


def test_a_stale_unix_socket_is_replaced(tmp_path: Path) -> None:
    config = ServeConfig(uds=str(tmp_path / "s"))
    with bind(config):
        pass
    with bind(config) as again:
        assert url_of(config, again) == f"unix:{tmp_path}/s"
        again.listen()
        with pytest.raises(ConfigError, match="in use"):
            bind(config)
