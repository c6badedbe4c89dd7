"""Clients that send too much, too slowly, or never read: each is cut, the others are served."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.conftest import Server, running, wait_until
from tests.serve.fakes import Options, counting
from tests.serve.raw import HANG_GUARD_S, RawClient, error_of, get, post, status_of
from windlass.errors import ConfigError

ROOT = Path(__file__).parents[2]
TEXT = "/v1/completions"
MIB = 2**20


def num_cut(server: Server, reason: str) -> float:
    return server.metric("http_connections_cut_total", reason=reason)


def is_idle(server: Server) -> bool:
    stats = server.client.replicas[0].stats
    return server.client.num_in_flight == stats.num_running == stats.num_waiting == 0


# ---- sizes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /" + b"a" * 8190 + b" HTTP/1.1\r\n\r\n", 404),
        (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET /" + b"a" * MIB, 414),
        (b"GET /version HTTP/1.1\r\nX: " + b"a" * 32_000 + b"\r\n\r\n", 200),
        (b"GET /version HTTP/1.1\r\nX: " + b"a" * 33_000 + b"\r\n\r\n", 431),
        (b"GET /version HTTP/1.1\r\nX: " + b"a" * MIB, 431),
        (b"GET /version HTTP/1.1\r\n" + b"a" * MIB, 431),
        (b"GET /version HTTP/1.1\r\n" + b"X: 1\r\n" * 100 + b"\r\n", 200),
        (b"GET /version HTTP/1.1\r\n" + b"X: 1\r\n" * 101 + b"\r\n", 431),
        (b"\r\n" * 300_000, 431),
        (b"NOT HTTP\r\n\r\n", 400),
    ],
)
def test_url_and_headers_have_limits(server: Server, head: bytes, status: int) -> None:
    with RawClient(server.url) as client:
        client.send(head)
        response = client.read_until(b"}")
        assert status_of(response) == status
        if status not in (200, 404):
            response += client.read_all()
            assert b"connection: close" in response
            assert error_of(response)["type"] == "invalid_request_error"
    assert server.http.get("/version").status_code == 200


@pytest.mark.parametrize(
    "start",
    [
        b"GET /",
        b"GET / HTTP/1.1\r\nX: ",
        b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5;",
        b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: ",
    ],
)
def test_an_endless_line_is_cut_while_it_arrives(server: Server, start: bytes) -> None:
    with RawClient(server.url) as client:
        client.send(start)
        assert client.flood(b"a" * 65536, 256 * MIB) < 64 * MIB


def test_small_headers_without_end_are_cut(server: Server) -> None:
    with RawClient(server.url) as client:
        client.send(b"GET / HTTP/1.1\r\n")
        assert client.flood(b"X: 1\r\n" * 10_000, 256 * MIB) < 64 * MIB


CHUNKED = b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("rest", "status"),
    [
        (b"1;ext=" + b"a" * 200_000 + b"\r\nx\r\n0\r\n\r\n", 400),
        (b"1;a\r\nx\r\n" * 100_000, 400),  # a body of single bytes
        (b"0\r\n" + b"X: 1\r\n" * 200 + b"\r\n", 431),
        (b"0\r\nX: " + b"a" * 200_000 + b"\r\n\r\n", 400),
    ],
)
def test_framing_of_chunks_has_limits(server: Server, rest: bytes, status: int) -> None:
    with RawClient(server.url) as client:
        client.send(CHUNKED + rest)
        response = client.read_all()
        assert status_of(response) == status
        assert error_of(response)["type"] == "invalid_request_error"


def test_chunks_with_extensions_and_trailers_are_read(server: Server) -> None:
    body = b'{"prompt": "Hi", "max_tokens": 1}'
    with RawClient(server.url) as client:
        client.send(CHUNKED + b"%x;a=b\r\n%s\r\n0\r\nX-Sum: 1\r\n\r\n" % (len(body), body))
        assert status_of(client.read_until(b"}]")) == 200
        client.send(get("/version"))
        assert status_of(client.read_until(b"}")) == 200


def test_a_refused_body_is_not_read_forever() -> None:
    with running(api_key=("one",)) as server, RawClient(server.url) as client:
        client.send(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 9999999999\r\n\r\n")
        assert status_of(client.read_until(b"}")) == 401
        assert client.flood(b"a" * 65536, 4096 * MIB) < 2048 * MIB
        wait_until(lambda: num_cut_with_key(server, "unread_body") == 1)


def num_cut_with_key(server: Server, reason: str) -> float:
    server.http.headers["Authorization"] = "Bearer one"
    return num_cut(server, reason)


def test_bodies_share_a_budget() -> None:
    limits = {"max_body_bytes": MIB, "max_buffered_body_bytes": MIB}
    with running(**limits) as server, RawClient(server.url) as big, RawClient(server.url) as second:
        head = b"POST /v1/completions HTTP/1.1\r\nContent-Length: 900000\r\n\r\n"
        big.send(head + b"a" * 800_000)
        wait_until(lambda: server.metric("requests_in_flight") == 1)
        wait_until(lambda: server.metric("http_buffered_body_bytes") == 800_000)
        second.send(head + b"a" * 800_000)
        response = second.read_all()
        assert status_of(response) == 503
        assert b"retry-after: " in response.lower()
        big.close()
        wait_until(lambda: server.metric("http_buffered_body_bytes") == 0)
        assert server.complete(prompt="a" * 900, max_tokens=1).status_code == 200
        assert num_cut(server, "body_memory") == 1


def test_http_workers_share_the_budget_of_bodies() -> None:
    limits = {"max_body_bytes": MIB, "max_buffered_body_bytes": 4 * MIB}
    head = b"POST /v1/completions HTTP/1.1\r\nContent-Length: 900000\r\n\r\n"
    with running(http_workers=2, **limits) as server, ExitStack() as stack:
        clients = [stack.enter_context(RawClient(server.url)) for _ in range(6)]
        for client in clients[:4]:  # two for each worker, which has no room for a third
            client.send(head + b"a" * 800_000)
        wait_until(lambda: server.metric("http_buffered_body_bytes") == 3_200_000)
        for client in clients[4:]:
            client.send(head + b"a" * 800_000)
        wait_until(lambda: num_cut(server, "body_memory") == 2)


def test_pipelined_requests_have_a_limit(server: Server) -> None:
    with RawClient(server.url) as client:
        slow = {"prompt": "SLOW", "max_tokens": 500, "stream": True}
        client.send(post(TEXT, slow) + get("/version") * 1000)
        client.read_all()
    wait_until(lambda: is_idle(server))
    with RawClient(server.url) as client:
        client.send(get("/version") * 3)
        got = b""
        while got.count(b'"version"') < 3:
            got += client.read_some()


# ---- slow clients ----------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[1, 2], ids=["one-process", "two-workers"])
def impatient(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server with short timeouts."""
    limits = {"header_timeout": 0.3, "body_timeout": 0.3, "keep_alive_timeout": 0.5}
    with running(**limits, write_timeout=0.3, http_workers=request.param) as server:
        server.http.headers["Connection"] = "close"  # the test's own client would time out too
        yield server


