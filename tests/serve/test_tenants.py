"""Tenants of a real server: rights, limits, usage and budgets, and the admin endpoints."""

from __future__ import annotations

import csv
import io
import json
import logging
import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from tests import warm_start
from tests.serve.conftest import Server, running, wait_until
from tests.serve.fakes import CARD
from windlass.core.memory import AdapterUse, BlockUse, Memory
from windlass.serve.admin import memory_json
from windlass.serve.tenants import Tenant

ROOT = Path(__file__).parents[2]
BODY = {"prompt": "Hi", "max_tokens": 4}
TENANTS: dict[str, Any] = {
    "boss": {"admin": True},
    "second": {"admin": True},
    "shop": {"weight": 2.0},
    "other": {},
    "slow": {"requests_per_minute": 1, "tokens_per_minute": 1000},
    "single": {"max_concurrent_requests": 1},
    "poor": {"budget": {"usd": 1e-12, "per": "month"}},
    "narrow": {"models": ["counter"], "adapters": []},
    "nothing": {"models": [], "max_priority": 3},
    "changed": {},
    "batcher": {"tokens_per_minute": 10**6},
}


def write_tenants(path: Path, tenants: dict[str, Any]) -> str:
    full = {
        name: {"keys": [{"id": f"{name}-1", "sha256": digest(name)}], **fields}
        for name, fields in tenants.items()
    }
    path.write_text(json.dumps({"tenants": full}))
    path.chmod(0o600)
    return str(path)


def digest(key: str) -> str:
    return sha256(key.encode()).hexdigest()


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def client(server: Server, key: str) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def complete(server: Server, key: str, **body: Any) -> httpx.Response:
    return server.http.post("/v1/completions", json={**BODY, **body}, headers=bearer(key))


def usage_of(server: Server, tenant: str) -> dict[str, float]:
    """The sums of all keys and models of a tenant."""
    found = server.http.get("/admin/usage", params={"tenant": tenant}, headers=bearer("boss"))
    sums: dict[str, float] = {}
    for row in found.json()["data"]:
        assert row["tenant"] == tenant
        for name, value in row.items():
            if isinstance(value, int | float) and name != "start":
                sums[name] = sums.get(name, 0) + value
    return sums


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tenants")


@pytest.fixture(scope="module", params=[1, 2], ids=["one-process", "two-workers"])
def server(request: pytest.FixtureRequest, folder: Path) -> Iterator[Server]:
    own = folder / str(request.param)
    own.mkdir()
    with running(
        http_workers=request.param,
        keys_file=write_tenants(own / "keys.json", TENANTS),
        data_dir=str(own / "data"),
        price_per_hour=3600.0,
    ) as server:
        yield server


def test_a_tenant_sees_its_own_adapters(folder: Path) -> None:
    tenants = {"boss": {"admin": True}, "narrow": {"adapters": ["sea"]}}
    path = folder / "adapters.json"
    with running(keys_file=write_tenants(path, tenants)) as server:
        server.client.adapters.folders.update(sea="/sea", ice="/ice")
        for key, names in (("narrow", ["sea"]), ("boss", ["sea", "ice"])):
            state = server.http.get("/console/state", headers=bearer(key)).json()
            assert list(state["adapters"]) == names
    uses = (AdapterUse(name, "disk", None, 0, 0, 0) for name in ("sea", "ice"))
    memory = Memory(BlockUse(0, 0, 4, 16, 0), asleep=False, adapters=tuple(uses))
    (entry,) = memory_json(memory, 1024, Tenant(name="narrow", adapters=("sea",)))["adapters"]
    assert (entry["name"], entry["place"], entry["rank"]) == ("sea", "disk", None)


def test_every_header_carries_a_key_and_every_path_needs_one(server: Server) -> None:
    for headers in (bearer("shop"), {"x-api-key": "shop"}, {"api-key": "shop"}):
        assert server.http.get("/v1/models", headers=headers).status_code == 200
    for path in ("/v1/models", "/metrics", "/v1/usage", "/admin/tenants", "/nothing"):
        refused = server.http.get(path)
        assert refused.status_code == 401
        assert refused.headers["WWW-Authenticate"] == "Bearer"
    assert complete(server, "wrong").status_code == 401
    assert server.http.get("/health").status_code == 200
    for path in ("/admin/tenants", "/admin/usage"):
        assert server.http.get(path, headers=bearer("shop")).status_code == 403
    with pytest.raises(openai.AuthenticationError):
        client(server, "wrong").completions.create(model="counter", prompt="Hi")


