"""A real server and the default model: a client's grammar does not stop other requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from time import monotonic, sleep

import httpx
import openai
import pytest

from tests.system.server import Server, serving

pytestmark = pytest.mark.model

NUM_TOKENS = 60
SCHEMA = {"type": "integer", "multipleOf": 99999937}  # hours and gigabytes to compile
ENDLESS = {"type": "json_schema", "json_schema": {"name": "endless", "schema": SCHEMA}}
MESSAGES = [{"role": "user", "content": "Tell me a number."}]


@contextmanager
def served(*flags: str) -> Iterator[tuple[Server, openai.OpenAI, str]]:
    with (
        serving("--max-model-len", "1024", *flags) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield server, client, client.models.list().data[0].id


def metric(server: Server, name: str) -> float:
    text = httpx.get(f"{server.url}/metrics").text
    lines = [line for line in text.splitlines() if line.startswith(f"windlass:{name}{{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def wait_until(condition: Callable[[], bool], hang_guard_s: float = 120.0) -> None:
    end = monotonic() + hang_guard_s
    while not condition():
        assert monotonic() < end, "the condition was not met in time"
        sleep(0.02)


def test_streams_continue_while_a_grammar_compiles() -> None:
    flags = ("--grammar-compile-timeout", "600", "--shutdown-timeout", "0.1")
    with ThreadPoolExecutor(1) as pool:
        with served(*flags) as (server, client, model):
            request = {"model": model, "messages": MESSAGES}
            hostile = pool.submit(
                client.chat.completions.create, response_format=ENDLESS, timeout=600, **request
            )
            wait_until(lambda: metric(server, "grammar_requests_waiting") == 1)
            stream = client.chat.completions.create(
                stream=True, max_tokens=NUM_TOKENS, extra_body={"ignore_eos": True}, **request
            )
            num_chunks = sum(bool(chunk.choices[0].delta.content) for chunk in stream)
            assert num_chunks > NUM_TOKENS // 2, "a chunk may hold more than one token"
            whole = client.chat.completions.create(
                max_tokens=NUM_TOKENS, extra_body={"ignore_eos": True}, **request
            )
            assert whole.usage.completion_tokens == NUM_TOKENS
            formed = client.chat.completions.create(
                extra_body={"guided_regex": "[0-9]{4}"}, **request
            )
            assert formed.choices[0].message.content.isdigit()
            assert not hostile.done(), "it is still being compiled"
            wait_until(lambda: metric(server, "grammar_requests_waiting") == 1)
        with pytest.raises(openai.APIError):
            hostile.result()


def test_a_grammar_beyond_the_limits_is_a_bad_request_and_compiled_once() -> None:
    with served("--grammar-compile-timeout", "1") as (server, client, model):
        request = {"model": model, "messages": MESSAGES, "response_format": ENDLESS}
        with ThreadPoolExecutor(10) as pool:
            hostile = [pool.submit(client.chat.completions.create, **request) for _ in range(30)]
            for each in hostile:
                with pytest.raises(openai.BadRequestError) as error:
                    each.result()
                assert error.value.param == "response_format"
                assert "more than 1 s of CPU time" in error.value.message
        wait_until(lambda: metric(server, "grammar_compilations_total") == 1)
        assert metric(server, "grammar_refusals_total") == 1
        assert httpx.get(f"{server.url}/health/generate", timeout=60).status_code == 200
