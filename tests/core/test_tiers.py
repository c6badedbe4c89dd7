"""KV tiers: what is saved and loaded, who waits, and what happens when a load is in progress."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from tests.core.fake_tiers import FakeStores
from tests.core.test_kv_groups import request_hashes
from tests.core.world import World, limits, make_layout, plain_loop, request
from windlass.core.trace import BLOCKERS, KV


def prompt_of(count: int, seed: int = 0) -> list[int]:
    random = Random(seed)
    return [random.randrange(20) for _ in range(count)]


PROMPT = prompt_of(24)


def world_of(stores: FakeStores, kinds: tuple[str, ...] = ("full",), **changes) -> World:
    layout = make_layout(*kinds, block_size=4)
    values = {"layout": layout, "max_num_batched_tokens": 64, "num_blocks": 12 * len(kinds)}
    return World(limits(**{**values, **changes}), options={"tiers": stores})


def run(world: World, name: str, prompt: list[int]) -> int:
    """Run one request alone; returns how many tokens were computed."""
    before = world.runner.num_computed
    item = request(name, prompt, max_tokens=1)
    world.add(item)
    world.finish_all()
    layout = world.limits.layout
    assert world.got[name] == plain_loop(item, world.limits.max_model_len, layout=layout)
    return world.runner.num_computed - before


def evict_all(world: World) -> None:
    """Take all blocks of the device once; its tiers save them."""
    taken = world.pool.take(world.pool.num_free)
    world.runner.run(world.scheduler.plan(world.now))
    world.pool.release(taken)


def evicted_world(stores: FakeStores, kinds: tuple[str, ...] = ("full",), **changes) -> World:
    """A world whose tiers have the blocks of PROMPT, and whose device has none."""
    world = world_of(stores, kinds, **changes)
    run(world, "first", PROMPT)
    evict_all(world)
    return world


def is_cached(world: World) -> bool:
    return world.pool.is_cached(request_hashes(world, PROMPT)[0])


@pytest.mark.parametrize(
    "kinds", [("full",), ("window6",), ("latent",), ("state",), ("full", "window6", "state")]
)
def test_an_evicted_prefix_is_loaded_instead_of_computed(kinds: tuple[str, ...]) -> None:
    stores = FakeStores(delay=2)
    world = evicted_world(stores, kinds)
    assert run(world, "again", [*PROMPT, 1, 2]) == 2
    assert stores.num_loads > 0
    stats = world.scheduler.stats()
    assert stats.tiers[0].num_hit_tokens == 24
    assert stats.tier_decisions == {"loaded": 1}
    assert stats.prefix_hits == 24


def test_others_pass_while_blocks_are_loaded() -> None:
    stores = FakeStores(delay=3)
    world = evicted_world(stores, num_blocks=16)
    stores.random.seed(1)
    world.add(request("late", [*PROMPT, 1], max_tokens=1))
    world.add(request("quick", [1, 2, 3], max_tokens=1))
    plan = world.plan()
    assert len(plan.loads) == 6
    assert [row.request_id for row in plan.rows] == ["quick"]
    assert world.scheduler.stats().waiting_by_reason == {BLOCKERS[KV]: 1}
    world.commit(plan, world.runner.run(plan))
    world.finish_all()
    (trace,) = (t for t in world.scheduler.accounting.traces if t.request_id == "late")
    assert trace.loaded == {"host": 24}
    assert trace.timeline.num_loaded == 24
    assert trace.blocked_s[KV] == pytest.approx(sum(trace.blocked_s))
    assert trace.tier_decision.startswith("loaded: 24 tokens from host: 0.0 ms to load, ")


def test_requests_with_the_same_prefix_load_it_once() -> None:
    stores = FakeStores(delay=2)
    world = evicted_world(stores, num_blocks=16)
    before = world.runner.num_computed
    for name in "abc":
        world.add(request(name, [*PROMPT, *name.encode()], max_tokens=1))
    world.finish_all()
    assert stores.num_loads == 6
    assert world.runner.num_computed - before == 3


def test_a_failed_load_is_a_miss() -> None:
    stores = FakeStores()
    world = evicted_world(stores)
    stores.loss = 1.0
    assert run(world, "again", [*PROMPT, 1]) == 25
    assert world.scheduler.stats().tier_decisions == {"failed": 1}


def test_the_blocks_of_an_aborted_request_are_cached_when_they_arrive() -> None:
    stores = FakeStores(delay=5)
    world = evicted_world(stores)
    world.add(request("gone", [*PROMPT, 1]))
    world.step()
    assert stores.writing
    world.abort("gone")
    assert world.scheduler.has_work  # until the load has ended
    world.finish_all()
    assert is_cached(world)
    assert run(world, "again", [*PROMPT, 1]) == 1


def test_a_reset_drops_what_is_being_loaded() -> None:
    stores = FakeStores(delay=5)
    world = evicted_world(stores)
    world.add(request("late", [*PROMPT, 1], max_tokens=1))
    world.step()
    world.scheduler.reset_prefix_cache()
    world.scheduler.tiers.clear()
    before = world.runner.num_computed
    world.finish_all()
    assert world.runner.num_computed - before == 25
    assert world.got["late"] == plain_loop(request("late", [*PROMPT, 1], max_tokens=1), 64)


def test_a_deadline_ends_a_request_whose_blocks_are_loading() -> None:
    stores = FakeStores(delay=5)
    world = evicted_world(stores)
    world.add(replace(request("late", [*PROMPT, 1]), deadline=world.now + 0.015))
    world.step()
    world.step()
    assert [output.finish for output in world.scheduler.failed] == ["deadline"]
    world.finish_all()


@pytest.mark.parametrize("retracted", [True, False])
def test_loads_go_on_after_a_failed_step(retracted: bool) -> None:
    stores = FakeStores(delay=3)
    world = evicted_world(stores, num_blocks=16, max_num_batched_tokens=256)
    world.add(request("late", [*PROMPT, 1], max_tokens=1))
    world.add(request("broken", [1, 2, 3], max_tokens=1))
    plan = world.plan()
    world.runner.run(plan)
    if retracted:
        assert world.scheduler.retract(plan, "out of memory") == []
    else:
        (output,) = world.scheduler.fail_running("broken")
        assert output.request_id == "broken"
    world.finish_all()
    assert world.got["late"] == plain_loop(request("late", [*PROMPT, 1], max_tokens=1), 64)


def test_what_is_faster_to_compute_is_not_loaded() -> None:
    stores = FakeStores(("host", "disk"), sizes=(10**6, 10**6), seconds=(0.0, 10.0))
    world = evicted_world(stores)
    # A step takes a second, so that the rate of prompts is known.
    world.add(request("slow", [1, 2, 3], max_tokens=1))
    plan = world.plan()
    world.now += 1.0
    world.commit(plan, world.runner.run(plan))
    for digest in request_hashes(world, PROMPT)[3:]:
        del stores.records[0][digest]
    # Three blocks are in host memory, the others on a disk that is slower than the model.
    assert run(world, "again", [*PROMPT, 1]) == 25 - 12
    evict_all(world)
    stores.records[0].clear()
    assert run(world, "last", [*PROMPT, 2]) == 25
    assert world.scheduler.stats().tier_decisions == {"loaded": 1, "recomputed": 1}
    (trace,) = (t for t in world.scheduler.accounting.traces if t.request_id == "last")
    assert trace.tier_decision.startswith("recomputed: ")
    assert "from disk: " in trace.tier_decision


def test_the_rate_measured_at_the_start_counts_before_the_first_prompt() -> None:
    stores = FakeStores(seconds=(1.0,))
    evicted_world(stores)
    for token_s, num_computed in ((0.1, 25), (1.0, 1)):
        stores.prompt_token_s = token_s
        assert run(world_of(stores), "first", [*PROMPT, 1]) == num_computed


def test_prompts_are_saved_when_they_are_computed_if_a_tier_outlives_the_engine() -> None:
    stores = FakeStores(keeps_prompts=True)
    world = world_of(stores, num_blocks=16, max_num_batched_tokens=10)
    world.add(request("a", PROMPT, max_tokens=12, ignore_eos=True))
    world.finish_all()
    assert stores.num_saves == 6  # the blocks of the prompt, not those of the answer
    restarted = world_of(stores)
    assert run(restarted, "b", [*PROMPT, 1]) == 1


def test_only_evicted_blocks_are_saved_otherwise() -> None:
    stores = FakeStores()
    world = world_of(stores)
    run(world, "first", PROMPT)
    assert stores.num_saves == 0
    evict_all(world)
    assert stores.num_saves == 6
    run(world, "again", PROMPT)
    evict_all(world)
    assert stores.num_saves == 6  # none is saved twice


def test_only_as_many_requests_load_as_could_start() -> None:
    stores, other = FakeStores(delay=9), prompt_of(24, seed=1)
    world = world_of(stores, num_blocks=64, max_num_seqs=1)
    run(world, "first", PROMPT)
    run(world, "second", other)
    evict_all(world)
    world.add(request("a", [*PROMPT, 1]))
    world.add(request("b", [*other, 1]))
    assert len(world.plan().loads) == 6