def test_requests_per_minute_with_openais_headers(server: Server) -> None:
    raw = client(server, "slow").completions.with_raw_response.create(model="counter", **BODY)
    assert raw.headers["x-ratelimit-limit-requests"] == "1"
    assert raw.headers["x-ratelimit-remaining-requests"] == "0"
    assert raw.headers["x-ratelimit-limit-tokens"] == "1000"
    assert int(raw.headers["x-ratelimit-remaining-tokens"]) >= 990
    with pytest.raises(openai.RateLimitError) as caught:
        client(server, "slow").completions.create(model="counter", **BODY)
    assert caught.value.code == "rate_limit_exceeded"
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
    assert caught.value.response.headers["x-ratelimit-remaining-requests"] == "0"
    assert complete(server, "shop").headers.get("x-ratelimit-limit-requests") is None


def test_requests_at_once(server: Server) -> None:
    body = {"prompt": "SLOW", "max_tokens": 1000, "stream": True, "ignore_eos": True}
    url, headers = f"{server.url}/v1/completions", bearer("single")
    with httpx.stream("POST", url, json=body, headers=headers) as response:
        lines = response.iter_lines()  # a generator that is deleted closes the response
        next(lines)
        refused = complete(server, "single")
        assert refused.status_code == 429
        assert "max_concurrent_requests" in refused.json()["error"]["message"]
    # The client has disconnected, so its request ends.
    wait_until(lambda: complete(server, "single").status_code == 200)


def test_a_spent_budget_is_openais_insufficient_quota(server: Server) -> None:
    assert complete(server, "poor").status_code == 200
    wait_until(lambda: usage_of(server, "poor").get("usd", 0) > 0)
    with pytest.raises(openai.RateLimitError) as caught:
        client(server, "poor").completions.create(model="counter", **BODY)
    assert (caught.value.code, caught.value.type) == ("insufficient_quota",) * 2
    assert "$1e-12 per month" in str(caught.value)


def test_models_of_a_tenant(server: Server) -> None:
    assert complete(server, "narrow", model="counter").status_code == 200
    assert [each.id for each in client(server, "narrow").models.list()] == ["counter"]
    assert list(client(server, "nothing").models.list()) == []
    for body in ({"model": "counter"}, {}):
        refused = complete(server, "nothing", **body)
        assert refused.status_code == 404
        assert refused.json()["error"]["code"] == "model_not_found"
    assert server.http.get("/api/tags", headers=bearer("nothing")).json() == {"models": []}
    for path in ("/v1/embeddings", "/tokenize", "/v1/messages/count_tokens"):
        messages = [{"role": "user", "content": "Hi"}]
        body = {"input": "Hi", "prompt": "Hi", "messages": messages, "model": "counter"}
        found = server.http.post(path, json=body, headers=bearer("nothing"))
        assert found.status_code == 404, found.text
    assert server.http.get("/props", headers=bearer("nothing")).status_code == 404


def test_changes_are_checked_kept_and_logged(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="windlass.audit")
    url = "/admin/tenants/changed"

    def patch(key: str = "boss", **changes: Any) -> httpx.Response:
        return server.http.patch(url, json=changes, headers=bearer(key))

    assert complete(server, "changed", priority=1).status_code == 200
    found = patch(max_priority=2, weight=0.5).json()
    assert (found["max_priority"], found["weight"]) == (2, 0.5)
    assert found["keys"] == [{"id": "changed-1", "expires": None}]
    assert "boss (key boss-1) changed weight of tenant changed from None to 0.5" in caplog.text
    for _ in range(4):  # all workers know it
        with httpx.Client(base_url=server.url, headers=bearer("changed")) as http:
            refused = http.post("/v1/completions", json={**BODY, "priority": 1})
            assert refused.status_code == 403
            assert refused.json()["error"]["param"] == "priority"
            assert http.post("/v1/completions", json=BODY).status_code == 200
    assert patch("shop", weight=9).status_code == 403
    bad = patch(weight=-1)
    assert bad.status_code == 400
    assert "tenant 'changed': weight" in bad.json()["error"]["message"]
    assert patch(wieght=1).status_code == 400
    assert patch().status_code == 400
    missing = server.http.patch("/admin/tenants/no", json={"weight": 1}, headers=bearer("boss"))
    assert missing.status_code == 404
    assert patch(disabled=True).status_code == 200
    assert complete(server, "changed").status_code == 401
    listed = server.http.get("/admin/tenants", headers=bearer("boss")).json()["data"]
    (own,) = [each for each in listed if each["name"] == "changed"]
    assert (own["disabled"], own["max_priority"]) == (True, 2)
    assert digest("changed") not in json.dumps(listed)


