"""Settings change while the server runs: each has its effect, at once, whole, and with a record."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from tests.serve.conftest import Server, running, wait_until
from tests.serve.fakes import Options, counting
from tests.serve.raw import RawClient, get, post, status_of
from tests.serve.tiny_model import serving, write_tiny_model
from windlass.cli.main import app
from windlass.config import flag
from windlass.core.types import SloStats
from windlass.serve.config_admin import LIVE

ROOT = Path(__file__).parents[2]
ADMIN = "admin-key"
KEY = {"Authorization": f"Bearer {ADMIN}"}
TEXT = "/v1/completions"
FLOOD = {"prompt": "x", "max_tokens": 4000, "n": 4, "stream": True}
ORIGIN = "https://page.example"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("config") / "data"


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    build = counting(Options(max_model_len=8192, step_s=0.001))
    sources = {"data_dir": "flag", "max_logprobs": "file"}
    with running(
        build,
        send_buffer=4096,
        data_dir=str(folder),
        admin_key=(ADMIN,),
        max_logprobs=10,
        record_traffic=str(folder.parent / "traffic"),
        record_share=1e-12,
        sources=sources,
    ) as server:
        server.http.headers["Connection"] = "close"  # its own connections would hit the limits
        yield server


@pytest.fixture(scope="module")
def speculating(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of a real tiny model with n-gram speculation."""
    model = write_tiny_model(tmp_path_factory.mktemp("model"))
    with serving(model, serve={"admin_key": (ADMIN,)}, spec="ngram", spec_tokens=4) as server:
        yield server


def patch(server: Server, given: object, **headers: str) -> httpx.Response:
    return server.http.patch("/admin/config", json=given, headers={**KEY, **headers})


def config(server: Server) -> dict[str, Any]:
    got = server.http.get("/admin/config", headers=KEY)
    assert got.status_code == 200
    found: dict[str, Any] = got.json()
    return found


@contextmanager
def changed(server: Server, **settings: Any) -> Iterator[None]:
    """Change settings, and change them back at the end."""
    before = {name: config(server)["settings"][name]["value"] for name in settings}
    done = patch(server, settings)
    assert done.status_code == 200, done.text
    assert patch(server, {}).json()["changes"] == {}
    try:
        yield
    finally:
        assert patch(server, before).status_code == 200


@contextmanager
def streaming(server: Server, **body: Any) -> Iterator[Iterator[str]]:
    """A stream that has begun."""
    request = {"prompt": "SLOW", "max_tokens": 2000, "stream": True, "ignore_eos": True, **body}
    with server.http.stream("POST", TEXT, json=request) as response:
        lines = (line for line in response.iter_lines() if line)
        next(lines)
        yield lines


# ---- the effect of each setting ----------------------------------------------------------------


def _max_num_queued_reqs(server: Server) -> None:
    with changed(server, max_num_queued_reqs=1):
        refused = server.complete(n=100)
    assert refused.status_code == 400
    assert "queues 1." in refused.json()["error"]["message"]
    assert server.complete(n=100, max_tokens=1).status_code == 200


def _max_num_queued_tokens(server: Server) -> None:
    with streaming(server, n=70), changed(server, max_num_queued_tokens=1):
        refused = server.complete(max_tokens=1)
    assert refused.status_code == 429
    assert "1 prompt tokens" in refused.json()["error"]["message"]


def _max_body_bytes(server: Server) -> None:
    with changed(server, max_body_bytes=100):
        assert server.complete(prompt="a" * 100).status_code == 413
    assert server.complete(prompt="a" * 100, max_tokens=1).status_code == 200


def _max_buffered_body_bytes(server: Server) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900\r\n\r\n"
    with (
        changed(server, max_body_bytes=1000, max_buffered_body_bytes=1000),
        RawClient(server.url) as first,
        RawClient(server.url) as second,
    ):
        first.send(head + b"a" * 800)
        wait_until(lambda: server.metric("http_buffered_body_bytes") == 800)
        second.send(head + b"a" * 800)
        assert status_of(second.read_all()) == 503


