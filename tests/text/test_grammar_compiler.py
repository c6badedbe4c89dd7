"""Grammars compile once, outside of steps, within the memory limit; results are cached."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from windlass.config import GrammarConfig
from windlass.core.sampling import SamplingParams
from windlass.core.structured import StructuredOutputs
from windlass.core.types import SlotId, SlotInit
from windlass.errors import EngineError, Overloaded, RequestError
from windlass.text.grammar import compiler as compiler_module
from windlass.text.grammar import matchers as matchers_module
from windlass.text.grammar.compiler import GrammarCompiler
from windlass.text.grammar.matcher import RequestMatcher
from windlass.text.grammar.matchers import BuiltGrammars, RequestMatchers
from windlass.text.grammar.sandbox import Cancellation, Verdict

MIB = 2**20
HANG_GUARD_S = 60


class FakeMatcher:
    """A grammar that accepts every token, until a test sets an error."""

    def __init__(self, shared: dict[str, str]) -> None:
        self.shared = shared
        self.taken: list[int] = []

    def deep_copy(self) -> FakeMatcher:
        return FakeMatcher(self.shared)

    def compute_bitmask(self) -> bytes:
        return b"\xff"

    def consume_token(self, token: int) -> bool:
        self.taken.append(token)
        return True

    def is_error(self) -> bool:
        return bool(self.get_error())

    def get_error(self) -> str:
        return self.shared.get("error", "")


class FakeBackend:
    """Compiles a regex when the test allows it; the regex decides the result."""

    def __init__(self) -> None:
        self.checked: list[str] = []
        self.built: list[str] = []
        self.cancelled: list[str] = []
        self.open = threading.Event()  # slow checks wait for this
        self.open.set()

    def check(self, structured: StructuredOutputs, cancellation: Cancellation) -> Verdict:
        regex = structured.text
        self.checked.append(regex)
        if regex.startswith("slow"):
            while not self.open.wait(0.001):
                if cancellation.cancelled:
                    self.cancelled.append(regex)
                    raise EngineError("cancelled")
        if regex.startswith("broken"):
            raise EngineError("no sandbox")
        if regex.startswith("late"):
            return Verdict(refused="it took too long.", final=False)
        if regex.startswith("bad"):
            return Verdict(refused="it is bad.")
        size = int(regex.partition("=")[2] or 1) * MIB
        return Verdict(grammar=regex, num_bytes=size)

    def build(self, grammar: str) -> Any:
        self.built.append(grammar)
        return FakeMatcher({})


class Clock:
    """CPU time that a test controls."""

    def __init__(self) -> None:
        self.now = 0.0
        self.step = 0.0

    def __call__(self) -> float:
        self.now += self.step
        return self.now


class World:
    def __init__(self, memory_mib: int = 100) -> None:
        self.backend, self.clock = FakeBackend(), Clock()
        config = GrammarConfig(grammar_memory_bytes=memory_mib * MIB, grammar_step_timeout=0.1)
        self.grammars = GrammarCompiler(self.backend, config)
        self.matchers = RequestMatchers(self.grammars.built, config, 8, self.clock)
        self.started: dict[str, str] = {}  # the grammars of requests

    def enter(self, name: str, regex: str) -> None:
        self.grammars.enter(name, StructuredOutputs(regex=regex, source="guided_regex"))

    def wait_for_jobs(self) -> None:
        """Wait until no thread has work left."""
        for _ in range(20):
            self.grammars.begin()
            for job in self.grammars._jobs:
                assert job.done.wait(HANG_GUARD_S)
            self.grammars.begin()

    def run(self, name: str, regex: str) -> None:
        """Begin plan after plan, like the scheduler, until the request is ready."""
        self.enter(name, regex)
        deadline = time.monotonic() + HANG_GUARD_S
        while not self.grammars.ready(name):
            assert time.monotonic() < deadline, f"{name} did not become ready"
            self.grammars.begin()
        self.started[name] = self.grammars.acquire(name)

    def matcher(self, name: str, output: Sequence[int] = ()) -> RequestMatcher:
        """The matcher that a runner opens for a request that got a slot."""
        grammar = self.started[name]
        return self.matchers.open(
            SlotInit(
                request_id=name,
                slot=SlotId(0),
                tokens=[9, *output],
                num_prompt=1,
                sampling=SamplingParams(),
                stop_ids=frozenset(),
                seed=0,
                grammar=grammar,
            )
        )

    def error(self) -> EngineError:
        """The error of the one request whose grammar failed."""
        (failure,) = self.matchers.take_failures()
        return self.grammars.fail(failure)


def test_equal_grammars_are_compiled_once() -> None:
    world = World()
    for number in range(100):
        world.enter(f"r{number}", "a+")
    assert not world.grammars.ready("r0")
    world.wait_for_jobs()
    assert all(world.grammars.ready(f"r{number}") for number in range(100))
    for number in range(100):
        world.grammars.acquire(f"r{number}")
        world.grammars.leave(f"r{number}")
    world.enter("later", "a+")
    assert world.grammars.ready("later"), "not cached"
    assert (world.backend.checked, world.backend.built) == (["a+"], ["a+"])
    assert world.grammars.stats().num_checks == 1


def test_a_refusal_is_cached_and_names_the_field() -> None:
    world = World()
    for number in range(3):
        world.enter(f"r{number}", "bad")
        world.wait_for_jobs()
        with pytest.raises(RequestError, match="guided_regex: it is bad") as error:
            world.grammars.ready(f"r{number}")
        assert error.value.param == "guided_regex"
        world.grammars.leave(f"r{number}")
    assert world.backend.checked == ["bad"]
    assert world.grammars.stats().num_refusals == 1
    assert world.grammars.stats().num_bytes == 0


@pytest.mark.parametrize("regex", ["broken", "late"])
def test_a_failure_of_the_sandbox_is_not_cached(regex: str) -> None:
    world = World()
    for number in range(2):
        world.enter(f"r{number}", regex)
        world.wait_for_jobs()
        with pytest.raises(EngineError) as error:
            world.grammars.ready(f"r{number}")
        assert not isinstance(error.value, RequestError)
        assert isinstance(error.value, Overloaded) == (regex == "late")
        world.grammars.leave(f"r{number}")
    assert world.backend.checked == [regex] * 2


def test_a_slow_grammar_does_not_delay_others() -> None:
    world = World()
    world.backend.open.clear()
    world.enter("slow", "slow")
    world.run("quick", "a+")
    assert not world.grammars.ready("slow")
    assert world.grammars.stats().num_waiting == 1
    before = world.grammars.state
    world.backend.open.set()
    world.wait_for_jobs()
    assert world.grammars.state != before
    assert world.grammars.ready("slow")


def test_a_compilation_without_waiting_requests_is_cancelled() -> None:
    world = World()
    world.backend.open.clear()
    for name in ("first", "second"):
        world.enter(name, "slow")
    world.grammars.begin()
    world.grammars.leave("first")
    assert not world.grammars._jobs[0].cancellation.cancelled
    world.grammars.leave("second")
    world.wait_for_jobs()
    assert world.backend.cancelled == ["slow"]
    assert world.grammars.stats().num_grammars == 0


def test_the_number_of_concurrent_compilations_is_limited() -> None:
    world = World()
    world.backend.open.clear()
    for number in range(10):
        world.enter(f"r{number}", f"slow{number}")
        world.grammars.begin()
    assert len(world.grammars._jobs) == 4
    world.backend.open.set()
    for number in range(10):
        world.wait_for_jobs()
        assert world.grammars.ready(f"r{number}")
    assert sorted(world.backend.checked) == [f"slow{number}" for number in range(10)]


def test_grammars_in_use_stay_within_the_memory_limit() -> None:
    """A grammar that does not fit waits until a running request ends."""
    world = World(memory_mib=100)
    world.run("a", "a=60")
    world.enter("b", "b=60")
    world.wait_for_jobs()
    assert not world.grammars.ready("b")
    assert world.backend.built == ["a=60"]
    world.run("c", "c=40")
    assert world.grammars.stats().num_bytes == 100 * MIB
    world.grammars.leave("a")
    world.wait_for_jobs()
    assert world.grammars.ready("b")
    assert world.grammars.stats().num_bytes == 100 * MIB


def test_the_least_recently_used_grammar_is_evicted() -> None:
    world = World(memory_mib=100)
    for name in ("a", "b"):
        world.run(name, f"{name}=40")
        world.grammars.leave(name)
    world.run("a2", "a=40")
    world.grammars.leave("a2")
    world.run("c", "c=40")
    world.grammars.leave("c")
    assert world.backend.checked == ["a=40", "b=40", "c=40"]
    world.run("a3", "a=40")
    assert world.backend.checked[3:] == []
    world.run("b2", "b=40")
    assert world.backend.checked[3:] == ["b=40"]


def test_the_number_of_cached_entries_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "_MAX_KEPT", 3)
    monkeypatch.setattr(compiler_module, "_MAX_REFUSED", 2)
    world = World(memory_mib=1000)
    for number in range(9):
        world.enter(f"bad{number}", f"bad{number}")
        world.wait_for_jobs()
        world.grammars.leave(f"bad{number}")
        world.run(f"r{number}", f"a{number}")
        world.grammars.leave(f"r{number}")
    assert world.grammars.stats().num_grammars == 5
    assert world.grammars.stats().num_bytes == 3 * MIB


def test_a_preempted_request_keeps_its_matcher() -> None:
    world = World()
    world.run("a", "a+")
    matcher = world.matcher("a")
    matcher.take(1)
    assert world.grammars.ready("a")
    assert world.grammars.acquire("a") == "a+"
    again = world.matcher("a", [1, 2])
    assert again is matcher
    assert matcher._matcher.taken == [1, 2]
    world.grammars.leave("a")
    assert world.grammars.stats().num_bytes == MIB


def test_another_request_with_the_same_id_gets_another_matcher() -> None:
    world = World()
    world.run("a", "a+")
    matcher = world.matcher("a", [1, 2])
    other = world.matcher("a", [1, 3, 4])
    assert other is not matcher
    assert other._matcher.taken == [1, 3, 4]
    world.started["a"] = "b+"
    assert world.matcher("a", [1, 3, 4]) is not other


def test_few_matchers_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matchers_module, "_MAX_KEPT", 2)
    world = World()
    for name in "abc":
        world.run(name, "a+")
    first = world.matcher("a")
    world.matcher("b")
    assert world.matcher("a") is first
    world.matcher("c")
    world.matcher("b")
    assert world.matcher("a") is not first


def test_a_runner_in_another_process_builds_grammars_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(matchers_module, "_MAX_BUILT", 2)
    backend = FakeBackend()
    built = BuiltGrammars(backend.build)
    for grammar in ("a", "b", "a", "c", "a", "b"):
        built.copy(grammar)
    assert backend.built == ["a", "b", "c", "b"], "the least recently used is dropped"
    built.discard("b")
    built.copy("b")
    assert backend.built[4:] == ["b"]


def test_a_failed_grammar_ends_its_request_and_is_compiled_again() -> None:
    world = World()
    world.run("a", "a+")
    world.enter("waits", "a+")
    matcher = world.matcher("a")
    matcher._matcher.shared["error"] = "too many states\nand more"
    matcher.take(1)
    assert str(world.error()) == "guided_regex: too many states"
    assert matcher.mask() is None
    assert not world.grammars.ready("waits")
    world.grammars.leave("a")
    assert not world.matchers.take_failures()
    world.wait_for_jobs()
    assert world.grammars.ready("waits")
    world.started["waits"] = world.grammars.acquire("waits")
    assert world.matcher("waits").mask() == b"\xff"
    assert world.backend.built == ["a+", "a+"]
    world.grammars.leave("waits")
    assert world.grammars.stats().num_bytes == MIB


def test_a_grammar_with_slow_masks_ends_its_request_and_is_refused() -> None:
    world = World()
    world.run("a", "a+")
    world.run("beside", "a+")
    matcher = world.matcher("a")
    world.clock.step = 0.02
    assert matcher.mask() is not None
    world.clock.step = 0.2
    assert matcher.mask() is None
    world.clock.step = 0.0
    assert "took 220 ms of CPU time for 0 tokens, at most 100 ms are allowed" in str(world.error())
    assert world.matcher("beside").mask() == b"\xff"
    world.grammars.leave("a")
    world.grammars.leave("beside")
    world.enter("again", "a+")
    with pytest.raises(RequestError, match="--grammar-step-timeout"):
        world.grammars.ready("again")
    world.grammars.leave("again")
    assert world.grammars.stats().num_bytes == 0
    assert not world.grammars.built._added


def test_each_token_adds_to_the_time_limit() -> None:
    world = World()
    world.run("a", "a+")
    matcher = world.matcher("a")
    world.clock.step = 0.0049  # CPU seconds per mask and per token
    for token in range(1000):
        assert matcher.mask() is not None
        matcher.take(token)
    world.clock.step = 0.0
    assert not world.matchers.take_failures()
