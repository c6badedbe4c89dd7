"""llama-server's own API: the shapes are those of llama.cpp's server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.conftest import Server
from tests.serve.tiny_model import FIM_IDS, TEMPLATE, serving, write_tiny_model

# The keys of responses of llama.cpp's server (b11549) that are the same in all settings.
FINAL = [
    "index",
    "content",
    "tokens",
    "id_slot",
    "stop",
    "model",
    "tokens_predicted",
    "tokens_evaluated",
    "generation_settings",
    "prompt",
    "has_new_line",
    "truncated",
    "stop_type",
    "stopping_word",
    "tokens_cached",
    "timings",
]
PARTIAL = ["index", "content", "tokens", "stop", "id_slot", "tokens_predicted", "tokens_evaluated"]
TIMINGS = [
    "cache_n",
    "prompt_n",
    "prompt_ms",
    "prompt_per_token_ms",
    "prompt_per_second",
    "predicted_n",
    "predicted_ms",
    "predicted_per_token_ms",
    "predicted_per_second",
]
SETTINGS = [
    "seed",
    "temperature",
    "dynatemp_range",
    "dynatemp_exponent",
    "top_k",
    "top_p",
    "min_p",
    "top_n_sigma",
    "xtc_probability",
    "xtc_threshold",
    "typical_p",
    "repeat_last_n",
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
    "dry_multiplier",
    "dry_base",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "dry_sequence_breakers",
    "mirostat",
    "mirostat_tau",
    "mirostat_eta",
    "stop",
    "max_tokens",
    "n_predict",
    "n_keep",
    "n_discard",
    "ignore_eos",
    "stream",
    "logit_bias",
    "n_probs",
    "min_keep",
    "grammar",
    "samplers",
    "timings_per_token",
    "post_sampling_probs",
    "lora",
]
PROPS = [
    "default_generation_settings",
    "total_slots",
    "model_alias",
    "model_path",
    "modalities",
    "chat_template",
    "chat_template_caps",
    "bos_token",
    "eos_token",
    "build_info",
    "is_sleeping",
    "endpoint_slots",
    "endpoint_props",
    "endpoint_metrics",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(folder) as each:
        yield each


@pytest.fixture(scope="module")
def letters(server: Server) -> list[int]:
    """The tokens of letters: the tiny model's bytes are not UTF-8 otherwise."""
    body = {"content": "abcdefghijklmnopqrstuvwxyz"}
    tokens: list[int] = server.http.post("/tokenize", json=body).json()["tokens"]
    return tokens


def complete(server: Server, path: str = "/completion", **fields: Any) -> httpx.Response:
    return server.http.post(path, json={"prompt": "Hello", **fields})


