"""A prefill and a decode engine of a real model behind one server: the tokens of one engine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.serve.conftest import Server, wait_until
from tests.serve.tiny_model import serving, write_tiny_adapter, write_tiny_model
from windlass.core.sampling import SamplingParams
from windlass.core.types import NewRequest
from windlass.serve.handover import Handovers, SplitPolicy

PROMPT = "The quick brown fox jumps over the lazy dog. " * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def apart(folder: Path) -> Iterator[Server]:
    with serving(
        folder,
        data_parallel_size=2,
        prefill_replicas=1,
        min_prefill_tokens=32,
        kv_transfer_gb=0.02,
        num_threads=1,
        block_size=16,
    ) as server:
        yield server


@pytest.fixture(scope="module")
def together(folder: Path) -> Iterator[Server]:
    with serving(folder, num_threads=1, block_size=16) as server:
        yield server


def explained(server: Server, reply: dict[str, Any]) -> dict[str, Any]:
    return server.http.get(f"/v1/requests/{reply['id']}/explain").json()["completions"][0]


def peer_loads(server: Server, replica: int = 1) -> int:
    """0 before the first report of the engine."""
    tiers = server.client.replicas[replica].stats.tiers
    return sum(each.num_loads for each in tiers if each.name == "peer")


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    "body",
    [
        {"temperature": 0},
        {"temperature": 1.0, "seed": 7},
        {"temperature": 1.0, "seed": 7, "n": 3},
        {"temperature": 0.8, "seed": 3, "top_p": 0.9, "top_k": 20},
        {"temperature": 0, "frequency_penalty": 1.5, "presence_penalty": 1.0},
        {"temperature": 0, "repetition_penalty": 1.5},
        {"temperature": 0, "logprobs": 3},
        {"temperature": 0, "prompt_logprobs": 1},
        {"temperature": 0, "min_tokens": 20, "max_tokens": 20},
        {"temperature": 0, "bad_words": ["e", "a"]},
        {"temperature": 0, "structured_outputs": {"json": SCHEMA}},
        {"temperature": 1.0, "seed": 5, "structured_outputs": {"regex": "[a-c]{12}"}},
        {"temperature": 0, "max_tokens": 2},
    ],
    ids=str,
)
def test_tokens_equal_those_of_one_engine(
    apart: Server, together: Server, body: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    prompt = f"{request.node.name}: {PROMPT}"
    full = {"prompt": prompt, "max_tokens": 24, "return_token_ids": True, **body}
    before = peer_loads(apart)
    got, expected = (each.complete(**full).json() for each in (apart, together))
    assert strip(got["choices"]) == strip(expected["choices"])
    assert got["usage"] == expected["usage"]
    wait_until(lambda: peer_loads(apart) > before)
    found = explained(apart, got)
    assert found["handover"]["engines"] == 2
    assert found["handover"]["blocks"] == len(prompt) // 16
    assert found["handover"]["reason"] is None


def strip(value: Any) -> Any:
    """Round floats: blocks of other sizes are computed in another order."""
    if isinstance(value, dict):
        return {name: strip(each) for name, each in value.items()}
    if isinstance(value, list):
        return [strip(each) for each in value]
    return round(value, 3) if isinstance(value, float) else value


def test_the_decode_engine_computes_less_than_a_block(apart: Server) -> None:
    computed = [each.stats.num_prompt_tokens_computed for each in apart.client.replicas]
    reply = apart.complete(prompt="Only once. " + PROMPT, max_tokens=6, temperature=0).json()
    num_prompt = reply["usage"]["prompt_tokens"]
    wait_until(
        lambda: (
            apart.client.replicas[1].stats.num_prompt_tokens_computed
            == computed[1] + num_prompt % 16
        )
    )
    assert apart.client.replicas[0].stats.num_prompt_tokens_computed == computed[0] + num_prompt
    assert explained(apart, reply)["handover"]["seconds"] > 0


def test_many_requests_at_once(apart: Server, together: Server) -> None:
    bodies = [
        {"prompt": f"{number} " + PROMPT * (1 + number % 2), "max_tokens": 16, "temperature": 0}
        for number in range(12)
    ]
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda body: apart.complete(**body).json()["choices"], bodies))
    assert found == [together.complete(**body).json()["choices"] for body in bodies]


def test_salts_keep_tenants_apart(apart: Server) -> None:
    """The blocks of one salt are not found under another."""
    body = {"prompt": "Salted. " + PROMPT, "max_tokens": 4, "temperature": 0}
    replies = [apart.complete(**body, cache_salt=salt).json() for salt in ("a", "b", "a")]
    cached = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in replies]
    assert cached[0] == cached[1] == 0 < cached[2]
    assert replies[0]["choices"] == replies[1]["choices"] == replies[2]["choices"]


def test_aborts_free_the_blocks_of_both(apart: Server) -> None:
    for number in range(4):
        chunks = apart.openai.completions.create(
            model=apart.openai.models.list().data[0].id,
            prompt=f"abort {number} " + PROMPT,
            max_tokens=200,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(iter(chunks))
        chunks.close()
    wait_until(lambda: apart.client.num_in_flight == 0)
    wait_until(lambda: all(each.stats.num_used_blocks == 0 for each in apart.client.replicas))


def test_a_killed_prefill_engine_hands_over_again_after_its_restart(
    apart: Server, together: Server
) -> None:
    body = {"prompt": "After a kill. " + PROMPT, "max_tokens": 12, "temperature": 0}
    expected = together.complete(**body).json()["choices"]
    os.kill(apart.client.replicas[0].pid or 0, signal.SIGKILL)
    wait_until(lambda: not apart.client.replicas[0].health().ok)
    reply = apart.complete(**body).json()
    assert reply["choices"] == expected
    assert explained(apart, reply)["handover"]["reason"] == "no prefill engine"
    wait_until(lambda: apart.client.replicas[0].health().ok)
    before = peer_loads(apart)
    body["prompt"] = "Later. " + PROMPT
    reply = apart.complete(**body).json()
    assert reply["choices"] == together.complete(**body).json()["choices"]
    assert explained(apart, reply)["handover"]["engines"] == 2
    wait_until(lambda: peer_loads(apart) > before)


def test_adapters_and_http_workers(folder: Path, tmp_path: Path) -> None:
    """The blocks of an adapter are not those of the model, and requests of HTTP workers are split, too."""
    adapter = write_tiny_adapter(tmp_path / "adapter")
    engine = {"num_threads": 1, "block_size": 16, "enable_lora": True}
    engine["lora_modules"] = (f"tuned={adapter}",)
    apart = {"data_parallel_size": 2, "prefill_replicas": 1, "min_prefill_tokens": 32}
    workers = {"http_workers": 2}
    with (
        serving(folder, serve=workers, **engine, **apart, kv_transfer_gb=0.02) as split,
        serving(folder, **engine) as whole,
    ):
        base = whole.http.get("/v1/models").json()["data"][0]["id"]
        body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "return_token_ids": True}
        found = {}
        for model in (base, "tuned"):
            full = {**body, "model": model}
            replies = [each.complete(**full).json() for each in (split, whole)]
            assert replies[0]["choices"] == replies[1]["choices"]
            assert replies[0]["usage"] == replies[1]["usage"]
            assert explained(split, replies[0])["handover"]["engines"] == 2
            found[model] = replies[0]["choices"][0]["token_ids"]
        assert found[base] != found["tuned"]
        assert split.metric("handovers_total", result="handed over") == 2


@pytest.mark.slow
def test_pipeline_stages(folder: Path, together: Server) -> None:
    """Each stage hands over the blocks of its layers."""
    apart = {"data_parallel_size": 2, "prefill_replicas": 1, "min_prefill_tokens": 32}
    options = {"num_threads": 1, "block_size": 16, "pipeline_parallel_size": 2}
    with serving(folder, **options, **apart, kv_transfer_gb=0.04) as split:
        bodies = [
            {"prompt": f"{number % 3} {PROMPT}", "max_tokens": 12, "temperature": 0}
            for number in range(6)
        ]
        with ThreadPoolExecutor(6) as pool:
            replies = list(pool.map(lambda body: split.complete(**body).json(), bodies))
        for reply, body in zip(replies, bodies, strict=True):
            assert reply["choices"] == together.complete(**body).json()["choices"]
        found = [explained(split, reply)["handover"] for reply in replies]
        assert {each["reason"] for each in found} <= {None, "short prompt"}
        assert [each["blocks"] for each in found].count(len(bodies[0]["prompt"]) // 16) >= 3
        wait_until(lambda: peer_loads(split) > 0)


def test_an_adapter_that_another_host_may_not_have_is_computed_here() -> None:
    handovers = Handovers(SplitPolicy(("decode", "prefill"), min_tokens=4))
    params = SamplingParams(max_tokens=5)
    request = NewRequest("own", [1] * 9, params, adapter="tuned")
    found, replicas = handovers.begin(request, [0, 1], 0, own_adapter=True)
    assert (found.hand_over, replicas) == (False, [0])
    state = handovers.find("own")
    assert state is not None
    assert state.reason == "adapter of this server"
    found, replicas = handovers.begin(replace(request, request_id="known"), [0, 1], 0)
    assert (found.hand_over, replicas) == (True, [1])
