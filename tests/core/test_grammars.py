"""A request waits in the queue for its grammar: others overtake it, and its time is accounted."""

from __future__ import annotations

import pytest

from tests.core.world import World, limits, plain_loop, request
from windlass.core.structured import StructuredOutputs
from windlass.core.trace import BLOCKERS, GRAMMAR
from windlass.core.types import GrammarFailure, GrammarStats
from windlass.errors import EngineError, Overloaded, RequestError


class FakeGrammars:
    """Grammars that are ready after `compile`; the regex "bad" is refused."""

    def __init__(self) -> None:
        self.forms: dict[str, StructuredOutputs] = {}
        self.compiled: set[str] = set()
        self.running: set[str] = set()
        self.num_checks = 0
        self.state: object = 0

    def compile(self, name: str) -> None:
        self.compiled.add(name)
        self.state = len(self.compiled)

    def enter(self, request_id: str, structured: StructuredOutputs) -> None:
        self.forms[request_id] = structured

    def begin(self) -> None:
        pass

    def ready(self, request_id: str) -> bool:
        self.num_checks += 1
        if self.forms[request_id].regex == "bad":
            raise RequestError("guided_regex: it is bad.", "guided_regex")
        if self.forms[request_id].regex == "late":
            raise Overloaded("it was not compiled in time.", retry_after_s=5.0)
        return request_id in self.compiled

    def acquire(self, request_id: str) -> str:
        assert request_id in self.compiled
        self.running.add(request_id)
        return f"grammar of {request_id}"

    def fail(self, failure: GrammarFailure) -> EngineError:
        return self.forms[failure.request_id].error(failure.reason)

    def leave(self, request_id: str) -> None:
        del self.forms[request_id]
        self.running.discard(request_id)

    def stats(self) -> GrammarStats:
        return GrammarStats(len(self.forms), len(self.forms), 0, 0, 0)


@pytest.fixture
def grammars() -> FakeGrammars:
    return FakeGrammars()


@pytest.fixture
def world(grammars: FakeGrammars) -> World:
    return World(limits(num_blocks=64, max_num_seqs=8), options={"grammars": grammars})


def formed(name: str, regex: str = "a+"):
    return request(name, [1, 2, 3], structured_outputs={"regex": regex})


def test_other_requests_overtake_one_whose_grammar_compiles(
    world: World, grammars: FakeGrammars
) -> None:
    first, free = formed("form"), request("free", [4, 5], ignore_eos=True)
    world.add(first)
    world.add(free)
    while "free" not in world.finish:
        world.step()
    assert world.got["form"] == []
    assert world.got["free"] == plain_loop(free, 64)
    assert world.scheduler.stats(world.now).num_waiting == 1
    assert world.scheduler.stats(world.now).grammars == grammars.stats()
    grammars.compile("form")
    world.finish_all()
    assert world.got["form"] == plain_loop(first, 64)
    assert not grammars.forms
    trace = {each.request_id: each for each in world.scheduler.accounting.traces}["form"]
    waited = trace.timeline.admitted - trace.timeline.arrived
    assert waited > 0
    assert trace.blocked_s[GRAMMAR] == pytest.approx(sum(trace.blocked_s))
    assert BLOCKERS[GRAMMAR] == "grammar"


def test_a_queue_of_requests_without_grammars_yet_is_blocked_by_grammars(
    world: World, grammars: FakeGrammars
) -> None:
    world.add(formed("form"))
    for _ in range(3):  # scanned, then known to be stuck
        world.step()
        assert world.scheduler.accounting.blocker == GRAMMAR
    trace = world.scheduler.trace("form", world.now + 1.0)
    assert trace is not None
    assert trace.blocked_s[GRAMMAR] == pytest.approx(sum(trace.blocked_s)) == pytest.approx(1.02)
    grammars.compile("form")
    world.finish_all()


def test_a_queue_blocked_by_grammars_is_not_scanned_again(
    world: World, grammars: FakeGrammars
) -> None:
    for number in range(5):
        world.add(formed(f"r{number}"))
    for _ in range(10):
        world.step()
    assert grammars.num_checks == 5
    grammars.compile("r3")
    world.step()
    assert grammars.num_checks == 10
    assert grammars.running == {"r3"}


def test_a_refused_grammar_ends_its_request_with_the_field(
    world: World, grammars: FakeGrammars
) -> None:
    grammars.compile("good")
    world.add(formed("bad", "bad"))
    world.add(formed("good"))
    world.step()
    (output,) = world.scheduler.failed
    assert (output.request_id, output.finish, output.param) == ("bad", "error", "guided_regex")
    error = output.exception()
    assert isinstance(error, RequestError)
    assert error.param == "guided_regex"
    assert "bad" not in grammars.forms
    world.finish_all()
    assert world.finish["good"] in ("stop", "length")


def test_a_grammar_that_a_busy_machine_did_not_compile_may_be_sent_again(world: World) -> None:
    world.add(formed("form", "late"))
    world.step()
    (output,) = world.scheduler.failed
    error = output.exception()
    assert isinstance(error, Overloaded)
    assert error.retry_after_s == 5.0


def test_a_grammar_that_fails_in_a_step_ends_only_its_request(
    world: World, grammars: FakeGrammars
) -> None:
    for name in ("a", "b"):
        grammars.compile(name)
        world.add(formed(name))
    plan = world.plan()
    assert [new.grammar for new in plan.admitted] == ["grammar of a", "grammar of b"]
    failures = tuple(GrammarFailure(name, "too hard", False) for name in ("a", "gone"))
    result = world.runner.run(plan)._replace(grammar_failures=failures)
    outputs = world.commit(plan, result)
    assert [(output.error, output.param) for output in outputs if output.finish == "error"] == [
        ("structured_outputs: too hard", "structured_outputs")
    ]
    world.finish_all()
    assert world.finish["b"] in ("stop", "length")
    assert not grammars.forms


def test_an_aborted_request_releases_its_grammar(world: World, grammars: FakeGrammars) -> None:
    world.add(formed("a"))
    world.step()
    world.scheduler.abort("a", world.now)
    assert not grammars.forms
    assert not world.scheduler.has_work


def test_an_engine_without_grammars_raises() -> None:
    world = World(limits())
    world.add(formed("a"))
    world.step()
    (output,) = world.scheduler.failed
    assert "built without structured outputs" in output.error
