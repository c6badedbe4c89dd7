"""Embeddings, scores and reranking over HTTP, with a tiny model and real clients."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import ollama
import openai
import pytest
import torch

from tests.pooling_models import CONTEXT, HIDDEN, add_modules, save_model, vector
from tests.serve.conftest import Server, running, wait_until
from tests.serve.test_openapi import Described
from tests.serve.tiny_model import serving
from windlass.errors import ConfigError
from windlass.serve.response_types import EmbeddingList, Ranking, ScoreList

TEXTS = {"t5 t6": [5, 6, 2], "t7": [7, 2], "t8 t9 t10": [8, 9, 10, 2]}


OPTIONS: dict[str, Any] = {"num_blocks": 64, "num_threads": 1, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    folder = tmp_path_factory.mktemp("model")
    reference = save_model(folder)
    add_modules(folder, "lasttoken")
    return folder, reference


@pytest.fixture(scope="module")
def server(model: tuple[Path, torch.nn.Module]) -> Iterator[Server]:
    overrides = {"matryoshka_dimensions": [8, 16]}
    options = {"price_per_hour": 3600.0, "enable_request_id_headers": True}
    with serving(model[0], serve=options, hf_overrides=overrides, **OPTIONS) as server:
        yield server


@pytest.fixture(scope="module")
def want(model: tuple[Path, torch.nn.Module]) -> torch.Tensor:
    return torch.stack([vector(model[1], ids) for ids in TEXTS.values()])


def embed(server: Server, **body: Any) -> Any:
    response = server.http.post("/v1/embeddings", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_ollamas_vectors_have_the_described_fields(server: Server, want: torch.Tensor) -> None:
    described = Described(server, server.http.get("/openapi.json").json())
    name = server.openai.models.list().data[0].id
    several = described("POST", "/api/embed", json={"model": name, "input": list(TEXTS)})
    torch.testing.assert_close(torch.tensor(several["embeddings"]), want, rtol=1e-4, atol=1e-5)
    one = described("POST", "/api/embeddings", json={"model": name, "prompt": next(iter(TEXTS))})
    vector = torch.nn.functional.normalize(torch.tensor(one["embedding"]), dim=0)
    torch.testing.assert_close(vector, want[0], rtol=1e-4, atol=1e-5)


def test_the_openai_client(server: Server, want: torch.Tensor) -> None:
    name = server.openai.models.list().data[0].id
    made = server.openai.embeddings.create(model=name, input=list(TEXTS))
    got = torch.tensor([each.embedding for each in made.data])
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    assert [each.index for each in made.data] == [0, 1, 2]
    assert made.model == name
    assert made.usage.prompt_tokens == made.usage.total_tokens == 9
    short = server.openai.embeddings.create(model=name, input="t7", dimensions=8)
    cut = torch.nn.functional.normalize(want[1, :8], dim=0)
    torch.testing.assert_close(torch.tensor(short.data[0].embedding), cut, atol=1e-4, rtol=1e-4)
    with pytest.raises(openai.BadRequestError, match="8, 16; got 12"):
        server.openai.embeddings.create(model=name, input="t7", dimensions=12)
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        server.openai.embeddings.create(model="another", input="t7")


def test_ollamas_client(server: Server, want: torch.Tensor) -> None:
    client = ollama.Client(host=server.url)
    name = client.list().models[0].model or ""
    made = client.embed(model=f"{name}:latest", input=list(TEXTS), options={"num_ctx": 64})
    torch.testing.assert_close(torch.tensor(made.embeddings), want, atol=1e-5, rtol=1e-5)
    assert (made.model, made.prompt_eval_count) == (name, 9)
    assert made.total_duration
    (short,) = client.embed(model=name, input="t7", dimensions=8).embeddings
    assert len(short) == 8
    old = torch.tensor(client.embeddings(model=name, prompt="t5 t6").embedding)
    assert old.norm() > 2
    torch.testing.assert_close(
        torch.nn.functional.normalize(old, dim=0), want[0], atol=1e-4, rtol=1e-4
    )


def test_ollamas_client_gets_errors(server: Server) -> None:
    client = ollama.Client(host=server.url)
    name = client.list().models[0].model or ""
    long = " ".join(["t5"] * (CONTEXT + 8))
    (cut,) = client.embed(model=name, input=long).embeddings
    assert len(cut) == HIDDEN
    for call, message in (
        (lambda: client.embed(model=name, input=long, truncate=False), str(CONTEXT)),
        (lambda: client.embed(model="another", input="t5"), "does not exist"),
        (lambda: client.embed(model=name, input="t5", options={"mystery": 1}), "mystery"),
        (lambda: client.embed(model=name, input=[]), "input is empty"),
    ):
        with pytest.raises(ollama.ResponseError, match=message):
            call()


def test_every_form_of_input_gives_the_same(server: Server, want: torch.Tensor) -> None:
    ids = list(TEXTS.values())
    for given, count in (("t5 t6", 1), (list(TEXTS), 3), (ids[0], 1), (ids, 3)):
        data = embed(server, input=given)["data"]
        got = torch.tensor([each["embedding"] for each in data])
        torch.testing.assert_close(got, want[:count], atol=1e-5, rtol=1e-5)
    (item,) = embed(server, input="t5 t6", encoding_format="base64")["data"]
    got = torch.tensor(struct.unpack(f"<{HIDDEN}f", base64.b64decode(item["embedding"])))
    torch.testing.assert_close(got, want[0], atol=1e-5, rtol=1e-5)
    raw = torch.tensor(embed(server, input="t5 t6", normalize=False)["data"][0]["embedding"])
    assert raw.norm() > 2
    torch.testing.assert_close(
        torch.nn.functional.normalize(raw, dim=0), want[0], atol=1e-4, rtol=1e-4
    )
    bare = embed(server, input="t5 t6", add_special_tokens=False)
    assert bare["usage"]["prompt_tokens"] == 2


def test_truncation_keeps_the_last_tokens(server: Server) -> None:
    cut = embed(server, input="t4 t5 t6", truncate_prompt_tokens=3)
    assert cut["usage"]["prompt_tokens"] == 3
    assert cut["data"] == embed(server, input="t5 t6")["data"]
    long = " ".join(["t9"] * CONTEXT)  # and the token at the end
    fitted = embed(server, input=long, truncate_prompt_tokens=-1)
    assert fitted["usage"]["prompt_tokens"] == CONTEXT


BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "no input": ({}, "input is missing", "input"),
    "empty list": ({"input": []}, "input is empty", "input"),
    "empty ids": ({"input": [[]]}, "no tokens", "input"),
    "nothing kept": ({"input": "t5", "truncate_prompt_tokens": 0}, "no tokens", "input"),
    "mixed": ({"input": ["t5", 7]}, "mixes kinds", "input"),
    "an object": ({"input": {"a": 1}}, "must be a string", "input"),
    "too long": ({"input": [[5] * 129]}, "129 tokens, and the model's context holds 128", "input"),
    "bad id": ({"input": [[5, 97]]}, "ids go from 0 to 96", "input"),
    "format": ({"input": "t5", "encoding_format": "hex"}, "'float' or 'base64'", "encoding_format"),
    "dimensions": ({"input": "t5", "dimensions": 4096}, "8, 16; got 4096", "dimensions"),
    "no dimension": ({"input": "t5", "dimensions": 0}, "greater than or equal", "dimensions"),
    "too many": ({"input": ["t5"] * 2049}, "at most 2,048", "input"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_names_the_field(name: str, server: Server) -> None:
    body, message, param = BAD[name]
    response = server.http.post("/v1/embeddings", json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert message in error["message"]
    assert error["param"] == param


def test_more_inputs_than_sequences(server: Server, model: tuple[Path, torch.nn.Module]) -> None:
    """They go to the engine in groups, and come back in order."""
    inputs = [[3 + i % 60, 4 + i // 60, 2] for i in range(150)]
    data = embed(server, input=inputs)["data"]
    assert [each["index"] for each in data] == list(range(150))
    for i in (0, 77, 149):
        got = torch.tensor(data[i]["embedding"])
        torch.testing.assert_close(got, vector(model[1], inputs[i]), atol=1e-5, rtol=1e-5)


def test_embeddings_run_beside_completions(server: Server, want: torch.Tensor) -> None:
    def complete(i: int) -> list[int]:
        body = {"max_tokens": 30, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
        response = server.complete(prompt=f"t{i} t4", **body)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["token_ids"]

    alone = [complete(i) for i in range(3)]
    with ThreadPoolExecutor(6) as threads:
        texts = [threads.submit(complete, i) for i in range(3)]
        vectors = [threads.submit(embed, server, input=list(TEXTS)) for _ in range(3)]
        assert [each.result() for each in texts] == alone
        for each in vectors:
            got = torch.tensor([item["embedding"] for item in each.result()["data"]])
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_requests_are_counted_traced_and_paid(server: Server) -> None:
    before = {
        name: server.metric(name)
        for name in ("prompt_tokens_total", "requests_received_total", "generation_tokens_total")
    }
    success = server.metric("request_success_total", finished_reason="stop")
    response = server.http.post(
        "/v1/embeddings",
        json={"input": [[11, 12, 13], [14]], "request_id": "mine", "include_cost": True},
    )
    body = response.json()
    assert body["id"] == response.headers["x-request-id"] == "embd-mine"
    assert body["usage"]["cost"] > 0
    assert server.metric("prompt_tokens_total") == before["prompt_tokens_total"] + 4
    assert server.metric("requests_received_total") == before["requests_received_total"] + 1
    assert server.metric("request_success_total", finished_reason="stop") == success + 2
    assert server.metric("requests_in_flight") == 0
    explained = server.http.get("/v1/requests/embd-mine/explain").json()
    assert len(explained["completions"]) == 2
    wait_until(lambda: server.metric("num_requests_running") == 0)
    assert server.metric("generation_tokens_total") == before["generation_tokens_total"]
    spent = server.http.get("/cost").json()
    assert spent["by_key"]


def test_cosine_scores(server: Server, want: torch.Tensor) -> None:
    texts = list(TEXTS)
    cosines = (want[0] @ want.T).tolist()
    for path in ("/score", "/v1/score"):
        body = {"text_1": texts[0], "text_2": texts}
        found = server.http.post(path, json=body).json()
        assert [each["score"] for each in found["data"]] == pytest.approx(cosines, abs=1e-5)
        ScoreList.model_validate(found, strict=True)  # as /openapi.json describes it
        assert found["usage"]["total_tokens"] == 9  # each text once
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        body = {"query": texts[0], "documents": [{"text": texts[1]}, *texts[2:], texts[0]]}
        ranking = server.http.post(path, json=body).json()
        Ranking.model_validate(ranking, strict=True)
        results = ranking["results"]
        scores = [each["relevance_score"] for each in results]
        assert scores == pytest.approx(sorted(cosines, reverse=True), abs=1e-5)
        assert results[0]["index"] == 2
        assert results[0]["document"] == {"text": texts[0]}
    body |= {"top_n": 1, "return_documents": False}
    (best,) = server.http.post("/rerank", json=body).json()["results"]
    assert set(best) == {"index", "relevance_score"}
    long = " ".join(["t9"] * 2 * CONTEXT)
    for path, body, message, param in (
        (
            "/score",
            {"text_1": ["t5", "t6"], "text_2": ["t5", "t6", "t7"]},
            "2 texts and text_2 3",
            "text_1",
        ),
        ("/score", {"text_1": [], "text_2": "t5"}, "nothing to score", "text_1"),
        ("/score", {"text_1": "t5", "text_2": []}, "nothing to score", "text_2"),
        ("/score", {"text_1": long, "text_2": "t5"}, "context holds 128", "text_1"),
        ("/score", {"text_1": "t5", "text_2": [long]}, "context holds 128", "text_2"),
        ("/rerank", {"query": "t5", "documents": []}, "documents is empty", "documents"),
        ("/rerank", {"query": "t5", "documents": [{"title": "x"}]}, "field 'text'", "documents"),
        ("/rerank", {"query": "t5", "documents": ["t5"] * 2049}, "at most 2,048", "documents"),
        ("/rerank", {"query": long, "documents": ["t5"]}, "context holds 128", "query"),
    ):
        response = server.http.post(path, json=body)
        assert response.status_code == 400, response.text
        assert message in response.json()["error"]["message"]
        assert response.json()["error"]["param"].startswith(param)


def test_embeddings_and_scores_are_explained(server: Server) -> None:
    embedded = embed(server, input=list(TEXTS))
    EmbeddingList.model_validate(embedded, strict=True)  # as /openapi.json describes it
    scored = server.http.post("/score", json={"text_1": "t5", "text_2": "t6"}).json()
    for made, count in ((embedded, 3), (scored, 2)):
        explained = server.http.get(f"/v1/requests/{made['id']}/explain").json()
        assert explained["state"] == "ended"
        assert "computing the prompt" in explained["sentence"] or explained["dominated_by"]
        parts = explained["completions"]
        assert [each["index"] for each in parts] == list(range(count))
        assert sum(each["prompt_tokens"] for each in parts) == made["usage"]["prompt_tokens"]
        assert all(each["output_tokens"] == 0 for each in parts)


def test_a_classification_head(tmp_path: Path) -> None:
    """With a template, which the operator sets; generating and embedding are refused."""
    reference = save_model(tmp_path, "Qwen3ForSequenceClassification", num_labels=1)
    template = tmp_path / "score.jinja"
    template.write_text("t30 {{ messages[0].content }} t31 {{ messages[1].content }} t32")
    with serving(tmp_path, serve={"score_template": str(template)}, **OPTIONS) as server:
        body = {"query": "t5", "documents": ["t6", "t7 t8"]}
        results = server.http.post("/v1/rerank", json=body).json()["results"]
        with torch.inference_mode():
            logits = [
                reference(torch.tensor([[30, 5, 31, *ids, 32]])).logits[0, 0]
                for ids in ([6], [7, 8])
            ]
        wanted = torch.sigmoid(torch.stack(logits)).tolist()
        assert {each["index"]: each["relevance_score"] for each in results} == pytest.approx(
            dict(enumerate(wanted)), abs=1e-5
        )
        plain = server.http.post(
            "/v1/score", json={"text_1": "t5", "text_2": "t6", "use_activation": False}
        ).json()
        assert plain["data"][0]["score"] == pytest.approx(logits[0].item(), abs=1e-4)
        refused = server.http.post("/v1/embeddings", json={"input": "t5"})
        assert refused.status_code == 400
        assert "/v1/rerank" in refused.json()["error"]["message"]
        refused = server.complete(prompt="t5")
        assert refused.status_code == 400
        assert "generates no text" in refused.json()["error"]["message"]


def test_a_template_for_a_model_without_a_head_is_refused(
    model: tuple[Path, torch.nn.Module], tmp_path: Path
) -> None:
    template = tmp_path / "score.jinja"
    template.write_text("{{ messages[0].content }} {{ messages[1].content }}")
    with (
        pytest.raises(AssertionError) as caught,
        serving(model[0], serve={"score_template": str(template)}, **OPTIONS),
    ):
        pass
    assert isinstance(caught.value.__cause__, ConfigError)


def test_a_client_that_leaves_and_a_step_that_fails() -> None:
    """Neither leaves a request behind; the counting model takes 10 ms for a step of SLOW inputs."""
    with running() as server:
        body = {"input": [f"SLOW {i}" for i in range(2048)]}
        with pytest.raises(httpx.ReadTimeout):
            server.http.post("/v1/embeddings", json=body, timeout=0.5)
        wait_until(lambda: server.metric("request_outcomes_total", outcome="aborted") == 1)
        wait_until(lambda: server.metric("num_requests_running") == 0)
        assert server.metric("num_requests_waiting") == 0
        failed = server.http.post("/v1/embeddings", json={"input": ["fine", "CRASH"]})
        assert failed.status_code == 500
        assert embed(server, input="fine")["data"][0]["embedding"] is not None
        assert server.metric("requests_in_flight") == 0
