"""The explain endpoint: sentences, settings, and access per key."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.conftest import Server, running, wait_until
from tests.serve.fakes import Options, counting
from windlass.core.card import Capacity, EngineReport
from windlass.core.kv_layout import KVLayout
from windlass.core.trace import BLOCKERS, Chunk, RequestTrace
from windlass.core.types import Timeline
from windlass.serve.explain import explain_trace, trace_json
from windlass.serve.trace_store import Entry, TraceStore

REPORT = EngineReport(
    max_model_len=2048,
    max_num_seqs=8,
    max_num_batched_tokens=512,
    vocab_size=1000,
    capacity=Capacity(
        num_blocks=100, layout=KVLayout.unsized(16), bytes_per_block=2**20, reason="set by the test"
    ),
)


def timeline(admitted: float, first_token: float, last_token: float, **counts: int) -> Timeline:
    return Timeline(0.0, admitted, first_token, last_token=last_token, **counts)


def trace(**changes: Any) -> RequestTrace:
    """Queued 1.9 s, prompt 0.1 s, decode 0.3 s."""
    times = timeline(1.9, 2.0, 2.3, num_prompt=40, num_output=31, num_chunks=1)
    values: dict[str, Any] = {
        "request_id": "r",
        "timeline": times,
        "finish": "length",
        "ended": 2.3,
        "num_ahead": 3,
        "num_running": 12,
        "blocked_s": (0.0,) * len(BLOCKERS),
        "short_blocks": 0,
        "first_miss": 0,
        "why_missed": "never seen",
        "chunks": [Chunk(0, 40, step_tokens=52, step_rows=13, seconds=0.1)],
        "batch": (1, 9, 13),
        "mixed_steps_s": 0.05,
        "drafted": [],
        "accepted": [],
        "waited_again_s": 0.0,
        "num_recomputed": 0,
        "recomputed_s": 0.0,
        "prefill_s": 0.08,
        "decode_s": 0.1,
        "saved_s": 0.0,
    }
    return RequestTrace(**{**values, **changes})


def blocked(name: str, seconds: float = 1.9) -> tuple[float, ...]:
    return tuple(seconds if each == name else 0.0 for each in BLOCKERS)


@pytest.mark.parametrize(
    ("changes", "sentence", "flag", "value"),
    [
        (
            {"blocked_s": blocked("blocks"), "short_blocks": 7},
            "1.9 s of 2.3 s were spent waiting for free KV blocks behind 12 running requests.",
            "--num-blocks",
            107,
        ),
        (
            {"blocked_s": blocked("sequences")},
            "1.9 s of 2.3 s were spent waiting for one of 8 running slots (--max-num-seqs), behind "
            "3 others in the queue.",
            "--max-num-seqs",
            12,
        ),
        (
            {"blocked_s": blocked("batch")},
            "1.9 s of 2.3 s were spent waiting for its batch to start (--batching).",
            "--batching",
            "continuous",
        ),
        (
            {"blocked_s": blocked("tokens")},
            "1.9 s of 2.3 s were spent waiting for the token budget of full steps (512 tokens), "
            "behind 3 others in the queue.",
            None,
            None,
        ),
        (
            {"timeline": timeline(0.1, 0.2, 2.3, num_prompt=40, num_output=31)},
            "2.1 s of 2.3 s were spent generating 31 tokens, 70 ms each, in batches of 1 to 13 (median 9).",
            None,
            None,
        ),
        (
            {
                "timeline": timeline(
                    0.1, 2.1, 2.3, num_prompt=900, num_cached=100, num_output=3, num_chunks=2
                ),
                "chunks": [
                    Chunk(100, 128, step_tokens=128, step_rows=1, seconds=1.0),
                    Chunk(228, 128, step_tokens=130, step_rows=3, seconds=1.0),
                ],
            },
            "2.0 s of 2.3 s were spent computing the prompt: 800 tokens in 2 steps; 100 more were "
            "cached.",
            "--long-prefill-token-threshold",
            0,
        ),
    ],
)
def test_sentence_and_setting(
    changes: dict[str, Any], sentence: str, flag: str | None, value: object
) -> None:
    found = explain_trace(trace(**changes), 0.0, REPORT)
    assert found["sentence"] == sentence
    assert (found["setting"] and found["setting"]["flag"]) == flag
    assert (found["setting"] and found["setting"]["value"]) == value


@pytest.mark.parametrize("blocker", BLOCKERS)
def test_every_blocker_has_a_sentence(blocker: str) -> None:
    found = explain_trace(trace(blocked_s=blocked(blocker)), 0.0, REPORT)
    assert found["dominated_by"] == blocker


def test_preemptions_and_drafts_are_reported() -> None:
    times = timeline(0.1, 0.2, 2.3, num_prompt=4, num_output=9, num_preemptions=2)
    times.num_drafted, times.num_accepted = 7, 3
    example = trace(
        timeline=times,
        waited_again_s=1.2,
        num_recomputed=11,
        recomputed_s=0.3,
        blocked_s=blocked("blocks", 1.2),
        drafted=[0, 1, 3],
        accepted=[2, 1, 1],
    )
    body = trace_json(example, 0.0)
    assert body["seconds"]["decode"] == pytest.approx(0.9)
    assert body["seconds"]["preempted"] == pytest.approx(1.2)
    assert body["preemptions"]["recomputed_tokens"] == 11
    assert body["drafts"]["per_position"] == [
        {"proposed": 4, "accepted": 2},
        {"proposed": 3, "accepted": 1},
    ]
    sentence = explain_trace(example, 0.0, REPORT)["sentence"]
    assert "waiting for free KV blocks" in sentence
    assert "after 2 preemptions" in sentence


def test_the_oldest_entry_is_evicted() -> None:
    store = TraceStore(lambda *_: None, max_ended=2)
    for name in ("a", "b", "c"):
        store.open(Entry(response_id=name, owner="me", began=0.0, request_ids=(f"{name}-0",)))
        store.add([trace(request_id=f"{name}-0")])
    assert store.find("c", "me").traces
    with pytest.raises(Exception, match="no request 'a' of yours is known"):
        store.find("a", "me")


def test_lost_traces_close_the_entries_of_their_engine() -> None:
    """A request that another engine computes stays open."""
    store = TraceStore(lambda *_: None)
    lost, kept = (
        Entry(response_id=name, owner="me", began=0.0, request_ids=(f"{name}-0", f"{name}-1"))
        for name in ("a", "b")
    )
    store.open(lost)
    store.open(kept)
    store.add([trace(request_id="a-0"), trace(request_id="b-0")])
    store.lose(["a-1", "unknown"])
    assert (lost.lost, lost.closed.is_set(), list(lost.traces)) == (True, True, ["a-0"])
    assert kept.is_open
    store.add([trace(request_id="b-1")])
    assert kept.closed.is_set()
    assert not kept.lost


# ---- over HTTP -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def narrow() -> Iterator[Server]:
    """A server with two slots and slow steps."""
    build = counting(Options(max_num_seqs=2, step_s=0.005))
    with running(build, api_key=("one", "two"), admin_key=("boss",)) as server:
        server.http.headers["Authorization"] = "Bearer one"
        yield server


def explain(server: Server, response_id: str, key: str = "one") -> Any:
    headers = {"Authorization": f"Bearer {key}"}
    return server.http.get(f"/v1/requests/{response_id}/explain", headers=headers)


def test_explain_finds_the_response_id(narrow: Server) -> None:
    prompt = "a prompt of some length, with a block or two"
    narrow.complete(prompt=prompt, max_tokens=1)
    response = narrow.complete(prompt=prompt + "!" * 20, max_tokens=5).json()
    explanation = explain(narrow, response["id"]).json()
    assert explanation["id"] == response["id"]
    assert explanation["state"] == "ended"
    assert explanation["sentence"].endswith(".")
    (only,) = explanation["completions"]
    assert only["finish"] == "length"
    assert only["output_tokens"] == 5
    assert only["prompt"]["cached_tokens"] == 32
    assert only["prompt"]["first_missed"] == 32
    assert only["prompt"]["chunks"][0]["num_tokens"] == only["prompt_tokens"] - 32
    assert only["decode"]["batch"] == {"min": 1, "median": 1, "max": 1}
    parts = {name: value for name, value in only["seconds"].items() if name != "total"}
    assert sum(parts.values()) == pytest.approx(only["seconds"]["total"], abs=1e-4)
    assert only["engine_seconds"]["decode"] > 4 * 0.005


@pytest.mark.parametrize(
    ("path", "body", "prefix"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}, "chatcmpl-"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}]}, "msg_"),
        ("/v1/responses", {"input": "Hi"}, "resp_"),
    ],
)
def test_explain_finds_the_response_id_of_every_api(
    narrow: Server, path: str, body: dict[str, Any], prefix: str
) -> None:
    limit = "max_output_tokens" if "input" in body else "max_tokens"
    sent = narrow.http.post(path, json={"model": "counter", limit: 20, **body}).json()
    assert sent["id"].startswith(prefix), sent
    assert explain(narrow, sent["id"]).json()["id"] == sent["id"]


def test_a_request_that_waited_for_a_slot(narrow: Server) -> None:
    responses: list[Any] = []

    def send() -> None:
        responses.append(narrow.complete(prompt="wait", max_tokens=30).json())

    threads = [threading.Thread(target=send) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    explanation = explain(narrow, responses[-1]["id"]).json()
    assert explanation["dominated_by"] == "sequences"
    assert "waiting for one of 2 running slots" in explanation["sentence"]
    assert explanation["setting"]["flag"] == "--max-num-seqs"
    assert explanation["setting"]["value"] > 2


def test_a_running_request_is_explained_so_far(narrow: Server) -> None:
    body = {"prompt": "SLOW", "max_tokens": 400, "stream": True, "request_id": "mine"}
    with narrow.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        explanation = explain(narrow, "cmpl-mine").json()
        assert explanation["state"] == "running"
        assert explanation["completions"][0]["finish"] is None
    wait_until(lambda: explain(narrow, "cmpl-mine").json()["state"] == "ended")
    assert explain(narrow, "cmpl-mine").json()["completions"][0]["finish"] == "abort"


def test_a_stop_string_ends_the_trace(narrow: Server) -> None:
    response = narrow.complete(prompt="Hi", max_tokens=50, stop=["h"]).json()
    wait_until(lambda: explain(narrow, response["id"]).json()["state"] == "ended")


def test_a_beam_search_has_one_trace_per_prompt(narrow: Server) -> None:
    response = narrow.complete(
        prompt=["Hi", "Ho"], max_tokens=4, n=2, use_beam_search=True, temperature=0
    ).json()
    explanation = explain(narrow, response["id"]).json()
    assert explanation["state"] == "ended"
    assert [each["index"] for each in explanation["completions"]] == [0, 1]
    for each in explanation["completions"]:
        assert each["finish"] == "length"
        assert each["output_tokens"] == 1 + 3 * 2  # one beam in the first round
        assert each["engine_seconds"]["prefill"] > 0
    assert explain(narrow, response["id"], "two").status_code == 404


def test_other_keys_get_404(narrow: Server) -> None:
    response_id = narrow.complete(max_tokens=1).json()["id"]
    assert explain(narrow, response_id).status_code == 200
    assert explain(narrow, response_id, "boss").status_code == 200
    other, unknown = explain(narrow, response_id, "two"), explain(narrow, "cmpl-nothing")
    assert (other.status_code, unknown.status_code) == (404, 404)
    assert other.json()["error"]["code"] == "request_not_found"
    assert "is known here" in unknown.json()["error"]["message"]


def test_a_failed_request_has_an_explanation(narrow: Server) -> None:
    failed = narrow.complete(prompt="CRASH", max_tokens=4, request_id="broken")
    assert failed.status_code == 500
    explanation = explain(narrow, "cmpl-broken").json()
    assert explanation["completions"][0]["finish"] == "error"
