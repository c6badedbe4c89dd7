"""The routing policy: properties, and a comparison with round robin and least outstanding."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.core.sampling import SamplingParams
from windlass.core.types import NewRequest
from windlass.serve.routing import (
    CACHED_WEIGHT,
    DECODE_WEIGHT,
    MAX_IMBALANCE,
    Candidate,
    PrefixIndex,
    PrefixRouter,
    choose,
)

BLOCK = 16
NUMBERS = itertools.count()


def request(prompt: list[int], **options: object) -> NewRequest:
    sampling = SamplingParams(max_tokens=8, **options.pop("sampling", {}))  # type: ignore[arg-type]
    return NewRequest(f"r{next(NUMBERS)}", prompt, sampling, **options)  # type: ignore[arg-type]


def tokens(seed: int, count: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(1000) for _ in range(count)]


candidates = st.lists(
    st.tuples(st.integers(0, 50_000), st.integers(0, 50_000), st.integers(0, 5_000)),
    min_size=1,
    max_size=8,
).map(
    lambda each: [
        Candidate(at, num_outstanding=load, num_cached=cached, chosen_at=at, num_evicted=evicted)
        for at, (load, cached, evicted) in enumerate(each)
    ]
)


@given(candidates)
def test_imbalance_is_bounded_by_the_cached_tokens(given: list[Candidate]) -> None:
    chosen = choose(given)
    least = min(given, key=lambda each: each.num_outstanding)
    ahead = chosen.num_outstanding - least.num_outstanding
    assert ahead <= CACHED_WEIGHT * chosen.num_cached + least.num_evicted
    assert ahead <= MAX_IMBALANCE


@given(candidates)
def test_no_candidate_has_both_fewer_tokens_and_a_longer_prefix(given: list[Candidate]) -> None:
    chosen = choose(given)
    for other in given:
        no_worse = other.num_outstanding <= chosen.num_outstanding
        no_worse = no_worse and other.num_evicted <= chosen.num_evicted
        assert not (no_worse and other.num_cached > chosen.num_cached)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 200), st.booleans()), max_size=60))
def test_outstanding_tokens_return_to_zero(events: list[tuple[int, int, bool]]) -> None:
    router = PrefixRouter(BLOCK, [64, 64, 64])
    ids = []
    for seed, count, answered in events:
        new = request(tokens(seed, count + 1))
        router.route(new, range(3))
        ids.append(new.request_id)
        if answered:
            router.prompt_computed(new.request_id)
    assert all(router.outstanding(replica) >= 0 for replica in range(3))
    for request_id in ids:
        router.ended(request_id, 8)
        router.ended(request_id, 8)  # a second time changes nothing
    assert all(abs(router.outstanding(replica)) < 1e-6 for replica in range(3))


@given(st.lists(st.lists(st.integers(0, 40), max_size=12), max_size=30), st.integers(0, 20))
def test_the_index_is_bounded_and_finds_whole_prefixes(
    prompts: list[list[int]], max_blocks: int
) -> None:
    index = PrefixIndex(max_blocks)
    for prompt in prompts:
        hashes = [bytes(prompt[: end + 1]) for end in range(len(prompt))]
        index.add(hashes)
        assert len(index) <= max_blocks
        assert index.num_found(hashes) == min(len(hashes), max_blocks)


def test_a_conversation_stays_on_its_replica() -> None:
    router = PrefixRouter(BLOCK, [1000] * 4)
    conversations = {user: tokens(user, 100) for user in range(8)}
    homes: dict[int, set[int]] = {user: set() for user in conversations}
    for turn in range(5):
        for user, prompt in conversations.items():
            new = request(prompt)
            homes[user].add(router.route(new, range(4)))
            router.prompt_computed(new.request_id)
            router.ended(new.request_id, 8)
            conversations[user] = prompt + tokens(100 * turn + user, 40)
    assert all(len(replicas) == 1 for replicas in homes.values())
    assert {next(iter(replicas)) for replicas in homes.values()} == set(range(4))


def test_salt_adapter_and_prompt_logprobs_use_no_foreign_prefix() -> None:
    prompt = tokens(1, 400)
    for options in ({"cache_salt": "b"}, {"adapter": "x"}, {"sampling": {"prompt_logprobs": 0}}):
        router = PrefixRouter(BLOCK, [1000, 1000])
        home = router.route(request(prompt), range(2))
        assert router.route(request(prompt), range(2)) == home
        assert router.route(request(prompt, **options), range(2)) != home


def test_a_lost_cache_and_a_missing_replica_are_not_chosen_for_their_prefix() -> None:
    router = PrefixRouter(BLOCK, [1000, 1000])
    new = request(tokens(1, 400))
    home = router.route(new, range(2))
    router.ended(new.request_id)
    assert router.route(request(new.prompt), [1 - home]) == 1 - home
    router.cache_lost(home)
    router.cache_lost(1 - home, max_blocks=0)
    least = min(range(2), key=router.outstanding)
    assert router.route(request(new.prompt), range(2)) == least


def test_all_caches_are_used_before_one_evicts() -> None:
    """Without load, the system prompt alone does not keep all conversations on one replica."""
    router = PrefixRouter(BLOCK, [120, 120])
    system = tokens(0, 64)
    chats = [request(system + tokens(user, 320)) for user in range(1, 11)]
    homes = []
    for new in chats:
        homes.append(router.route(new, range(2)))
        router.ended(new.request_id, 8)
    assert homes[:4] == [homes[0]] * 4
    assert min(homes.count(0), homes.count(1)) >= 4
    for new, home in zip(chats, homes, strict=True):  # each is still where it was
        again = request(new.prompt)
        assert router.route(again, range(2)) == home
        router.ended(again.request_id, 8)


def test_completions_of_one_prompt_share_a_replica() -> None:
    """Also while the prompt of the first is not computed yet."""
    router = PrefixRouter(BLOCK, [1000, 1000])
    prompt = tokens(1, 400)
    assert len({router.route(request(prompt), range(2)) for _ in range(4)}) == 1


def test_many_completions_of_a_long_prompt_spread() -> None:
    router = PrefixRouter(BLOCK, [10_000, 10_000])
    prompt = tokens(1, 20_000)
    chosen = [router.route(request(prompt), range(2)) for _ in range(1500)]
    most = max(chosen.count(0), chosen.count(1))
    per_request = 8 * DECODE_WEIGHT
    assert (2 * most - 1500) * per_request <= MAX_IMBALANCE + len(prompt) + per_request


# ---- simulation ------------------------------------------------------------------------------

Route = Callable[[NewRequest, "Simulation"], int]


@dataclass
class _Running:
    request: NewRequest
    replica: int
    num_prompt_left: int
    num_output_left: int


class Simulation:
    """Replicas that compute a fixed number of prompt tokens per tick, one request after the other,
    and one output token of every request whose prompt is computed. Each has an LRU prefix cache.
    """

    def __init__(self, num_replicas: int, cache_blocks: int) -> None:
        self.caches = [PrefixIndex(cache_blocks) for _ in range(num_replicas)]
        self.running: list[_Running] = []
        self.num_prompt = self.num_cached = 0
        self.max_loads: list[int] = []
        self.spreads: list[int] = []

    def load(self, replica: int) -> int:
        mine = [each for each in self.running if each.replica == replica]
        return sum(e.num_prompt_left + DECODE_WEIGHT * e.num_output_left for e in mine)

    def add(self, new: NewRequest, replica: int, num_output: int) -> None:
        # The simulated cache hashes whole prefixes, unlike the router.
        ends = range(BLOCK, len(new.prompt) + 1, BLOCK)
        hashes = [repr(new.prompt[:end]).encode() for end in ends]
        num_cached = min(self.caches[replica].num_found(hashes) * BLOCK, len(new.prompt) - 1)
        self.caches[replica].add(hashes)
        self.num_prompt += len(new.prompt)
        self.num_cached += num_cached
        self.running.append(_Running(new, replica, len(new.prompt) - num_cached, num_output))

    def tick(self, router: PrefixRouter) -> None:
        budgets = [64] * len(self.caches)
        for each in list(self.running):
            if each.num_prompt_left:
                done = min(each.num_prompt_left, budgets[each.replica])
                budgets[each.replica] -= done
                each.num_prompt_left -= done
                if each.num_prompt_left == 0:
                    router.prompt_computed(each.request.request_id)
                continue
            each.num_output_left -= 1
            if each.num_output_left == 0:
                self.running.remove(each)
                router.ended(each.request.request_id, 20)
        loads = [self.load(replica) for replica in range(len(self.caches))]
        self.max_loads.append(max(loads))
        self.spreads.append(max(loads) - min(loads))


@dataclass(frozen=True)
class Result:
    hit_rate: float
    max_load: float  # outstanding tokens of the most loaded replica, mean over time
    spread: float  # most minus least loaded


def simulate(route: Route, num_replicas: int = 4) -> Result:
    """Chats whose prompts grow, behind four system prompts."""
    dice = random.Random(5)
    simulation, router = Simulation(num_replicas, 400), PrefixRouter(BLOCK, [400] * num_replicas)
    systems = [tokens(1000 + number, 160) for number in range(4)]
    chats = {user: dice.choice(systems) + tokens(user, 48) for user in range(40)}
    for _ in range(300):
        for _ in range(2):
            user = dice.randrange(len(chats))
            new = request(chats[user])
            preferred = router.route(new, range(num_replicas))
            replica = route(new, simulation)
            simulation.add(new, preferred if replica < 0 else replica, num_output=20)
            chats[user] = chats[user] + tokens(dice.randrange(10**6), 32)
            if len(chats[user]) > 600:
                chats[user] = dice.choice(systems) + tokens(dice.randrange(10**6), 48)
        simulation.tick(router)
    return Result(
        hit_rate=simulation.num_cached / simulation.num_prompt,
        max_load=sum(simulation.max_loads) / len(simulation.max_loads),
        spread=sum(simulation.spreads) / len(simulation.spreads),
    )


@pytest.mark.slow
def test_the_router_beats_round_robin_and_least_outstanding() -> None:
    turns = itertools.count()
    round_robin = simulate(lambda _new, _simulation: next(turns) % 4)
    least = simulate(lambda _new, simulation: min(range(4), key=simulation.load))
    prefix = simulate(lambda _new, _simulation: -1)
    assert prefix.hit_rate > max(round_robin.hit_rate, least.hit_rate) + 0.2
    assert prefix.max_load < 0.5 * min(round_robin.max_load, least.max_load)
    assert least.spread < prefix.spread < round_robin.spread
