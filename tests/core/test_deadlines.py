"""Deadlines in the scheduler: what is dropped, when, and by which rates."""

from __future__ import annotations

from dataclasses import replace

from tests.core.test_scheduler import tokens_of
from tests.core.world import World, limits, request
from windlass.core.types import NewRequest, Output
from windlass.errors import DeadlineExceeded


def due(deadline: float, new: NewRequest) -> NewRequest:
    return replace(new, deadline=deadline)


def failed(world: World) -> Output:
    (output,) = world.scheduler.failed
    assert output.finish == "deadline"
    return output


def compute(world: World, request_id: str, num_prompt: int, step_s: float) -> None:
    """Compute a prompt in steps of `step_s`, so that its rate is known."""
    world.add(request(request_id, tokens_of(num_prompt, first=len(world.got)), max_tokens=1))
    while world.scheduler.has_work:
        plan = world.plan()
        world.now += step_s
        world.commit(plan, world.runner.run(plan))


def test_a_queued_request_is_dropped_when_its_deadline_passes() -> None:
    world = World(limits(max_num_seqs=1))
    world.add(request("first", [1], max_tokens=20, ignore_eos=True))
    world.step()
    world.add(due(world.now + 0.025, request("late", [1, 2])))
    world.step()
    world.step()
    assert world.scheduler.failed == []
    world.step()
    output = failed(world)
    assert output.request_id == "late"
    assert "after 25 ms in the queue" in (output.error or "")
    assert isinstance(output.exception(), DeadlineExceeded)
    assert world.scheduler.stats().deadlines == {"queued": 1}
    world.finish_all()


def test_a_running_request_keeps_its_output() -> None:
    world = World(limits())
    world.add(due(0.035, request("cut", [1, 2], max_tokens=30, ignore_eos=True)))
    for _ in range(4):
        world.step()
    output = failed(world)
    assert output.error is None
    assert output.timeline is not None
    assert output.timeline.num_output == len(world.got["cut"]) == 3
    assert world.scheduler.stats().deadlines == {"decode": 1}
    (trace,) = world.scheduler.accounting.traces
    assert (trace.finish, trace.why_ended) == (
        "deadline",
        "its deadline passed after 3 output tokens",
    )
    world.finish_all()  # its blocks are free


def test_a_step_in_flight_does_not_outlive_its_request() -> None:
    world = World(limits())
    world.add(due(0.025, request("cut", [1, 2], max_tokens=30, ignore_eos=True)))
    world.add(request("other", [3, 4]))
    world.finish_all(ahead=True)
    assert world.got["other"]


def test_a_prompt_that_is_not_computed_in_time_fails() -> None:
    world = World(limits(max_num_batched_tokens=8))
    world.add(due(0.025, request("long", tokens_of(40))))
    for _ in range(3):
        world.step()
    assert "when 16 of its 40 prompt tokens were computed" in (failed(world).error or "")
    assert world.scheduler.stats().deadlines == {"prefill": 1}


def test_a_deadline_that_cannot_be_met_is_refused_before_the_prompt_is_computed() -> None:
    world = World(limits())
    compute(world, "rate", 16, step_s=0.16)  # 10 ms per token
    computed = world.runner.num_computed
    world.add(due(world.now + 0.2, request("doomed", tokens_of(32, first=3))))
    world.add(due(world.now + 0.6, request("possible", tokens_of(32, first=4))))
    world.step()
    output = failed(world)
    assert output.request_id == "doomed"
    assert "32 prompt tokens (0 more are cached) at 10 ms per token" in (output.error or "")
    assert "it is in 0.2 s, and the answer takes at least 0.3 s" in (output.error or "")
    assert world.runner.num_computed == computed + 16  # of the other request
    assert world.scheduler.stats().deadlines == {"predicted": 1}


def test_a_request_is_dropped_while_it_waits_once_it_could_not_be_ready() -> None:
    world = World(limits(max_num_seqs=1))
    compute(world, "rate", 16, step_s=0.16)
    world.add(request("first", [1], max_tokens=60, ignore_eos=True))
    world.step()
    world.add(due(world.now + 0.4, request("waits", tokens_of(32, first=3))))
    start = world.now
    while not world.scheduler.failed:
        world.step()
    assert 0.05 < world.now - start < 0.2  # about 0.3 s before the deadline
    assert world.scheduler.stats().deadlines == {"predicted": 1}


def test_cached_tokens_need_no_time() -> None:
    world = World(limits())
    compute(world, "rate", 32, step_s=0.15)
    world.add(due(world.now + 0.05, request("again", tokens_of(32), max_tokens=1)))
    world.finish_all()
    assert world.finish["again"] == "length"


def test_tokens_that_the_answer_must_have_count() -> None:
    world = World(limits())
    world.add(request("rate", [1, 2], max_tokens=40, ignore_eos=True))
    world.finish_all()  # 10 ms per step; the mean begins at 0
    soon = world.now + 0.2
    world.add(due(soon, request("short", [3, 3], max_tokens=40)))
    world.add(due(soon, request("least", [4, 3], max_tokens=40, min_tokens=30)))
    world.step()
    assert {output.request_id for output in world.scheduler.failed} == {"least"}
    assert "at least 30 output tokens" in (world.scheduler.failed[0].error or "")


def test_rates_of_a_slow_start_do_not_drop_requests_for_ever() -> None:
    world = World(limits())
    compute(world, "slow", 16, step_s=1.0)
    num_dropped = 0
    while True:
        world.add(due(world.now + 0.2, request(f"r{num_dropped}", tokens_of(16, first=3))))
        world.step()
        if not world.scheduler.failed:
            break
        num_dropped += 1
    assert 5 <= num_dropped <= 20
    world.finish_all()


def test_ended_requests_are_not_kept_until_their_deadline() -> None:
    world = World(limits())
    for index in range(100):
        world.add(due(1e9, request(str(index), [1, 2], max_tokens=1)))
        world.finish_all()
    assert len(world.scheduler._deadlines._heap) <= 2
