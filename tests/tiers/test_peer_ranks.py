"""Blocks between engines of two ranks: handed over when both have stored them, read by both."""

from __future__ import annotations

from typing import Any

from tests.tiers.test_peer import PRINT, SIZE, exported, fetched, key, reader_of, record
from windlass.core.handover import HandedBlocks, PeerRecord
from windlass.tiers.peer import PeerExport, PeerStore
from windlass.tiers.peer_ranks import RankedExport, RankedImport, follower_calls

KEYS = [key(1), key(2)]


class OneFollower:
    """Rank 1, which does at once what rank 0 says."""

    def __init__(self, peer: PeerExport | PeerStore) -> None:
        self._calls = follower_calls(peer, rank=1)

    def start_call(self, name: str, *arguments: str) -> None:
        self._calls[name](*arguments)

    def call(self, name: str, *arguments: str) -> list[object]:
        return [self._calls[name](*arguments)]


class Tiers:
    """Records what rank 0 learns of the records of other ranks."""

    def __init__(self) -> None:
        self.lost: list[bytes] = []
        self.found: list[bytes] = []

    def save_again(self, keys: list[bytes]) -> None:
        self.lost += keys

    def found_again(self, keys: list[bytes]) -> None:
        self.found += keys


def ranked(kind: Any, own: Any, other: Any) -> tuple[Any, Tiers]:
    tiers = Tiers()
    return kind(own, tiers, OneFollower(other)), tiers


def test_a_block_is_handed_over_when_all_ranks_have_it() -> None:
    memories = [bytearray(40 * SIZE) for _ in range(2)]
    own, other = map(exported, memories)
    export, tiers = ranked(RankedExport, own, other)
    other.put(key(9), record(9))  # numbers differ from rank to rank
    export.expect(KEYS)
    assert all(own.wants(each) and other.wants(each) for each in KEYS)
    for number in (1, 2):
        own.put(key(number), record(number))
    assert not export.contains(key(1))
    other.put(key(1), record(11))
    assert export.contains(key(1))
    assert not export.contains(key(2))
    export.expect([key(2)])  # tried again: only rank 1 lacks it
    assert tiers.lost == [key(2)]
    handed = export.hand_over(KEYS)
    assert handed.records == [PeerRecord(key(1), 1, (2,))]
    assert handed.num_failed == 1
    assert not any(own.wants(each) or other.wants(each) for each in KEYS)

    stores = [reader_of(memory, PRINT) for memory in memories]
    imports, tiers = ranked(RankedImport, *stores)
    imports.announce(handed)
    assert tiers.found == [key(1)]
    assert [fetched(store, 1) for store in stores] == [record(1), record(11)]


def test_a_prompt_that_two_requests_have_is_handed_over_twice() -> None:
    own, other = exported(bytearray(40 * SIZE)), exported(bytearray(40 * SIZE))
    export, _ = ranked(RankedExport, own, other)
    export.expect(KEYS[:1])
    export.expect(KEYS[:1])
    for each in (own, other):
        each.put(key(1), record(1))
    for _ in range(2):
        assert export.contains(key(1))
        assert export.hand_over(KEYS[:1]).num_failed == 0


def test_records_of_an_engine_with_fewer_ranks_are_misses() -> None:
    stores = [reader_of(bytearray(40 * SIZE)) for _ in range(2)]
    imports, _ = ranked(RankedImport, *stores)
    imports.announce(HandedBlocks("0", [PeerRecord(key(1), 1)]))
    assert [store.contains(key(1)) for store in stores] == [True, False]
