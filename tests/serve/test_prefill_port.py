"""Prompts computed by the server of another host: the requests of both servers."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from mmap import mmap

import msgspec
import pytest

from tests.serve.conftest import Server, running, wait_until
from tests.serve.fakes import Options, counting
from windlass.core.sampling import SamplingParams
from windlass.core.types import NewRequest, Output, Timeline
from windlass.serve import messages
from windlass.serve.handover import SplitPolicy
from windlass.serve.prefill_link import _decode_from_prefill, _decode_to_prefill
from windlass.serve.prefill_listener import PrefillListener, listen

LONG = "words " * 20
SECRET = b"0123456789abcdef"


@contextmanager
def both(options: Options = Options(), **config: object) -> Iterator[tuple[Server, Server]]:  # noqa: B008
    """A prefill server and a decode server of the counting model."""
    port = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{port.getsockname()[1]}"
    policy = SplitPolicy(("decode", "prefill"), min_tokens=32)
    listener = PrefillListener(port, [mmap(-1, 2**20)], SECRET)
    with (
        running(counting(options), prefill=listener, **config) as prefill,  # type: ignore[arg-type]
        running(split=policy, prefill_servers=[address], secret=SECRET) as decode,
    ):
        assert decode.client.prefill_servers[0].health().ok
        yield prefill, decode


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[Server, Server]]:
    with both() as found:
        yield found


def handover(server: Server, reply: dict[str, object]) -> dict[str, object]:
    (completion,) = server.http.get(f"/v1/requests/{reply['id']}/explain").json()["completions"]
    return completion["handover"]


@pytest.mark.parametrize(
    "body",
    [
        {"max_tokens": 20},
        {"max_tokens": 8, "n": 3},
        {"max_tokens": 8, "prompt_logprobs": 1, "echo": True},
        {"max_tokens": 20, "stop": ["k"]},
        {"max_tokens": 1},
        {"max_tokens": 20, "deadline_ms": 60_000},
    ],
    ids=str,
)
def test_outputs_equal_those_of_one_server(
    servers: tuple[Server, Server], server: Server, body: dict
) -> None:
    got, expected = (each.complete(prompt=LONG, **body).json() for each in (servers[1], server))
    assert got["choices"] == expected["choices"]
    assert got["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]
    wait_until(lambda: servers[0].client.num_in_flight == servers[1].client.num_in_flight == 0)


def test_a_prompt_passes_both_servers(servers: tuple[Server, Server]) -> None:
    prefill, decode = servers
    before = prefill.client.replicas[0].stats.num_prompt_tokens_computed
    reply = decode.complete(prompt="split " + LONG, max_tokens=5).json()
    assert handover(decode, reply)["engines"] == 2
    wait_until(lambda: prefill.client.replicas[0].stats.num_prompt_tokens_computed > before)
    assert prefill.complete(prompt="its own " + LONG, max_tokens=5).status_code == 200


def test_an_abort_reaches_the_prefill_server() -> None:
    with both(Options(step_s=0.2)) as (prefill, decode), ThreadPoolExecutor(1) as pool:
        with decode.http.stream(
            "POST", "/v1/completions", json={"prompt": LONG, "max_tokens": 400, "stream": True}
        ):
            pass
        slow = pool.submit(decode.complete, prompt="more " + LONG, max_tokens=2)
        assert slow.result().status_code == 200
        wait_until(lambda: decode.client.num_in_flight == prefill.client.num_in_flight == 0)
        wait_until(lambda: not decode.client.prefill_servers[0].untraced)
        handovers = decode.client.handovers
        wait_until(lambda: handovers is not None and handovers.num_open == 0)


def test_a_prompt_that_the_prefill_server_refuses_is_computed_here(tmp_path: object) -> None:
    admin = {"Authorization": "Bearer boss"}
    options = Options(sleep_file=f"{tmp_path}/asleep")
    with both(options, admin_key=("boss",)) as (prefill, decode):
        asleep = prefill.http.post("/admin/sleep", json={"level": 1}, headers=admin)
        assert asleep.status_code == 200
        reply = decode.complete(prompt=LONG, max_tokens=5).json()
        assert len(reply["choices"][0]["text"]) == 5
        assert handover(decode, reply)["reason"] == "prefill engine refused"
        assert handover(decode, reply)["engines"] == 1
        assert decode.metric("handovers_total", result="prefill engine refused") == 1
        assert prefill.http.post("/admin/wake", json={}, headers=admin).status_code == 200
        reply = decode.complete(prompt="again " + LONG, max_tokens=5).json()
        assert handover(decode, reply)["engines"] == 2


def test_a_dead_prefill_engine_is_used_again_after_its_restart(server: Server) -> None:
    with both() as (prefill, decode), ThreadPoolExecutor(1) as pool:
        body = {"prompt": "killed " + LONG, "max_tokens": 6}
        os.kill(prefill.client.replicas[0].pid or 0, signal.SIGSTOP)
        reply = pool.submit(decode.complete, **body)
        wait_until(lambda: prefill.client.num_in_flight == 1)
        os.kill(prefill.client.replicas[0].pid or 0, signal.SIGKILL)
        found = reply.result().json()
        assert found["choices"] == server.complete(**body).json()["choices"]
        assert handover(decode, found)["reason"] == "prefill engine died"
        wait_until(lambda: prefill.client.health().ok)
        wait_until(lambda: decode.client.health().reason == "")
        found = decode.complete(prompt="later " + LONG, max_tokens=3).json()
        assert handover(decode, found)["engines"] == 2


def test_a_prompt_that_kills_engines_is_blocked(servers: tuple[Server, Server]) -> None:
    """It kills the prefill engine, then the decode engine, and runs nowhere any more."""
    prefill, decode = servers
    body = {"prompt": "DIE " + LONG, "max_tokens": 5}
    assert decode.complete(**body).status_code >= 400
    wait_until(
        lambda: prefill.client.replicas[0].num_ends == decode.client.replicas[0].num_ends == 1
    )
    wait_until(lambda: prefill.client.health().ok and decode.client.health().reason == "")
    assert "is blocked" in decode.complete(**body).text
    assert prefill.client.replicas[0].num_ends == decode.client.replicas[0].num_ends == 1


def test_a_decode_server_starts_before_its_prefill_server() -> None:
    port = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{port.getsockname()[1]}"
    port.close()
    policy = SplitPolicy(("decode", "prefill"), min_tokens=32)
    with running(split=policy, prefill_servers=[address], secret=SECRET) as decode:
        reply = decode.complete(prompt=LONG, max_tokens=3).json()
        assert handover(decode, reply)["reason"] == "no prefill engine"
        health = decode.http.get("/health").json()
        assert health["status"] == "degraded"
        assert "Connection refused" in str(health)
        with running(prefill=PrefillListener(listen(address), [mmap(-1, 2**20)], SECRET)):
            wait_until(lambda: decode.client.health().reason == "")
            reply = decode.complete(prompt="then " + LONG, max_tokens=3).json()
            assert handover(decode, reply)["engines"] == 2
        reply = decode.complete(prompt="ended " + LONG, max_tokens=3).json()
        assert handover(decode, reply)["engines"] == 1


def test_times_are_shifted_to_the_clock_of_the_receiver() -> None:
    request = NewRequest("r", [1, 2], SamplingParams(), deadline=1007.0)
    there, here = 1000.0, time.monotonic()  # the same moment in both clocks
    frame = msgspec.msgpack.encode((there, [messages.Add(request, b"f"), messages.Abort("r")]))
    add, abort = _decode_to_prefill(frame)
    assert isinstance(add, messages.Add)
    assert add.request.deadline is not None
    assert here <= add.request.deadline - 7.0 <= time.monotonic()
    assert replace(add.request, deadline=1007.0) == request
    assert abort == messages.Abort("r")
    times = Timeline(arrived=995.0, admitted=996.0, first_token=998.0, num_prompt=3)
    frame = msgspec.msgpack.encode((there, [messages.Outputs([Output("r", timeline=times)])]))
    (outputs,) = _decode_from_prefill(frame)
    assert isinstance(outputs, messages.Outputs)
    found = outputs.outputs[0].timeline
    assert found is not None
    assert found.admitted is not None
    assert found.first_token is not None
    assert here <= found.arrived + 5.0 <= time.monotonic()
    assert found.admitted - found.arrived == pytest.approx(1.0)
    assert found.first_token - found.admitted == pytest.approx(2.0)
    assert found.last_token is None
    assert found.num_prompt == 3
