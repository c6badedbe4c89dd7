"""The governor: drafts while they are profitable, none under load, and back-off after rejections."""

from __future__ import annotations

from itertools import pairwise, product
from random import Random

import pytest

from tests.speculative.step_times import drafted, plain
from windlass.core.speculation.costs import DraftCosts, StepCosts
from windlass.core.speculation.governor import Governor
from windlass.core.types import Draft
from windlass.speculative.base import NO_DRAFT

# Reading the weights costs 10, each token 1: memory-bound at first, as real steps are.
MEMORY_BOUND = StepCosts({1: 11.0, 2: 12.0, 64: 74.0})
COMPUTE_BOUND = StepCosts({1: 1.0, 2: 2.0, 64: 64.0})
FOUR = Draft((1, 2, 3, 4), kind=3)


def governor(costs: StepCosts = MEMORY_BOUND, slots: int = 1, positions: int = 1000) -> Governor:
    made = Governor(costs, positions)
    for slot in range(slots):
        made.admit(slot)
    return made


def next_step(
    made: Governor, slots: list[int], draft: Draft = FOUR, free: bool = True
) -> list[int]:
    """The number of draft tokens per request; all requests have the same draft."""
    if not made.draft_length(slots, free):
        return [0] * len(slots)
    return made.choose(slots, [draft] * len(slots), 0)


def test_costs_are_interpolated_and_extrapolated() -> None:
    costs = StepCosts({4: 2.0, 2: 1.0, 8: 1.5, 16: 10.0})
    assert costs.of(3) == pytest.approx(1.5)
    assert costs.of(8) == 2.0, "more tokens are never cheaper"
    assert costs.of(24) == pytest.approx(18.0)


def test_accepted_drafts_are_verified_whole_and_rejected_ones_not_at_all() -> None:
    good, bad = governor(), governor()
    for _ in range(20):
        good.verified(0, 3, 4, 4)
        bad.verified(0, 3, 4, 0)
    assert good.choose([0], [FOUR], 0) == [4]
    assert bad.choose([0], [FOUR], 0) == [0]


def test_a_draft_is_cut_where_acceptance_ends() -> None:
    made = governor()
    for _ in range(20):
        made.verified(0, 3, 4, 2)
    assert made.choose([0], [FOUR], 0) == [2]


def test_compute_bound_steps_have_no_drafts() -> None:
    made = governor(COMPUTE_BOUND)
    for _ in range(20):
        made.verified(0, 3, 4, 3)
    assert made.choose([0], [FOUR], 0) == [0]


def test_load_shortens_and_ends_drafts_until_it_falls() -> None:
    """Up to 16 tokens a step costs hardly more; beyond, every token costs."""
    made = governor(StepCosts({1: 10.0, 16: 10.5, 32: 60.0}), slots=16)
    for slot in range(16):
        for _ in range(5):
            made.verified(slot, 3, 4, 3)
    totals = []
    for count in (1, 4, 8, 16, 1):
        totals.append(sum(made.choose(list(range(count)), [FOUR] * count, 0)) / count)
    assert totals[0] >= totals[1] > totals[2] > totals[3] == 0
    assert totals[4] == totals[0]


def test_prompts_in_the_step_count_as_load() -> None:
    made = governor(StepCosts({1: 10.0, 16: 10.5, 32: 60.0}))
    assert made.choose([0], [FOUR], 0) != [0]
    assert made.choose([0], [FOUR], 16) == [0]


@pytest.mark.parametrize(("free", "max_trials"), [(False, 8), (True, 18)])
def test_a_request_with_rejected_drafts_has_rare_trials(free: bool, max_trials: int) -> None:
    """Within 2000 steps; a little more often where drafting is free."""
    made = governor()
    for _ in range(20):
        made.verified(0, 3, 4, 0)
    trials = []
    for step in range(2000):
        (count,) = next_step(made, [0], free=free)
        if count:
            assert count == 1
            trials.append(step)
            made.verified(0, 3, 1, 0)
    gaps = [b - a for a, b in pairwise(trials)]
    assert 4 <= len(trials) <= max_trials
    assert min(gaps) >= 32
    assert gaps[0] < gaps[1] < gaps[2]


