"""Prompt lookup: guesses are what followed the latest earlier occurrence."""

from __future__ import annotations

from random import Random

import pytest

from windlass.core.sampling import SamplingParams
from windlass.core.types import SlotId, SlotInit, StepPlan
from windlass.speculative.base import NO_DRAFT, Draft, Seen, tell
from windlass.speculative.ngram import Index, NgramProposer


def plainly(tokens: list[int], shortest: int, longest: int, count: int) -> Draft:
    """The definition: search backwards for the longest end that occurred before."""
    for length in range(longest, shortest - 1, -1):
        end = tokens[len(tokens) - length :]
        for at in range(len(tokens) - 1, length - 1, -1):
            if len(tokens) > length and tokens[at - length : at] == end:
                grown = list(tokens)
                for _ in range(count):
                    grown.append(grown[at + len(grown) - len(tokens)])
                return Draft(tuple(grown[len(tokens) :]), length)
    return NO_DRAFT


@pytest.mark.parametrize("seed", range(20))
def test_an_index_grown_token_by_token_finds_what_a_search_finds(seed: int) -> None:
    rng = Random(seed)
    tokens = [rng.randrange(4) for _ in range(60)]
    start = rng.randrange(20)
    index = Index(2, 4)
    index.extend(tokens[:start])
    for end in range(start, len(tokens)):
        assert index.guess(5) == plainly(tokens[:end], 2, 4, 5)
        index.extend(tokens[end : end + 1])


def test_a_longer_match_goes_before_a_later_one() -> None:
    index = Index(2, 3)
    index.extend([1, 2, 3, 4, 0, 9, 2, 3, 5, 0, 1, 2, 3])
    assert index.guess(2) == Draft((4, 0), 3)


def test_a_loop_is_guessed_beyond_its_end() -> None:
    index = Index(2, 2)
    index.extend([5, 6, 7, 5, 6])
    assert index.guess(7) == Draft((7, 5, 6, 7, 5, 6, 7), 2)


def test_of_tokens_that_came_very_often_only_the_latest_places_are_looked_at() -> None:
    index = Index(1, 2)
    index.extend([7, 1, 5, *[1, 2] * 1000, 7, 1])
    assert index.guess(1) == Draft((2,), 1)
    index = Index(1, 2)
    index.extend([7, 1, 5, *[1, 2] * 10, 7, 1])
    assert index.guess(1) == Draft((5,), 2)


def admission(slot: int, tokens: list[int]) -> SlotInit:
    return SlotInit("", SlotId(slot), tokens, len(tokens), SamplingParams(), frozenset(), 0)


def test_slots_are_apart_and_forgotten() -> None:
    proposer = NgramProposer(2, 4, 3)
    one, two = admission(0, [1, 2, 3, 9]), admission(1, [1, 2, 8, 9])
    tell(proposer, StepPlan([], [one, two]))
    proposer.take_in([Seen(one.slot, [1]), Seen(two.slot, [1])])
    proposer.take_in([Seen(one.slot, [2]), Seen(two.slot, [2])])
    drafts = proposer.propose([two.slot, one.slot])
    assert [draft.tokens for draft in drafts] == [(8, 9, 1), (3, 9, 1)]
    tell(proposer, StepPlan([], [admission(0, [4])], [one.slot]))
    proposer.take_in([Seen(one.slot, [1, 2])])
    assert proposer.propose([one.slot]) == [NO_DRAFT]