def test_an_admin_that_changes_its_own_key_gets_an_answer(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="windlass.audit")
    keys = [{"id": "second-2", "sha256": digest("second again")}]
    url = "/admin/tenants/second"
    changed = server.http.patch(url, json={"keys": keys}, headers=bearer("second"))
    assert changed.status_code == 200, changed.text
    assert "second (key second-1) changed keys of tenant second" in caplog.text
    assert server.http.get("/v1/models", headers=bearer("second")).status_code == 401
    assert server.http.get("/v1/models", headers=bearer("second again")).status_code == 200


def test_metrics_show_a_tenant_nothing_of_others(server: Server) -> None:
    def labels(key: str) -> set[tuple[str, str]]:
        text = server.http.get("/metrics", headers=bearer(key)).text
        assert "windlass:requests_received_total" in text
        return set(re.findall(r'(tenant|key|max_lora)="([^"]*)"', text))

    for name in ("shop", "other"):
        assert complete(server, name).status_code == 200
    both = {(label, name) for label in ("tenant", "key") for name in ("shop", "other")}
    wait_until(lambda: both < labels("boss"))
    assert labels("shop") == {("tenant", "shop"), ("key", "shop")}
    assert labels("other") == {("tenant", "other"), ("key", "other")}


def test_tenants_share_no_cached_prefix(server: Server) -> None:
    def cached(key: str, **body: Any) -> int:
        found = complete(server, key, prompt="a prompt of several blocks " * 8, **body)
        return int(found.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached("shop") == 0
    assert cached("shop") > 0
    assert cached("other") == 0
    assert cached("other", cache_salt="shop") == 0


def test_usage_is_that_of_the_responses(server: Server) -> None:
    before = usage_of(server, "other")
    with ThreadPoolExecutor(4) as pool:
        bodies = [{"n": 3, "prompt": ["Hi", "Hello"]}, {"stream": True}, {"best_of": 2, "n": 1}, {}]
        sent = list(pool.map(lambda body: complete(server, "other", **body), bodies))
    beams = complete(server, "other", use_beam_search=True, best_of=2, n=2).json()["usage"]
    counted = [each.json()["usage"] for each in (sent[0], sent[3])]
    assert [each.status_code for each in sent] == [200] * 4
    wait_until(lambda: usage_of(server, "other")["requests"] == before.get("requests", 0) + 5)
    after = usage_of(server, "other")
    new = {name: value - before.get(name, 0) for name, value in after.items()}
    prompts = [each["prompt_tokens"] for each in (*counted, counted[1], counted[1], beams)]
    assert new["prompt_tokens"] == sum(prompts)
    # Both of best_of=2 were computed, and of the beams 1 + 3 * 2 tokens.
    outputs = counted[0]["completion_tokens"] + 4 + 4 + 2 * 4 + 1 + 3 * 2
    assert new["output_tokens"] == outputs
    assert new["usd"] > 0
    assert new["cached_tokens"] >= 0
    own = server.http.get("/v1/usage", headers=bearer("other")).json()
    assert {row["tenant"] for row in own["data"]} == {"other"}
    assert {row["key_id"] for row in own["data"]} == {"other-1"}
    assert {row["model"] for row in own["data"]} == {CARD.name}


def test_usage_as_csv_and_its_parameters(server: Server) -> None:
    complete(server, "shop")
    boss = bearer("boss")
    wait_until(lambda: usage_of(server, "shop").get("requests", 0) > 0)
    for params, headers in (({"format": "csv"}, boss), ({}, {**boss, "Accept": "text/csv"})):
        found = server.http.get("/admin/usage", params=params, headers=headers)
        assert found.headers["content-type"].startswith("text/csv")
        rows = list(csv.DictReader(io.StringIO(found.text)))
        shop = [row for row in rows if row["tenant"] == "shop"]
        assert sum(int(row["requests"]) for row in shop) == usage_of(server, "shop")["requests"]
    for bucket in ("hour", "day", "month"):
        found = server.http.get("/admin/usage", params={"bucket": bucket}, headers=boss).json()
        assert {row["start"] % 3600 for row in found["data"]} == {0}
    past = {"since": "2020-01-01", "until": "2021-01-01T00:00:00Z"}
    assert server.http.get("/admin/usage", params=past, headers=boss).json()["data"] == []
    turned = {"since": "2021-01-01", "until": "2020-01-01"}
    found = server.http.get("/admin/usage", params=turned, headers=boss)
    assert (found.status_code, found.json()["error"]["param"]) == (400, "since")
    for name, value in {"since": "soon", "bucket": "week", "format": "xml", "x": "1"}.items():
        found = server.http.get("/admin/usage", params={name: value}, headers=boss)
        assert found.status_code == 400
    assert server.http.get("/v1/usage?tenant=shop", headers=bearer("other")).status_code == 400


def test_batches_count_and_files_belong_to_the_tenant(server: Server) -> None:
    api = client(server, "batcher")
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions"}
    content = json.dumps({**line, "body": {"model": "counter", **BODY}}).encode()
    file = api.files.create(file=content, purpose="batch")
    batch = api.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    )
    with pytest.raises(openai.NotFoundError):
        client(server, "shop").batches.retrieve(batch.id)
    wait_until(lambda: api.batches.retrieve(batch.id).status == "completed")
    assert api.batches.retrieve(batch.id).request_counts.completed == 1  # type: ignore[union-attr]
    wait_until(lambda: usage_of(server, "batcher").get("requests") == 1)
    data = server.http.get("/v1/usage", headers=bearer("batcher")).json()["data"]
    assert [row["key_id"] for row in data] == ["batch"]