def test_an_accepted_trial_resets_the_record() -> None:
    made = governor(StepCosts({1: 10.0, 2: 14.0, 64: 262.0}), slots=2)
    for _ in range(20):
        made.verified(0, 3, 4, 0)
    for _ in range(100):
        made.verified(1, 3, 4, 4)  # another request's drafts of this kind are accepted
    while next_step(made, [0]) == [0]:
        pass
    made.verified(0, 3, 1, 1)
    assert next_step(made, [0]) == [4]


def test_steps_slower_than_the_table_end_drafting() -> None:
    made = governor()
    assert made.choose([0], [FOUR], 0) != [0]
    for _ in range(100):
        made.observe_step(plain(11.0))
        made.observe_step(drafted(60.0, num_tokens=5))
    assert made.choose([0], [FOUR], 0) == [0]


def test_a_slow_step_only_causes_one_timed_plain_step() -> None:
    made = governor()
    for seconds in (100.0, 14.0, 14.0, 14.0, 100.0, 14.0):
        assert next_step(made, [0]) != [0]
        made.verified(0, 3, 3, 3)
        made.observe_step(drafted(seconds, num_tokens=4, num_sampled=4))
        if seconds == 100.0:
            assert next_step(made, [0]) == [0]
            made.observe_step(plain(11.0))


def test_one_step_in_64_is_plain_while_drafts_pay() -> None:
    """Otherwise a machine that became faster would make drafts look profitable."""
    made = governor()
    num_drafted = 0
    for _ in range(200):
        if next_step(made, [0]) == [0]:
            made.observe_step(plain(11.0))
        else:
            num_drafted += 1
            made.verified(0, 3, 4, 4)
            made.observe_step(drafted(15.0, num_tokens=5, num_sampled=5))
    assert 195 <= num_drafted < 200


def test_drafting_continues_when_plain_steps_cannot_be_timed() -> None:
    """Each step has a prompt in it, so none is timed."""
    made = governor()
    drafts = [next_step(made, [0]) != [0] for _ in range(200)]
    assert 185 <= sum(drafts) < 200


@pytest.mark.parametrize("seed", range(20))
def test_early_rejections_do_not_end_profitable_drafting(seed: int) -> None:
    """Requests of 64 tokens, one after another, with an acceptance of one half."""
    rng, draft_costs = Random(seed), StepCosts({1: 1.0, 2: 1.0})
    made = Governor(
        MEMORY_BOUND, 100, drafting=DraftCosts({1: draft_costs, 3: draft_costs}), max_draft_tokens=3
    )
    num_tokens, seconds = 0, 0.0
    for _ in range(24):
        made.admit(0)
        left, count = 64, 0
        while left > 0:
            length = made.draft_length([0], free=False)
            accepted = next((i for i in range(count) if rng.random() < 0.5), count)
            if count:
                made.verified(0, 0, count, accepted)
            step_s, draft_s = MEMORY_BOUND.of(1 + count), 1.0 if length else 0.0
            made.observe_step(
                drafted(
                    step_s,
                    num_tokens=1 + count,
                    num_sampled=1 + accepted,
                    draft_length=length,
                    draft_s=draft_s,
                )
            )
            seconds += step_s + draft_s
            left -= 1 + accepted
            num_tokens += 1 + accepted
            count = made.choose([0], [Draft((7,) * length)], 0)[0] if length else 0
        made.forget(0)
    assert num_tokens / seconds > 1.15 / MEMORY_BOUND.of(1)


def test_overhead_of_larger_batches_does_not_count_for_one_row() -> None:
    made, slots, drafts = governor(slots=4), [0, 1, 2, 3], [FOUR] * 4
    assert all(governor(slots=4).choose(slots, drafts, 0))
    for _ in range(100):
        made.observe_step(plain(MEMORY_BOUND.of(4), num_rows=4))
        made.observe_step(drafted(2 * MEMORY_BOUND.of(8), num_tokens=8, num_rows=4))
    assert not any(made.choose(slots, drafts, 0))
    assert made.choose([0], [FOUR], 0) == governor().choose([0], [FOUR], 0)


