"""No body causes a 500: random bodies, mostly almost valid ones, with a fixed seed."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.serve.conftest import Server
from tests.serve.test_prepare import chat, complete, preparer_of
from windlass.errors import RequestError
from windlass.serve import messages
from windlass.serve.fields import _IGNORED, _NEUTRAL
from windlass.serve.llama_api import LlamaCompletionRequest, LlamaInfillRequest
from windlass.serve.protocol import ChatRequest, CompletionRequest
from windlass.text.chat_template import ChatTemplate

ENDPOINTS = [
    "/v1/chat/completions",
    "/v1/completions",
    "/tokenize",
    "/detokenize",
    "/apply-template",
    "/completion",
    "/infill",
]
MODELS = (ChatRequest, CompletionRequest, LlamaCompletionRequest, LlamaInfillRequest)
FIELDS = sorted(
    {*(name for model in MODELS for name in model.model_fields), *_NEUTRAL, *_IGNORED, "content"}
    - {"messages", "prompt", "max_tokens"}
)
# Values that overflow, are empty, or have an unexpected type.
EDGES = [
    *(sign * 2**bits + off for bits in (15, 31, 32, 53, 63, 64, 100) for sign in (1, -1) for off in (-1, 0, 1)),
    *(0, -1, 1, 0.0, -0.0, 5e-324, 1.7e308, -1.5, 0.5, 1e-40, math.nan, math.inf, -math.inf),
    *(None, True, False, "", "a", "\\ud800", "\\ud83d\\ude00", "\\u0000", "text", "none", "auto", "json_object"),
    *([], {}, [[]], [None], [""], ["a"], [0], [-1], [2**63], {"": None}, {"1": 1}, {"-1": 0}, {"x": 1}),
    *({"type": "text"}, {"type": "json_object"}, {"type": "json_schema"}, {"regex": "["}),
    *({"type": "json_schema", "json_schema": {"schema": True}}, {"json": {}}, {"choice": [""]}),
    {"json_object": 5},
    {"include_usage": True},
]  # fmt: skip
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=10,
)
VALUES = st.sampled_from(EDGES) | ANYTHING
ROLES = st.sampled_from(["system", "developer", "user", "assistant", "tool", "wizard", None])
MESSAGES = st.lists(
    st.dictionaries(
        st.sampled_from(["role", "content", "name", "tool_calls", "reasoning_content", "x"]), VALUES
    ).flatmap(lambda rest: ROLES.map(lambda role: {"content": "a", "role": role, **rest}))
    | ANYTHING,
    max_size=3,
)
PROMPTS = st.text(max_size=20) | st.lists(st.integers(-1, 300), max_size=5) | VALUES
BODIES = st.fixed_dictionaries(
    {"max_tokens": st.just(1) | st.just(1) | st.just(1) | VALUES},
    optional={
        "messages": st.just([{"role": "user", "content": "a"}]) | MESSAGES | VALUES,
        "prompt": PROMPTS,
        "tokens": st.lists(st.integers(-1, 300), max_size=5) | VALUES,
    },
).flatmap(
    lambda body: st.dictionaries(
        st.sampled_from(FIELDS) | st.text(max_size=8), VALUES, max_size=3
    ).map(lambda more: {**more, **body})
)


def encoded(body: Any) -> bytes:
    """Encode as JSON with Python's extensions: NaN, surrogates."""
    return json.dumps(body, ensure_ascii=False).encode(errors="surrogatepass")


def check_response(server: Server, path: str, raw: bytes) -> None:
    response = server.http.post(path, content=raw)
    assert response.status_code in (200, 400, 404, 429), (raw[:500], response.text[:500])
    if response.status_code != 200:
        assert sorted(response.json()["error"]) == ["code", "message", "param", "type"]


_SETTINGS = settings(
    max_examples=60,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("path", ENDPOINTS)
def test_no_body_causes_a_500(server: Server, path: str) -> None:
    @_SETTINGS
    @given(body=BODIES)
    @example(
        body={
            "prompt": "a",
            "messages": [{"role": "user", "content": "a"}],
            "seed": 2**63 - 1,
            "n": 2,
            "max_tokens": 1,
        }
    )
    def attempt(body: dict[str, Any]) -> None:
        check_response(server, path, encoded(body))

    attempt()
    assert server.http.get("/health/ready").status_code == 200


@pytest.mark.parametrize("path", ENDPOINTS)
def test_no_bytes_cause_a_500(server: Server, path: str) -> None:
    @_SETTINGS
    @given(raw=st.binary(max_size=50) | BODIES.flatmap(lambda body: _damaged(encoded(body))))
    @example(raw=b'{"prompt": "\\ud800"}')
    @example(raw=b'{"prompt": "a", "seed": 1e999}')
    @example(raw=b'{"prompt": "a", "n": ' + b"9" * 10_000 + b"}")
    @example(raw=b'{"prompt":' + b"[" * 100_000)
    def attempt(raw: bytes) -> None:
        check_response(server, path, raw)

    attempt()


def _damaged(raw: bytes) -> st.SearchStrategy[bytes]:
    """`raw` with a part replaced or removed."""
    at = st.integers(0, len(raw))
    return st.tuples(at, at, st.binary(max_size=4)).map(
        lambda cut: raw[: cut[0]] + cut[2] + raw[cut[1] :]
    )


@pytest.mark.parametrize("field", [*FIELDS, "max_tokens", "prompt", "messages"])
def test_every_accepted_field_can_be_sent_to_the_engine(field: str) -> None:
    """An undecodable message ends the engine, so every accepted body must be encodable."""
    preparer = preparer_of(template=ChatTemplate("{{ messages[0].content }}", {}))
    for value in EDGES:
        for attempt in (complete, chat):
            try:
                prepared = attempt(preparer, **{"max_tokens": 1, field: value})
            except RequestError:
                continue
            sent = [messages.Add(request) for request in prepared.requests]
            assert messages.decode_to_engine(messages.encode(sent)) == sent
