"""Named prefixes: saved once, found by the tenant's requests, kept through restarts and sleep."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.conftest import Server, running, wait_until
from tests.serve.fakes import Options, counting

ADMIN = {"Authorization": "Bearer boss"}
SYSTEM = "You are a helpful pirate who answers in rhymes and never lies. "  # 64 tokens with BOS


def post(server: Server, path: str, key: str = "boss", **body: object) -> httpx.Response:
    return server.http.post(path, headers={"Authorization": f"Bearer {key}"}, json=body)


def save(server: Server, **body: object) -> dict[str, Any]:
    saved = post(server, "/admin/kv/save", **body)
    assert saved.status_code == 200, saved.text
    return saved.json()


def cached(server: Server, key: str = "boss", **body: object) -> int:
    """Prompt tokens that a completion found in the cache."""
    answer = post(server, "/v1/completions", key, **{"max_tokens": 1, **body})
    assert answer.status_code == 200, answer.text
    return (answer.json()["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0)


def reset(server: Server) -> None:
    assert post(server, "/admin/reset_prefix_cache").status_code == 200


def listed(server: Server) -> dict[str, list[dict[str, Any]]]:
    """The reports of the replicas by name."""
    found = server.http.get("/admin/kv", headers=ADMIN).json()
    assert found["object"] == "list"
    return {each["name"]: each["replicas"] for each in found["data"]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("prefixes")
    options = Options(sleep_file=str(folder / "asleep"), num_blocks=256)
    with running(counting(options), admin_key=("boss",)) as server:
        yield server


def test_a_saved_prompt_is_computed_once_and_outlives_a_reset(server: Server) -> None:
    first = save(server, name="pirate", prompt=SYSTEM)
    (replica,) = first.pop("replicas")
    assert first.pop("created") > 1e9
    assert first == {
        "object": "kv.prefix",
        "name": "pirate",
        "model": "counter",
        "tenant": "none",
        "pin": True,
        "num_prompt_tokens": 64,
    }
    assert replica == {
        "replica": 0,
        "num_tokens": 64,
        "num_blocks": 4,
        "cached_tokens": 0,
        "computed_tokens": 64,
    }
    reset(server)
    assert cached(server, prompt=SYSTEM + "Hi!") == 64
    assert server.metric("kv_cache_pinned_blocks") == 4
    (again,) = save(server, name="pirate", prompt=SYSTEM)["replicas"]
    assert (again["cached_tokens"], again["computed_tokens"]) == (64, 0)
    deleted = server.http.delete("/admin/kv/pirate", headers=ADMIN)
    assert deleted.json() == {"name": "pirate", "deleted": True, "num_blocks": 4}
    reset(server)
    assert cached(server, prompt=SYSTEM + "Hi!") == 0
    reset(server)
    # The tokens after the last full block are computed, and not kept.
    (longer,) = save(server, name="longer", prompt=SYSTEM + "reset")["replicas"]
    assert (longer["num_tokens"], longer["cached_tokens"]) == (64, 0)
    assert longer["computed_tokens"] == 69
    server.http.delete("/admin/kv/longer", headers=ADMIN)
    reset(server)


def test_the_beginning_of_a_conversation_is_a_prefix_of_its_turns(server: Server) -> None:
    system = {"role": "system", "content": SYSTEM}
    save(server, name="chat", messages=[system])
    reset(server)
    answer = server.chat(messages=[system, {"role": "user", "content": "Hi"}], max_tokens=1).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 64
    server.http.delete("/admin/kv/chat", headers=ADMIN)


def test_a_salt_separates_prefixes(server: Server) -> None:
    save(server, name="salted", prompt=SYSTEM, cache_salt="s")
    reset(server)
    assert cached(server, prompt=SYSTEM + "x") == 0
    assert cached(server, prompt=SYSTEM + "x", cache_salt="s") == 64
    server.http.delete("/admin/kv/salted", headers=ADMIN)


def test_sleep_and_a_crash_restore_the_prefixes(server: Server) -> None:
    save(server, name="kept", prompt=SYSTEM)
    for name in ("sleep", "wake"):
        assert post(server, f"/admin/{name}").status_code == 200
        if name == "sleep":
            assert post(server, "/admin/kv/load", name="kept").status_code == 503
    wait_until(lambda: bool(listed(server)["kept"]))
    reset(server)
    assert cached(server, prompt=SYSTEM + "Hi!") == 64
    replica = server.client.replicas[0]
    pid = replica.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: replica.num_ends == 1 and replica.health().ok)
    wait_until(lambda: bool(listed(server)["kept"]))
    reset(server)
    assert cached(server, prompt=SYSTEM + "Hi!") == 64
    loaded = post(server, "/admin/kv/load", name="kept").json()
    assert loaded["replicas"][0]["computed_tokens"] == 0
    server.http.delete("/admin/kv/kept", headers=ADMIN)


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"name": "x"}, 400, "prompt"),
        ({"name": "a/b", "prompt": SYSTEM}, 400, "name"),
        ({"name": "x", "prompt": SYSTEM, "max_tokens": 3}, 400, "max_tokens"),
        ({"name": "x", "prompt": "Hi"}, 400, "3 tokens, and only full blocks of 16"),
        ({"name": "x", "prompt": [1, 2, 999]}, 400, "999"),
        ({"name": "x", "prompt": SYSTEM, "tenant": "acme"}, 400, "no tenants"),
        ({"name": "x", "prompt": SYSTEM, "pin": False}, 400, "no KV tier"),
        ({"name": "x", "prompt": SYSTEM, "model": "other"}, 404, "other"),
        (
            {"name": "x", "prompt": "long " * 400},
            400,
            "2,000 tokens needs 125 KV blocks; 0 are pinned already, and at most 64 of 256",
        ),
    ],
)
def test_a_wrong_save_is_an_error(
    server: Server, body: dict[str, Any], status: int, says: str
) -> None:
    answer = post(server, "/admin/kv/save", **body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert says in f"{error['message']} {error['param']}"
    assert listed(server) == {}


def test_names_that_are_unknown_or_taken_are_errors(server: Server) -> None:
    unknown = post(server, "/admin/kv/load", name="unknown")
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "name")
    assert server.http.delete("/admin/kv/unknown", headers=ADMIN).status_code == 404
    save(server, name="taken", prompt=SYSTEM)
    other = post(server, "/admin/kv/save", name="taken", prompt=SYSTEM * 2)
    assert (other.status_code, other.json()["error"]["code"]) == (409, "prefix_conflict")
    server.http.delete("/admin/kv/taken", headers=ADMIN)


@pytest.mark.parametrize(("method", "path"), [("POST", "save"), ("POST", "load"), ("GET", ".")])
def test_an_admin_key_is_needed(server: Server, method: str, path: str) -> None:
    answer = server.http.request(method, f"/admin/kv/{path}".removesuffix("/."), json={"name": "x"})
    assert answer.status_code == 403


def test_replicas_tenants_and_a_restart_of_the_server(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    digests = {f"{key}team": sha256(key.encode()).hexdigest() for key in "ab"}
    tenants = {name: {"keys": [{"sha256": digest}]} for name, digest in digests.items()}
    keys.write_text(json.dumps({"tenants": tenants}))
    keys.chmod(0o600)
    data = tmp_path / "data"
    options = {"admin_key": ("boss",), "keys_file": str(keys), "data_dir": str(data)}
    with running(counting(), num_replicas=2, **options) as server:
        saved = save(server, name="system", prompt=SYSTEM, tenant="ateam")
        assert [each["replica"] for each in saved["replicas"]] == [0, 1]
        assert (
            post(server, "/admin/kv/save", name="x", prompt=SYSTEM, tenant="none").status_code
            == 400
        )
        reset(server)
        assert [cached(server, key, prompt=SYSTEM + "x") for key in "ab"] == [64, 0]
        file = data / "kv-prefixes.json"
        assert file.stat().st_mode & 0o777 == 0o600
        assert [each["name"] for each in json.loads(file.read_bytes())] == ["system"]
    with running(counting(), **options) as server:
        wait_until(lambda: bool(listed(server)["system"]))
        reset(server)
        assert [cached(server, key, prompt=SYSTEM + "x") for key in "ab"] == [64, 0]
        server.http.delete("/admin/kv/system", headers=ADMIN)
        assert json.loads(file.read_bytes()) == []