def test_the_draft_length_has_hysteresis() -> None:
    def made() -> Governor:
        drafting = DraftCosts({1: StepCosts({1: 0.0, 2: 0.0}), 2: StepCosts({1: 0.0, 2: 0.0})})
        costs = StepCosts({1: 10.0, 2: 10.2, 3: 11.6, 64: 100.0})
        found = Governor(costs, 1000, drafting=drafting, max_draft_tokens=2)
        found.admit(0)
        return found

    def length_after(found: Governor, num_second: int) -> int:
        """The draft length after all first draft tokens and `num_second` of 10 second ones passed."""
        for i in range(40):
            found.verified(0, 0, 2, 2 if i % 10 < num_second else 1)
        return found.draft_length([0], free=False)

    assert length_after(made(), 0) == 1
    assert length_after(made(), 9) == 2
    falling = made()
    assert [length_after(falling, few) for few in (9, 1, 0)] == [2, 2, 1]
    rising = made()
    assert [length_after(rising, few) for few in (0, 3, 9)] == [1, 1, 2]


def test_a_free_probe_without_drafts_times_a_plain_step() -> None:
    """Otherwise a machine that became faster since the measurement makes drafts look cheap."""
    made = governor()
    for _ in range(100):
        made.observe_step(plain(1.0, draft_length=4))
    assert made.choose([0], [FOUR], 0) == governor().choose([0], [FOUR], 0)
    for _ in range(100):
        made.observe_step(plain(1.0, draft_length=4))
        made.observe_step(drafted(6.0, num_tokens=5, draft_length=4))
    assert made.choose([0], [FOUR], 0) == [0]


def test_trials_of_many_requests_share_rare_steps() -> None:
    """One by one, their trials would slow every step down."""
    slots = list(range(40))
    made = governor(StepCosts({1: 10.0, 2: 20.0, 64: 640.0}), slots=len(slots))
    counts = [sum(next_step(made, slots)) for _ in range(300)]
    assert 2 <= sum(count > 0 for count in counts) <= 6
    assert max(counts) == 32


def test_free_probes_back_off_shortly_and_restart_with_a_new_request() -> None:
    made = governor()
    probes = []
    for _ in range(60):
        probes.append(made.draft_length([0], True) > 0)
        if probes[-1]:
            made.choose([0], [NO_DRAFT], 0)
    assert all(probes[:16])
    assert 4 <= sum(probes[16:]) <= 6
    while made.draft_length([0], True):
        made.choose([0], [NO_DRAFT], 0)
    made.admit(0)
    assert made.draft_length([0], True) > 0


def test_passing_idle_steps_does_not_move_the_probes() -> None:
    slots = list(range(40))
    every, idle = governor(slots=len(slots)), governor(slots=len(slots))
    probes: dict[Governor, list[int]] = {every: [], idle: []}
    num_idle = 0
    for step in range(1000):
        for made in (every, idle):
            if made is idle and step % 16 > 1 and made.pass_idle_step(len(slots)):
                num_idle += 1
            elif made.draft_length(slots, True):
                probes[made].append(step)
                made.choose(slots, [NO_DRAFT] * len(slots), 0)
    assert probes[idle] == probes[every]
    assert num_idle > 800
    assert not idle.pass_idle_step(20), "half of the requests are gone"


def test_failed_probes_of_many_requests_become_rare_until_half_are_gone() -> None:
    slots = list(range(40))
    made = governor(slots=len(slots))
    probes = []
    for step in range(1000):
        if made.draft_length(slots, True):
            probes.append(step)
            made.choose(slots, [NO_DRAFT] * len(slots), 0)
    assert probes[:16] == list(range(16))
    assert 4 <= len(probes[16:]) <= 6
    made.admit(0)
    assert made.draft_length(slots, True) == 0
    assert made.draft_length(slots[:20], True) > 0


