"""Block tables per group: windows that free blocks, prefix hits of several groups, states."""

from __future__ import annotations

import pytest

from tests.core.test_scheduler import tokens_of
from tests.core.world import World, limits, make_layout, plain_loop, request
from windlass.core.kv_layout import KVLayout
from windlass.core.types import NO_BLOCK
from windlass.errors import CapacityError


def world_of(layout: KVLayout, **changes) -> World:
    return World(limits(layout=layout, **{"max_num_batched_tokens": 64, **changes}))


def run(world: World, name: str, prompt: list[int], **sampling) -> int:
    """Run one request alone; returns how many of its tokens were cached."""
    before = world.scheduler.stats().prefix_hits
    item = request(name, prompt, **{"max_tokens": 1, **sampling})
    world.add(item)
    world.finish_all()
    layout = world.limits.layout
    assert world.got[name] == plain_loop(item, world.limits.max_model_len, layout=layout)
    return world.scheduler.stats().prefix_hits - before


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(
    ("window", "chunk", "size"), [(10, 16, 4), (5, 3, 2), (8, 8, 8), (1, 4, 4)]
)
def test_a_window_bounds_the_blocks_of_a_request(
    window: int, chunk: int, size: int, caching: bool
) -> None:
    layout = make_layout(f"window{window}", block_size=size)
    few = layout.blocks_for(10**6, 2 * chunk)
    world = World(
        limits(
            layout=layout,
            max_num_batched_tokens=chunk,
            max_model_len=400,
            num_blocks=few,
        ),
        caching,
    )
    item = request("long", tokens_of(200), max_tokens=150, ignore_eos=True)
    world.add(item)
    most = 0
    while world.scheduler.has_work:
        world.step()
        most = max(most, world.pool.num_used)
    assert world.got["long"] == plain_loop(item, 400, layout=layout)
    assert most * size <= window + chunk + 2 * size
    assert world.scheduler.stats().num_preemptions == 0


def test_groups_hold_what_their_kind_needs() -> None:
    layout = make_layout("full", "window6", "state", "latent", block_size=4)
    world = world_of(layout, num_blocks=64, max_model_len=128)
    world.add(request("r", tokens_of(30), max_tokens=2, ignore_eos=True))
    plan = world.plan()
    assert len(plan.rows[0].blocks) == 4 * 8
    world.commit(plan, world.runner.run(plan))
    (running,) = world.scheduler._running
    held = [len(table) - table.count(NO_BLOCK) for table in running.tables]
    assert held == [8, 2, 1, 8]  # window: positions 25 to 29; state: after position 29
    assert running.tables[1][:6] == [NO_BLOCK] * 6
    use = world.scheduler.block_use()
    assert (use.num_used, use.num_unfilled) == (19, 4 * 2)
    assert use.num_cached == 7 * 4 - (7 + 1 + 0 + 7)
    world.finish_all()


def test_a_prefix_hit_needs_only_the_window() -> None:
    layout = make_layout("window6", block_size=4)
    world = world_of(layout, num_blocks=20)
    prompt = tokens_of(32)
    assert run(world, "a", prompt) == 0
    assert run(world, "b", [*prompt, 1, 2, 3]) == 32
    # The first blocks of the prompt are evicted; the hit needs positions 27 to 31 alone.
    for block in [world.pool._by_hash[key] for key in request_hashes(world, prompt)[:6]]:
        world.pool._evict(block)
    assert run(world, "c", [*prompt, 4, 5]) == 32
    # Without the block before the last, the hit ends before the gap, where nothing is left.
    world.pool._evict(world.pool._by_hash[request_hashes(world, prompt)[6]])
    assert run(world, "d", [*prompt, 6]) == 0


def request_hashes(world: World, prompt: list[int]) -> list[bytes]:
    from windlass.core.blocks import block_hash, root_hash

    size, parent, hashes = world.limits.block_size, root_hash("\0\0"), []
    for at in range(0, len(prompt) - size + 1, size):
        parent = block_hash(parent, prompt[at : at + size])
        hashes.append(parent)
    return hashes


