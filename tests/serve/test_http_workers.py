"""A server with several HTTP workers behaves as one process does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import active_children
from multiprocessing.process import BaseProcess

import httpx
import pytest

from tests.serve.conftest import Server, running, wait_until
from tests.serve.fakes import Options, counting
from windlass.errors import EngineError, Overloaded, RequestBlocked, WorkerDied
from windlass.serve.http.messages import ErrorMessage
from windlass.serve.metric_samples import MetricSample, add_up
from windlass.serve.problems import ModelNotFound, Sleeping

KEY, ADMIN = "key", "admin"
HEADERS = {"Authorization": f"Bearer {ADMIN}"}


def workers() -> set[BaseProcess]:
    """The processes of HTTP workers of all servers of this process."""
    return {each for each in active_children() if each.name.startswith("windlass-http")}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(http_workers=2, api_key=(KEY,), admin_key=(ADMIN,), price_per_hour=1.0) as server:
        server.http.headers.update(HEADERS)
        yield server


def test_responses_of_all_workers_are_those_of_one_process(server: Server) -> None:
    with running() as alone:
        expected = alone.complete(max_tokens=8).json()["choices"]
    for _ in range(4):  # connections go to the workers in turn
        with httpx.Client(base_url=server.url, headers=HEADERS) as http:
            body = {"prompt": "Hi", "max_tokens": 8}
            assert http.post("/v1/completions", json=body).json()["choices"] == expected
            stream = http.post("/v1/completions", json={**body, "stream": True}).text
            assert stream.endswith("data: [DONE]\n\n")


def test_metrics_are_the_sum_of_all_workers(server: Server) -> None:
    before = server.metric("request_outcomes_total", outcome="success")
    for _ in range(4):
        with httpx.Client(base_url=server.url, headers=HEADERS) as http:
            http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 2})
    assert server.metric("request_outcomes_total", outcome="success") == before + 4
    assert server.metric("requests_in_flight") == 0
    received = server.metric("requests_received_total")
    assert server.metric("request_outcomes_total") == received
    assert server.metric("time_to_first_token_seconds_count") > 0
    assert server.metric("http_connections") >= 1


def test_costs_and_explanations_of_a_workers_requests(server: Server) -> None:
    body = server.complete(max_tokens=4, include_cost=True).json()
    assert body["usage"]["cost"] > 0
    explained = server.http.get(f"/v1/requests/{body['id']}/explain").json()
    assert explained["state"] == "ended"
    assert server.http.get("/cost").status_code == 200


def test_other_endpoints_are_forwarded(server: Server) -> None:
    assert server.http.get("/v1/models").json()["object"] == "list"
    assert server.http.get("/health").json() == {"status": "ok"}
    assert server.http.post("/tokenize", json={"prompt": "Hi"}).json()["count"] > 0
    assert server.http.get("/v1/models/no%2Fsuch").status_code == 404
    assert server.http.get("/nothing?x=1").json()["error"]["message"].startswith("there is nothing")
    assert server.http.get("/health").headers.get_list("date") != []
    response = server.http.post("/v1/responses", json={"input": "Hi", "max_output_tokens": 4})
    assert server.http.get(f"/v1/responses/{response.json()['id']}").status_code == 200


def test_errors_have_their_status(server: Server) -> None:
    assert server.complete(model="other").status_code == 404
    assert server.complete(temperature=-1).status_code == 400
    assert (
        server.complete(prompt=[1] * 100_000).json()["error"]["code"] == "context_length_exceeded"
    )
    without_key = httpx.post(f"{server.url}/v1/completions", json={"prompt": "Hi"})
    assert without_key.status_code == 401
    assert httpx.get(f"{server.url}/v1/models").status_code == 401


def test_all_workers_know_a_change_when_its_response_arrives(server: Server) -> None:
    assert server.http.post("/admin/sleep", json={"level": 1}).status_code == 200
    for _ in range(4):
        with httpx.Client(base_url=server.url, headers=HEADERS) as http:
            refused = http.post("/v1/completions", json={"prompt": "Hi"})
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "sleeping"
    assert server.http.post("/admin/wake").status_code == 200
    for _ in range(4):
        with httpx.Client(base_url=server.url, headers=HEADERS) as http:
            assert http.post("/v1/completions", json={"prompt": "Hi"}).status_code == 200


def test_a_client_that_disconnects_aborts_its_request(server: Server) -> None:
    body = {"prompt": "SLOW", "max_tokens": 1000, "stream": True, "ignore_eos": True}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        assert server.metric("requests_in_flight") == 1
    wait_until(lambda: server.metric("requests_in_flight") == 0)
    wait_until(lambda: server.client.num_in_flight == 0)


def test_a_full_queue_is_refused_with_the_time_to_retry() -> None:
    build = counting(Options(max_num_seqs=1, step_s=0.02))
    with running(build, http_workers=2, max_num_queued_reqs=1) as server:
        with ThreadPoolExecutor(8) as pool:
            sent = [pool.submit(server.complete, max_tokens=50) for _ in range(8)]
            statuses = [each.result() for each in sent]
        refused = [each for each in statuses if each.status_code == 429]
        assert refused
        assert all(int(each.headers["Retry-After"]) >= 1 for each in refused)
        assert sum(each.status_code == 200 for each in statuses) == 8 - len(refused)
        assert server.metric("admission_rejections_total") == len(refused)


def test_a_worker_that_dies_is_replaced_and_the_others_go_on() -> None:
    others = workers()
    with running(counting(Options(step_s=0.01)), http_workers=2) as server:
        body = {"prompt": "Hi", "max_tokens": 400, "stream": True, "ignore_eos": True}
        ends: list[str] = []

        def stream() -> None:
            lines = [""]
            try:
                with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as response:
                    lines += [line for line in response.iter_lines() if line]
            except httpx.HTTPError:
                lines.append("broken")
            ends.append(lines[-1])

        threads = [threading.Thread(target=stream) for _ in range(4)]
        for thread in threads:
            thread.start()
        wait_until(lambda: server.client.num_in_flight == 4)
        next(iter(workers() - others)).kill()
        for thread in threads:
            thread.join(60)
        assert sorted(ends) == ["broken", "broken", "data: [DONE]", "data: [DONE]"]
        wait_until(lambda: server.client.num_in_flight == 0)
        wait_until(lambda: len(workers() - others) == 2)
        for _ in range(4):
            wait_until(lambda: _answers(server))
        received = server.metric("requests_received_total")
        assert server.metric("request_outcomes_total") == received
        assert server.stop() == 0
    assert workers() <= others


def _answers(server: Server) -> bool:
    try:
        return httpx.post(f"{server.url}/v1/completions", json={"prompt": "Hi"}).status_code == 200
    except httpx.HTTPError:
        return False


def test_running_requests_finish_when_the_server_drains() -> None:
    build = counting(Options(step_s=0.01))
    with running(build, http_workers=2) as server, ThreadPoolExecutor(4) as pool:
        sent = [pool.submit(server.complete, max_tokens=100) for _ in range(4)]
        wait_until(lambda: server.client.num_in_flight == 4)
        assert server.stop() == 0
        assert [each.result().status_code for each in sent] == [200] * 4


@pytest.mark.parametrize(
    "error",
    [
        Overloaded("full", 3.0),
        Sleeping("asleep", 2.0),
        ModelNotFound("none", "model"),
        RequestBlocked("no"),
        WorkerDied("dead"),
        EngineError("other"),
    ],
)
def test_errors_keep_their_class_and_fields_between_processes(error: EngineError) -> None:
    copy = ErrorMessage.of(error).error()
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_samples_add_up_by_name_and_labels() -> None:
    one, two = {"model": "a"}, {"model": "b"}
    samples = [MetricSample("x", one, 1), MetricSample("x", two, 2), MetricSample("x", one, 3)]
    assert add_up(samples) == [MetricSample("x", one, 4), MetricSample("x", two, 2)]