def test_embeddings_count_their_prompts(server: Server) -> None:
    before = usage_of(server, "narrow")
    found = server.http.post(
        "/v1/embeddings", json={"input": ["Hi", "Ho"]}, headers=bearer("narrow")
    )
    assert found.status_code == 200
    wait_until(lambda: usage_of(server, "narrow")["requests"] == before["requests"] + 1)
    after = usage_of(server, "narrow")
    assert (
        after["prompt_tokens"] - before["prompt_tokens"] == found.json()["usage"]["prompt_tokens"]
    )
    assert after["output_tokens"] == before["output_tokens"]


def test_tenants_may_share_the_prefix_cache(tmp_path: Path) -> None:
    keys_file = write_tenants(tmp_path / "keys.json", {"shop": {}, "other": {}})
    with running(keys_file=keys_file, share_prefix_cache=True) as server:
        prompt = "a prompt of several blocks " * 8
        first, second = (complete(server, key, prompt=prompt) for key in ("shop", "other"))
        assert first.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert second.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert server.http.get("/v1/usage", headers=bearer("shop")).status_code == 400
        assert server.http.get("/admin/usage", headers=bearer("shop")).status_code == 403


def test_budgets_keep_the_price_from_being_removed(tmp_path: Path) -> None:
    keys_file = write_tenants(tmp_path / "keys.json", {"boss": {"admin": True}, "shop": {}})
    with running(keys_file=keys_file, usage_db=str(tmp_path / "usage.sqlite")) as server:

        def patch(path: str, **changes: Any) -> tuple[int, str]:
            done = server.http.patch(f"/admin/{path}", json=changes, headers=bearer("boss"))
            return done.status_code, done.text

        budget = {"usd": 1.0, "per": "month"}
        status, text = patch("tenants/shop", budget=budget)
        assert status == 400
        assert "--price-per-hour" in text
        assert patch("config", price_per_hour=3600.0)[0] == 200
        assert patch("tenants/shop", budget=budget)[0] == 200
        for price in (None, 0):
            status, text = patch("config", price_per_hour=price, max_logprobs=3)
            assert status == 400
            assert "budgets in dollars (shop)" in text
        found = server.http.get("/admin/config", headers=bearer("boss")).json()["settings"]
        assert found["price_per_hour"]["value"] == 3600.0
        assert found["max_logprobs"]["value"] == 20  # of a refused change, nothing applies
        assert complete(server, "shop").status_code == 200
        wait_until(lambda: usage_of(server, "shop").get("usd", 0) > 0)
        assert patch("config", price_per_hour=7200.0)[0] == 200
        assert patch("tenants/shop", budget=None)[0] == 200
        assert patch("config", price_per_hour=None)[0] == 200
        assert patch("tenants/shop", budget=budget)[0] == 400


# ---- a process of its own ------------------------------------------------------------------------

