"""Adapters over HTTP: a real server on a tiny model, OpenAI's client, and all that is refused."""

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

from tests.lora.folders import write_adapter, write_model
from tests.system.server import serving
from windlass.config import ServeConfig
from windlass.errors import AdapterConflict, CheckpointError, ConfigError, WorkerDied
from windlass.serve import messages
from windlass.serve.adapters import AdapterRegistry

ADMIN = {"Authorization": "Bearer boss"}


@dataclass
class SpeculationContext:
    """A running server, and the folder below which it loads adapters."""

    url: str
    root: Path
    outside: Path
    http: httpx.Client

    def change(self, what: str, headers: dict[str, str] = ADMIN, **body: Any) -> httpx.Response:
        return self.http.post(f"/v1/{what}_lora_adapter", json=body, headers=headers)

    def load(self, name: str, path: Path | str) -> httpx.Response:
        return self.change("load", lora_name=name, lora_path=str(path))

    def complete(self, model: str, **body: Any) -> httpx.Response:
        asked = {"prompt": "w1 w2 w3", "temperature": 0, "max_tokens": 6, "ignore_eos": True}
        return self.http.post("/v1/completions", json=asked | {"model": model} | body)

    def names(self) -> list[str]:
        return [entry["id"] for entry in self.http.get("/v1/models").json()["data"]]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SpeculationContext]:
    folder = tmp_path_factory.mktemp("site")
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
        yield SpeculationContext(server.url, root, folder, http)


def test_adapters_are_models_under_their_base(site: SpeculationContext) -> None:
    entries = {entry["id"]: entry for entry in site.http.get("/v1/models").json()["data"]}
    assert entries["base"]["parent"] is None
    assert entries["first"]["parent"] == "base"
    assert entries["first"]["root"] == str(site.outside / "first")
    for name, entry in entries.items():
        assert site.http.get(f"/v1/models/{name}").json() == entry


def test_the_model_field_chooses_the_adapter(site: SpeculationContext) -> None:
    client = openai.OpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0)
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
    counted = site.http.post("/tokenize", json={"model": "first", "prompt": "w1 w2"}).json()
    assert counted["count"] == 2


def test_an_adapter_is_loaded_used_and_unloaded(site: SpeculationContext) -> None:
    folder = write_adapter(site.root / "second", seed=2)
    assert site.complete("second").status_code == 404
    assert site.load("second", folder).json() == {"status": "loaded", "id": "second"}
    client = openai.OpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0)
    assert client.models.retrieve("second").model_dump()["parent"] == "base"
    assert site.names() == ["base", "first", "second"]
    text = site.complete("second").json()["choices"][0]["text"]
    assert text != site.complete("first").json()["choices"][0]["text"]
    assert site.load("second", folder).status_code == 409
    answer = site.change("unload", lora_name="second")
    assert answer.json() == {"status": "unloaded", "id": "second", "num_running": 0}
    assert site.complete("second").status_code == 404
    with pytest.raises(openai.NotFoundError, match="does not exist here"):
        client.models.retrieve("second")
    assert site.change("unload", lora_name="second").status_code == 404
    metrics = site.http.get("/metrics").text
    assert 'windlass:lora_adapters_loaded{model_name="base"} 1.0' in metrics
    assert "windlass:lora_adapter_reads_total" in metrics


def test_names_may_have_slashes(site: SpeculationContext) -> None:
    client = openai.OpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0)
    assert site.load("org/mail", write_adapter(site.root / "mail", seed=6)).status_code == 200
    assert client.models.retrieve("org/mail").id == "org/mail"
    assert site.complete("org/mail").json()["model"] == "org/mail"
    assert site.change("unload", lora_name="org/mail").status_code == 200


def test_unloading_what_runs_lets_it_end(site: SpeculationContext) -> None:
    folder = write_adapter(site.root / "busy", seed=3)
    site.load("busy", folder)
    answers: list[httpx.Response] = []

    def ask() -> None:
        answers.append(site.complete("busy", max_tokens=200))

    with site.http.stream(
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
        next(stream.iter_lines())
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join(0.05)
        answer = site.change("unload", lora_name="busy").json()
        assert (answer["status"], answer["num_running"] >= 1) == ("draining", True)
        assert site.complete("busy").status_code == 404
        again = site.load("busy", folder)
        assert again.status_code in (200, 409)  # 409 while it drains
    thread.join()
    assert answers[0].status_code in (200, 404)  # 404: it came after the unload


def test_a_hostile_pattern_is_refused_and_others_are_answered(site: SpeculationContext) -> None:
    folder = write_adapter(site.root / "hostile", targets=r"(.*)*(.*)*(.*)*x")
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(site.load("hostile", folder)))
    thread.start()
    served = 0
    while not answers:
        assert site.complete("first").status_code == 200
        served += 1
    thread.join()
    assert served > 3
    assert answers[0].status_code == 400
    assert "matching target_modules with the names" in answers[0].json()["error"]["message"]
    assert "hostile" not in site.names()
    assert site.complete("first").status_code == 200


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}])
def test_only_an_admin_may_change_adapters(
    site: SpeculationContext, headers: dict[str, str]
) -> None:
    answer = site.change("load", headers, lora_name="x", lora_path=str(site.root))
    assert answer.status_code == 403
    assert "admin key" in answer.json()["error"]["message"]
    assert site.change("unload", headers, lora_name="first").status_code == 403


