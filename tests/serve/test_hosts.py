"""Web pages must not use a server on the visitor's machine: Host, Origin and Content-Type."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.serve.conftest import Server, running
from tests.serve.raw import RawClient, status_of
from windlass.config import ServeConfig
from windlass.errors import ConfigError
from windlass.serve.hosts import names_of

TEXT = "/v1/completions"


def get_version(server: Server, **headers: str) -> httpx.Response:
    return server.http.post(TEXT, json={"prompt": "Hi", "max_tokens": 1}, headers=headers)


def code_of(response: httpx.Response) -> str:
    code: str = response.json()["error"]["code"]
    return code


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:8000",
        "127.0.0.1",
        "127.0.0.1:99",
        "[::1]",
        "[::1]:8000",
        "localhost.",
    ],
)
def test_own_hosts_are_served(server: Server, host: str) -> None:
    assert get_version(server, Host=host).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "[::2]",
    ],
)
def test_foreign_hosts_are_refused(server: Server, host: str) -> None:
    refused = get_version(server, Host=host)
    assert refused.status_code == 403
    assert code_of(refused) == "foreign_host"
    assert "--allowed-hosts" in refused.json()["error"]["message"]
    assert server.http.get("/v1/models", headers={"Host": host}).status_code == 403


def test_a_second_host_is_checked_too(server: Server) -> None:
    with RawClient(server.url) as client:
        client.send(b"GET /version HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
        assert status_of(client.read_until(b"}")) == 403
    with RawClient(server.url) as client:
        client.send(b"GET /version HTTP/1.0\r\n\r\n")  # no browser sends this
        assert status_of(client.read_all()) == 200


@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "null", "http://localhost:1", "https://127.0.0.1", "file://", ""],
)
def test_foreign_origins_are_refused(server: Server, origin: str) -> None:
    refused = get_version(server, Origin=origin)
    assert refused.status_code == 403
    assert code_of(refused) == "foreign_origin"
    assert "--allowed-origins" in refused.json()["error"]["message"]


def test_the_own_origin_is_served(server: Server) -> None:
    assert get_version(server, Origin=server.url).status_code == 200
    assert (
        get_version(server, Origin="http://localhost:8000", Host="localhost:8000").status_code
        == 200
    )


@pytest.fixture(scope="module")
def opened() -> Iterator[Server]:
    options = {"allowed_hosts": ("api.example",), "allowed_origins": ("http://shop.example",)}
    with running(**options, api_key=("one",)) as server:
        server.http.headers["Authorization"] = "Bearer one"
        yield server


def test_options_extend_the_lists(opened: Server) -> None:
    assert get_version(opened, Host="api.example").status_code == 200
    assert get_version(opened, Host="api.example", Origin="https://api.example").status_code == 200
    assert get_version(opened, Host="evil.example").status_code == 403
    allowed = get_version(opened, Origin="http://shop.example")
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "http://shop.example"
    assert get_version(opened, Origin="http://evil.example").status_code == 403


def test_a_preflight_succeeds_for_allowed_origins_only(opened: Server) -> None:
    for origin, status in {"http://shop.example": 200, "http://evil.example": 403}.items():
        preflight = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        assert opened.http.options(TEXT, headers=preflight).status_code == status


def test_a_star_allows_any_origin_and_host() -> None:
    with running(allowed_hosts=("*",), allowed_origins=("*",)) as server:
        assert (
            get_version(server, Host="x.example", Origin="http://evil.example").status_code == 200
        )


@pytest.mark.parametrize(
    ("options", "guarded"),
    [
        ({}, True),
        ({"host": "localhost"}, True),
        ({"host": "127.8.8.8"}, True),
        ({"host": "::1"}, True),
        ({"host": "0.0.0.0"}, False),
        ({"host": "192.0.2.1"}, False),
        ({"host": "0.0.0.0", "allowed_hosts": ("api.example",)}, True),
        ({"uds": "/tmp/s"}, False),
    ],
)
def test_servers_on_loopback_are_guarded(options: dict[str, object], guarded: bool) -> None:
    names = names_of(ServeConfig(**options))  # type: ignore[arg-type]
    assert (names is not None) == guarded


@pytest.mark.parametrize("host", ["", "http://a.example", "a.example/x", "*.example"])
def test_a_bad_allowed_host_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="--allowed-hosts"):
        ServeConfig(allowed_hosts=(host,))


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        (None, 200),
        ("application/json", 200),
        ("Application/JSON; charset=utf-8", 200),
        ("application/vnd.api+json", 200),
        ("text/plain", 415),
        ("text/plain;application/json", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
        ("", 415),
    ],
)
@pytest.mark.parametrize("path", [TEXT, "/tokenize"])
def test_bodies_are_json(server: Server, path: str, content_type: str | None, status: int) -> None:
    headers = {} if content_type is None else {"Content-Type": content_type}
    got = server.http.post(path, content=b'{"prompt": "Hi"}', headers=headers)
    assert got.status_code == status
    if status == 415:
        assert code_of(got) == "unsupported_media_type"
        assert "application/json" in got.json()["error"]["message"]


def test_a_page_must_send_the_content_type(server: Server) -> None:
    """A script can leave it out (a Blob without a type) to avoid the browser's preflight."""
    headers = {"Origin": server.url}
    got = server.http.post(TEXT, content=b'{"prompt": "Hi"}', headers=headers)
    assert got.status_code == 415
