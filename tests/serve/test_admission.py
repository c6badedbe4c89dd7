"""Admission control: queue limits and Retry-After."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Receive

from tests.serve.conftest import running, wait_until
from tests.serve.fakes import Options, counting
from windlass.config import ServeConfig
from windlass.core.types import EngineStats, SloStats
from windlass.errors import Overloaded, RequestError
from windlass.serve import response
from windlass.serve.admission import AdmissionControl, Rates
from windlass.serve.health import Backlog
from windlass.serve.live_config import LiveConfig


def backlog(running: int, waiting: int, *, unseen: int = 0, tokens: int = 0) -> Backlog:
    return Backlog(num_running=running, num_waiting=waiting, num_unseen=unseen, num_tokens=tokens)


def admission(
    backlog: Backlog, reasons: list[str] | None = None, **options: Any
) -> tuple[AdmissionControl, SimpleNamespace]:
    client = SimpleNamespace(backlog=backlog, max_num_seqs=4, num_finished=0)
    on_reject = (reasons if reasons is not None else []).append
    clock = iter(range(1000)).__next__
    config = ServeConfig(**options)
    return AdmissionControl(LiveConfig(config), client, on_reject, clock), client  # type: ignore[arg-type]


def test_a_burst_fills_free_slots_beyond_the_queue_limit() -> None:
    control, client = admission(backlog(0, 0, unseen=3), max_num_queued_reqs=1)
    control.check(1, 10)  # the fourth of four slots
    client.backlog = backlog(0, 0, unseen=4)
    control.check(1, 10)  # the one that may be queued
    client.backlog = backlog(0, 0, unseen=5)
    with pytest.raises(Overloaded):
        control.check(1, 10)


def test_requests_waiting_for_memory_count_as_queued() -> None:
    control, _ = admission(backlog(1, 3), max_num_queued_reqs=3)
    with pytest.raises(Overloaded):
        control.check(1, 10)


def test_more_completions_than_slots_and_queue_are_a_bad_request() -> None:
    control, _ = admission(backlog(0, 0), max_num_queued_reqs=2)
    control.check_possible(6)
    with pytest.raises(RequestError, match="7 completions"):
        control.check_possible(7)


def test_queued_tokens_are_limited_except_for_a_lone_prompt() -> None:
    reasons: list[str] = []
    control, client = admission(backlog(0, 0), reasons, max_num_queued_tokens=100)
    control.check(1, 5000)
    client.backlog = backlog(1, 1, tokens=60)
    control.check(1, 40)
    with pytest.raises(Overloaded):
        control.check(1, 41)
    assert reasons == ["max_num_queued_tokens"]


def test_retry_after_follows_from_the_measured_rate() -> None:
    control, client = admission(backlog(4, 10), max_num_queued_reqs=5)
    last = EngineStats(num_steps=1)
    for second in range(11):  # a request every two seconds
        client.num_finished = second // 2
        stats = EngineStats(num_running=4, num_generated_tokens=100 * second, num_steps=second + 1)
        control.observe(stats, last)
        last = stats
    with pytest.raises(Overloaded) as caught:
        control.check(1, 10)  # eleven would wait, five may: six must finish first
    assert caught.value.retry_after_s == pytest.approx(12.0)


def test_retry_after_has_bounds() -> None:
    rates = Rates()
    assert rates.seconds_for(10**9, 0) == 1.0  # no data
    rates.observe(0.0, 0, num_finished=0, restart=False)
    rates.observe(10.0, 0, num_finished=0, restart=False)
    assert rates.seconds_for(0, 1) == 60.0  # no progress
    rates.observe(11.0, 100, num_finished=5, restart=True)
    assert rates.seconds_for(0, 1) == 1.0  # idle: old samples are dropped


def slo_admission(
    backlog: Backlog, *, rate: float = 1000.0, hits: int = 0
) -> tuple[AdmissionControl, list[str]]:
    """Admission of an engine with a target of 0.5 s for the first token and four rows."""
    reasons: list[str] = []
    control, client = admission(backlog, reasons, slo_admission=True)
    slo = SloStats(
        ttft_s=0.5,
        num_prompt_tokens=64,
        num_running=4,
        draft_length=None,
        prompt_tokens_per_s=rate,
        is_possible=True,
        changes={},
    )
    stats = EngineStats(slo=slo, prefix_queries=100, prefix_hits=hits)
    client.replicas = [SimpleNamespace(stats=stats)]
    return control, reasons


def test_a_request_that_would_miss_the_ttft_target_is_refused() -> None:
    control, reasons = slo_admission(backlog(1, 1, tokens=400))
    control.check(1, 90)
    with pytest.raises(Overloaded, match=r"is 0\.60 s, 0\.40 s of it behind 2 requests, at 1,000"):
        control.check(1, 200)
    assert reasons == ["slo_ttft"]


def test_a_prompt_that_is_late_by_itself_may_wait_as_long_as_the_target() -> None:
    slo_admission(backlog(1, 1, tokens=400))[0].check(1, 5000)
    with pytest.raises(Overloaded):
        slo_admission(backlog(1, 1, tokens=600))[0].check(1, 5000)


def test_the_usual_share_of_cached_tokens_takes_no_time() -> None:
    slo_admission(backlog(1, 1, tokens=900), hits=90)[0].check(1, 900)


def test_nothing_is_refused_before_a_step_was_measured() -> None:
    slo_admission(backlog(4, 100, tokens=10**6), rate=0.0)[0].check(1, 1000)


def test_requests_beyond_the_running_ones_wait_for_those_that_finish() -> None:
    control, _ = slo_admission(backlog(4, 0))
    for finished in (0, 3, 6):  # in the two seconds of three calls: one in a third of a second
        control._client.num_finished = finished
        control.observe(EngineStats(num_steps=1), EngineStats(num_steps=1))
    control.check(1, 10)
    with pytest.raises(Overloaded):
        control.check(2, 10)


def test_the_wait_is_predicted_by_the_place_in_the_queue() -> None:
    control, client = admission(backlog(4, 0))
    assert control.predicted_wait_s(1) == 0.0  # nothing was measured
    for num_finished in (0, 5, 10):  # one second between them
        client.num_finished = num_finished
        control.observe(EngineStats(num_steps=num_finished + 1), EngineStats(num_steps=1))
    assert control.predicted_wait_s(2) == pytest.approx(2 / 5)
    client.backlog = backlog(4, 6)
    assert control.predicted_wait_s(1) == pytest.approx(7 / 5)
    client.backlog = backlog(3, 0)
    assert control.predicted_wait_s(1) == 0.0  # a slot is free


def test_without_a_finished_request_the_wait_is_at_least_the_time_so_far() -> None:
    control, _ = admission(backlog(4, 2))
    for _ in range(6):
        control.observe(EngineStats(num_steps=2), EngineStats(num_steps=1))
    assert control.predicted_wait_s(1) == pytest.approx(3 * 5.0)


def test_requests_that_have_ended_since_the_report_are_not_in_the_backlog() -> None:
    reported = backlog(4, 2, unseen=1, tokens=50)
    assert reported.at_most(9) == reported
    assert reported.at_most(5) == backlog(2, 2, unseen=1, tokens=50)
    assert reported.at_most(1) == backlog(0, 0, unseen=1, tokens=50)
    assert reported.at_most(0) == backlog(0, 0)


def test_an_aborted_request_takes_no_place_in_the_queue() -> None:
    """The engine is stopped: it cannot report that its requests were aborted."""
    with running(counting(Options(max_num_seqs=1)), max_num_queued_reqs=1) as server:
        pid = server.client.replicas[0].pid
        assert pid is not None
        body = {"prompt": "SLOW", "max_tokens": 1500, "ignore_eos": True, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body) as streamed:
            lines = streamed.iter_lines()  # httpx closes a response whose iterator is gone
            assert next(lines).startswith("data: ")
            wait_until(lambda: server.client.backlog.num_running == 1)
            os.kill(pid, signal.SIGSTOP)
        try:
            wait_until(lambda: server.client.num_in_flight == 0)
            with ThreadPoolExecutor(1) as pool:
                later = pool.submit(server.complete, max_tokens=2, n=2)
                wait_until(lambda: server.client.num_in_flight == 2 or later.done())
                os.kill(pid, signal.SIGCONT)
                assert later.result().status_code == 200
        finally:
            os.kill(pid, signal.SIGCONT)


def test_requests_that_are_checked_at_the_same_time_do_not_overfill_the_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_requests, checked = 8, 0
    wait_for_work = response.cancel_on_disconnect

    async def after_all_checks(receive: Receive, work: Coroutine[Any, Any, Any]) -> Any:
        nonlocal checked
        checked += 1
        while checked < num_requests:
            await asyncio.sleep(0.01)
        return await wait_for_work(receive, work)

    monkeypatch.setattr(response, "cancel_on_disconnect", after_all_checks)
    build = counting(Options(max_num_seqs=1, step_s=0.05))
    with (
        running(build, max_num_queued_reqs=2) as server,
        ThreadPoolExecutor(num_requests) as pool,
    ):
        sent = [pool.submit(server.complete, max_tokens=3) for _ in range(num_requests)]
        statuses = Counter(each.result().status_code for each in sent)
    assert statuses == {200: 3, 429: num_requests - 3}