def ok(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json()


def test_a_completion_has_the_shape_of_llama_server(server: Server) -> None:
    for path in ("/completion", "/completions"):
        found = ok(complete(server, path, n_predict=5, temperature=0, ignore_eos=True))
        assert list(found) == FINAL
        assert set(found["timings"]) == set(TIMINGS)
        assert set(found["generation_settings"]) == set(SETTINGS)
        assert (found["stop"], found["stop_type"], found["stopping_word"]) == (True, "limit", "")
        assert (found["tokens_predicted"], found["tokens_evaluated"]) == (5, 5)
        assert found["generation_settings"]["n_predict"] == 5
        assert (found["tokens"], found["prompt"]) == ([], "Hello")
    assert found["timings"]["predicted_n"] == 5
    assert found["timings"]["prompt_ms"] > 0


def test_defaults_are_those_of_llama_server(server: Server) -> None:
    settings = ok(complete(server, n_predict=1))["generation_settings"]
    assert [settings[name] for name in ("temperature", "top_k", "top_p", "min_p")] == [
        0.8,
        40,
        0.95,
        0.05,
    ]
    whole = ok(complete(server, temperature=0))
    assert whole["tokens_predicted"] > 16  # no limit but the context
    plain = ok(complete(server, samplers=["temperature"], n_predict=1))["generation_settings"]
    assert (plain["top_k"], plain["top_p"], plain["min_p"]) == (0, 1.0, 0.0)


def test_the_text_is_that_of_the_openai_api(server: Server) -> None:
    body = {"temperature": 0, "seed": 1, "repeat_penalty": 1.2, "stop": ["zzz"]}
    found = ok(complete(server, n_predict=12, return_tokens=True, **body))
    body |= {"max_tokens": 12, "repetition_penalty": body.pop("repeat_penalty")}
    body |= {"top_k": 40, "top_p": 0.95, "min_p": 0.05, "return_token_ids": True}
    (choice,) = server.complete(prompt="Hello", **body).json()["choices"]
    assert (found["content"], found["tokens"]) == (choice["text"], choice["token_ids"])


def test_a_stream(server: Server) -> None:
    body = {"n_predict": 6, "temperature": 0, "ignore_eos": True, "n_probs": 2}
    whole = ok(complete(server, **body))
    response = complete(server, **body, stream=True, timings_per_token=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line]
    *parts, last = events
    assert "".join(part["content"] for part in parts) == whole["content"]
    assert [part["stop"] for part in parts] == [False] * len(parts)
    assert set(parts[0]) == {*PARTIAL, "completion_probabilities", "timings"}
    assert (list(last), last["content"], last["tokens"]) == (FINAL, "", [])
    streamed = [each for part in parts for each in part["completion_probabilities"]]
    assert [each["id"] for each in streamed] == [
        each["id"] for each in whole["completion_probabilities"]
    ]
    assert sum(len(part["tokens"]) for part in parts) == last["tokens_predicted"] == 6
    entry = whole["completion_probabilities"][0]
    assert list(entry) == ["id", "token", "bytes", "logprob", "top_logprobs"]
    assert entry["top_logprobs"][0]["id"] == entry["id"]


def test_how_completions_stop(server: Server, letters: list[int]) -> None:
    bias = [[token, 50] for token in letters]
    free = ok(complete(server, n_predict=8, temperature=0, logit_bias=bias))
    word = free["content"][4:6]
    found = ok(complete(server, n_predict=8, temperature=0, logit_bias=bias, stop=[word]))
    assert (found["stop_type"], found["stopping_word"]) == ("word", word)
    assert found["content"] == free["content"][: free["content"].index(word)]
    ended = ok(complete(server, n_predict=8, logit_bias=[["</s>", 100]]))
    assert (ended["stop_type"], ended["content"]) == ("eos", "")
    never = ok(complete(server, n_predict=8, temperature=0, logit_bias=[[word[0], False]]))
    assert word[0] not in never["content"]
    none = ok(complete(server, n_predict=0))
    assert (none["content"], none["stop_type"], none["tokens_predicted"]) == ("", "limit", 0)


def test_several_prompts_are_an_array(server: Server) -> None:
    tokens = server.http.post("/tokenize", json={"content": "Bye"}).json()["tokens"]
    found = ok(complete(server, prompt=["Hello", "Bye"], n_predict=3, temperature=0))
    assert [each["index"] for each in found] == [0, 1]
    one = ok(complete(server, prompt=tokens, n_predict=3, temperature=0))
    assert (one["content"], one["prompt"]) == (found[1]["content"], "Bye")
    mixed = ok(complete(server, prompt=[tokens[0], "ye"], n_predict=3, temperature=0))
    assert mixed["content"] == one["content"]
    kinds = ok(complete(server, prompt=["Hello", tokens], n_predict=3, temperature=0))
    assert [each["content"] for each in kinds] == [each["content"] for each in found]
    wrapped = ok(complete(server, prompt={"prompt_string": "Bye"}, n_predict=3, temperature=0))
    assert wrapped["content"] == one["content"]
    assert len(ok(complete(server, n_cmpl=3, n_predict=2))) == 3


def test_grammars(server: Server) -> None:
    found = ok(complete(server, grammar='root ::= "yes" | "no"', n_predict=8))
    assert found["content"] in ("yes", "no")
    assert found["stop_type"] == "eos"
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    found = ok(complete(server, json_schema=schema | {"additionalProperties": False}, n_predict=40))
    assert json.loads(found["content"])["a"] in (1, 2)


def test_cache_prompt_false_computes_the_prompt_again(server: Server) -> None:
    prompt = "A prompt that is long enough for several blocks of the cache. " * 2
    for cached, expected in ((True, False), (True, True), (False, False)):
        found = ok(complete(server, prompt=prompt, n_predict=1, cache_prompt=cached))
        assert (found["timings"]["cache_n"] > 0) is expected


def test_response_fields(server: Server) -> None:
    fields = ["content", "generation_settings/n_predict", "timings/predicted_n", "nothing/there"]
    found = ok(complete(server, n_predict=2, ignore_eos=True, response_fields=fields))
    assert list(found) == fields[:3]
    assert found["generation_settings/n_predict"] == found["timings/predicted_n"] == 2


def test_infill(server: Server) -> None:
    body = {"input_prefix": "ab", "input_suffix": "cd", "n_predict": 4, "temperature": 0}
    filled = ok(server.http.post("/infill", json=body))
    ids = server.http.post("/tokenize", json={"content": "abcd"}).json()["tokens"]
    fim = [FIM_IDS["prefix"], *ids[:2], FIM_IDS["suffix"], *ids[2:], FIM_IDS["middle"]]
    assert filled["tokens_evaluated"] == len(fim)
    plain = ok(complete(server, prompt=fim, n_predict=4, temperature=0))
    assert filled["content"] == plain["content"]
    extra = {"input_extra": [{"filename": "x.py", "text": "import y"}], "prompt": "start"}
    longer = ok(server.http.post("/infill", json=body | extra))
    assert longer["tokens_evaluated"] == len(
        [0, *"myproject\n", 0, *"x.py\n", *"import y", 0, *"filename\n", *fim, *"start"]
    )


def test_tokens_and_templates(server: Server) -> None:
    body = {"content": "aé", "add_special": True, "with_pieces": True}
    pieces = ok(server.http.post("/tokenize", json=body))["tokens"]
    assert [each["piece"] for each in pieces] == ["a", [0xC3], [0xA9]]
    tokens = [each["id"] for each in pieces]
    assert ok(server.http.post("/tokenize", json={"content": "aé"})) == {"tokens": tokens}
    assert ok(server.http.post("/detokenize", json={"tokens": tokens}))["content"] == "aé"
    messages = [{"role": "user", "content": "hi"}]
    assert ok(server.http.post("/apply-template", json={"messages": messages})) == {"prompt": "hi"}


def test_props_slots_and_health(server: Server) -> None:
    props = ok(server.http.get("/props"))
    assert set(props) == set(PROPS)
    assert set(props["default_generation_settings"]["params"]) == set(SETTINGS)
    assert (props["total_slots"], props["chat_template"]) == (8, TEMPLATE)
    slots = ok(server.http.get("/slots", params={"fail_on_no_slot": 1}))
    assert [slot["id"] for slot in slots] == list(range(8))
    assert not any(slot["is_processing"] for slot in slots)
    for path in ("/health", "/v1/health"):
        assert ok(server.http.get(path)) == {"status": "ok"}


def test_what_is_obeyed_in_part_is_named(server: Server) -> None:
    response = complete(
        server, n_predict=1, repeat_penalty=1.1, repeat_last_n=64, id_slot=0, n_keep=5
    )
    assert response.headers["X-Windlass-Unknown-Fields"] == "repeat_last_n"
    response = complete(server, n_predict=1, samplers=["temperature", "top_k"])
    assert response.headers["X-Windlass-Unknown-Fields"] == "samplers"
    neutral = {"mirostat": 0, "typical_p": 1.0, "dry_multiplier": 0.0, "dry_base": 1.75}
    response = complete(server, n_predict=1, repeat_last_n=-1, seed=-1, grammar="", **neutral)
    assert "X-Windlass-Unknown-Fields" not in response.headers


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"mirostat": 2}, "mirostat"),
        ({"dry_multiplier": 0.8}, "dry_multiplier"),
        ({"post_sampling_probs": True}, "post_sampling_probs"),
        ({"lora": [{"id": 0, "scale": 1}]}, "lora"),
        ({"prompt": {"prompt_string": "a", "multimodal_data": ["aGk="]}}, "prompt"),
        ({"prompt": ["a", None]}, "prompt"),
        ({"prompt": [5, [6]]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"logit_bias": [[None, 1]]}, "logit_bias"),
        ({"logit_bias": [["a", "b"]]}, "logit_bias"),
        ({"n_probs": -1}, "n_probs"),
        ({"temperature": "hot"}, "temperature"),
    ],
)
def test_bad_requests(server: Server, fields: dict[str, Any], param: str) -> None:
    response = complete(server, **fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    missing = server.http.post("/completion", json={"n_predict": 2})
    assert missing.json()["error"]["param"] == "prompt"