PROGRAM = """
import sys
from tests.serve.fakes import CARD, counting
from windlass.config import ServeConfig
from windlass.serve.client import EngineClient
from windlass.serve.launch import serve

if __name__ == "__main__":
    config = ServeConfig(
        port=0, keys_file=sys.argv[1], usage_db=sys.argv[2], price_per_hour=3600.0, http_workers=1
    )
    client = EngineClient(counting(), config.hang_timeout)
    serve(client, lambda: CARD, config, lambda _report, url: print(url, flush=True))
"""


@contextmanager
def process(folder: Path, keys_file: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    program = folder / "program.py"
    program.write_text(PROGRAM)
    with warm_start.start(
        [sys.executable, str(program), keys_file, str(folder / "usage.sqlite")],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as started:
        try:
            assert started.stdout is not None
            with httpx.Client(base_url=started.stdout.readline().strip(), timeout=20) as http:
                yield started, http
        finally:
            started.kill()


def test_usage_and_budgets_survive_kill_9_and_sighup_reads_the_file(tmp_path: Path) -> None:
    budget = {"budget": {"usd": 1e-12, "per": "month"}}
    path = tmp_path / "keys.json"
    keys_file = write_tenants(path, {"boss": {"admin": True}, "poor": budget, "shop": {}})
    with process(tmp_path, keys_file) as (started, http):

        def status(key: str) -> int:
            return http.post("/v1/completions", json=BODY, headers=bearer(key)).status_code

        assert [status("shop") for _ in range(5)] == [200] * 5
        assert status("poor") == 200
        wait_until(lambda: stored(tmp_path) == {"shop": 5, "poor": 1})
        write_tenants(path, {"boss": {"admin": True}, "poor": budget, "shop": {}, "new": {}})
        started.send_signal(signal.SIGHUP)
        wait_until(lambda: status("new") == 200)
        path.write_text("{")
        started.send_signal(signal.SIGHUP)
        assert status("shop") == 200
        wait_until(lambda: stored(tmp_path)["shop"] == 6)
        started.send_signal(signal.SIGKILL)
        started.wait()
    write_tenants(path, {"boss": {"admin": True}, "poor": budget})
    with process(tmp_path, keys_file) as (_, http):
        refused = http.post("/v1/completions", json=BODY, headers=bearer("poor"))
        assert refused.json()["error"]["code"] == "insufficient_quota"
        rows = http.get("/admin/usage", headers=bearer("boss")).json()["data"]
        assert {row["tenant"]: row["requests"] for row in rows} == stored(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit of file sizes")
def test_usage_waits_in_memory_while_the_disk_is_full(tmp_path: Path) -> None:
    import resource

    keys_file = write_tenants(tmp_path / "keys.json", {"boss": {"admin": True}, "shop": {}})
    with process(tmp_path, keys_file) as (started, http):
        http.headers.update(bearer("shop"))

        def complete() -> int:
            return http.post("/v1/completions", json=BODY).status_code

        def metric(name: str) -> float:
            return metric_of(http.get("/metrics").text, f"windlass:usage_{name}")

        def limit(max_bytes: int) -> None:
            resource.prlimit(
                started.pid, resource.RLIMIT_FSIZE, (max_bytes, resource.RLIM_INFINITY)
            )

        assert complete() == 200
        wait_until(lambda: stored(tmp_path) == {"shop": 1})
        limit(1)
        assert [complete() for _ in range(5)] == [200] * 5
        wait_until(lambda: metric("write_errors_total") > 2)
        wait_until(lambda: metric("unwritten_requests") == 5)
        assert stored(tmp_path) == {"shop": 1}
        rows = http.get("/v1/usage").json()["data"]
        assert [row["requests"] for row in rows] == [6]
        limit(resource.RLIM_INFINITY)
        wait_until(lambda: metric("unwritten_requests") == 0)
        assert stored(tmp_path) == {"shop": 6}
        assert metric("lost_requests_total") == 0


def metric_of(text: str, name: str) -> float:
    """The value of a metric without labels beside the model."""
    [line] = [line for line in text.splitlines() if line.startswith(f"{name}{{")]
    return float(line.rpartition(" ")[2])


def stored(folder: Path) -> dict[str, int]:
    """The requests by tenant that are on disk."""
    with sqlite3.connect(f"file:{folder / 'usage.sqlite'}?mode=ro", uri=True) as connection:
        query = "SELECT tenant, SUM(requests) FROM usage GROUP BY tenant"
        return dict(connection.execute(query).fetchall())