def _status(server: Server, raw: bytes) -> int:
    with RawClient(server.url) as client:
        client.send(raw)
        return status_of(client.read_all())


def _max_url_bytes(server: Server) -> None:
    with changed(server, max_url_bytes=100):
        assert _status(server, get("/version?" + "a" * 200)) == 414


def _max_header_bytes(server: Server) -> None:
    with changed(server, max_header_bytes=1000):
        assert _status(server, get("/version", "X: " + "a" * 2000)) == 431


def _max_header_fields(server: Server) -> None:
    with changed(server, max_header_fields=10):
        assert _status(server, get("/version", *["X: 1"] * 20)) == 431


def _unread(server: Server, reason: str) -> None:
    """A client that does not read its stream is cut for this reason."""
    before = server.metric("http_connections_cut_total", reason=reason)
    with RawClient(server.url, receive_buffer=4096) as client:
        client.send(post(TEXT, FLOOD))
        client.read_until(b"data: ")
        wait_until(lambda: server.metric("http_connections_cut_total", reason=reason) == before + 1)
    wait_until(lambda: server.client.num_in_flight == 0)


def _max_stream_buffer_bytes(server: Server) -> None:
    with changed(server, max_stream_buffer_bytes=65536):
        _unread(server, "stream_buffer")


def _write_timeout(server: Server) -> None:
    with changed(server, write_timeout=0.2, max_stream_buffer_bytes=2**30):
        _unread(server, "write_timeout")


def _header_timeout(server: Server) -> None:
    with changed(server, header_timeout=0.1):
        assert _status(server, b"GET /version HTTP/1.1\r\nX-One: ") == 408


def _body_timeout(server: Server) -> None:
    with changed(server, body_timeout=0.1):
        assert _status(server, post(TEXT, {"prompt": "Hi"})[:-1]) == 408


def _min_transfer_rate(server: Server) -> None:
    """A body of 2 MB in pieces is too slow for a rate that it cannot reach."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2000000\r\n\r\n"
    with (
        changed(server, body_timeout=0.1, min_transfer_rate=10**8),
        RawClient(server.url) as client,
    ):
        client.send(head + b"a" * 1_000_000)
        assert status_of(client.read_all()) == 408
        assert server.metric("http_connections_cut_total", reason="body_timeout") > 0


def _keep_alive_timeout(server: Server) -> None:
    with changed(server, keep_alive_timeout=0.1), RawClient(server.url) as client:
        client.send(get("/version"))
        assert b"200 OK" in client.read_all()  # ends when the server closes the connection


def _max_logprobs(server: Server) -> None:
    with changed(server, max_logprobs=2):
        assert server.complete(logprobs=5, max_tokens=1).status_code == 400
    assert server.complete(logprobs=5, max_tokens=1).status_code == 200


def _num_chunks(server: Server) -> int:
    return server.complete(max_tokens=12, stream=True).text.count('"text"')


def _stream_interval(server: Server) -> None:
    before = _num_chunks(server)
    with changed(server, stream_interval=6):
        assert _num_chunks(server) < before


def _unknown_fields(server: Server) -> None:
    with changed(server, unknown_fields="error"):
        assert server.complete(no_such_field=1).status_code == 400
    assert server.complete(no_such_field=1, max_tokens=1).status_code == 200


@contextmanager
def _logged(text: str, name: str = "windlass.serve") -> Iterator[Callable[[], bool]]:
    """Whether a line with `text` was logged meanwhile, by the server in this process."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(name)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lambda: any(text in line for line in lines)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _log_stats_interval(server: Server) -> None:
    with (
        streaming(server),
        _logged("tok/s, generation") as found,
        changed(server, log_stats_interval=0.05),
    ):
        wait_until(found)


def _enable_log_requests(server: Server) -> None:
    with _logged(f"{TEXT}: 200 success", "windlass.request") as found:
        server.complete(max_tokens=1)
        assert not found()
        with changed(server, enable_log_requests=True):
            server.complete(max_tokens=1)
        assert found()


def _enable_request_id_headers(server: Server) -> None:
    with changed(server, enable_request_id_headers=True):
        assert "X-Request-Id" in server.complete(max_tokens=1).headers
    assert "X-Request-Id" not in server.complete(max_tokens=1).headers


