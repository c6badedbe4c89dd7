"""Adapters over HTTP: a real server on a tiny model, OpenAI's client, and rejected requests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.lora.folders import lora_tensors, write_adapter, write_model
from tests.system.server import serving
from windlass.config import ServeConfig
from windlass.errors import AdapterConflict, CheckpointError, ConfigError, WorkerDied
from windlass.serve import messages
from windlass.serve.adapter_registry import AdapterCalls, AdapterRegistry, Change

ADMIN = {"Authorization": "Bearer boss"}


@dataclass
class AdapterServer:
    """A running server and its --lora-root folder."""

    url: str
    root: Path
    outside: Path
    http: httpx.Client

    def change(self, what: str, headers: dict[str, str] = ADMIN, **body: Any) -> httpx.Response:
        return self.http.post(f"/v1/{what}_lora_adapter", json=body, headers=headers)

    def load(self, name: str, path: Path | str) -> httpx.Response:
        return self.change("load", lora_name=name, lora_path=str(path))

    def complete(self, model: str, **body: Any) -> httpx.Response:
        defaults = {"prompt": "w1 w2 w3", "temperature": 0, "max_tokens": 6, "ignore_eos": True}
        return self.http.post("/v1/completions", json=defaults | {"model": model} | body)

    def names(self) -> list[str]:
        return [entry["id"] for entry in self.http.get("/v1/models").json()["data"]]


@pytest.fixture(scope="module")
def adapter_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdapterServer]:
    folder = tmp_path_factory.mktemp("server")
    model = write_model(folder / "base")
    first = write_adapter(folder / "first", seed=1)
    root = folder / "root"
    root.mkdir()
    flags = [
        "--load-format",
        "dummy",
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--num-blocks",
        "80",
    ]
    flags += ["--max-num-seqs", "8", "--enable-lora", "--lora-modules", f"first={first}"]
    flags += ["--max-loras", "2", "--max-lora-rank", "8"]
    flags += ["--lora-root", str(root), "--admin-key", "boss"]
    with (
        serving(str(model), *flags) as server,
        httpx.Client(base_url=server.url, timeout=30) as http,
    ):
        yield AdapterServer(server.url, root, folder, http)


def test_adapters_are_listed_with_their_base_as_parent(adapter_server: AdapterServer) -> None:
    entries = {entry["id"]: entry for entry in adapter_server.http.get("/v1/models").json()["data"]}
    assert entries["base"]["parent"] is None
    assert entries["first"]["parent"] == "base"
    assert entries["first"]["root"] == str(adapter_server.outside / "first")
    for name, entry in entries.items():
        assert adapter_server.http.get(f"/v1/models/{name}").json() == entry


def test_model_field_selects_the_adapter(adapter_server: AdapterServer) -> None:
    client = openai.OpenAI(base_url=f"{adapter_server.url}/v1", api_key="none", max_retries=0)
    texts = {}
    for model in ("base", "first"):
        answer = client.completions.create(
            model=model, prompt="w1 w2 w3", temperature=0, max_tokens=6
        )
        assert answer.model == model
        texts[model] = answer.choices[0].text
    assert texts["base"] != texts["first"]
    with pytest.raises(openai.NotFoundError, match="does not exist here"):
        client.completions.create(model="third", prompt="w1")
    (use,) = adapter_server.http.get("/memory").json()["adapters"]
    assert use.pop("bytes") > 0
    assert use == {
        "name": "first",
        "place": "device",
        "rank": 4,
        "running": 0,
        "waiting": 0,
        "requests": 1,
    }
    counted = adapter_server.http.post(
        "/tokenize", json={"model": "first", "prompt": "w1 w2"}
    ).json()
    assert counted["count"] == 2


def test_load_use_and_unload(adapter_server: AdapterServer) -> None:
    folder = write_adapter(adapter_server.root / "second", seed=2)
    assert adapter_server.complete("second").status_code == 404
    assert adapter_server.load("second", folder).json() == {"status": "loaded", "id": "second"}
    client = openai.OpenAI(base_url=f"{adapter_server.url}/v1", api_key="none", max_retries=0)
    assert client.models.retrieve("second").model_dump()["parent"] == "base"
    assert adapter_server.names() == ["base", "first", "second"]
    text = adapter_server.complete("second").json()["choices"][0]["text"]
    assert text != adapter_server.complete("first").json()["choices"][0]["text"]
    assert adapter_server.load("second", folder).status_code == 409
    answer = adapter_server.change("unload", lora_name="second")
    assert answer.json() == {"status": "unloaded", "id": "second", "num_running": 0}
    assert adapter_server.complete("second").status_code == 404
    with pytest.raises(openai.NotFoundError, match="does not exist here"):
        client.models.retrieve("second")
    assert adapter_server.change("unload", lora_name="second").status_code == 404
    metrics = adapter_server.http.get("/metrics").text
    assert 'windlass:lora_adapters_loaded{model_name="base"} 1.0' in metrics
    assert "windlass:lora_adapter_reads_total" in metrics


def test_names_can_contain_slashes(adapter_server: AdapterServer) -> None:
    client = openai.OpenAI(base_url=f"{adapter_server.url}/v1", api_key="none", max_retries=0)
    assert (
        adapter_server.load(
            "org/mail", write_adapter(adapter_server.root / "mail", seed=6)
        ).status_code
        == 200
    )
    assert client.models.retrieve("org/mail").id == "org/mail"
    assert adapter_server.complete("org/mail").json()["model"] == "org/mail"
    assert adapter_server.change("unload", lora_name="org/mail").status_code == 200


def test_unload_lets_running_requests_finish(adapter_server: AdapterServer) -> None:
    folder = write_adapter(adapter_server.root / "busy", seed=3)
    adapter_server.load("busy", folder)
    answers: list[httpx.Response] = []

    def ask() -> None:
        answers.append(adapter_server.complete("busy", max_tokens=200))

    with adapter_server.http.stream(
        "POST",
        "/v1/completions",
        json={
            "model": "busy",
            "prompt": "w5",
            "max_tokens": 200,
            "ignore_eos": True,
            "stream": True,
        },
    ) as stream:
        lines = stream.iter_lines()  # kept: httpx closes the stream with its iterator
        next(lines)
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join(0.05)
        answer = adapter_server.change("unload", lora_name="busy").json()
        assert (answer["status"], answer["num_running"] >= 1) == ("draining", True)
        assert adapter_server.complete("busy").status_code == 404
        again = adapter_server.load("busy", folder)
        assert again.status_code in (200, 409)  # 409 while it drains
    thread.join()
    assert answers[0].status_code in (200, 404)  # 404: it arrived after the unload


def test_hostile_pattern_is_rejected_while_other_requests_run(
    adapter_server: AdapterServer,
) -> None:
    pattern, folder = r"(.*)*(.*)*(.*)*x", adapter_server.root / "hostile"
    write_adapter(folder, targets=pattern, tensors=lora_tensors())
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(adapter_server.load("hostile", folder)))
    thread.start()
    served = 0
    while not answers:
        assert adapter_server.complete("first").status_code == 200
        served += 1
    thread.join()
    assert served > 3
    assert answers[0].status_code == 400
    assert (
        "matching target_modules against the module names" in answers[0].json()["error"]["message"]
    )
    assert "hostile" not in adapter_server.names()
    assert adapter_server.complete("first").status_code == 200


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}])
def test_loading_needs_the_admin_key(
    adapter_server: AdapterServer, headers: dict[str, str]
) -> None:
    answer = adapter_server.change(
        "load", headers, lora_name="x", lora_path=str(adapter_server.root)
    )
    assert answer.status_code == 403
    assert "admin key" in answer.json()["error"]["message"]
    assert adapter_server.change("unload", headers, lora_name="first").status_code == 403


def test_concurrent_loads_of_one_name_load_it_once(adapter_server: AdapterServer) -> None:
    folder = write_adapter(adapter_server.root / "wanted", seed=4)

    async def main() -> list[int]:
        async with httpx.AsyncClient(
            base_url=adapter_server.url, headers=ADMIN, timeout=30
        ) as http:
            body = {"lora_name": "wanted", "lora_path": str(folder)}
            calls = [http.post("/v1/load_lora_adapter", json=body) for _ in range(60)]
            return [answer.status_code for answer in await asyncio.gather(*calls)]

    assert sorted(asyncio.run(main())) == [200] + [409] * 59
    assert adapter_server.complete("wanted").status_code == 200
    assert adapter_server.change("unload", lora_name="wanted").status_code == 200


def test_paths_outside_the_root_are_rejected(adapter_server: AdapterServer) -> None:
    (adapter_server.root / "link").symlink_to(adapter_server.outside / "first")
    inner = write_adapter(adapter_server.root / "inner")
    (inner / "adapter_model.safetensors").unlink()
    secret = adapter_server.outside / "first" / "adapter_model.safetensors"
    (inner / "adapter_model.safetensors").symlink_to(secret)
    outside = adapter_server.outside / "first"
    for path in (
        outside,
        adapter_server.root / "link",
        inner,
        f"{adapter_server.root}/../first",
        "/etc",
        "first",
        "",
    ):
        answer = adapter_server.load("x", path)
        assert answer.status_code == 403, path
        assert "outside of the folders" in answer.json()["error"]["message"]
    assert adapter_server.load("x", "a\0b").status_code == 400
    assert "x" not in adapter_server.names()


def test_failed_loads_leave_no_state(adapter_server: AdapterServer) -> None:
    for number in range(20):
        answer = adapter_server.load(f"bad-{number}", adapter_server.root / "missing")
        assert answer.status_code == 400
        assert "no such folder" in answer.json()["error"]["message"]
    wide = write_adapter(adapter_server.root / "wide", rank=16)
    answer = adapter_server.load("wide", wide)
    assert "rank 16, above the engine's maximum of 8" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "lora_path"
    for name in ("", " x", "a\nb", "n" * 300):
        assert adapter_server.load(name, wide).status_code == 400
    assert adapter_server.load("base", wide).status_code == 409
    assert adapter_server.change("load", lora_name="x").status_code == 400
    assert adapter_server.change("unload", lora_name="x", model="y").status_code == 400
    assert "wide" not in adapter_server.names()


# ---- the registry alone ----------------------------------------------------------------------


def loaded(name: str, folder: str, **error: str) -> messages.AdapterReply:
    return messages.AdapterReply(messages.LoadAdapter(name, folder), **error)  # type: ignore[arg-type]


class FakeEngine:
    """An engine that answers every change with an error or with a number of running requests."""

    def __init__(self, *results: Exception | int) -> None:
        self.results = list(results)
        self.changes: list[Change] = []

    async def change_adapter(self, change: Change) -> int:
        self.changes.append(change)
        await asyncio.sleep(0)
        result = self.results.pop(0) if self.results else 0
        if isinstance(result, Exception):
            raise result
        return result


LOAD, UNLOAD = messages.LoadAdapter("a", "/a"), messages.UnloadAdapter("a")


def test_restart_replays_changes_since_the_start() -> None:
    async def main() -> None:
        registry, engine = AdapterRegistry(), FakeEngine()
        assert registry.sync_after_start({"a": "/a", "b": "/b"}) == []
        await registry.change(UNLOAD, [engine])
        await registry.change(messages.LoadAdapter("c", "/c", ("/",)), [engine])
        expected = [UNLOAD, messages.LoadAdapter("c", "/c", ("/",))]
        assert registry.sync_after_start({"a": "/a", "b": "/b"}) == expected
        # An adapter that cannot be reloaded is removed.
        assert registry.reload_failed(messages.LoadAdapter("c", "/c"))
        assert not registry.reload_failed(messages.LoadAdapter("c", "/c"))
        assert registry.folders == {"b": "/b"}

    asyncio.run(main())


def test_versions_are_those_of_adapters_that_did_not_change() -> None:
    async def main() -> None:
        registry, engine = AdapterRegistry(), FakeEngine()
        folders, versions = {"a": "/a", "b": "/b"}, {"a": "1", "b": "2"}
        registry.sync_after_start(folders, versions)
        assert registry.versions == versions
        await registry.change(UNLOAD, [engine])
        await registry.change(messages.LoadAdapter("a", "/other"), [engine])
        assert registry.versions == {"b": "2"}
        registry.sync_after_start(folders, {"a": "1", "b": "3"})  # a restarted engine read b again
        assert registry.versions == {"b": "3"}

    asyncio.run(main())


def test_a_restart_replays_changes_in_progress() -> None:
    async def main() -> None:
        registry, engine = AdapterRegistry(), FakeEngine()
        registry.sync_after_start({"a": "/a"})
        changes = [
            asyncio.create_task(registry.change(change, [engine]))
            for change in (UNLOAD, messages.LoadAdapter("c", "/c", ("/",)))
        ]
        await asyncio.sleep(0)
        assert registry.folders == {"a": "/a"}
        expected = [UNLOAD, messages.LoadAdapter("c", "/c", ("/",))]
        assert registry.sync_after_start({"a": "/a"}) == expected
        await asyncio.gather(*changes)
        assert registry.folders == {"c": "/c"}

    asyncio.run(main())


def test_a_change_reaches_all_engines_or_none() -> None:
    async def main() -> None:
        registry = AdapterRegistry()
        good, broken = FakeEngine(), FakeEngine(CheckpointError("broken"))
        with pytest.raises(CheckpointError, match="broken"):
            await registry.change(LOAD, [good, broken])
        assert (good.changes, broken.changes) == ([LOAD, UNLOAD], [LOAD])
        assert registry.folders == {}
        # The engine that died may have restarted, and loaded the adapter.
        good, dead = FakeEngine(), FakeEngine(WorkerDied("dead"))
        with pytest.raises(WorkerDied):
            await registry.change(LOAD, [good, dead])
        assert good.changes == dead.changes == [LOAD, UNLOAD]
        assert registry.folders == {}
        assert await registry.change(LOAD, [good, dead]) == 0
        assert registry.folders == {"a": "/a"}
        # One engine has unloaded it: the one that died must not load it again.
        assert await registry.change(UNLOAD, [FakeEngine(2), FakeEngine(WorkerDied("dead"))]) == 2
        assert registry.folders == {}

    asyncio.run(main())


def test_answers_reach_their_caller() -> None:
    async def main() -> None:
        calls = AdapterCalls()
        sent: list[object] = []
        first = asyncio.create_task(calls.call(LOAD, sent.append))
        await asyncio.sleep(0)
        assert not calls.on_reply(loaded("a", "/other"))
        assert calls.on_reply(loaded("a", "/a", kind="CheckpointError", message="broken"))
        with pytest.raises(CheckpointError, match="broken"):
            await first
        second = asyncio.create_task(calls.call(LOAD, sent.append))
        await asyncio.sleep(0)
        calls.fail("the engine died")
        with pytest.raises(WorkerDied):
            await second
        assert (sent, calls._pending) == ([LOAD, LOAD], {})

    asyncio.run(main())


def test_a_second_change_of_a_name_is_a_conflict() -> None:
    async def main() -> None:
        registry, engine = AdapterRegistry(), FakeEngine()
        first = asyncio.create_task(registry.change(LOAD, [engine]))
        await asyncio.sleep(0)
        with pytest.raises(AdapterConflict, match="by another call"):
            await registry.change(LOAD, [engine])
        await first
        with pytest.raises(AdapterConflict, match="is loaded already"):
            await registry.change(LOAD, [engine])
        assert (registry.folders, registry._changing) == ({"a": "/a"}, {})

    asyncio.run(main())


def test_ten_thousand_loads_leave_no_state() -> None:
    async def main() -> None:
        registry, engine = AdapterRegistry(), FakeEngine()
        for number in range(10_000):
            name = f"a{number}"
            for change in (messages.LoadAdapter(name, "/a"), messages.UnloadAdapter(name)):
                assert await registry.change(change, [engine]) == 0
        assert (registry.folders, registry._changing) == ({}, {})

    asyncio.run(main())


def test_lora_root_needs_a_key_and_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--admin-key"):
        ServeConfig(lora_root=(str(tmp_path),))
    with pytest.raises(ConfigError, match="no such folder"):
        ServeConfig(lora_root=("/no/such",), admin_key=("k",))
