"""Random workloads and settings: every request gets the tokens of the reference loop."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.fake_tiers import FakeStores
from tests.core.world import World, limits, make_layout, plain_loop, request
from tests.lora.shelf import FakeShelf
from windlass.core.adapters import Adapters
from windlass.core.kv_layout import KVLayout
from windlass.core.policy import Continuous, Fcfs, Priority, Static

LAYOUTS = [
    ("full",),
    ("window",),
    ("full", "window"),
    ("full", "full", "window", "window"),
    ("latent",),
    ("state",),
    ("full", "state"),
    ("window", "latent", "state"),
]
ADAPTERS = ("", "a", "b", "c")


def random_layout(rng: Random, size: int) -> KVLayout:
    kinds = rng.choice(LAYOUTS) if rng.random() < 0.7 else ("full",)
    window = f"window{rng.choice([1, 2, 3, 5, 8, 13, 30])}"
    return make_layout(*(window if kind == "window" else kind for kind in kinds), block_size=size)


def random_tiers(rng: Random) -> FakeStores:
    names = rng.choice([("host",), ("host", "disk")])
    return FakeStores(
        names,
        sizes=tuple(rng.choice([0, 3, 20, 10**6]) for _ in names),
        delay=rng.choice([0, 1, 4]),
        loss=rng.choice([0.0, 0.0, 0.3, 1.0]),
        lies=rng.choice([0.0, 0.0, 0.1]),
        seconds=tuple(rng.choice([0.0, 0.001, 0.1]) for _ in names),
        keeps_prompts=rng.random() < 0.5,
        random=rng,
    )


def random_world(seed: int, tiers: FakeStores | None = None) -> tuple[World, list, bool]:
    rng = Random(seed)
    size = rng.choice([1, 2, 4, 8])
    context = rng.randint(8, 48)
    layout = random_layout(rng, size)
    budget = rng.randint(seqs := rng.randint(1, 6), 24)
    world_limits = limits(
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        max_model_len=context,
        layout=layout,
        num_blocks=layout.blocks_for(context, 2 * budget) + rng.randint(0, 20),
        long_prefill_token_threshold=rng.choice([0, 0, 3]),
        lookahead=rng.choice([0, 0, 5]),
    )
    gate = rng.choice([Continuous(), Continuous(), Static(rng.randint(1, 4), 0.05)])
    options = {"policy": rng.choice([Fcfs(), Priority()]), "gate": gate}
    tenants = Random(seed).choice([("",), ("a", "b"), ("a", "b", "c")])
    adapters = ADAPTERS if rng.random() < 0.3 else ("",)
    if len(adapters) > 1:
        options["adapters"] = Adapters(rng.randint(1, 3), FakeShelf(adapters[1:], delay=1))
    caching = rng.random() < 0.7
    if tiers is not None:
        options["tiers"], caching = tiers, True
    world = World(world_limits, caching, rng.choice([0, 0, 4]), options)
    longest = context
    shared = [rng.randrange(5) for _ in range(longest)]
    deterministic = rng.choice([0.0, 0.0, 0.5])
    requests = []
    for index in range(rng.randint(1, 14)):
        length = rng.randint(1, longest - 1)
        keep = rng.randint(0, length)
        prompt = shared[:keep] + [rng.randrange(5) for _ in range(length - keep)]
        room = longest - length
        most = rng.choice([None, rng.randint(1, room)])
        fewest = rng.randint(0, most) if most and rng.random() < 0.3 else 0
        requests.append(
            request(
                f"r{index}",
                prompt,
                rng.randint(0, 2),
                max_tokens=most,
                ignore_eos=rng.random() < 0.3,
                min_tokens=fewest,
                adapter=rng.choice(adapters),
                deterministic=rng.random() < deterministic,
                tenant=tenants[index % len(tenants)],
                weight=1.0 + index % len(tenants),
            )
        )
    return world, requests, rng.random() < 0.5


@pytest.mark.parametrize("seed", range(240))
def test_every_request_matches_the_reference_loop(seed: int) -> None:
    world, requests, ahead = random_world(seed)
    rng = Random(seed + 1)
    aborted = set()
    for item in requests:
        world.add(item)
        for _ in range(rng.randint(0, 3)):
            world.step()
        if rng.random() < 0.1:
            victim = rng.choice(requests).request_id
            if victim in world.got and victim not in world.finish:
                world.abort(victim)
                aborted.add(victim)
    world.finish_all(ahead=ahead)
    longest = world.limits.max_model_len
    for item in requests:
        want = plain_loop(item, longest, layout=world.limits.layout)
        got = world.got[item.request_id]
        if item.request_id in aborted:
            assert got == want[: len(got)]
        else:
            assert got == want, item.request_id
            assert world.finish[item.request_id] in ("stop", "length")


@pytest.mark.parametrize("seed", range(300, 460))
def test_tiers_change_no_token(seed: int) -> None:
    """Prefixes come from tiers that are slow, full, lossy, or wrong about what they have."""
    rng = Random(seed)
    world, requests, ahead = random_world(seed, random_tiers(rng))
    requests += [replace(item, request_id=item.request_id + "again") for item in requests]
    rng.shuffle(requests)
    aborted = set()
    for item in requests:
        world.add(item)
        for _ in range(rng.randint(0, 6)):
            world.step()
        if rng.random() < 0.1:
            world.scheduler.reset_prefix_cache()
        if rng.random() < 0.1:
            victim = rng.choice(requests).request_id
            if victim in world.got and victim not in world.finish:
                world.abort(victim)
                aborted.add(victim)
    world.finish_all(ahead=ahead)
    for item in requests:
        want = plain_loop(item, world.limits.max_model_len, layout=world.limits.layout)
        got = world.got[item.request_id]
        assert got == (want[: len(got)] if item.request_id in aborted else want), item.request_id
    assert not world.scheduler.has_work
    assert not world.runner.tiers.writing


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=20), min_size=1, max_size=6),
    budget=st.integers(4, 12),
    num_blocks=st.integers(8, 16),
    ahead=st.booleans(),
)
def test_small_pools_and_budgets(prompts, budget, num_blocks, ahead) -> None:
    world = World(limits(max_num_batched_tokens=budget, num_blocks=num_blocks, max_model_len=32))
    requests = [request(f"r{i}", prompt, max_tokens=10) for i, prompt in enumerate(prompts)]
    for item in requests:
        world.add(item)
    world.finish_all(ahead=ahead)
    for item in requests:
        assert world.got[item.request_id] == plain_loop(item, 32)


@pytest.mark.parametrize("seed", range(240, 300))
def test_planning_ahead_matches_the_reference_loop(seed: int) -> None:
    results = []
    for ahead in (False, True):
        world, requests, _ = random_world(seed)
        for item in requests:
            world.add(item)
        world.finish_all(ahead=ahead)
        results.append((world.got, world.finish))
    assert results[0] == results[1]
