"""The guarantees of the scheduler, one per test."""

import math

import pytest

from tests.core.world import EOS, World, limits, next_token, plain_loop, request
from tests.lora.shelf import FakeShelf
from windlass.core.adapters import Adapters
from windlass.core.blocks import BlockPool, block_hash, root_hash
from windlass.core.policy import Fcfs, Priority, Static
from windlass.core.sampling import SamplingParams
from windlass.core.types import BATCH_PRIORITY, NewRequest, StepResult
from windlass.errors import CapacityError, ConfigError, RequestError


def tokens_of(count: int, first: int = 0) -> list[int]:
    return [(first + i) % 5 for i in range(count)]


def test_a_long_prompt_is_chunked_beside_running_requests() -> None:
    world = World(limits(max_num_batched_tokens=8))
    world.add(request("short", [1], max_tokens=20, ignore_eos=True))
    world.step()
    world.add(request("long", tokens_of(30)))
    plan = world.plan()
    assert [(row.request_id, row.num_tokens, row.sample) for row in plan.rows] == [
        ("short", 1, True),
        ("long", 7, False),
    ]
    world.commit(plan, world.runner.run(plan))
    world.finish_all()


def test_a_shared_prefix_is_computed_once() -> None:
    world = World(limits(max_num_batched_tokens=64, max_model_len=64))
    prefix = tokens_of(32)
    world.add(request("a", [*prefix, 1, 2]))
    world.finish_all()
    before = world.runner.num_computed
    world.add(request("b", [*prefix, 3, 4, 4], max_tokens=1))
    world.finish_all()
    assert world.runner.num_computed - before == 3
    stats = world.scheduler.stats()
    assert (stats.prefix_hits, stats.prefix_queries) == (32, 34 + 35)


def test_a_fully_cached_prompt_computes_one_token_on_a_copied_block() -> None:
    world = World(limits(max_num_batched_tokens=64))
    prompt = tokens_of(16)
    world.add(request("a", prompt, max_tokens=1))
    world.finish_all()
    world.add(request("b", prompt))
    plan = world.plan()
    assert [row.num_tokens for row in plan.rows] == [1]
    assert len(plan.copies) == 1
    world.commit(plan, world.runner.run(plan))
    world.finish_all()
    assert world.got["b"] == plain_loop(request("b", prompt), 64)


def test_simultaneous_requests_wait_for_the_shared_prefix() -> None:
    world = World(limits(max_num_batched_tokens=64, num_blocks=64))
    prefix = tokens_of(32)
    for i in range(3):
        world.add(request(f"r{i}", [*prefix, i, i], max_tokens=2, ignore_eos=True))
    world.add(request("other", [4, 4, 4], max_tokens=2, ignore_eos=True))
    plan = world.plan()
    assert [row.request_id for row in plan.rows] == ["r0", "other"]
    world.commit(plan, world.runner.run(plan))
    rows = {row.request_id: row.num_tokens for row in world.plan().rows}
    assert rows == {"r0": 1, "other": 1, "r1": 2, "r2": 2}


@pytest.mark.parametrize(
    ("bounds", "alike", "joining"),
    [
        ({"max_num_batched_tokens": 8}, False, 2),  # no room in this step
        ({"max_num_batched_tokens": 64}, True, 2),  # what they share is computed in it
        ({"max_num_batched_tokens": 64}, False, 0),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 2}, False, 1),
        ({"max_num_batched_tokens": 64, "max_num_seqs": 1}, False, 0),
    ],
)
def test_a_plan_counts_pending_admissions(
    bounds: dict[str, int], alike: bool, joining: int
) -> None:
    world = World(limits(**bounds))
    for i in range(3):
        world.add(request(str(i), tokens_of(8, first=0 if alike else i), max_tokens=2))
    plan = world.plan()
    assert world.scheduler.num_pending_admissions == joining
    world.commit(plan, world.runner.run(plan))
    world.finish_all()


def test_no_request_waits_for_the_prefix_of_an_aborted_one() -> None:
    world = World(limits(max_num_batched_tokens=8, num_blocks=64))
    prefix = tokens_of(32)
    world.add(request("gone", prefix, max_tokens=2))
    world.add(request("next", prefix, max_tokens=2))
    world.step()
    world.abort("gone")
    assert [row.request_id for row in world.plan().rows] == ["next"]