def _enable_force_include_usage(server: Server) -> None:
    with changed(server, enable_force_include_usage=True):
        assert "completion_tokens" in server.complete(max_tokens=1, stream=True).text
    assert "completion_tokens" not in server.complete(max_tokens=1, stream=True).text


def _price_per_hour(server: Server) -> None:
    def cost() -> dict[str, Any]:
        found: dict[str, Any] = server.http.get("/cost", headers=KEY).json()
        return found

    assert "no price" in cost()["error"]["message"]
    with changed(server, price_per_hour=3600.0):
        first = server.complete(max_tokens=50, include_cost=True).json()["usage"]["cost"]
        assert first > 0
        with changed(server, price_per_hour=3.6e9):
            dearer = server.complete(max_tokens=50, include_cost=True).json()["usage"]["cost"]
            assert dearer > 1000 * first
            assert server.metric("cost_usd_per_hour") == 3.6e9
        assert cost()["price_per_hour"] == 3600.0
    assert "no price" in cost()["error"]["message"]


def _upload(server: Server) -> int:
    files = {"file": ("in.jsonl", b"{}\n" * 1000), "purpose": (None, "batch")}
    return server.http.post("/v1/files", files=files).status_code


def _max_file_bytes(server: Server) -> None:
    with changed(server, max_file_bytes=1000):
        assert _upload(server) == 413
    assert _upload(server) == 200


def _max_data_bytes(server: Server) -> None:
    with changed(server, max_data_bytes=1):
        assert _upload(server) == 507
    assert _upload(server) == 200


def _allowed_origins(server: Server) -> None:
    headers = {"Origin": ORIGIN}
    assert server.http.get("/version", headers=headers).status_code == 403
    with changed(server, allowed_origins=[ORIGIN]):
        allowed = server.http.get("/version", headers=headers)
        assert allowed.headers["access-control-allow-origin"] == ORIGIN
    assert server.http.get("/version", headers=headers).status_code == 403


def _queue(server: Server) -> tuple[int, int]:
    """Running and queued requests of the first engine."""
    stats = server.client.replicas[0].stats
    return stats.num_running, stats.num_waiting


def _max_num_seqs(server: Server) -> None:
    with changed(server, max_num_seqs=1), streaming(server, n=3):
        wait_until(lambda: _queue(server) == (1, 2))
        assert server.client.max_num_seqs == 1
        assert patch(server, {"max_num_seqs": None}).status_code == 200
        wait_until(lambda: _queue(server) == (3, 0))
        assert patch(server, {"max_num_seqs": 1}).status_code == 200
        assert _queue(server) == (3, 0)  # requests that run go on


def _num_steps(server: Server, prompt: str) -> int:
    """The steps that a request takes alone."""
    wait_until(lambda: _queue(server) == (0, 0))
    before = server.client.replicas[0].stats.num_steps
    server.complete(prompt=prompt, max_tokens=1)
    wait_until(lambda: server.client.replicas[0].stats.num_steps > before)
    wait_until(lambda: _queue(server) == (0, 0))
    return server.client.replicas[0].stats.num_steps - before


def _max_num_batched_tokens(server: Server) -> None:
    assert _num_steps(server, "a" * 640) < 10
    with changed(server, max_num_batched_tokens=64):
        assert _num_steps(server, "b" * 640) >= 10


def _slo_stats(server: Server) -> SloStats | None:
    """Of the last step, which a request has computed after a change."""
    _num_steps(server, "Hi")
    return server.client.replicas[0].stats.slo


def _slo_tpot_ms(server: Server) -> None:
    """Limits begin low, and rise with what steps show."""
    assert _num_steps(server, "c" * 640) == 1
    with changed(server, slo_tpot_ms=1000.0):
        assert _num_steps(server, "d" * 640) > 1
        assert server.metric("slo_limit", limit="prompt_tokens") > 0
    assert _slo_stats(server) is None
    assert server.metric("slo_limit", limit="prompt_tokens") == 0


