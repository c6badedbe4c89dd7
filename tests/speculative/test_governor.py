"""The governor: guesses while they pay, none under load, and no more of those that fail."""

from __future__ import annotations

from itertools import pairwise, product
from random import Random

import pytest

from tests.speculative.step_times import drafted, plain
from windlass.speculative.base import NO_DRAFT, Draft
from windlass.speculative.costs import Drafting, StepCosts
from windlass.speculative.governor import Governor

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
    """How many guesses of each request it carries; all found the same."""
    if not made.wanted(slots, free):
        return [0] * len(slots)
    return made.choose(slots, [draft] * len(slots), 0)


def test_costs_lie_on_lines_between_points_and_beyond() -> None:
    costs = StepCosts({4: 2.0, 2: 1.0, 8: 1.5, 16: 10.0})
    assert costs.of(3) == pytest.approx(1.5)
    assert costs.of(8) == 2.0, "more tokens are never cheaper"
    assert costs.of(24) == pytest.approx(18.0)


def test_right_guesses_grow_and_wrong_ones_end() -> None:
    good, bad = governor(), governor()
    for _ in range(20):
        good.verified(0, 3, 4, 4)
        bad.verified(0, 3, 4, 0)
    assert good.choose([0], [FOUR], 0) == [4]
    assert bad.choose([0], [FOUR], 0) == [0]


def test_the_first_guesses_may_pay_where_the_later_do_not() -> None:
    made = governor()
    for _ in range(20):
        made.verified(0, 3, 4, 2)
    assert made.choose([0], [FOUR], 0) == [2]


def test_where_every_token_costs_alike_nobody_guesses() -> None:
    made = governor(COMPUTE_BOUND)
    for _ in range(20):
        made.verified(0, 3, 4, 3)
    assert made.choose([0], [FOUR], 0) == [0]


def test_load_shortens_and_ends_guessing_and_it_comes_back() -> None:
    """Steps that are free up to 16 tokens, and cost by the token from there on."""
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


@pytest.mark.parametrize(("free", "most"), [(False, 8), (True, 18)])
def test_a_request_that_failed_tries_again_rarely(free: bool, most: int) -> None:
    """Within 2000 steps; a little more often where looking costs nothing."""
    made = governor()
    for _ in range(20):
        made.verified(0, 3, 4, 0)
    tries = []
    for step in range(2000):
        (count,) = next_step(made, [0], free=free)
        if count:
            assert count == 1
            tries.append(step)
            made.verified(0, 3, 1, 0)
    gaps = [b - a for a, b in pairwise(tries)]
    assert 4 <= len(tries) <= most
    assert min(gaps) >= 32
    assert gaps[0] < gaps[1] < gaps[2]


def test_a_lucky_try_begins_anew() -> None:
    made = governor(StepCosts({1: 10.0, 2: 14.0, 64: 262.0}), slots=2)
    for _ in range(20):
        made.verified(0, 3, 4, 0)
    for _ in range(100):
        made.verified(1, 3, 4, 4)  # others show that such guesses are worth something
    while next_step(made, [0]) == [0]:
        pass
    made.verified(0, 3, 1, 1)
    assert next_step(made, [0]) == [4]


def test_steps_that_take_longer_than_measured_end_guessing() -> None:
    made = governor()
    assert made.choose([0], [FOUR], 0) != [0]
    for _ in range(100):
        made.took(plain(11.0))
        made.took(drafted(60.0, num_tokens=5))
    assert made.choose([0], [FOUR], 0) == [0]


def test_a_slow_step_makes_the_governor_time_a_plain_one_and_no_more() -> None:
    made = governor()
    for seconds in (100.0, 14.0, 14.0, 14.0, 100.0, 14.0):
        assert next_step(made, [0]) != [0]
        made.verified(0, 3, 3, 3)
        made.took(drafted(seconds, num_tokens=4, num_sampled=4))
        if seconds == 100.0:
            assert next_step(made, [0]) == [0]
            made.took(plain(11.0))


def test_one_of_many_steps_is_plain_while_drafts_pay() -> None:
    """Else nobody would see a machine that has become faster, and drafts would seem to pay."""
    made = governor()
    num_drafted = 0
    for _ in range(200):
        if next_step(made, [0]) == [0]:
            made.took(plain(11.0))
        else:
            num_drafted += 1
            made.verified(0, 3, 4, 4)
            made.took(drafted(15.0, num_tokens=5, num_sampled=5))
    assert 195 <= num_drafted < 200


def test_plain_steps_that_cannot_be_timed_end_no_drafting() -> None:
    """Each step has a prompt in it: none is timed, and the governor goes on."""
    made = governor()
    drafts = [next_step(made, [0]) != [0] for _ in range(200)]
    assert 185 <= sum(drafts) < 200


