"""Simulations in which the governor's initial cost tables are wrong: it learns the real costs.

Time is simulated. Requests run one after another; a step costs what the simulation says, with
noise, and the governor observes it. Speeds are relative to the same simulation without speculation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from statistics import median

import pytest

from windlass.core.speculation.costs import DraftCosts, StepCosts
from windlass.core.speculation.governor import Governor, StepTime
from windlass.core.types import Draft, SlotId

# A 1B model in int4 on two cores, in plain steps: verification soon becomes compute-bound.
VERIFY = StepCosts({1: 1.0, 2: 1.5, 4: 2.3, 8: 3.4})
MAX_DRAFT_TOKENS = 5
SLOT = SlotId(0)
PROMPT = 500  # tokens


def linear(first: float, each: float) -> DraftCosts:
    """A draft model: catching up and a first token, then a step for each further token."""
    last = first + (MAX_DRAFT_TOKENS - 1) * each
    return DraftCosts(
        {1: StepCosts({1: first, 2: first}), MAX_DRAFT_TOKENS: StepCosts({1: last, 2: last})}
    )


QUARTER = linear(0.32, 0.25)  # a draft model of a quarter of the target's size
HALF = linear(0.6, 0.5)
FREE = linear(0.3, 0.0)  # the result of a broken measurement
EXPENSIVE = linear(3.2, 2.5)


@dataclass(frozen=True)
class World:
    """The real costs; `drafting` and `speed` depend on the passed share of the horizon."""

    acceptance: float
    drafting: Callable[[float], DraftCosts]
    noise: float = 0.2  # of each step, up or down
    stalls: float = 0.0  # share of steps that take ten times as long
    speed: Callable[[float], float] = field(default=lambda _: 1.0)
    prompt: float = 0.0  # the draft model's cost of a request's prompt, in plain steps


@dataclass(frozen=True)
class Outcome:
    times_plain: float
    oracle: float  # speed of the best draft length, with the real costs known

    @property
    def share(self) -> float:
        """The share of the oracle's gain."""
        return (self.times_plain - 1) / (self.oracle - 1)


def oracle(world: World) -> float:
    """Expected speed of the best draft length in each of many parts of the horizon."""
    parts = 20
    seconds = 0.0
    for part in range(parts):
        drafting, rates = world.drafting((part + 0.5) / parts), [1.0]
        for length in range(1, MAX_DRAFT_TOKENS + 1):
            tokens = sum(world.acceptance**at for at in range(length + 1))
            rates.append(tokens / (VERIFY.of(1 + length) + drafting.of(1, length)))
        seconds += 1 / max(rates)
    return parts / seconds


def run(
    world: World,
    believed: DraftCosts,
    seed: int,
    horizon: int = 3000,
    rule: type[Governor] = Governor,
) -> Outcome:
    """Generate `horizon` tokens, in requests of 100."""
    rng = Random(seed)
    made = rule(VERIFY, 100, drafting=believed, max_draft_tokens=MAX_DRAFT_TOKENS)
    seconds = plain = 0.0
    num_tokens = count = 0

    def noisy(value: float) -> float:
        stalled = rng.random() < world.stalls
        return value * (1 + world.noise * rng.uniform(-1, 1)) * (10 if stalled else 1)

    made.admit(SLOT)
    left, has_prompt = 100, False
    while num_tokens < horizon:
        at = num_tokens / horizon
        backlog = PROMPT if world.prompt and not has_prompt else 0
        length = made.draft_length([SLOT], False, lambda _, backlog=backlog: [backlog])
        accepted = next((i for i in range(count) if rng.random() >= world.acceptance), count)
        step_s = noisy(world.speed(at) * VERIFY.of(1 + count))
        draft_s = noisy(world.speed(at) * world.drafting(at).of(1, length)) if length else 0.0
        if length and backlog:
            draft_s, has_prompt = draft_s + world.prompt, True
            made.observe_catch_up(
                num_rows=1, num_tokens=PROMPT, draft_length=length, seconds=draft_s
            )
        else:
            made.observe_step(
                StepTime(
                    num_rows=1,
                    num_tokens=1 + count,
                    num_sampled=1 + accepted,
                    has_drafts=count > 0,
                    draft_length=length,
                    step_s=step_s,
                    draft_s=draft_s,
                )
            )
        if count:
            made.verified(SLOT, 0, count, accepted)
        seconds += step_s + draft_s
        plain += world.speed(at) * (1 + accepted) * (1 + 9 * world.stalls)
        num_tokens, left = num_tokens + 1 + accepted, left - 1 - accepted
        if left <= 0:
            made.forget(SLOT)
            made.admit(SLOT)
            left, count, has_prompt = 100, 0, False
            continue
        count = made.choose([SLOT], [Draft((7,) * length)], 0)[0] if length else 0
    return Outcome(plain / seconds, oracle(world))