def test_incomplete_headers_get_408(impatient: Server) -> None:
    before = num_cut(impatient, "header_timeout")
    with RawClient(impatient.url) as client:
        client.send(b"GET /version HTTP/1.1\r\nX-One: ")
        response = client.read_all()
        assert status_of(response) == 408
        assert error_of(response)["code"] == "request_timeout"
    wait_until(lambda: num_cut(impatient, "header_timeout") == before + 1)


def test_slow_headers_get_408(impatient: Server) -> None:
    with RawClient(impatient.url) as client:
        client.send(b"GET /version HTTP/1.1\r\nX: ")
        for _ in range(int(HANG_GUARD_S / 0.05)):
            if not client.send(b"a"):
                break
            time.sleep(0.05)
        else:
            raise AssertionError("the server waits forever")


def test_a_silent_connection_is_closed(impatient: Server) -> None:
    with RawClient(impatient.url) as client:
        assert client.read_all() == b""


@pytest.mark.parametrize("noise", [b"", b"\r\n", b"GET /vers"])
def test_an_idle_connection_is_closed(impatient: Server, noise: bytes) -> None:
    """Line ends or a partial request after a response must not keep the connection open."""
    with RawClient(impatient.url) as client:
        client.send(get("/version") + noise)
        assert b"200 OK" in client.read_all()


