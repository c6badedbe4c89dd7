"""Prompt lookup: drafts copy the tokens after the latest earlier occurrence."""

from __future__ import annotations

from random import Random

import pytest

from windlass.core.sampling import SamplingParams
from windlass.core.types import Draft, SlotId, SlotInit, StepPlan
from windlass.speculative.base import NO_DRAFT, SlotUpdate, apply_plan
from windlass.speculative.ngram import Index, NgramProposer


def reference(tokens: list[int], *, min_ngram: int, max_ngram: int, count: int) -> Draft:
    """The reference: search backwards for the longest suffix that occurred before."""
    for length in range(max_ngram, min_ngram - 1, -1):
        end = tokens[len(tokens) - length :]
        for at in range(len(tokens) - 1, length - 1, -1):
            if len(tokens) > length and tokens[at - length : at] == end:
                grown = list(tokens)
                for _ in range(count):
                    grown.append(grown[at + len(grown) - len(tokens)])
                return Draft(tuple(grown[len(tokens) :]), length)
    return NO_DRAFT


@pytest.mark.parametrize("seed", range(20))
def test_an_incremental_index_matches_the_reference(seed: int) -> None:
    rng = Random(seed)
    tokens = [rng.randrange(4) for _ in range(60)]
    start = rng.randrange(20)
    index = Index(2, 4)
    index.extend(tokens[:start])
    for end in range(start, len(tokens)):
        expected = reference(tokens[:end], min_ngram=2, max_ngram=4, count=5)
        assert index.draft(5) == expected
        index.extend(tokens[end : end + 1])


def test_a_longer_match_wins_over_a_later_one() -> None:
    index = Index(2, 3)
    index.extend([1, 2, 3, 4, 0, 9, 2, 3, 5, 0, 1, 2, 3])
    assert index.draft(2) == Draft((4, 0), 3)


def test_a_loop_continues_past_the_end_of_the_text() -> None:
    index = Index(2, 2)
    index.extend([5, 6, 7, 5, 6])
    assert index.draft(7) == Draft((7, 5, 6, 7, 5, 6, 7), 2)


def test_only_the_latest_occurrences_are_compared() -> None:
    index = Index(1, 2)
    index.extend([7, 1, 5, *[1, 2] * 1000, 7, 1])
    assert index.draft(1) == Draft((2,), 1)
    index = Index(1, 2)
    index.extend([7, 1, 5, *[1, 2] * 10, 7, 1])
    assert index.draft(1) == Draft((5,), 2)


def slot_init(slot: int, tokens: list[int]) -> SlotInit:
    return SlotInit("", SlotId(slot), tokens, len(tokens), SamplingParams(), frozenset(), 0)


def test_slots_are_independent_and_freed() -> None:
    proposer = NgramProposer(2, 4, 3)
    one, two = slot_init(0, [1, 2, 3, 9]), slot_init(1, [1, 2, 8, 9])
    apply_plan(proposer, StepPlan([], [one, two]))
    proposer.update([SlotUpdate(one.slot, [1]), SlotUpdate(two.slot, [1])])
    proposer.update([SlotUpdate(one.slot, [2]), SlotUpdate(two.slot, [2])])
    drafts = proposer.propose([two.slot, one.slot], 4)
    assert [draft.tokens for draft in drafts] == [(8, 9, 1), (3, 9, 1)]
    apply_plan(proposer, StepPlan([], [slot_init(0, [4])], [one.slot]))
    proposer.update([SlotUpdate(one.slot, [1, 2])])
    assert proposer.propose([one.slot], 4) == [NO_DRAFT]