@pytest.mark.parametrize("seed", range(20))
def test_bad_luck_at_first_is_made_up_for(seed: int) -> None:
    """Requests of 64 tokens, one after another, and guesses of which a half are right."""
    rng, making = Random(seed), StepCosts({1: 1.0, 2: 1.0})
    made = Governor(
        MEMORY_BOUND, 100, drafting=Drafting({1: making, 3: making}), max_draft_tokens=3
    )
    num_tokens, seconds = 0, 0.0
    for _ in range(24):
        made.admit(0)
        left, count = 64, 0
        while left > 0:
            wanted = made.wanted([0], free=False)
            right = next((i for i in range(count) if rng.random() < 0.5), count)
            if count:
                made.verified(0, 0, count, right)
            step_s, draft_s = MEMORY_BOUND.of(1 + count), 1.0 if wanted else 0.0
            made.took(
                drafted(
                    step_s,
                    num_tokens=1 + count,
                    num_sampled=1 + right,
                    depth=wanted,
                    draft_s=draft_s,
                )
            )
            seconds += step_s + draft_s
            left -= 1 + right
            num_tokens += 1 + right
            count = made.choose([0], [Draft((7,) * wanted)], 0)[0] if wanted else 0
        made.forget(0)
    assert num_tokens / seconds > 1.15 / MEMORY_BOUND.of(1)


def test_what_steps_of_several_cost_more_is_not_held_against_one() -> None:
    made, slots, drafts = governor(slots=4), [0, 1, 2, 3], [FOUR] * 4
    assert all(governor(slots=4).choose(slots, drafts, 0))
    for _ in range(100):
        made.took(plain(MEMORY_BOUND.of(4), num_rows=4))
        made.took(drafted(2 * MEMORY_BOUND.of(8), num_tokens=8, num_rows=4))
    assert not any(made.choose(slots, drafts, 0))
    assert made.choose([0], [FOUR], 0) == governor().choose([0], [FOUR], 0)


def test_the_number_of_guesses_stays_where_another_promises_hardly_more() -> None:
    def made() -> Governor:
        drafting = Drafting({1: StepCosts({1: 0.0, 2: 0.0}), 2: StepCosts({1: 0.0, 2: 0.0})})
        costs = StepCosts({1: 10.0, 2: 10.2, 3: 11.6, 64: 100.0})
        found = Governor(costs, 1000, drafting=drafting, max_draft_tokens=2)
        found.admit(0)
        return found

    def tell(found: Governor, seconds_right: int) -> int:
        """The depth after all first guesses were right, and so many of the second in ten."""
        for i in range(40):
            found.verified(0, 0, 2, 2 if i % 10 < seconds_right else 1)
        return found.wanted([0], free=False)

    assert tell(made(), 0) == 1
    assert tell(made(), 9) == 2
    staying = made()
    assert [tell(staying, few) for few in (9, 1, 0)] == [2, 2, 1]
    rising = made()
    assert [tell(rising, few) for few in (0, 3, 9)] == [1, 1, 2]


def test_looking_for_free_leaves_a_step_a_plain_one() -> None:
    """Else a machine that is faster than when it was measured makes guesses look cheap."""
    made = governor()
    for _ in range(100):
        made.took(plain(1.0, depth=4))
    assert made.choose([0], [FOUR], 0) == governor().choose([0], [FOUR], 0)
    for _ in range(100):
        made.took(plain(1.0, depth=4))
        made.took(drafted(6.0, num_tokens=5, depth=4))
    assert made.choose([0], [FOUR], 0) == [0]


def test_many_requests_try_together_and_rarely() -> None:
    """Each is due after a while: one by one that would make every step dearer."""
    slots = list(range(40))
    made = governor(StepCosts({1: 10.0, 2: 20.0, 64: 640.0}), slots=len(slots))
    tried = [sum(next_step(made, slots)) for _ in range(300)]
    assert 2 <= sum(count > 0 for count in tried) <= 6
    assert max(tried) == 32


def test_free_looks_in_vain_pause_for_a_few_steps_and_not_for_a_new_request() -> None:
    made = governor()
    looks = []
    for _ in range(60):
        looks.append(made.wanted([0], True) > 0)
        if looks[-1]:
            made.choose([0], [NO_DRAFT], 0)
    assert all(looks[:16])
    assert 4 <= sum(looks[16:]) <= 6
    while made.wanted([0], True):
        made.choose([0], [NO_DRAFT], 0)
    made.admit(0)
    assert made.wanted([0], True) > 0


def test_steps_of_a_pause_may_pass_unasked() -> None:
    """Then looks come when they would have come."""
    slots = list(range(40))
    asked, rested = governor(slots=len(slots)), governor(slots=len(slots))
    looks: dict[Governor, list[int]] = {asked: [], rested: []}
    num_rested = 0
    for step in range(1000):
        for made in (asked, rested):
            if made is rested and step % 16 > 1 and made.rests(len(slots)):
                num_rested += 1
            elif made.wanted(slots, True):
                looks[made].append(step)
                made.choose(slots, [NO_DRAFT] * len(slots), 0)
    assert looks[rested] == looks[asked]
    assert num_rested > 800
    assert not rested.rests(20), "half of them are gone"


