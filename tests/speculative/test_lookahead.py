"""Lookahead: chains of what was said after wrong guesses, and the iteration where there are none."""

from __future__ import annotations

from windlass.core.sampling import SamplingParams
from windlass.core.types import SlotInit
from windlass.speculative.base import Draft, Seen
from windlass.speculative.lookahead import LookaheadProposer, Pool


def admitted(slot: int, tokens: list[int]) -> SlotInit:
    return SlotInit("", slot, tokens, len(tokens), SamplingParams(), frozenset(), 0)


def test_what_followed_before_is_guessed() -> None:
    pool = Pool([1, 2, 3, 4, 5, 6, 1])
    assert pool.guess(4).tokens == (2, 3, 4, 5)
    assert pool.guess(8).tokens == (2, 3, 4, 5, 6, 1, 2, 3)


def test_without_any_chain_the_last_trail_goes_on() -> None:
    pool = Pool([1, 2])
    first = pool.guess(3).tokens
    assert len(first) > 0, "any guess begins the iteration"
    pool.take_in([7], target_tokens=(7, 8, 9)[: 1 + len(first)])
    assert pool.guess(3).tokens[:1] == (8,)


def test_what_was_said_after_a_wrong_guess_is_found_by_it() -> None:
    pool = Pool([1, 2])
    pool.guess(2)
    pool.take_in([7], target_tokens=(7, 30, 31))
    assert pool.guess(2).tokens == (30, 31)
    pool.take_in([8], target_tokens=(8, 40, 41))
    pool.take_in([30], target_tokens=())
    assert pool.guess(1) == Draft((40,), kind=1)


def test_pools_belong_to_slots_and_go_with_them() -> None:
    made = LookaheadProposer(2)
    made.admit(admitted(3, [1, 2, 3, 1]))
    made.take_in([Seen(3, [2])])
    assert made.propose([3])[0].tokens == (3, 1)
    made.forget(3)
    made.admit(admitted(3, [9, 8, 9]))
    assert made.propose([3])[0].tokens == (8, 9)


def test_the_text_goes_before_what_was_said_unless_that_tells_more() -> None:
    pool = Pool([1, 2, 9, 9, 9, 9, 8])
    pool.take_in([1], target_tokens=())
    assert pool.guess(2) == Draft((2, 9), kind=2)
    pool.take_in([2], target_tokens=(2, 30, 31))
    pool.take_in([1], target_tokens=())
    assert pool.guess(2).tokens == (2, 1), "what followed last"
    pool.take_in([7], target_tokens=(7, 40, 41))
    pool.take_in([2], target_tokens=())
    assert pool.guess(1).tokens == (1,), "one token was said, and the text has two"


def test_a_pool_stays_small() -> None:
    pool = Pool(list(range(20_000)))
    for token in range(50_000, 65_000, 3):
        pool.guess(2)
        pool.take_in([token], target_tokens=(token, token + 1, token + 2))
    assert len(pool._said) > 4000
    assert len(pool._places) > 4000
    assert len(pool._said) + len(pool._places) <= 8192
