"""Residency of adapters in device slots: waiting, pins, fairness, and unloading."""

from __future__ import annotations

from random import Random

import pytest

from tests.core.world import World, limits, plain_loop
from tests.lora.shelf import AdaptedRunner, FakeShelf
from windlass.core.adapters import Adapters
from windlass.core.sampling import SamplingParams
from windlass.core.types import AdapterSize, NewRequest
from windlass.errors import AdapterConflict, AdapterNotFound


class Adapted(World):
    """A scheduler world with adapters."""

    def __init__(self, shelf: FakeShelf, num_slots: int = 2, **numbers: int) -> None:
        self.shelf = shelf
        self.adapters = Adapters(num_slots, shelf)
        numbers = {"max_num_batched_tokens": 64, "num_blocks": 64, **numbers}
        super().__init__(limits(**numbers), options={"adapters": self.adapters})
        self.adapter_of: dict[str, str] = {}
        self.runner = AdaptedRunner(self.limits.num_blocks, self.limits.layout)
        self.runner.attach(shelf, self.adapter_of)
        self.errors: dict[str, str | None] = {}

    def ask(self, name: str, adapter: str = "", prompt: int = 5, max_tokens: int = 6) -> NewRequest:
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        tokens = [len(name) % 3, *range(prompt - 1)]
        request = NewRequest(name, tokens, sampling, adapter=adapter)
        self.adapter_of[name] = adapter
        self.add(request)
        return request

    def plan(self):
        plan = super().plan()
        for output in self.scheduler.failed:
            self.errors[output.request_id] = output.error
        return plan

    def rows(self) -> list[str]:
        """Run one step; returns the requests that it computed."""
        plan = self.plan()
        if plan.rows:
            self.commit(plan, self.runner.run(plan))
        return [row.request_id for row in plan.rows]


def test_uses_of_adapters() -> None:
    world = Adapted(FakeShelf("abc", delay=0), num_slots=1)
    uses = {use.name: use for use in world.adapters.uses()}
    assert [(use.place, use.size, use.num_requests) for use in uses.values()] == [
        ("disk", None, 0)
    ] * 3
    world.ask("first", "a")
    world.ask("second", "a")
    world.ask("third", "b")
    world.rows()
    uses = {use.name: use for use in world.adapters.uses()}
    counts = {
        name: (use.place, use.num_running, use.num_waiting, use.num_requests)
        for name, use in uses.items()
    }
    assert counts == {
        "a": ("device", 2, 0, 2),
        "b": ("memory", 0, 1, 1),
        "c": ("disk", 0, 0, 0),
    }
    assert uses["a"].size == AdapterSize(8, 1000)
    while world.rows():
        pass
    world.adapters.unload("a")
    world.adapters.load("a", "elsewhere")
    uses = {use.name: use for use in world.adapters.uses()}
    assert (uses["a"].num_requests, uses["b"].num_requests) == (0, 1)
    assert uses["b"].place == "device"


def test_request_waits_for_its_adapter_while_others_run() -> None:
    world = Adapted(FakeShelf(["a"], delay=2))
    request = world.ask("first", "a")
    world.ask("second")
    assert world.rows() == ["second"]
    stats = world.scheduler.stats().adapters
    assert stats is not None
    assert (stats.num_waiting, stats.num_resident, stats.num_in_memory) == (1, 0, 0)
    assert world.rows() == ["second"]
    assert world.rows() == ["second", "first"]
    world.finish_all()
    assert world.got["first"] == plain_loop(request, 64, None)


def test_request_without_a_free_slot_is_passed_over() -> None:
    world = Adapted(FakeShelf("abc", delay=0), num_slots=2)
    for name in "abc":
        world.ask(name, name)
    world.ask("base")
    world.ask("again", "b")
    assert world.rows() == ["a", "b", "base", "again"]
    world.finish_all()
    assert set(world.finish) == {"a", "b", "c", "base", "again"}


def test_waiting_requests_are_rechecked_only_after_a_change() -> None:
    world = Adapted(FakeShelf("ab", delay=0), num_slots=1)
    world.ask("a", "a", max_tokens=20)
    world.ask("b", "b")
    world.rows()
    world.shelf.names.remove("b")  # a call for it would now fail
    for _ in range(10):
        assert world.rows() == ["a"]
    world.ask("base")
    world.shelf.names.append("b")
    assert world.rows() == ["a", "base"]
    world.finish_all()
    assert set(world.finish) == {"a", "b", "base"}


def test_adapter_that_finishes_loading_during_planning_is_noticed() -> None:
    class Sudden(FakeShelf):
        num_ended = 0

        def ready(self, name: str) -> bool:
            there = super().ready(name)
            self.num_ended += not there  # its reader thread finishes concurrently
            return there

    world = Adapted(Sudden(["a"], delay=1))
    world.ask("one", "a")
    assert world.rows() == []
    assert world.rows() == ["one"]
    world.finish_all()


def test_idle_adapter_stays_until_its_slot_is_needed() -> None:
    world = Adapted(FakeShelf("abc", delay=0), num_slots=2)
    for name in ("a1", "b1", "a2", "c1", "a3"):
        world.ask(name, name[0])
        world.finish_all()
    assert sorted(world.runner.bank.values()) == ["a", "c"]  # b was used least recently
    stats = world.scheduler.stats().adapters
    assert stats is not None
    assert stats.num_reads == 3


def test_broken_adapter_ends_only_its_request() -> None:
    world = Adapted(FakeShelf(["a", "bad"], broken={"bad"}))
    world.ask("one", "bad")
    world.ask("two", "a")
    world.finish_all()
    assert world.errors == {"one": "bad is broken"}
    assert world.finish == {"two": "length"}
    world.shelf.broken.clear()
    world.ask("three", "bad")  # repaired
    world.finish_all()
    assert world.finish["three"] == "length"