def _slo_ttft_ms(server: Server) -> None:
    for target_ms in (5000.0, 7000.0):
        with changed(server, slo_tpot_ms=1000.0, slo_ttft_ms=target_ms):
            stats = _slo_stats(server)
            assert stats is not None
            assert stats.ttft_s == target_ms / 1000


def _slo_admission(server: Server) -> None:
    def has_measured() -> bool:
        stats = server.client.replicas[0].stats
        return stats.slo is not None and stats.slo.prompt_tokens_per_s > 0

    with streaming(server, n=70):
        wait_until(lambda: _queue(server)[1] > 0)
        with changed(server, slo_ttft_ms=0.001, slo_tpot_ms=1000.0):
            wait_until(has_measured)
            with changed(server, slo_admission=True):
                refused = server.complete(max_tokens=1)
    assert refused.status_code == 429
    assert "(--slo-ttft-ms)" in refused.json()["error"]["message"]


def _recorded(server: Server) -> int:
    """The bytes that a request adds to the recorded traffic."""
    path = Path(config(server)["settings"]["record_traffic"]["value"])
    before = path.stat().st_size
    assert server.complete(max_tokens=1).status_code == 200
    return path.stat().st_size - before


def _record_share(server: Server) -> None:
    assert _recorded(server) == 0
    with changed(server, record_share=1.0):
        assert _recorded(server) > 0


def _record_max_bytes(server: Server) -> None:
    with changed(server, record_share=1.0):
        with changed(server, record_max_bytes=1):
            assert _recorded(server) == 0
        assert _recorded(server) > 0


def _allowed_hosts(server: Server) -> None:
    headers = {"Host": "api.example"}
    with changed(server, allowed_hosts=["api.example"]):
        assert server.http.get("/v1/models", headers=headers).status_code == 200
        assert server.http.get("/v1/models").status_code == 200
    assert server.http.get("/v1/models", headers=headers).status_code == 403


def _drafts(server: Server) -> tuple[float, float]:
    """Drafts and draft tokens of a request."""
    names = ("spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total")
    before = [server.metric(name) for name in names]
    server.complete(prompt="ab" * 20, max_tokens=100, ignore_eos=True, temperature=0)
    wait_until(lambda: _queue(server) == (0, 0))
    drafts, tokens = (server.metric(name) - b for name, b in zip(names, before, strict=True))
    return drafts, tokens


def _spec_enabled(server: Server) -> None:
    assert _drafts(server)[0] > 0
    with changed(server, spec_enabled=False):
        assert _drafts(server) == (0, 0)
    assert _drafts(server)[0] > 0


def _spec_tokens(server: Server) -> None:
    with changed(server, spec_tokens=1):
        drafts, tokens = _drafts(server)
        assert tokens == drafts > 0


def _log_level(server: Server) -> None:
    logger, level = logging.getLogger("windlass"), logging.getLogger("windlass").level
    with changed(server, log_level="error"):
        assert not logging.getLogger("windlass.serve").isEnabledFor(logging.WARNING)
    logger.setLevel(level)
    del os.environ["WINDLASS_LOG_LEVEL"]


def _hang_timeout(server: Server) -> None:
    """A step that would hang for an hour ends the engine at once."""
    del server
    with running(counting(Options()), admin_key=(ADMIN,), hang_timeout=3600.0) as other:
        assert patch(other, {"hang_timeout": 0.5}).status_code == 200
        assert other.complete(prompt="HANG").status_code == 503


def _retry_on_restart(server: Server) -> None:
    """Requests survive a kill -9 of the engine, and the new engine has the live settings."""
    del server
    with running(counting(Options()), admin_key=(ADMIN,)) as other, ThreadPoolExecutor(1) as pool:
        assert patch(other, {"retry_on_restart": True, "max_num_seqs": 1}).status_code == 200
        answer = pool.submit(other.complete, prompt="SLOW", max_tokens=20)
        wait_until(lambda: _queue(other) == (1, 0))
        _kill_engine(other)
        assert answer.result().status_code == 200
        with streaming(other, n=3):
            wait_until(lambda: _queue(other) == (1, 2))