def test_a_stalled_step_does_not_change_the_costs() -> None:
    """A compilation stalls a step; drafts must not look cheap until the next plain steps."""
    made = governor(StepCosts({1: 10.0, 2: 14.0, 64: 262.0}))
    for _ in range(40):
        made.verified(0, 3, 4, 0)
    made.observe_step(plain(10_000.0))
    assert made.choose([0], [FOUR], 0) == [0]


def test_unprofitable_drafting_is_left_to_rare_trials() -> None:
    """A draft token for half the cost of a step pays while it is accepted."""
    draft_costs = DraftCosts({1: StepCosts({1: 5.0, 2: 5.0}), 4: StepCosts({1: 20.0, 2: 20.0})})
    made = Governor(MEMORY_BOUND, 100, drafting=draft_costs, max_draft_tokens=4)
    made.admit(0)
    for _ in range(20):
        made.verified(0, 0, 4, 4)
    assert made.draft_length([0], False) == 4
    for _ in range(40):
        made.verified(0, 0, 1, 0)
    trials = []
    for step in range(1000):
        length = made.draft_length([0], False)
        if length:
            trials.append(step)
            assert length == 1
            assert made.choose([0], [Draft((1,))], 0) == [1]
            made.verified(0, 0, 1, 0)
    assert 3 <= len(trials) <= 8
    for _ in range(40):
        made.verified(0, 0, 1, 1)
    assert max(made.draft_length([0], False) for _ in range(520)) > 1


def test_the_draft_length_follows_acceptance() -> None:
    draft_costs = DraftCosts({1: StepCosts({1: 2.0, 2: 2.0}), 8: StepCosts({1: 16.0, 2: 16.0})})
    made = Governor(MEMORY_BOUND, 100, drafting=draft_costs, max_draft_tokens=8)
    made.admit(0)
    lengths = []
    for accepted in (8, 4, 2):
        for _ in range(60):
            made.verified(0, 0, 8, accepted)
        lengths.append(made.draft_length([0], False))
    assert lengths == [8, 4, 2]


def test_drafts_stay_within_the_positions_of_a_step() -> None:
    made = governor(StepCosts({1: 1.0, 2: 1.0}), slots=8, positions=13)
    counts = made.choose(list(range(8)), [FOUR] * 8, 0)
    assert sum(counts) == 5
    assert made.choose([0], [NO_DRAFT], 0) == [0]


def test_drafts_stay_within_the_limit_per_row() -> None:
    made = Governor(StepCosts({1: 1.0, 2: 1.0}), 1000, max_drafts_per_row=(4, 3, 2, 1, 0))
    for slot in range(3):
        made.admit(slot)
    assert next_step(made, [0]) == [3]
    assert next_step(made, [0, 1]) == [2, 2]
    assert next_step(made, [0, 1, 2, 3]) == [0] * 4


@pytest.mark.parametrize("seed", range(10))
def test_the_choice_has_the_highest_expected_rate(seed: int) -> None:
    rng = Random(seed)
    points = sorted(rng.uniform(1, 10) for _ in range(4))
    costs = StepCosts(dict(zip((1, 4, 8, 16), points, strict=True)))
    made = governor(costs, slots=3)
    for slot in range(3):
        for _ in range(rng.randrange(6)):
            made.verified(slot, 3, 4, rng.randrange(5))
    acceptance = [made._slots[i].acceptance(made._prior(3), 4) for i in range(3)]

    def rate(counts: list[int]) -> float:
        tokens = sum(1 + sum(each[:n]) for each, n in zip(acceptance, counts, strict=True))
        return tokens / costs.of(3 + sum(counts))

    chosen = rate(made.choose([0, 1, 2], [FOUR] * 3, 0))
    best = max(rate(list(counts)) for counts in product(range(5), repeat=3))
    assert chosen * 1.0101 >= best


def test_prelaunched_drafts_are_not_shortened() -> None:
    made = governor(COMPUTE_BOUND, slots=2)
    drafts = [FOUR, NO_DRAFT]
    assert made.choose([0, 1], drafts, 0) == [0, 0]
    assert made.choose([0, 1], drafts, 0, prelaunched=True) == [4, 0]