def test_different_salts_and_adapters_share_no_blocks() -> None:
    adapters = Adapters(1, FakeShelf(["t"], delay=0))
    world = World(limits(max_num_batched_tokens=64), options={"adapters": adapters})
    for index, (salt, adapter) in enumerate([("", ""), ("t", ""), ("", "t")]):
        world.add(
            NewRequest(
                f"r{index}",
                tokens_of(16),
                SamplingParams(max_tokens=1),
                cache_salt=salt,
                adapter=adapter,
            )
        )
        world.finish_all()
    assert world.scheduler.stats().prefix_hits == 0


@pytest.mark.parametrize("weight", [0.0, -1.0, math.inf, math.nan])
def test_a_weight_is_finite_and_above_zero(weight: float) -> None:
    world = World(limits())
    with pytest.raises(RequestError, match=r"weight=.* of tenant 'a'"):
        world.add(NewRequest("r", [1], SamplingParams(), tenant="a", weight=weight))
    assert not world.scheduler.has_work


def test_without_caching_no_block_is_reused() -> None:
    world = World(limits(max_num_batched_tokens=64), caching=False)
    for name in ("a", "b"):
        world.add(request(name, tokens_of(16), max_tokens=1))
        world.finish_all()
    assert world.runner.num_computed == 32
    assert world.pool._by_hash == {}


def test_prompt_logprobs_do_not_use_the_cache() -> None:
    world = World(limits(max_num_batched_tokens=64))
    world.add(request("a", tokens_of(16), max_tokens=1))
    world.finish_all()
    world.add(request("b", tokens_of(16), max_tokens=1, prompt_logprobs=0))
    assert world.plan().rows[0].num_tokens == 16


def test_the_newest_request_is_preempted_and_completes() -> None:
    world = World(limits(num_blocks=8, max_model_len=32, max_num_batched_tokens=32))
    requests = [request(f"r{i}", tokens_of(8, i), max_tokens=16, ignore_eos=True) for i in range(3)]
    for item in requests:
        world.add(item)
    world.finish_all()
    assert world.scheduler.stats().num_preemptions > 0
    for item in requests:
        assert world.got[item.request_id] == plain_loop(item, 32)


def test_priority_orders_starts_and_preemptions() -> None:
    world = World(limits(max_num_seqs=1), options={"policy": Priority()})
    world.add(request("late", [1], priority=5, max_tokens=2, ignore_eos=True))
    world.add(request("soon", [2], priority=1, max_tokens=2, ignore_eos=True))
    order = []
    while world.scheduler.has_work:
        plan = world.plan()
        order += [row.request_id for row in plan.rows]
        world.commit(plan, world.runner.run(plan))
    assert order == ["soon", "soon", "late", "late"]


def test_requests_of_batches_start_after_all_others_under_every_policy() -> None:
    for policy in (Fcfs(), Priority()):
        world = World(limits(max_num_seqs=1), options={"policy": policy})
        for name, priority in (("batch", BATCH_PRIORITY), ("a", 3), ("b", 3)):
            world.add(request(name, [1], priority=priority, max_tokens=1, ignore_eos=True))
        order = []
        while world.scheduler.has_work:
            plan = world.plan()
            order += [row.request_id for row in plan.rows]
            world.commit(plan, world.runner.run(plan))
        assert order == ["a", "b", "batch"]


def test_static_batching_starts_together_and_waits_for_all() -> None:
    gate = Static(max_batch_size=2, max_wait_s=1.0)
    world = World(limits(), options={"gate": gate})
    world.add(request("a", [1], max_tokens=2, ignore_eos=True))
    assert not world.plan().rows, "a batch of one does not start at once"
    world.add(request("b", [2], max_tokens=4, ignore_eos=True))
    world.add(request("c", [3], max_tokens=1))
    seen = []
    for _ in range(4):
        plan = world.plan()
        seen.append([row.request_id for row in plan.rows])
        world.commit(plan, world.runner.run(plan))
    assert seen == [["a", "b"], ["a", "b"], ["b"], ["b"]]
    world.now += 2.0
    assert [row.request_id for row in world.plan().rows] == ["c"], "it has waited long enough"


def test_abort_frees_the_blocks_of_running_and_queued_requests() -> None:
    world = World(limits(max_num_seqs=1))
    world.add(request("a", tokens_of(8)))
    world.add(request("b", tokens_of(8)))
    world.step()
    world.abort("a")
    world.abort("b")
    world.abort("never was")
    assert world.pool.num_used == 0
    assert not world.scheduler.has_work