def _kill_engine(server: Server, replica: int = 0) -> None:
    pid = server.client.replicas[replica].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: server.client.replicas[replica].pid not in (None, pid))


def _shutdown_timeout(server: Server) -> None:
    """A server that would wait for an hour ends at once."""
    del server
    build = counting(Options())
    with running(build, admin_key=(ADMIN,), shutdown_timeout=3600.0) as other:
        with streaming(other) as lines:
            assert patch(other, {"shutdown_timeout": 0}).status_code == 200
            stopping = threading.Thread(target=other.stop)
            stopping.start()
            assert "the server shut down" in list(lines)[-1]
        stopping.join()


EFFECTS: dict[str, Callable[[Server], None]] = {
    name.removeprefix("_"): check
    for name, check in list(globals().items())
    if name.removeprefix("_") in LIVE
}


@pytest.mark.parametrize("name", sorted(LIVE))
def test_every_live_setting_has_its_effect_without_a_restart(
    request: pytest.FixtureRequest, name: str
) -> None:
    server = request.getfixturevalue("speculating" if name.startswith("spec_") else "server")
    assert name in EFFECTS, f"{name} is marked live: add a function _{name} that proves its effect"
    pids = [each.pid for each in server.client.replicas]
    EFFECTS[name](server)
    assert [each.pid for each in server.client.replicas] == pids


# ---- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "param", "message"),
    [
        ({"max_num_queued_reqs": 0}, "max_num_queued_reqs", "at least 1, got 0"),
        ({"max_num_queued_reqs": "8"}, "max_num_queued_reqs", "got '8'"),
        ({"max_num_queued_reqs": True}, "max_num_queued_reqs", "got True"),
        ({"max_num_queued_reqs": None}, "max_num_queued_reqs", "got None"),
        ({"unknown_fields": "loud"}, "unknown_fields", "one of error, warn, ignore; got 'loud'"),
        ({"allowed_origins": [1]}, "allowed_origins", "Expected `str`"),
        ({"header_timeout": 0}, "header_timeout", "must be above 0, got 0"),
        ({"max_model_len": 8}, "max_model_len", "start it with --max-model-len"),
        ({"admin_key": ["x"]}, "admin_key", "cannot change while the server runs"),
        ({"max_num_queued_req": 8}, "max_num_queued_req", "Did you mean 'max_num_queued_reqs'?"),
        ({"max_body_bytes": 2**30}, "max_body_bytes", "--max-buffered-body-bytes (268435456)"),
        ({"max-url-bytes": 8, "max_url_bytes": 9}, "max_url_bytes", "given twice"),
        ({"max_num_seqs": 65}, "max_num_seqs", "between 1 and 64"),
        ({"max_num_seqs": 0}, "max_num_seqs", "at least 1, got 0"),
        ({"max_num_batched_tokens": 63}, "max_num_batched_tokens", "below --max-num-seqs (64)"),
        ({"spec_enabled": False}, "spec_enabled", "does nothing without speculation"),
        ({"hang_timeout": 1e300}, "hang_timeout", "must be at most 1e+07, got 1e+300"),
        ({"hang_timeout": 1e-320}, "hang_timeout", "must be 0 (never) or at least 0.5"),
        ({"max_url_bytes": 1}, "max_url_bytes", "must be at least 64, got 1"),
        ({"max_header_bytes": 1}, "max_header_bytes", "must be at least 512, got 1"),
        ({"max_header_fields": 1}, "max_header_fields", "must be at least 10, got 1"),
        ({"allowed_origins": ["shop.example"]}, "allowed_origins", "'shop.example': expected"),
        ({"allowed_origins": ["http://"]}, "allowed_origins", "'http://': expected"),
        ({"allowed_origins": ["http://shop.example/"]}, "allowed_origins", "expected a scheme"),
        ({"allowed_origins": ["http://Shop.example"]}, "allowed_origins", "in lower case"),
        ({"log_stats_interval": 1e-300}, "log_stats_interval", "must be 0 or at least 0.05"),
        ({"slo_admission": True}, "slo_admission", "needs --slo-ttft-ms"),
        ({"slo_ttft_ms": 5}, "slo_ttft_ms", "does nothing without --slo-tpot-ms"),
        ({"slo_tpot_ms": 0}, "slo_tpot_ms", "must be above 0, got 0"),
        ({"slo_tpot_ms": 1e308}, "slo_tpot_ms", "must be at most 1e+10, got 1e+308"),
        ({"allowed_hosts": ["a/b"]}, "allowed_hosts", "--allowed-hosts 'a/b'"),
        ({"record_share": 0}, "record_share", "must be above 0 and at most 1, got 0"),
        ({"record_traffic": "/x"}, "record_traffic", "start it with --record-traffic"),
        ({"version": "1"}, "version", "must be a number"),
        ([], None, "must be a JSON object"),
    ],
)
def test_a_bad_change_names_the_setting_and_changes_nothing(
    server: Server, given: Any, param: str | None, message: str
) -> None:
    before = config(server)
    if isinstance(given, dict) and "stream_interval" not in given:
        given = {"stream_interval": 7, **given}  # a good one beside it is not applied either
    refused = patch(server, given)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == param
    assert message in error["message"]
    assert config(server) == before


