"""/openapi.json describes the routes of the real server, and /docs shows it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.serve.browser import find_chromium, open_browser
from tests.serve.conftest import Server, running, wait_until
from tests.serve.fakes import CARD
from tests.serve.test_tools import CALL_TEXT, HERMES
from windlass.serve import api_response_types
from windlass.serve.response_types import ChatCompletion, Model, ModelList, TextCompletion


@pytest.fixture(scope="module")
def document(server: Server) -> dict[str, Any]:
    response = server.http.get("/openapi.json")
    assert response.headers["content-type"] == "application/json"
    found: dict[str, Any] = response.json()
    return found


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method, path, operation


def refs(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for each in value.values():
            yield from refs(each)
    elif isinstance(value, list):
        for each in value:
            yield from refs(each)


def test_the_document_is_whole(document: dict[str, Any]) -> None:
    assert document["openapi"] == "3.1.0"
    known = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert set(refs(document)) <= known
    ids = [operation["operationId"] for _, _, operation in operations(document)]
    assert len(ids) == len(set(ids)) > 40
    for _, path, operation in operations(document):
        names = [each["name"] for each in operation.get("parameters", []) if each["in"] == "path"]
        assert names == re.findall(r"\{(\w+)\}", path)
        assert operation["tags"] != ["Other"], f"{path} has no entry in serve/openapi.py"


def test_bodies_have_the_fields_of_the_protocol(document: dict[str, Any]) -> None:
    def body(path: str) -> dict[str, Any]:
        content = document["paths"][path]["post"]["requestBody"]["content"]
        name = content["application/json"]["schema"]["$ref"].rpartition("/")[2]
        found: dict[str, Any] = document["components"]["schemas"][name]
        return found

    chat = body("/v1/chat/completions")
    assert chat["required"] == ["messages"]
    assert {"temperature", "tools", "response_format", "priority"} <= chat["properties"].keys()
    prompt = body("/v1/completions")["properties"]["prompt"]
    assert [each["type"] for each in prompt["anyOf"]] == ["string", "array", "array", "array"]
    message = document["components"]["schemas"]["Message"]["properties"]["content"]
    assert [each["type"] for each in message["anyOf"]] == ["string", "array", "null"]
    stop = chat["properties"]["stop"]["anyOf"]
    assert {"string", "array"} <= {each["type"] for each in stop[0].get("anyOf", stop)}


BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}),
    ("/v1/chat/completions", {"prompt_logprobs": 1, "n": 2, "include_cost": True, "stop": ["h"]}),
    ("/v1/completions", {"prompt": "Hi", "logprobs": 1, "echo": True, "return_token_ids": True}),
    ("/v1/completions", {"prompt": "Hi", "prompt_logprobs": 1, "n": 2, "include_cost": True}),
    ("/v1/completions", {"prompt": "Hi", "prediction": {"type": "content", "content": "Ho"}}),
]


@pytest.fixture(scope="module")
def priced() -> Iterator[Server]:
    with running(price_per_hour=1.0) as server:
        yield server


@pytest.mark.parametrize(("path", "fields"), BODIES)
def test_responses_have_the_described_fields(
    priced: Server, path: str, fields: dict[str, Any]
) -> None:
    """The types allow no other fields, and each field that a response must have is there."""
    kind = ChatCompletion if "chat" in path else TextCompletion
    messages = {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {}
    response = priced.http.post(path, json={"max_tokens": 3, **messages, **fields})
    assert response.status_code == 200, response.text
    found = kind.model_validate(response.json(), strict=True)
    assert found.model_dump(mode="json", exclude_unset=True) == response.json()


def test_models_have_the_described_fields(server: Server, document: dict[str, Any]) -> None:
    ModelList.model_validate(server.http.get("/v1/models").json(), strict=True)
    Model.model_validate(server.http.get("/v1/models/counter").json(), strict=True)
    content = document["paths"]["/v1/models"]["get"]["responses"]["200"]["content"]
    assert content["application/json"]["schema"] == {"$ref": "#/components/schemas/ModelList"}


class Described:
    """Requests to a server whose answers are checked against the types of its /openapi.json."""

    def __init__(self, server: Server, document: dict[str, Any]) -> None:
        self._http = server.http
        self._document = document

    def __call__(self, method: str, template: str, id_: str = "", **options: Any) -> Any:
        path = re.sub(r"\{\w+\}", id_, template)
        response = self._http.request(method, path, **options)
        assert response.status_code == 200, response.text
        described = self._document["paths"][template][method.lower()]["responses"]["200"]
        name = described["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        found = getattr(api_response_types, name).model_validate(response.json(), strict=True)
        assert found.model_dump(mode="json", exclude_unset=True) == response.json()
        return response.json()


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Described]:
    card = replace(CARD, chat_template=HERMES)
    with running(card=card, data_dir=str(tmp_path_factory.mktemp("data"))) as server:
        yield Described(server, server.http.get("/openapi.json").json())


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"SAY({text})YAS"}]


TEXTS = ("Yes.", f"<think>Hm.</think>Let me see. {CALL_TEXT}")
FUNCTION = {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("max_tokens", [4, 300])
def test_responses_of_other_apis_have_the_described_fields(
    described: Described, text: str, max_tokens: int
) -> None:
    messages, tool = said(text), {"type": "function", "function": FUNCTION}
    path = "/v1/responses"
    created = described(
        "POST",
        path,
        json={
            "input": messages,
            "max_output_tokens": max_tokens,
            "tools": [{"type": "function", **FUNCTION}],
            "metadata": {"a": "b"},
            "instructions": "Be brief.",
        },
    )
    described("GET", f"{path}/{{response_id}}", created["id"])
    described("DELETE", f"{path}/{{response_id}}", created["id"])
    body = {"messages": messages, "max_tokens": max_tokens}
    schema = {"name": "get_weather", "input_schema": FUNCTION["parameters"]}
    described("POST", "/v1/messages", json={**body, "model": "counter", "tools": [schema]})
    described("POST", "/v1/messages/count_tokens", json={"messages": messages, "model": "counter"})
    options = {"stream": False, "model": "counter", "options": {"num_predict": max_tokens}}
    described("POST", "/api/chat", json={"messages": messages, "tools": [tool], **options})
    described("POST", "/api/generate", json={"prompt": messages[0]["content"], **options})


def test_ollamas_lists_have_the_described_fields(described: Described) -> None:
    described("GET", "/api/tags")
    described("GET", "/api/version")
    described("GET", "/version")
    described("POST", "/api/show", json={"model": "counter"})


def test_files_and_batches_have_the_described_fields(described: Described) -> None:
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions"}
    good = json.dumps({**line, "body": {"model": "counter", "prompt": "Hi", "max_tokens": 2}})
    form = {"purpose": "batch", "expires_after[anchor]": "created_at"}
    form["expires_after[seconds]"] = "3600"
    for content, status in ((good, "completed"), ("{", "failed")):
        upload = {"data": form, "files": {"file": ("in.jsonl", content.encode())}}
        file = described("POST", "/v1/files", **upload)
        described("GET", "/v1/files/{file_id}", file["id"])
        body = {"input_file_id": file["id"], "endpoint": "/v1/completions"}
        body |= {"completion_window": "24h", "metadata": {"a": "b"}}  # type: ignore[dict-item]
        batch = described("POST", "/v1/batches", json=body)

        def has_ended(batch_id: str = batch["id"], expected: str = status) -> bool:
            found = described("GET", "/v1/batches/{batch_id}", batch_id)
            assert found["status"] in ("validating", "in_progress", "finalizing", expected)
            return bool(found["status"] == expected)

        wait_until(has_ended)
    described("GET", "/v1/batches")
    described("GET", "/v1/files")
    described("DELETE", "/v1/files/{file_id}", file["id"])


def test_a_cancelled_batch_has_the_described_fields(described: Described) -> None:
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions"}
    slow = {"model": "counter", "prompt": "SLOW", "max_tokens": 1500, "ignore_eos": True}
    upload = {"file": ("in.jsonl", json.dumps({**line, "body": slow}).encode())}
    file = described("POST", "/v1/files", data={"purpose": "batch"}, files=upload)
    body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = described("POST", "/v1/batches", json=body)
    described("POST", "/v1/batches/{batch_id}/cancel", batch["id"])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat"])
def test_errors_have_the_described_fields(
    server: Server, document: dict[str, Any], path: str
) -> None:
    content = document["paths"][path]["post"]["responses"]["default"]["content"]
    name = content["application/json"]["schema"]["$ref"].rpartition("/")[2]
    schema, error = document["components"]["schemas"][name], server.http.post(path, json={}).json()
    assert error.keys() == set(schema["required"])
    inner = schema["properties"]["error"]
    assert inner["type"] == ("object" if isinstance(error["error"], dict) else "string")
    if inner["type"] == "object":
        assert error["error"].keys() == set(inner["required"])


def test_every_described_operation_exists(server: Server, document: dict[str, Any]) -> None:
    for method, path, _ in operations(document):
        url = re.sub(r"\{\w+\}", "nothing", path)
        response = server.http.request(method, url, content=b"{")
        assert response.status_code != 405, path
        assert response.status_code < 500, (path, response.text)
        assert "there is nothing at" not in response.text, path


def test_the_page_loads_only_its_own_files(server: Server) -> None:
    page = server.http.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "unsafe" not in policy
    assert "//" not in page.text.replace("<!doctype html>", "")
    for name in re.findall(r'(?:src|href)="([^"]+)"', page.text):
        file = server.http.get(f"/{name}")
        assert file.status_code == 200
        again = server.http.get(f"/{name}", headers={"If-None-Match": file.headers["etag"]})
        assert again.status_code == 304
    assert server.http.get("/docs/nothing.js").status_code == 404
    assert server.http.get("/docs/..%2fkeys.py").status_code == 404
    assert server.http.head("/docs").status_code == 200


def test_docs_need_no_key() -> None:
    with running(api_key=("one",), root_path="/llm") as server:
        document = server.http.get("/openapi.json").json()
        assert document["security"] == [{"key": []}]
        assert document["servers"] == [{"url": "/llm"}]
        for path in ("/docs", "/docs/docs.js", "/docs/docs.css", "/docs/icon.svg"):
            assert server.http.get(path).status_code == 200
        assert server.http.get("/docs/other").status_code == 401


@pytest.mark.skipif(find_chromium() is None, reason="no Chromium is installed")
def test_the_page_shows_every_operation(
    server: Server, document: dict[str, Any], tmp_path: Path
) -> None:
    with open_browser(tmp_path / "profile") as page:
        page.open(f"{server.url}/docs")
        count = len(list(operations(document)))
        page.wait(f"document.querySelectorAll('details').length === {count}")
        page.click("details:has(.post) summary")
        shown = page.text("details[open]")
        assert "/v1/chat/completions" in shown
        assert "messages.role" in shown
        page.resize(1000, 1400)
        page.screenshot(tmp_path / "docs.png")
        page.fill("#search", "input_file_id")
        assert page.eval("[...document.querySelectorAll('details:not([hidden])')].length") == 1
        page.resize(400, 800, is_phone=True)
        assert page.eval("document.documentElement.scrollWidth <= innerWidth")
        assert page.complaints == []