def test_abort_between_plan_and_commit_drops_the_result() -> None:
    world = World(limits())
    world.add(request("a", [1]))
    plan = world.plan()
    result = world.runner.run(plan)
    world.abort("a")
    assert world.commit(plan, result) == []


def test_eos_stop_tokens_and_length_end_a_request() -> None:
    def prompt_with(token: int) -> list[int]:
        return next([a, b] for a in range(30) for b in range(30) if next_token([a, b]) == token)

    world = World(limits())
    world.add(request("eos", prompt_with(EOS), max_tokens=4))
    world.add(request("stop", prompt_with(11), stop_token_ids=[11], max_tokens=4))
    world.add(request("length", prompt_with(EOS), ignore_eos=True, max_tokens=3))
    world.finish_all()
    assert world.finish == {"eos": "stop", "stop": "stop", "length": "length"}
    assert (len(world.got["eos"]), len(world.got["length"])) == (1, 3)


def test_requests_that_can_never_fit_are_rejected_with_numbers() -> None:
    world = World(limits(max_model_len=32, num_blocks=32))
    with pytest.raises(CapacityError, match=r"40 tokens.*32"):
        world.add(request("a", tokens_of(40)))
    with pytest.raises(CapacityError, match="at most 12"):
        world.add(request("b", tokens_of(20), max_tokens=13))
    small = World(limits(max_model_len=64, num_blocks=4))
    with pytest.raises(CapacityError, match=r"KV cache.*kv-cache-memory-bytes"):
        small.add(request("c", tokens_of(10), max_tokens=10))
    with pytest.raises(RequestError, match="no tokens"):
        small.add(request("d", []))
    small.add(request("e", [1]))
    with pytest.raises(RequestError, match="already in use"):
        small.add(request("e", [1]))


def test_without_chunked_prefill_a_step_must_hold_a_whole_prompt() -> None:
    with pytest.raises(ConfigError, match="max-num-batched-tokens"):
        limits(chunked_prefill=False, max_num_batched_tokens=16, max_model_len=64)
    world = World(limits(chunked_prefill=False, max_num_batched_tokens=64))
    world.add(request("a", tokens_of(40), max_tokens=2))
    assert world.plan().rows[0].num_tokens == 40


def test_a_failed_step_ends_its_own_requests_and_queued_ones_go_on() -> None:
    world = World(limits(max_num_seqs=1))
    world.add(request("a", [1]))
    world.add(request("b", [1]))
    world.plan()
    outputs = world.scheduler.fail_running("boom")
    assert [(o.request_id, o.finish, o.error) for o in outputs] == [("a", "error", "boom")]
    world.add(request("c", [1]))
    world.finish_all()
    assert not world.scheduler.has_work


def test_a_preempted_request_with_a_sample_in_flight_fails_with_the_step() -> None:
    world = World(limits(max_num_seqs=2, num_blocks=3, block_size=4, max_model_len=12))
    world.add(request("a", tokens_of(4), max_tokens=8, ignore_eos=True))
    world.add(request("b", [50, 51, 52, 53], max_tokens=8, ignore_eos=True))
    world.plan()
    world.plan()  # "b" finds no block for its second token and is preempted
    assert world.scheduler.stats().num_waiting == 1
    outputs = world.scheduler.fail_running("boom")
    assert {o.request_id for o in outputs} == {"a", "b"}
    assert not world.scheduler.has_work


def test_a_failure_without_running_requests_ends_the_queue() -> None:
    world = World(limits(max_num_seqs=1))
    world.add(request("a", [1]))
    outputs = world.scheduler.fail_running("boom")
    assert [(o.request_id, o.error) for o in outputs] == [("a", "boom")]
    assert not world.scheduler.has_work


def test_the_timeline_counts_chunks_and_tokens() -> None:
    world = World(limits(max_num_batched_tokens=8))
    world.add(request("a", tokens_of(20), max_tokens=3, ignore_eos=True))
    last = None
    while world.scheduler.has_work:
        plan = world.plan()
        last = world.commit(plan, world.runner.run(plan))
    timeline = last[0].timeline
    assert (timeline.num_prompt, timeline.num_output, timeline.num_chunks) == (20, 3, 3)
    assert timeline.arrived < timeline.admitted <= timeline.first_token < timeline.last_token


def test_least_recently_used_blocks_are_evicted_first_and_tails_before_heads() -> None:
    pool = BlockPool(4)
    hashes = [root_hash("")]
    for i in range(3):
        hashes.append(block_hash(hashes[-1], [i]))
    blocks = pool.take(3)
    for block, digest in zip(blocks, hashes[1:], strict=True):
        pool.seal(block, digest)
    pool.release(blocks)
    pool.take(2)  # the block that was never used, and the tail of the chain
    assert pool.find(hashes[1:]) == blocks[:2]
    assert pool.reset_cache() == 2
    assert pool.find(hashes[1:]) == []