def test_only_an_admin_key_reads_and_changes_the_config(server: Server) -> None:
    for method, path in (
        ("GET", "/admin/config"),
        ("PATCH", "/admin/config"),
        ("GET", "/admin/config/history"),
    ):
        body = {"json": {"stream_interval": 2}} if method == "PATCH" else {}
        assert server.http.request(method, path, **body).status_code == 403  # type: ignore[arg-type]


def test_a_large_change_is_refused(server: Server) -> None:
    assert patch(server, {"allowed_origins": ["a" * 100_000]}).status_code == 413


# ---- values, sources, versions and history -------------------------------------------------------


def test_the_config_has_values_sources_and_hides_keys(server: Server) -> None:
    settings = config(server)["settings"]
    assert settings["max_logprobs"] == {
        "value": 10,
        "default": 20,
        "source": "file" if settings["max_logprobs"]["source"] == "file" else "live",
        "live": True,
    }
    assert settings["data_dir"]["source"] == "flag"
    assert settings["port"]["live"] is False
    assert settings["admin_key"]["value"] == "(set)"
    assert settings["api_key"]["value"] == []
    assert settings["max_model_len"]["source"] == "default"
    assert ADMIN not in json.dumps(config(server))


def test_a_change_is_for_the_version_that_was_read(server: Server) -> None:
    got = server.http.get("/admin/config", headers=KEY)
    version = got.json()["version"]
    assert got.headers["etag"] == f'"{version}"'
    done = patch(server, {"stream-interval": 2, "version": version})
    assert done.json() == {
        "version": version + 1,
        "changes": {"stream_interval": {"from": 1, "to": 2}},
    }
    for late in (
        patch(server, {"stream_interval": 3, "version": version}),
        patch(server, {"stream_interval": 3}, **{"If-Match": f'"{version}"'}),
        patch(server, {"stream_interval": 3}, **{"If-Match": "one"}),
    ):
        assert late.status_code == 412
        assert late.json()["error"]["code"] == "config_changed"
    assert config(server)["settings"]["stream_interval"]["value"] == 2
    matching = patch(server, {"stream_interval": 1}, **{"If-Match": done.headers["etag"]})
    assert matching.json()["version"] == version + 2
    assert patch(server, {"stream_interval": 1}).json() == {"version": version + 2, "changes": {}}


def test_changes_are_in_the_history_the_log_and_a_file(server: Server, folder: Path) -> None:
    with _logged("max_url_bytes from 8192 to 4000") as found, changed(server, max_url_bytes=4000):
        version = config(server)["version"]
    assert found()
    history = server.http.get("/admin/config/history", headers=KEY).json()["data"]
    entry = next(each for each in history if each["version"] == version)
    assert entry["changes"] == {"max_url_bytes": {"from": 8192, "to": 4000}}
    assert entry["by"]
    assert ADMIN not in entry["by"]
    lines = (folder / "config-history.jsonl").read_text().splitlines()
    assert entry in map(json.loads, lines)
    assert len(history) <= 100


