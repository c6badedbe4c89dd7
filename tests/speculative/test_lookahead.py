"""Lookahead: n-grams from samples after rejected draft tokens, and the Jacobi iteration."""

from __future__ import annotations

from windlass.core.sampling import SamplingParams
from windlass.core.types import Draft, SlotInit
from windlass.speculative.base import SlotUpdate
from windlass.speculative.lookahead import LookaheadProposer, Pool


def slot_init(slot: int, tokens: list[int]) -> SlotInit:
    return SlotInit("", slot, tokens, len(tokens), SamplingParams(), frozenset(), 0)


def test_followers_in_the_text_are_drafted() -> None:
    pool = Pool([1, 2, 3, 4, 5, 6, 1])
    assert pool.draft(4).tokens == (2, 3, 4, 5)
    assert pool.draft(8).tokens == (2, 3, 4, 5, 6, 1, 2, 3)


def test_without_an_entry_the_iteration_continues() -> None:
    pool = Pool([1, 2])
    first = pool.draft(3).tokens
    assert len(first) > 0, "any draft starts the iteration"
    pool.update([7], target_tokens=(7, 8, 9)[: 1 + len(first)])
    assert pool.draft(3).tokens[:1] == (8,)


def test_samples_after_a_rejected_token_are_drafted_later() -> None:
    pool = Pool([1, 2])
    pool.draft(2)
    pool.update([7], target_tokens=(7, 30, 31))
    assert pool.draft(2).tokens == (30, 31)
    pool.update([8], target_tokens=(8, 40, 41))
    pool.update([30], target_tokens=())
    assert pool.draft(1) == Draft((40,), kind=1)


def test_a_freed_slot_drops_its_pool() -> None:
    made = LookaheadProposer(2)
    made.admit(slot_init(3, [1, 2, 3, 1]))
    made.update([SlotUpdate(3, [2])])
    assert made.propose([3], 2)[0].tokens == (3, 1)
    made.forget(3)
    made.admit(slot_init(3, [9, 8, 9]))
    assert made.propose([3], 2)[0].tokens == (8, 9)


def test_the_text_wins_unless_the_sampled_entry_is_longer() -> None:
    pool = Pool([1, 2, 9, 9, 9, 9, 8])
    pool.update([1], target_tokens=())
    assert pool.draft(2) == Draft((2, 9), kind=2)
    pool.update([2], target_tokens=(2, 30, 31))
    pool.update([1], target_tokens=())
    assert pool.draft(2).tokens == (2, 1), "the latest occurrence"
    pool.update([7], target_tokens=(7, 40, 41))
    pool.update([2], target_tokens=())
    assert pool.draft(1).tokens == (1,), "one sampled follower, two in the text"


def test_a_pool_is_bounded() -> None:
    pool = Pool(list(range(20_000)))
    for token in range(50_000, 65_000, 3):
        pool.draft(2)
        pool.update([token], target_tokens=(token, token + 1, token + 2))
    assert len(pool._sampled) > 4000
    assert len(pool._positions) > 4000
    assert len(pool._sampled) + len(pool._positions) <= 8192