def test_draft_tokens_are_counted_for_the_engine_and_the_request() -> None:
    world = World(limits(), draft_length=4)
    world.add(request("a", [1, 2], max_tokens=30, ignore_eos=True))
    timeline = world.scheduler._requests["a"].timeline
    world.finish_all()
    stats = world.scheduler.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert stats.num_drafts <= stats.num_steps
    assert (timeline.num_drafted, timeline.num_accepted) == (
        stats.num_draft_tokens,
        stats.num_accepted_tokens,
    )
    assert sum(stats.accepted_per_position) == stats.num_accepted_tokens
    assert stats.accepted_per_position == sorted(stats.accepted_per_position, reverse=True)


@pytest.mark.parametrize(("num_blocks", "num_drafts"), [(3, 3), (2, 1)])
def test_draft_tokens_get_a_block_only_if_one_is_left(num_blocks: int, num_drafts: int) -> None:
    world = World(limits(num_blocks=num_blocks, max_model_len=8))
    world.add(request("a", [1, 2], max_tokens=6, ignore_eos=True))
    plan = world.plan()
    (got,) = world.runner.run(plan).rows
    world.commit(plan, StepResult([got._replace(drafts=(0, 0, 0))]))
    (row,) = world.plan().rows
    assert row.num_drafts == num_drafts


@pytest.mark.parametrize("drop_drafts_below", [0, 6, 100])
def test_draft_tokens_are_dropped_in_small_mixed_steps(
    drop_drafts_below: int,
) -> None:
    worlds = [
        World(limits(num_blocks=64, drop_drafts_below=drop_drafts_below), draft_length=4),
        World(limits(num_blocks=64)),
    ]
    beside = {False: 0, True: 0}  # draft tokens in steps with prompts, in small steps and others
    for world in worlds:
        for i in range(12):
            world.add(request(str(i), [i + 1] * (1 + i % 5), max_tokens=20, ignore_eos=True))
            for _ in range(3):
                plan = world.plan()
                prompts = any(row.num_tokens - row.num_drafts > 1 for row in plan.rows)
                if prompts or plan.admitted:
                    num_drafts = sum(row.num_drafts for row in plan.rows)
                    beside[plan.num_tokens + num_drafts <= drop_drafts_below] += num_drafts
                world.commit(plan, world.runner.run(plan))
        world.finish_all()
    assert worlds[0].got == worlds[1].got
    assert worlds[0].scheduler.stats().num_accepted_tokens > 0
    assert not beside[True]
    assert (beside[False] > 0) == (drop_drafts_below < 100)


def test_dropped_draft_tokens_are_not_accounted() -> None:
    world = World(limits(num_blocks=64, drop_drafts_below=100))
    world.add(request("a", [1, 2], max_tokens=8, ignore_eos=True))
    plan = world.plan()
    (got,) = world.runner.run(plan).rows
    world.commit(plan, StepResult([got._replace(drafts=(0, 0, 0))]))
    world.add(request("b", [3, 4], max_tokens=8, ignore_eos=True))
    plan = world.plan()
    assert [(row.num_tokens, row.num_drafts) for row in plan.rows] == [(1, 0), (2, 0)]
    assert world.scheduler.stats().num_step_tokens == plan.num_tokens == 3
    world.commit(plan, world.runner.run(plan))
    world.finish_all()
    assert world.scheduler.stats().num_draft_tokens == 0


@pytest.mark.parametrize("num_prompt", [8, 9, 11, 12])
def test_requests_with_one_prefix_wait_only_for_the_first_of_them(num_prompt: int) -> None:
    """Also if their whole prompt is cached, and while other requests compute theirs."""
    world = World(limits(num_blocks=256, max_num_seqs=64, max_num_batched_tokens=256))
    for i in range(16):
        world.add(request(f"same-{i}", [1] * num_prompt, max_tokens=30, ignore_eos=True))
    running = []
    for i in range(4):
        world.add(request(f"other-{i}", [2 + i] * 12, max_tokens=30, ignore_eos=True))
        world.step()
        running.append(world.scheduler.stats().num_running)
    assert running == [1 + 1, 16 + 2, 16 + 3, 16 + 4]
    world.finish_all()