def test_the_history_outlives_the_server(tmp_path: Path) -> None:
    for interval in (2, 3):
        with running(data_dir=str(tmp_path), admin_key=(ADMIN,)) as server:
            assert patch(server, {"stream_interval": interval}).json()["version"] == 1
            history = server.http.get("/admin/config/history", headers=KEY).json()["data"]
    assert [each["changes"]["stream_interval"]["to"] for each in history] == [2, 3]


def test_metrics_show_version_changes_and_values(server: Server) -> None:
    version = config(server)["version"]
    before = server.metric("config_changes_total", setting="max_header_fields")
    with changed(server, max_header_fields=50):
        assert server.metric("config_version") == version + 1
        values = {"setting": "max_header_fields", "value": "50"}
        assert server.metric("live_config_info", **values) == 1
        assert server.metric("live_config_info") == len(LIVE)
    assert server.metric("config_changes_total", setting="max_header_fields") == before + 2


def test_docs_and_help_name_every_live_setting() -> None:
    section = (ROOT / "docs" / "serving.md").read_text().split("\n## Live configuration\n")[1]
    table = section.partition("| live setting |")[2].partition("\n\n")[0]
    rows = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(LIVE)
    shown = CliRunner().invoke(app, ["serve", "--help"]).output
    options = re.split(r"^  (?=-)", shown, flags=re.MULTILINE)[1:]
    marked = {each.split()[0].strip(",") for each in options if "[live]" in " ".join(each.split())}
    assert marked == {flag(name) for name in LIVE}
    assert "[live]" not in CliRunner().invoke(app, ["generate", "--help"]).output


# ---- engines -------------------------------------------------------------------------------------


def test_all_engines_have_the_change_also_after_kill_9() -> None:
    with running(counting(Options()), num_replicas=2, admin_key=(ADMIN,)) as server:
        assert patch(server, {"max_num_seqs": 1, "slo_tpot_ms": 1000}).status_code == 200
        assert server.client.max_num_seqs == 2
        _kill_engine(server, 1)
        with streaming(server, n=6):
            stats = lambda: [each.stats for each in server.client.replicas]  # noqa: E731
            wait_until(lambda: sum(each.num_waiting for each in stats()) == 4)
            assert [each.num_running for each in stats()] == [1, 1]
            assert None not in [each.slo for each in stats()]


# ---- HTTP workers --------------------------------------------------------------------------------


def test_every_worker_and_every_new_one_has_the_change() -> None:
    from tests.serve.test_http_workers import workers

    others = workers()
    with running(http_workers=2, admin_key=(ADMIN,)) as server:

        def statuses() -> set[int]:
            """Of both workers: connections go to them in turn."""
            body = {"prompt": "Hi", "max_tokens": 1, "no_such_field": 1}
            replies = [httpx.post(server.url + TEXT, json=body, timeout=60) for _ in range(4)]
            return {each.status_code for each in replies}

        assert statuses() == {200}
        assert patch(server, {"unknown_fields": "error"}).status_code == 200
        assert statuses() == {400}
        ours = workers() - others
        victim = next(iter(ours))
        victim.kill()
        wait_until(lambda: len(workers() - others - {victim}) == 2)
        assert statuses() == {400}


def test_a_target_of_the_profile_is_shown_and_holds_while_none_is_set() -> None:
    build = counting(Options(default_tpot_ms=900.0, step_s=0.001))
    with running(build, admin_key=(ADMIN,)) as server:

        def target() -> tuple[float, bool]:
            shown = server.http.get("/admin/config", headers=KEY).json()["settings"]
            return shown["slo_tpot_ms"]["value"], _slo_stats(server) is not None

        assert target()[0] == 900.0
        for given, expected in (({"max_num_seqs": 8}, 900.0), ({"slo_tpot_ms": 500.0}, 500.0)):
            assert server.http.patch("/admin/config", json=given, headers=KEY).status_code == 200
            assert target() == (expected, True)
        assert server.http.patch(
            "/admin/config", json={"slo_tpot_ms": None}, headers=KEY
        ).is_success
        assert target() == (900.0, True)
