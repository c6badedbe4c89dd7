"""Named prefixes: pinned blocks are never evicted, bounded, and salted like those of requests."""

from dataclasses import replace

import pytest

from tests.core.fake_tiers import FakeStores
from tests.core.world import World, limits, make_layout, plain_loop, request
from windlass.core.types import NewRequest, PinnedPrefix
from windlass.errors import CapacityError, RequestError

PREFIX = [1, 2, 3, 4] * 4


def make_world(**changes: object) -> World:
    defaults = {"max_num_batched_tokens": 64, "max_model_len": 64, "num_blocks": 32}
    return World(limits(**{**defaults, **changes}), options={"max_pinned_share": 0.5})


def compute(world: World, new: NewRequest) -> int:
    """Run a request; returns how many tokens were computed."""
    before = world.runner.num_computed
    world.add(new)
    world.finish_all()
    return world.runner.num_computed - before


def churn(world: World) -> None:
    """Use every block that can be evicted."""
    for i in range(12):
        compute(world, request(f"churn{i}", [i % 20] * 3 + [5] * 50, max_tokens=4))


def test_a_pinned_prefix_outlives_other_requests() -> None:
    world = make_world()
    pins, new = world.scheduler.pins, request("save", PREFIX, max_tokens=1)
    assert pins.pin("a", new) == PinnedPrefix(num_missing=16)
    assert world.pool.num_used == 0
    compute(world, new)
    assert pins.pin("a", new) == PinnedPrefix(num_tokens=16, num_blocks=4)
    assert world.scheduler.stats().num_pinned_blocks == world.pool.num_used == 4
    churn(world)
    asked = request("b", [*PREFIX, 9, 9], max_tokens=1)
    assert compute(world, asked) == 2
    assert world.got["b"] == plain_loop(asked, 64)
    assert world.scheduler.reset_prefix_cache() > 0
    assert compute(world, replace(asked, request_id="c")) == 2


def test_an_unpinned_prefix_is_evicted_again() -> None:
    world = make_world()
    pins, new = world.scheduler.pins, request("save", PREFIX, max_tokens=1)
    compute(world, new)
    pins.pin("a", new)
    assert pins.unpin("a") == 4
    assert pins.unpin("a") == 0
    assert world.pool.num_used == pins.num_blocks == 0
    churn(world)
    assert compute(world, request("b", [*PREFIX, 9], max_tokens=1)) == 17


def test_a_name_is_pinned_anew_and_prefixes_share_blocks() -> None:
    world = make_world()
    pins, longer = world.scheduler.pins, [*PREFIX, *[6] * 8]
    for i, prompt in enumerate((PREFIX, longer)):
        compute(world, request(f"r{i}", prompt, max_tokens=1))
        pins.pin(f"p{i}", request("save", prompt))
    assert pins.num_blocks == 6
    pins.pin("p1", request("save", PREFIX))
    assert pins.num_blocks == world.pool.num_used == 4
    pins.clear()
    assert world.pool.num_used == 0


@pytest.mark.parametrize("salt", ["", "other"])
def test_a_pin_is_of_one_salt(salt: str) -> None:
    world = make_world()
    compute(world, request("a", PREFIX, max_tokens=1))
    pinned = world.scheduler.pins.pin("a", replace(request("save", PREFIX), cache_salt=salt))
    assert pinned.num_missing == (16 if salt else 0)


def test_a_prefix_beyond_the_bound_is_refused_before_it_is_computed() -> None:
    world = make_world()
    pins = world.scheduler.pins
    assert pins.max_blocks == 16  # half of 32; the longest request needs the other half
    compute(world, request("a", PREFIX, max_tokens=1))
    pins.pin("a", request("save", PREFIX))
    with pytest.raises(
        CapacityError, match=r"52 tokens needs 13 KV blocks; 4 are pinned.*16 of 32"
    ):
        pins.pin("b", request("save", [5] * 52))
    assert pins.pin("b", request("save", [5] * 48)).num_missing == 48
    with pytest.raises(RequestError, match="3 tokens, and only full blocks of 4"):
        pins.pin("b", request("save", [5] * 3))


def test_the_longest_request_runs_beside_all_pins() -> None:
    world = make_world(num_blocks=20)
    pins = world.scheduler.pins
    assert pins.max_blocks == 4
    compute(world, request("a", PREFIX, max_tokens=1))
    pins.pin("a", request("save", PREFIX))
    longest = request("b", [5] * 40, max_tokens=24, ignore_eos=True)
    compute(world, longest)
    assert world.got["b"] == plain_loop(longest, 64)


def test_without_prefix_caching_nothing_is_pinned() -> None:
    world = World(limits(), caching=False)
    with pytest.raises(RequestError, match="prefix caching is off"):
        world.scheduler.pins.pin("a", request("save", PREFIX))


def test_pinned_blocks_are_in_the_tiers_as_well() -> None:
    stores = FakeStores()
    world = World(limits(max_num_batched_tokens=64), options={"tiers": stores})
    pins, new = world.scheduler.pins, request("save", PREFIX, max_tokens=1)
    compute(world, new)
    pins.pin("a", new)
    world.finish_all()
    assert world.scheduler.stats().tiers[0].num_records == 4
    pins.clear()  # as sleep does
    world.pool.reset_cache()
    assert compute(world, request("b", [*PREFIX, 9], max_tokens=1)) == 1


def test_a_prefix_of_the_tiers_alone_is_saved_and_not_pinned() -> None:
    world = World(limits(max_num_batched_tokens=64), options={"tiers": FakeStores()})
    pins, new = world.scheduler.pins, request("save", PREFIX, max_tokens=1)
    assert pins.pin("a", new, on_device=False).num_missing == 16
    compute(world, new)
    assert pins.pin("a", new, on_device=False) == PinnedPrefix(num_tokens=16)
    world.finish_all()
    assert (pins.num_blocks, world.scheduler.stats().tiers[0].num_records) == (0, 4)
    with pytest.raises(RequestError, match="no KV tier"):
        make_world().scheduler.pins.pin("a", new, on_device=False)


@pytest.mark.parametrize("kinds", [("full", "window6"), ("full", "state"), ("window6", "window9")])
def test_pins_of_windows_and_states(kinds: tuple[str, ...]) -> None:
    world = make_world(num_blocks=64, layout=make_layout(*kinds, block_size=4))
    pins, new = world.scheduler.pins, request("save", [*PREFIX, 7], max_tokens=1)
    compute(world, new)
    assert pins.pin("a", new).num_tokens == 16
    for i in range(6):
        churn_more = request(f"more{i}", [i + 3] * 40, max_tokens=4)
        compute(world, churn_more)
    asked = request("b", [*PREFIX, 7, 9, 9], max_tokens=3)
    assert compute(world, asked) < 10
    assert world.got["b"] == plain_loop(asked, 64, layout=world.limits.layout)