def test_an_incomplete_body_gets_408(impatient: Server) -> None:
    before = num_cut(impatient, "body_timeout")
    with RawClient(impatient.url) as client:
        client.send(post(TEXT, {"prompt": "Hi"})[:-1])
        response = client.read_all()
        assert status_of(response) == 408
        assert "--body-timeout" in error_of(response)["message"]
    wait_until(lambda: num_cut(impatient, "body_timeout") == before + 1)
    wait_until(lambda: impatient.metric("requests_in_flight") == 0)


def test_slow_responses_are_not_cut(impatient: Server) -> None:
    """Timeouts apply to clients: 100 steps of 10 ms take longer than all of them."""
    got = impatient.complete(prompt="SLOW", max_tokens=100)
    assert got.json()["usage"]["completion_tokens"] == 100
    text = impatient.complete(prompt="SLOW", max_tokens=100, stream=True).text
    assert text.endswith("data: [DONE]\n\n")


# ---- clients that do not read ----------------------------------------------------------------

FLOOD = {"prompt": "x", "max_tokens": 4000, "n": 4, "stream": True}


@contextmanager
def long_responses(**options: object) -> Iterator[Server]:
    """A server whose responses exceed the kernel's buffers."""
    build = counting(Options(max_model_len=8192, step_s=0.001))
    with running(build, send_buffer=4096, **options) as server:
        yield server


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"write_timeout": 0.3, "max_stream_buffer_bytes": 1 << 30}, "write_timeout"),
        ({"write_timeout": 3600.0, "max_stream_buffer_bytes": 65536}, "stream_buffer"),
        ({"max_stream_buffer_bytes": 65536, "http_workers": 2}, "stream_buffer"),
    ],
)
def test_an_unread_stream_is_cut(options: dict[str, Any], reason: str) -> None:
    with long_responses(**options) as server, RawClient(server.url, receive_buffer=4096) as client:
        client.send(post(TEXT, FLOOD))
        client.read_until(b"data: ")
        wait_until(lambda: num_cut(server, reason) == 1)
        wait_until(lambda: is_idle(server))
        assert server.metric("request_outcomes_total", outcome="aborted") == 1


def test_an_unread_response_is_cut() -> None:
    """The response is complete and waits in the connection's buffer."""
    body = {**FLOOD, "max_tokens": 1000, "stream": False, "logprobs": 5}
    with (
        long_responses(write_timeout=0.3, keep_alive_timeout=0.3) as server,
        RawClient(server.url, receive_buffer=4096) as client,
    ):
        client.send(post(TEXT, body))
        client.read_some()
        wait_until(lambda: num_cut(server, "write_timeout") == 1)
        wait_until(lambda: server.metric("http_connections") == 1)


def test_a_disconnect_is_noticed_behind_a_pipelined_request(server: Server) -> None:
    with RawClient(server.url) as client:
        slow = {"prompt": "SLOW", "max_tokens": 2000, "stream": True}
        client.send(post(TEXT, slow))
        client.read_until(b"data: ")
        client.send(get("/version"))
        client.read_until(b"data: ")
    wait_until(lambda: is_idle(server))


# ---- number of connections -------------------------------------------------------------------


def test_connections_above_the_limit_get_503() -> None:
    slow = {"prompt": "SLOW", "max_tokens": 2000, "stream": True}
    with running(max_connections=4) as server, ExitStack() as stack:
        busy = [stack.enter_context(RawClient(server.url)) for _ in range(4)]
        for client in busy:
            client.send(post(TEXT, slow))
            client.read_until(b"data: ")
        with RawClient(server.url) as one_more:
            response = one_more.read_all()
            assert status_of(response) == 503
            assert b"retry-after: " in response.lower()
            assert "--max-connections" in error_of(response)["message"]
        # A client that has already sent its request can read the response too.
        assert httpx.get(server.url + "/version").status_code == 503
        busy[0].close()
        wait_until(lambda: httpx.get(server.url + "/version").status_code == 200)
        for client in busy:
            client.close()
        wait_until(lambda: is_idle(server))
        assert num_cut(server, "too_many") >= 2


def test_connections_without_a_request_are_evicted() -> None:
    """Half-open and idle connections cannot lock out other clients."""
    with running(max_connections=4) as server, ExitStack() as stack:
        incomplete = (b"GET /version HT", b"", get("/version"), post(TEXT, {"prompt": "a"})[:-1])
        for number in range(16):
            half_open = stack.enter_context(RawClient(server.url))
            half_open.send(incomplete[number % 4])
        wait_until(lambda: httpx.get(server.url + "/version").status_code == 200)
        assert num_cut(server, "evicted") >= 1