def test_unknown_adapters_are_rejected() -> None:
    with pytest.raises(AdapterNotFound, match="no adapter 'x' here"):
        Adapted(FakeShelf(["a"])).ask("r", "x")
    world = World(limits())
    with pytest.raises(AdapterNotFound, match="without --enable-lora"):
        world.add(NewRequest("r", [1], SamplingParams(), adapter="x"))


def test_unload_drains_running_requests_and_rejects_new_ones() -> None:
    world = Adapted(FakeShelf("ab", delay=0))
    world.ask("running", "a")
    world.rows()
    assert world.adapters.unload("a") == 1
    with pytest.raises(AdapterNotFound):
        world.ask("late", "a")
    with pytest.raises(AdapterConflict, match="1 requests with it are still running"):
        world.adapters.unload("a")
    with pytest.raises(AdapterConflict, match="being unloaded"):
        world.adapters.load("a", "folder")
    world.finish_all()
    assert world.finish["running"] == "length"
    assert world.shelf.names == ["b"]
    assert world.adapters.unload("b") == 0
    with pytest.raises(AdapterNotFound):
        world.adapters.unload("b")


def test_reloaded_name_reuses_neither_blocks_nor_weights() -> None:
    world = Adapted(FakeShelf(["a"], delay=0))
    for life in range(2):
        if life:
            world.adapters.unload("a")
            world.adapters.load("a", "elsewhere")
            world.runner.bank.clear()
        for number in range(2):
            world.ask(f"{life}{number}", "a", prompt=40)
            world.finish_all()
    assert world.scheduler.stats().prefix_hits == 2 * 39  # the second request of each life


def test_load_reports_completion_and_failure_leaves_no_state() -> None:
    world = Adapted(FakeShelf(broken={"bad"}))
    world.adapters.load("a", "folder")
    assert not world.adapters.loaded("a")
    assert world.adapters.loaded("a")
    world.adapters.load("bad", "folder")
    assert not world.adapters.loaded("bad")
    with pytest.raises(Exception, match="bad is broken"):
        world.adapters.loaded("bad")
    assert world.adapters.names == ["a"]


def test_no_starvation_for_a_slot() -> None:
    """Requests for one adapter arrive continuously; the other adapter still gets a slot."""
    world = Adapted(FakeShelf("ab", delay=0), num_slots=1)
    world.ask("a0", "a", max_tokens=4)
    world.rows()
    world.ask("b", "b")
    for number in range(1, 400):
        world.ask(f"a{number}", "a", max_tokens=4)
        world.rows()
        if world.finish.get("b"):
            break
    assert 60 < number < 150
    world.finish_all()


def test_adapters_of_a_failed_step_are_copied_again() -> None:
    world = Adapted(FakeShelf("ab", delay=0), max_num_batched_tokens=256)
    world.ask("one", "a")
    plan = world.plan()
    assert plan.adapters == [(1, "a")]
    world.scheduler.retract(plan, "no memory")
    world.finish_all()
    assert world.finish == {"one": "length"}
    world.ask("two", "b")
    assert [name for _, name in world.plan().adapters] == ["b"]
    world.scheduler.fail_running("broken")
    world.runner.bank.clear()
    world.ask("three", "b")
    world.finish_all()
    assert world.finish["three"] == "length"
    assert world.shelf.held == []


def change(adapters: Adapters, name: str) -> None:
    """Unload a loaded name, or load an unloaded one."""
    if name in adapters.names:
        adapters.unload(name)
        return
    try:
        adapters.load(name, "folder")
    except AdapterConflict:
        assert adapters._users[name] > 0


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_two_hundred_adapters_in_few_slots(seed: int, ahead: bool) -> None:
    """Random arrivals, preemptions, aborts and unloads: each row has its own adapter in its slot."""
    random = Random(seed)
    names = [f"n{i}" for i in range(200)]
    shelf = FakeShelf(names, max_in_memory=random.choice([16, 40]), delay=random.randint(0, 3))
    world = Adapted(shelf, num_slots=16, num_blocks=24, max_num_seqs=20)
    requests = {}
    for number in range(300):
        adapter = random.choice(names) if random.random() < 0.9 else ""
        name = f"r{number}"
        if random.random() < 0.1:
            change(world.adapters, random.choice(names))
        if adapter and adapter not in world.adapters.names:
            with pytest.raises(AdapterNotFound):
                world.ask(name, adapter)
            continue
        requests[name] = world.ask(name, adapter, random.randint(2, 40), random.randint(1, 12))
        if random.random() < 0.1:
            gone = random.choice(list(requests))
            world.abort(gone)
            del requests[gone]
        if random.random() < 0.5 and not ahead:
            world.step()
    world.finish_all(ahead=ahead)
    for name, request in requests.items():
        assert world.got[name] == plain_loop(request, 64, None), name
    assert world.runner.max_at_once > 4
    world.adapters.begin()
    adapters = world.adapters
    assert (adapters._pins, adapters._users, adapters._orders, shelf.held) == ({}, {}, {}, [])
    assert adapters._leaving == set()
    assert len(adapters._idle) == len(adapters._slots) == 16 - len(adapters._free)


def test_a_request_for_other_weights_is_refused() -> None:
    shelf = FakeShelf(["a"])
    adapters = Adapters(2, shelf)
    version = shelf.version("a")
    assert adapters.enter("a", version) == adapters.enter("a")
    with pytest.raises(AdapterConflict, match="has other weights here than on the server"):
        adapters.enter("a", "another version")
    assert adapters.unload("a") == 2  # the refused one is no user