def test_a_hit_is_the_longest_prefix_that_all_groups_have() -> None:
    layout = make_layout("full", "window5", block_size=4)
    world = world_of(layout, num_blocks=40)
    prompt = tokens_of(24)
    run(world, "a", prompt)
    hashes = request_hashes(world, prompt)
    assert run(world, "b", [*prompt, 1]) == 24
    # The window's last blocks are lost: hits end at block 3, where the window covers block 2.
    for index in (3, 4, 5):
        world.pool._evict(world.pool._by_hash[hashes[index] + b"\1"])
    assert run(world, "c", [*prompt, 2]) == 12
    world.pool._evict(world.pool._by_hash[hashes[1]])
    assert run(world, "d", [*prompt, 3]) == 4


@pytest.mark.parametrize("kind", ["full", "window6", "latent"])
def test_a_fully_cached_prompt_is_copied_in_every_group(kind: str) -> None:
    layout = make_layout(kind, "full", block_size=4)
    world = world_of(layout)
    prompt = tokens_of(16)
    run(world, "a", prompt)
    world.add(request("b", prompt, max_tokens=1))
    plan = world.plan()
    assert len(plan.copies) == 2
    assert plan.rows[0].num_tokens == 1
    world.commit(plan, world.runner.run(plan))
    assert world.got["b"] == world.got["a"]


def test_a_state_is_reused_only_at_the_end_of_a_block() -> None:
    world = world_of(make_layout("state", block_size=4))
    prompt = tokens_of(16)
    assert run(world, "a", prompt) == 0
    # All four blocks are cached, but the state before the last token is not.
    assert run(world, "b", prompt) == 12
    assert run(world, "c", [*prompt, 1]) == 16
    assert run(world, "d", prompt[:15]) == 12
    # Only the checkpoint at the hit's end is needed.
    hashes = request_hashes(world, prompt)
    for digest in hashes[:3]:
        world.pool._evict(world.pool._by_hash[digest])
    assert run(world, "e", [*prompt, 2]) == 16
    assert run(world, "f", prompt[:15]) == 0


def test_a_state_holds_one_block_and_gets_no_draft_tokens() -> None:
    world = World(limits(layout=make_layout("state", block_size=4)), draft_length=4)
    world.add(request("r", tokens_of(14), max_tokens=20, ignore_eos=True))
    world.step()
    while world.scheduler.has_work:
        plan = world.plan()
        assert not plan.has_drafts
        result = world.runner.run(plan)
        rows = [row._replace(drafts=(1, 2)) for row in result.rows]
        world.commit(plan, result._replace(rows=rows))
        assert world.pool.num_used <= 2
    assert len(world.got["r"]) == 20


def test_the_limit_of_a_request_counts_all_groups() -> None:
    layout = make_layout("full", "window8", block_size=4)
    given = limits(layout=layout, max_num_batched_tokens=4, max_model_len=1000, num_blocks=20)
    # 8 tokens in flight: the window group holds up to 2 + 3 blocks, the full group the other 15.
    assert given.fit(59, None) == 1
    with pytest.raises(CapacityError, match="the whole KV cache holds 60"):
        given.fit(60, None)
    windowed = limits(
        layout=make_layout("window8", block_size=4), max_model_len=1000, num_blocks=20
    )
    assert windowed.fit(500, None) == 500


def test_window_blocks_are_freed_in_preempted_worlds() -> None:
    layout = make_layout("full", "window6", block_size=2)
    world = world_of(layout, num_blocks=36, max_num_batched_tokens=8, max_model_len=48)
    items = [request(f"r{i}", tokens_of(12, i), max_tokens=30, ignore_eos=True) for i in range(3)]
    for item in items:
        world.add(item)
    world.finish_all(ahead=True)
    assert world.scheduler.stats().num_preemptions > 0
    for item in items:
        assert world.got[item.request_id] == plain_loop(item, 48, layout=layout)
