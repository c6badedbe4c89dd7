"""The account of requests: received = success + error + aborted + rejected + in flight, whatever happens."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing import active_children

import httpx
import pytest

from tests.serve.conftest import Server, running, wait_until
from tests.serve.fakes import Options, counting

LONG = {"max_tokens": 1500, "ignore_eos": True, "stream": True}


def account(text: str) -> tuple[float, Counter[str], float]:
    """Received requests, outcomes and requests in flight of one exposition."""
    received = in_flight = 0.0
    outcomes: Counter[str] = Counter()
    for line in text.splitlines():
        head, _, value = line.rpartition(" ")
        if head.startswith("windlass:requests_received_total{"):
            received = float(value)
        elif head.startswith("windlass:requests_in_flight{"):
            in_flight = float(value)
        elif head.startswith("windlass:request_outcomes_total{"):
            outcome = head.partition('outcome="')[2].partition('"')[0]
            outcomes[outcome] += int(float(value))
    return received, outcomes, in_flight


@contextmanager
def scraping(server: Server) -> Iterator[list[str]]:
    """Read /metrics in a thread, as often as possible; yields the list of expositions."""
    found: list[str] = []
    stop = threading.Event()

    def scrape() -> None:
        while not stop.wait(0.01):
            try:
                found.append(httpx.get(f"{server.url}/metrics", timeout=20).text)
            except httpx.TransportError:  # the worker of this connection was killed
                continue

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join(60)


class Streams:
    """Streams that have sent their first token and go on.

    `prompt` differs after the engine's death: the same requests would run one after the other.
    """

    def __init__(self, server: Server, count: int, prompt: str = "SLOW") -> None:
        self._clients = [httpx.Client(base_url=server.url, timeout=60) for _ in range(count)]
        body = {**LONG, "prompt": prompt}
        requests = [
            each.build_request("POST", "/v1/completions", json=body) for each in self._clients
        ]
        with ThreadPoolExecutor(count) as pool:
            pairs = zip(self._clients, requests, strict=True)
            sent = pool.map(lambda pair: pair[0].send(pair[1], stream=True), pairs)
            self._responses = list(sent)
        self._lines = [each.iter_lines() for each in self._responses]
        for response, lines in zip(self._responses, self._lines, strict=True):
            assert response.status_code == 200
            assert next(lines).startswith("data: ")

    def last_lines(self) -> list[str]:
        """Read all streams to the end."""
        found = [[line for line in lines if line][-1] for lines in self._lines]
        self.close()
        return found

    def num_broken(self) -> int:
        """Read all streams to the end; returns how many end with a closed connection."""
        count = 0
        for lines in self._lines:
            try:
                list(lines)
            except httpx.TransportError:
                count += 1
        self.close()
        return count

    def close(self) -> None:
        for response in self._responses:
            response.close()
        for client in self._clients:
            client.close()


def post(server: Server, body: bytes) -> int:
    headers = {"Content-Type": "application/json"}
    return httpx.post(
        f"{server.url}/v1/completions", content=body, headers=headers, timeout=60
    ).status_code


def workers(others: set[int]) -> list[int]:
    named = (each for each in active_children() if each.name.startswith("windlass-http"))
    return [each.pid for each in named if each.pid is not None and each.pid not in others]


def is_reachable(server: Server) -> bool:
    try:
        return server.http.get("/health").status_code == 200
    except httpx.TransportError:  # no worker has started yet
        return False


def is_settled(server: Server) -> bool:
    return server.metric("requests_in_flight") == 0 and server.client.num_in_flight == 0


@pytest.mark.parametrize("num_workers", [1, 2])
def test_the_account_holds_whatever_happens(num_workers: int) -> None:
    others = set(workers(set()))
    build = counting(Options(max_num_seqs=4))
    with (
        running(build, http_workers=num_workers, max_num_queued_reqs=2) as server,
        scraping(server) as expositions,
        ExitStack() as stack,
    ):
        expected: Counter[str] = Counter()

        good = [post(server, b'{"prompt": "Hi", "max_tokens": 3}') for _ in range(8)]
        assert good == [200] * 8
        expected["success"] += len(good)

        bad = [b"{", b"[1]", b'{"prompt": 3.5}', b'{"prompt": "Hi", "temperature": -1}', b"\xff"]
        assert {post(server, body) for body in bad} <= {400, 422}
        expected["rejected"] += len(bad)

        assert post(server, b'{"prompt": "CRASH"}') == 500
        expected["error"] += 1

        running_streams = Streams(server, 4)  # all slots are taken
        with ThreadPoolExecutor(8) as pool:
            many = [
                pool.submit(post, server, b'{"prompt": "Hi", "max_tokens": 2}') for _ in range(8)
            ]
            wait_until(lambda: sum(each.done() for each in many) == 6)
            running_streams.close()  # the two that are queued run now
            statuses = Counter(each.result() for each in many)
        assert statuses == {429: 6, 200: 2}
        expected["rejected"] += 6
        expected["success"] += 2
        expected["aborted"] += 4
        wait_until(lambda: is_settled(server))

        streams = Streams(server, 4)
        pid = server.client.replicas[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert all("engine" in line for line in streams.last_lines())
        expected["error"] += 4
        wait_until(lambda: server.client.health().ok)
        wait_until(lambda: server.metric("engine_restarts_total") == 1)

        if num_workers > 1:
            streams = Streams(server, 4, "SLOW again")
            for pid in workers(others):
                os.kill(pid, signal.SIGKILL)
            assert streams.num_broken() == 4
            expected["error"] += 4
            server.http.close()  # its connection is broken, too
            server.http = stack.enter_context(httpx.Client(base_url=server.url, timeout=20))
            wait_until(lambda: is_reachable(server))
            assert server.metric("http_worker_restarts_total") == 2

        assert post(server, b'{"prompt": "Hi", "max_tokens": 3}') == 200
        expected["success"] += 1
        wait_until(lambda: is_settled(server))
        received, outcomes, in_flight = account(server.http.get("/metrics").text)
        assert outcomes == expected
        assert (received, in_flight) == (expected.total(), 0)
    assert len(expositions) > 10
    for text in expositions:
        received, outcomes, in_flight = account(text)
        assert received == outcomes.total() + in_flight
    assert max(account(text)[2] for text in expositions) >= 4