def test_incomplete_bodies_lock_no_client_out() -> None:
    with running(max_connections=4) as server, ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(RawClient(server.url)).send(post(TEXT, {"prompt": "a"})[:-1])
        wait_until(lambda: httpx.get(server.url + "/version").status_code == 200)
        assert num_cut(server, "evicted") >= 1
        assert num_cut(server, "body_timeout") == 0


def test_a_limit_above_the_descriptors_is_refused() -> None:
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with (
        pytest.raises(AssertionError) as failed,
        running(max_connections=soft),
    ):
        pass
    cause = failed.value.__cause__
    assert isinstance(cause, ConfigError)
    assert "ulimit -n" in str(cause)


PROGRAM = """
import resource, sys
from tests.serve.fakes import CARD, counting
from windlass.config import ServeConfig
from windlass.serve.client import EngineClient
from windlass.serve.health import RestartPolicy
from windlass.serve.launch import serve

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, 256))
    client = EngineClient(counting(), restarts=RestartPolicy(first_pause_s=0.05))

    def on_ready(report, url):
        (line,) = [choice for choice in report.choices if choice.what == "connections"]
        print(url, client.replicas[0].pid, line.value, line.reason, flush=True)

    sys.exit(serve(client, lambda: CARD, ServeConfig(port=0), on_ready))
"""


def test_half_open_connections_leave_descriptors_for_a_restart(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with (
        subprocess.Popen(
            [sys.executable, str(program)], stdout=subprocess.PIPE, text=True, env=environment
        ) as process,
        ExitStack() as stack,
    ):
        stack.callback(process.kill)
        assert process.stdout is not None
        url, pid, cap, reason = process.stdout.readline().split(maxsplit=3)
        assert 100 < int(cap) < 256  # the soft limit of 128 was raised
        assert "256 descriptors" in reason
        for _ in range(300):
            half_open = stack.enter_context(RawClient(url))
            half_open.send(b"GET /version HTTP/1.1\r\n")
        os.kill(int(pid), signal.SIGKILL)
        wait_until(lambda: completes(url))


def completes(url: str, verify: bool = True) -> bool:
    """Whether a new connection gets a completion."""
    try:
        got = httpx.post(url + TEXT, json={"prompt": "Hi", "max_tokens": 1}, verify=verify)
    except httpx.TransportError:
        return False
    return got.status_code == 200


# ---- TLS -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")
    key, cert = str(folder / "key.pem"), str(folder / "cert.pem")
    command = f"openssl req -x509 -newkey rsa:2048 -nodes -keyout {key} -out {cert} -days 2"
    subprocess.run([*command.split(), "-subj", "/CN=localhost"], check=True, capture_output=True)
    return {"ssl_keyfile": key, "ssl_certfile": cert}


def trusting() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def test_tls_has_the_same_limits(certificate: dict[str, str]) -> None:
    with running(**certificate, verify=False) as server:
        assert server.complete(max_tokens=2).json()["choices"][0]["text"] == "de"
        with RawClient(server.url, tls=trusting()) as client:
            client.send(b"GET /" + b"a" * 9000)
            assert status_of(client.read_all()) == 414


def test_incomplete_handshakes_are_cut(certificate: dict[str, str]) -> None:
    with running(**certificate, verify=False, max_connections=4) as server, ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(RawClient(server.url))
        wait_until(lambda: completes(server.url, verify=False))
    with (
        running(**certificate, verify=False, header_timeout=0.3) as server,
        RawClient(server.url) as silent,
    ):
        assert silent.read_all() == b""


def test_a_broken_certificate_is_a_config_error(tmp_path: Path) -> None:
    broken = tmp_path / "cert.pem"
    broken.write_text("no certificate")
    with (
        pytest.raises(AssertionError) as failed,
        running(ssl_certfile=str(broken), ssl_keyfile=str(broken)),
    ):
        pass
    assert isinstance(failed.value.__cause__, ConfigError)
    assert "--ssl-certfile" in str(failed.value.__cause__)


def test_a_reset_connection_leaves_no_state(server: Server) -> None:
    for _ in range(20):
        with RawClient(server.url) as client:
            client._socket.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0"
            )  # RST instead of FIN
            client.send(b"GET /version HTTP/1.1\r\n")
    wait_until(lambda: server.metric("http_connections") == 1)
