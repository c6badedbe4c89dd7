"""Grammars that a client must not be able to stop the server with, over HTTP."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.serve.conftest import Server, running, wait_until
from tests.serve.fakes import Options, counting
from tests.serve.test_bad_input import error_of

pytest.importorskip("llguidance")

ENDLESS = {"type": "integer", "multipleOf": 99999937}
FORMAT = {"type": "json_schema", "json_schema": {"name": "endless", "schema": ENDLESS}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


HOSTILE = {
    "endless": ({"response_format": FORMAT}, "more than 1 s of CPU time"),
    "deep": ({"guided_json": nested(90)}, "more than 64 levels"),
    "deep text": ({"guided_json": json.dumps(nested(450))}, "more than 64 levels"),
    "itself": ({"guided_json": {"$ref": "#"}}, "no text satisfies it"),
    "repeats": ({"guided_regex": "((a{1,1000}){1,1000}){1,1000}"}, "too many expressions"),
    "groups": ({"guided_regex": "(" * 9000 + "a" + ")" * 9000}, "nested parentheses"),
    "long": ({"guided_regex": "a" * 70_000}, "at most 65,536"),
    "gbnf": ({"guided_grammar": "root ::= " + "(" * 5000 + "x" + ")" * 5000}, "nested too deeply"),
    "choices": ({"guided_choice": ["x" * 30] * 3000}, "at most 65,536"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_bad_requests(server: Server, name: str, stream: bool) -> None:
    body, says = HOSTILE[name]
    error = error_of(server.chat(stream=stream, **body), 400)
    assert error["param"] == next(iter(body))
    assert error["message"].startswith(error["param"])
    assert says in error["message"]


def test_three_thousand_choices_are_accepted(server: Server) -> None:
    assert server.chat(guided_choice=[f"choice {i}" for i in range(3000)]).status_code == 200


def test_a_hundred_equal_requests_are_compiled_once(server: Server) -> None:
    before = server.metric("grammar_compilations_total")
    with ThreadPoolExecutor(20) as pool:
        accepted = [
            pool.submit(server.chat, guided_regex="once+", max_tokens=2) for _ in range(100)
        ]
        assert {each.result().status_code for each in accepted} == {200}
        wait_until(lambda: server.metric("grammar_compilations_total") == before + 1)
        bad = [pool.submit(server.chat, guided_regex="(once") for _ in range(100)]
        assert {each.result().status_code for each in bad} == {400}
    wait_until(lambda: server.metric("grammar_compilations_total") == before + 2)


def test_streams_continue_while_a_grammar_compiles() -> None:
    """Explain reports the blocker of the waiting request."""
    build = counting(Options(grammar_compile_timeout=600.0))
    with ThreadPoolExecutor(1) as pool:
        with running(build, shutdown_timeout=0.1) as server:
            waiting = pool.submit(server.chat, response_format=FORMAT, request_id="endless")
            wait_until(lambda: server.metric("grammar_requests_waiting") == 1)
            request = {"model": "counter", "prompt": "Hi", "max_tokens": 300, "stream": True}
            chunks = list(server.openai.completions.create(**request))
            assert "".join(chunk.choices[0].text for chunk in chunks).count("a") >= 300 // 26
            assert server.chat(guided_regex="a+").status_code == 200
            assert not waiting.done()
            explanation = server.http.get("/v1/requests/chatcmpl-endless/explain").json()
            assert "grammar" in explanation["completions"][0]["queue"]["blocked_by"]
        assert waiting.result().status_code == 503


SET = {"type": "object", "properties": {"tags": {"type": "array", "uniqueItems": True}}}


@pytest.mark.parametrize("stream", [False, True])
def test_keywords_that_are_not_enforced_are_named(server: Server, stream: bool, caplog) -> None:
    response = server.chat(guided_json=SET, stream=stream, max_tokens=2)
    assert response.status_code == 200
    named = "uniqueItems at #/properties/tags"
    assert response.headers["X-Windlass-Schema-Relaxed"] == named
    assert named in caplog.text
    assert "X-Windlass-Schema-Relaxed" not in server.chat(guided_json=True, max_tokens=2).headers


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_a_schema_beside_the_type(server: Server, kind: str) -> None:
    form = {"type": kind, "schema": {"type": "array", "uniqueItems": True}}
    response = server.chat(max_tokens=1, response_format=form)
    assert response.headers["X-Windlass-Schema-Relaxed"] == "uniqueItems at #"


def test_empty_grammars_of_other_servers_have_no_effect(server: Server) -> None:
    empty = {"grammar": "", "json_schema": "", "ebnf": "", "regex": ""}
    response = server.chat(max_tokens=1, ignore_eos=True, **empty)
    assert response.status_code == 200, response.text
    assert "X-Windlass-Unknown-Fields" not in response.headers
    assert server.complete(max_tokens=1, use_beam_search=True, **empty).status_code == 200


def test_such_a_header_is_short_and_ascii(server: Server) -> None:
    items = {f"é\n{i}": {"not": {}} for i in range(200)}
    response = server.chat(guided_json={"type": "object", "properties": items}, max_tokens=2)
    header = response.headers["X-Windlass-Schema-Relaxed"]
    assert header.startswith(r"not at #/properties/\u00e9\u000a0, ")


def test_a_strict_server_refuses_them() -> None:
    with running(counting(Options(schema_strictness="strict"))) as server:
        error = error_of(server.chat(guided_json=SET), 400)
        assert "uniqueItems at #/properties/tags" in error["message"]
        assert error["param"] == "guided_json"
