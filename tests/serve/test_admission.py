"""Who may join the queue, and how long those who may not are told to wait."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from windlass.config import ServeConfig
from windlass.core.types import EngineStats
from windlass.errors import Overloaded, RequestError
from windlass.serve.admission import AdmissionControl, Rates
from windlass.serve.health import Backlog


def admission(
    backlog: Backlog, reasons: list[str] | None = None, **options: Any
) -> tuple[AdmissionControl, SimpleNamespace]:
    client = SimpleNamespace(
        backlog=backlog, report=SimpleNamespace(max_num_seqs=4), num_finished=0
    )
    on_reject = (reasons if reasons is not None else []).append
    clock = iter(range(1000)).__next__
    return AdmissionControl(ServeConfig(**options), client, on_reject, clock), client  # type: ignore[arg-type]


def test_free_slots_take_a_burst_whatever_the_queue_may_hold() -> None:
    gate, client = admission(Backlog(0, 0, 3, 0), max_num_queued_reqs=1)
    gate.check(1, 10)  # the fourth of four slots
    client.backlog = Backlog(0, 0, 4, 0)
    gate.check(1, 10)  # the one that may wait
    client.backlog = Backlog(0, 0, 5, 0)
    with pytest.raises(Overloaded):
        gate.check(1, 10)


def test_requests_that_wait_for_memory_count_although_slots_are_free() -> None:
    gate, _ = admission(Backlog(1, 3, 0, 0), max_num_queued_reqs=3)
    with pytest.raises(Overloaded):
        gate.check(1, 10)


def test_more_at_once_than_could_ever_wait_is_the_clients_fault() -> None:
    gate, _ = admission(Backlog(0, 0, 0, 0), max_num_queued_reqs=2)
    gate.check_possible(6)
    with pytest.raises(RequestError, match="7 completions"):
        gate.check_possible(7)


def test_tokens_are_bounded_but_never_for_a_lone_prompt() -> None:
    reasons: list[str] = []
    gate, client = admission(Backlog(0, 0, 0, 0), reasons, max_num_queued_tokens=100)
    gate.check(1, 5000)
    client.backlog = Backlog(1, 1, 0, 60)
    gate.check(1, 40)
    with pytest.raises(Overloaded):
        gate.check(1, 41)
    assert reasons == ["max_num_queued_tokens"]


def test_the_wait_follows_from_the_measured_speed() -> None:
    gate, client = admission(Backlog(4, 10, 0, 0), max_num_queued_reqs=5)
    last = EngineStats(num_steps=1)
    for second in range(11):  # a request every two seconds
        client.num_finished = second // 2
        stats = EngineStats(num_running=4, num_generated_tokens=100 * second, num_steps=second + 1)
        gate.observe(stats, last)
        last = stats
    with pytest.raises(Overloaded) as caught:
        gate.check(1, 10)  # eleven would wait, five may: six must leave first
    assert caught.value.retry_after_s == pytest.approx(12.0)


def test_the_wait_has_bounds() -> None:
    rates = Rates()
    assert rates.seconds_for(10**9, 0) == 1.0  # nothing known
    busy, before = EngineStats(num_running=1, num_steps=5), EngineStats(num_steps=4)
    rates.observe(0.0, busy, before, 0)
    rates.observe(10.0, busy, before, 0)
    assert rates.seconds_for(0, 1) == 60.0  # nothing moves
    rates.observe(11.0, EngineStats(num_steps=6), busy, 5)
    assert rates.seconds_for(0, 1) == 1.0  # idle: the past is forgotten