def always(drafting: DraftCosts) -> Callable[[float], DraftCosts]:
    return lambda _: drafting


def changing(first: DraftCosts, then: DraftCosts) -> Callable[[float], DraftCosts]:
    return lambda at: first if at < 0.5 else then


SEEDS = range(3)
BELIEFS = {"right": None, "free": FREE, "expensive": EXPENSIVE}


def outcomes(world: World, believed: DraftCosts) -> list[Outcome]:
    return [run(world, believed, seed) for seed in SEEDS]


@pytest.mark.parametrize("belief", BELIEFS)
@pytest.mark.parametrize("true", [QUARTER, HALF, EXPENSIVE], ids=["quarter", "half", "expensive"])
@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.8])
def test_unprofitable_drafts_lose_at_most_two_percent(
    acceptance: float, true: DraftCosts, belief: str
) -> None:
    world = World(acceptance, always(true))
    for found in outcomes(world, BELIEFS[belief] or true):
        assert found.oracle == 1.0
        assert found.times_plain > 0.98


@pytest.mark.parametrize(("belief", "share"), [("right", 0.6), ("free", 0.6), ("expensive", 0.5)])
@pytest.mark.parametrize("acceptance", [0.97, 1.0])
def test_profitable_drafts_reach_most_of_the_gain(
    acceptance: float, belief: str, share: float
) -> None:
    """0.97: a third faster with a draft model of a quarter of the size."""
    world = World(acceptance, always(QUARTER))
    found = outcomes(world, BELIEFS[belief] or QUARTER)
    assert min(each.times_plain for each in found) > 1.05
    assert median(each.share for each in found) > share


@pytest.mark.parametrize("acceptance", [0.0, 0.8, 0.97])
@pytest.mark.parametrize(
    "drafting",
    [changing(QUARTER, HALF), changing(QUARTER, EXPENSIVE), changing(EXPENSIVE, QUARTER)],
    ids=["twice as much", "ten times as much", "a tenth"],
)
def test_changing_costs_lose_at_most_two_percent(
    drafting: Callable[[float], DraftCosts], acceptance: float
) -> None:
    for found in outcomes(World(acceptance, drafting), drafting(0.0)):
        assert found.times_plain > 0.98


@pytest.mark.parametrize("drafting", [changing(QUARTER, EXPENSIVE), changing(HALF, QUARTER)])
def test_the_governor_adapts_to_changing_costs(
    drafting: Callable[[float], DraftCosts],
) -> None:
    found = outcomes(World(0.97, drafting), drafting(0.0))
    assert median(each.share for each in found) > 0.3


@pytest.mark.parametrize("acceptance", [0.0, 0.8, 0.97])
@pytest.mark.parametrize("speeds", [(1.0, 2.0), (2.0, 1.0)], ids=["busier", "idle again"])
def test_the_governor_adapts_to_a_changing_machine_speed(
    speeds: tuple[float, float], acceptance: float
) -> None:
    world = World(acceptance, always(QUARTER), speed=lambda at: speeds[at >= 0.5])
    found = outcomes(world, QUARTER)
    assert min(each.times_plain for each in found) > 0.98
    if acceptance == 0.97:
        assert median(each.share for each in found) > 0.6


def test_stalled_steps_do_not_end_drafting() -> None:
    found = outcomes(World(0.97, always(QUARTER), stalls=0.01), QUARTER)
    assert median(each.share for each in found) > 0.5


@pytest.mark.parametrize("acceptance", [0.0, 0.97])
@pytest.mark.parametrize("prompt", [5.0, 30.0, 150.0])
def test_draft_model_prompts_are_paid_by_its_drafts(prompt: float, acceptance: float) -> None:
    """`prompt`: plain steps per request of 100 tokens, of which drafts save 25 at best."""
    believed = DraftCosts(QUARTER.by_length, prompt_token_s=prompt / PROMPT)
    found = outcomes(World(acceptance, always(QUARTER), prompt=prompt), believed)
    assert min(each.times_plain for each in found) > 0.98
    if prompt == 5.0 and acceptance == 0.97:
        assert median(each.times_plain for each in found) > 1.1