def test_many_calls_for_one_name_load_it_once(site: SpeculationContext) -> None:
    folder = write_adapter(site.root / "wanted", seed=4)

    async def main() -> list[int]:
        async with httpx.AsyncClient(base_url=site.url, headers=ADMIN, timeout=30) as http:
            body = {"lora_name": "wanted", "lora_path": str(folder)}
            calls = [http.post("/v1/load_lora_adapter", json=body) for _ in range(60)]
            return [answer.status_code for answer in await asyncio.gather(*calls)]

    assert sorted(asyncio.run(main())) == [200] + [409] * 59
    assert site.complete("wanted").status_code == 200
    assert site.change("unload", lora_name="wanted").status_code == 200


def test_nothing_outside_of_the_root_is_read(site: SpeculationContext) -> None:
    (site.root / "link").symlink_to(site.outside / "first")
    inner = write_adapter(site.root / "inner")
    (inner / "adapter_model.safetensors").unlink()
    secret = site.outside / "first" / "adapter_model.safetensors"
    (inner / "adapter_model.safetensors").symlink_to(secret)
    outside = site.outside / "first"
    for path in (outside, site.root / "link", inner, f"{site.root}/../first", "/etc", "first", ""):
        answer = site.load("x", path)
        assert answer.status_code == 403, path
        assert "outside of the folders" in answer.json()["error"]["message"]
    assert site.load("x", "a\0b").status_code == 400
    assert "x" not in site.names()


def test_bad_adapters_leave_nothing(site: SpeculationContext) -> None:
    for number in range(20):
        answer = site.load(f"bad-{number}", site.root / "missing")
        assert answer.status_code == 400
        assert "no such folder" in answer.json()["error"]["message"]
    wide = write_adapter(site.root / "wide", rank=16)
    answer = site.load("wide", wide)
    assert "rank 16, and this engine takes up to 8" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "lora_path"
    for name in ("", " x", "a\nb", "n" * 300):
        assert site.load(name, wide).status_code == 400
    assert site.load("base", wide).status_code == 409
    assert site.change("load", lora_name="x").status_code == 400
    assert site.change("unload", lora_name="x", model="y").status_code == 400
    assert "wide" not in site.names()


# ---- the registry alone ----------------------------------------------------------------------


def loaded(name: str, folder: str, **error: str) -> messages.AdapterAnswer:
    return messages.AdapterAnswer(messages.LoadAdapter(name, folder), **error)  # type: ignore[arg-type]


def test_a_new_engine_is_told_what_changed_since_the_start() -> None:
    registry = AdapterRegistry()
    assert registry.restarted({"a": "/a", "b": "/b"}) == []
    registry.answered(messages.AdapterAnswer(messages.UnloadAdapter("a")))
    registry.answered(loaded("c", "/c"))
    told = [messages.UnloadAdapter("a"), messages.LoadAdapter("c", "/c")]
    assert registry.restarted({"a": "/a", "b": "/b"}) == told
    # One that cannot be loaded again is not offered any more.
    registry.answered(loaded("c", "/c", kind="CheckpointError", message="gone"))
    assert registry.folders == {"b": "/b"}


def test_answers_reach_who_asked() -> None:
    async def main() -> None:
        registry = AdapterRegistry()
        sent: list[object] = []
        change = messages.LoadAdapter("a", "/a")
        first = asyncio.create_task(registry.change(change, sent.append))
        await asyncio.sleep(0)
        with pytest.raises(AdapterConflict, match="by another call"):
            await registry.change(change, sent.append)
        registry.answered(loaded("a", "/a", kind="CheckpointError", message="broken"))
        with pytest.raises(CheckpointError, match="broken"):
            await first
        second = asyncio.create_task(registry.change(change, sent.append))
        await asyncio.sleep(0)
        registry.fail("the engine died")
        with pytest.raises(WorkerDied):
            await second
        assert (sent, registry.folders, registry._calls) == ([change, change], {}, {})

    asyncio.run(main())


def test_what_is_loaded_stays_when_it_is_loaded_again() -> None:
    registry = AdapterRegistry()
    registry.answered(loaded("a", "/a"))
    with pytest.raises(AdapterConflict, match="is loaded already"):
        asyncio.run(registry.change(messages.LoadAdapter("a", "/a"), lambda _: None))
    assert (registry.folders, registry._calls) == ({"a": "/a"}, {})


def test_ten_thousand_loads_leave_nothing() -> None:
    async def main() -> None:
        registry = AdapterRegistry()
        for number in range(10_000):
            name = f"a{number}"
            for change in (messages.LoadAdapter(name, "/a"), messages.UnloadAdapter(name)):
                call = asyncio.ensure_future(registry.change(change, lambda _: None))
                await asyncio.sleep(0)
                registry.answered(messages.AdapterAnswer(change))
                assert await call == 0
        assert (registry.folders, registry._calls) == ({}, {})

    asyncio.run(main())


def test_a_root_needs_a_key_and_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--admin-key"):
        ServeConfig(lora_root=(str(tmp_path),))
    with pytest.raises(ConfigError, match="no such folder"):
        ServeConfig(lora_root=("/no/such",), admin_key=("k",))