def test_looks_for_many_in_vain_become_rare_until_half_of_them_are_gone() -> None:
    slots = list(range(40))
    made = governor(slots=len(slots))
    looks = []
    for step in range(1000):
        if made.wanted(slots, True):
            looks.append(step)
            made.choose(slots, [NO_DRAFT] * len(slots), 0)
    assert looks[:16] == list(range(16))
    assert 4 <= len(looks[16:]) <= 6
    made.admit(0)
    assert made.wanted(slots, True) == 0
    assert made.wanted(slots[:20], True) > 0


def test_a_step_that_stood_still_says_nothing_of_the_others() -> None:
    """While something was compiled; else guesses would look cheap until plain steps came again."""
    made = governor(StepCosts({1: 10.0, 2: 14.0, 64: 262.0}))
    for _ in range(40):
        made.verified(0, 3, 4, 0)
    made.took(plain(10_000.0))
    assert made.choose([0], [FOUR], 0) == [0]


def test_guesses_that_cost_more_than_they_give_are_not_made() -> None:
    """A guess for half the price of a step pays while it is right, and is made once in a while."""
    making = Drafting({1: StepCosts({1: 5.0, 2: 5.0}), 4: StepCosts({1: 20.0, 2: 20.0})})
    made = Governor(MEMORY_BOUND, 100, drafting=making, max_draft_tokens=4)
    made.admit(0)
    for _ in range(20):
        made.verified(0, 0, 4, 4)
    assert made.wanted([0], False) == 4
    for _ in range(40):
        made.verified(0, 0, 1, 0)
    looks = []
    for step in range(1000):
        depth = made.wanted([0], False)
        if depth:
            looks.append(step)
            assert depth == 1
            assert made.choose([0], [Draft((1,))], 0) == [1]
            made.verified(0, 0, 1, 0)
    assert 3 <= len(looks) <= 8
    for _ in range(40):
        made.verified(0, 0, 1, 1)
    assert max(made.wanted([0], False) for _ in range(520)) > 1


def test_as_many_guesses_are_made_as_pay() -> None:
    making = Drafting({1: StepCosts({1: 2.0, 2: 2.0}), 8: StepCosts({1: 16.0, 2: 16.0})})
    made = Governor(MEMORY_BOUND, 100, drafting=making, max_draft_tokens=8)
    made.admit(0)
    depths = []
    for accepted in (8, 4, 2):
        for _ in range(60):
            made.verified(0, 0, 8, accepted)
        depths.append(made.wanted([0], False))
    assert depths == [8, 4, 2]


def test_never_more_positions_than_there_is_room_for() -> None:
    made = governor(StepCosts({1: 1.0, 2: 1.0}), slots=8, positions=13)
    counts = made.choose(list(range(8)), [FOUR] * 8, 0)
    assert sum(counts) == 5
    assert made.choose([0], [NO_DRAFT], 0) == [0]


def test_no_row_has_more_guesses_than_its_step_has_room_for() -> None:
    made = Governor(StepCosts({1: 1.0, 2: 1.0}), 1000, most_of=lambda num_rows: 4 - num_rows)
    for slot in range(3):
        made.admit(slot)
    assert next_step(made, [0]) == [3]
    assert next_step(made, [0, 1]) == [2, 2]
    assert next_step(made, [0, 1, 2, 3]) == [0] * 4


@pytest.mark.parametrize("seed", range(10))
def test_no_other_choice_is_expected_to_be_faster(seed: int) -> None:
    rng = Random(seed)
    points = sorted(rng.uniform(1, 10) for _ in range(4))
    costs = StepCosts(dict(zip((1, 4, 8, 16), points, strict=True)))
    made = governor(costs, slots=3)
    for slot in range(3):
        for _ in range(rng.randrange(6)):
            made.verified(slot, 3, 4, rng.randrange(5))
    chances = [made._slots[i].chances(made._expected(3), 4) for i in range(3)]

    def rate(counts: list[int]) -> float:
        tokens = sum(1 + sum(each[:n]) for each, n in zip(chances, counts, strict=True))
        return tokens / costs.of(3 + sum(counts))

    chosen = rate(made.choose([0, 1, 2], [FOUR] * 3, 0))
    best = max(rate(list(counts)) for counts in product(range(5), repeat=3))
    assert chosen * 1.0101 >= best


def test_what_is_being_verified_already_is_not_shortened() -> None:
    made = governor(COMPUTE_BOUND, slots=2)
    drafts = [FOUR, NO_DRAFT]
    assert made.choose([0, 1], drafts, 0) == [0, 0]
    assert made.choose([0, 1], [draft._replace(begun=True) for draft in drafts], 0) == [4, 0]
