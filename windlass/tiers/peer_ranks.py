"""KV blocks between engines of several ranks: each rank hands over, or reads, the records of its slice.

Rank 0 tells the others which records to store, and where those of another engine are. A block counts as
handed over when all ranks have stored theirs; the number of a record differs from rank to rank.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from windlass.core.handover import HandedBlocks, PeerRecord
from windlass.tiers.peer import PeerExport, PeerStore

_SEQUENCE = struct.Struct("<Q")


class Followers(Protocol):
    """The other ranks of the engine; runner/worker.py:Followers."""

    def start_call(self, name: str, *arguments: str) -> None: ...

    def call(self, name: str, *arguments: str) -> list[bytes]: ...


class RankRecords(Protocol):
    """What rank 0 believes of the records of all ranks; runner/kv_tiers.py:KVTiers."""

    def save_again(self, keys: Sequence[bytes]) -> None: ...

    def found_again(self, keys: Sequence[bytes]) -> None: ...


class RankedExport:
    """Rank 0's part of an engine that computes prompts for others. Implements core's `BlockExport`."""

    def __init__(self, own: PeerExport, tiers: RankRecords, followers: Followers) -> None:
        self._own = own
        self._tiers = tiers
        self._followers = followers
        # Of the keys that are being handed over: their numbers on the other ranks, when all have them.
        self._expected: dict[bytes, tuple[int, ...] | None] = {}

    def expect(self, keys: Sequence[bytes]) -> None:
        self._own.expect(keys)
        self._followers.start_call("kv_expect", *_texts(keys))
        # Those that only other ranks lack.
        self._tiers.save_again([key for key in keys if key in self._expected])
        self._expected |= dict.fromkeys((key for key in keys if key not in self._expected), None)

    def contains(self, key: bytes) -> bool:
        if not self._own.contains(key):
            return False
        if self._expected.get(key) is None:
            self._ask(key)
        return self._expected[key] is not None

    def _ask(self, key: bytes) -> None:
        """Ask the other ranks for the numbers of this record, and of others that this rank has stored."""
        unknown = [each for each, found in self._expected.items() if found is None]
        keys = [key, *(each for each in unknown if each != key and self._own.contains(each))]
        replies = self._followers.call("kv_exported", *_texts(keys))
        numbers = [[each for (each,) in _SEQUENCE.iter_unpack(reply)] for reply in replies]
        for each, *others in zip(keys, *numbers, strict=True):
            self._expected[each] = tuple(others) if all(others) else None

    def hand_over(self, keys: Sequence[bytes]) -> HandedBlocks:
        own = self._own.hand_over(keys)
        others = {key: self._expected.pop(key, None) for key in keys}
        self._followers.start_call("kv_handed", *_texts(keys))
        records = [
            record._replace(others=found)
            for record in own.records
            if (found := others[record.key]) is not None
        ]
        return HandedBlocks(own.source, records, num_failed=len(keys) - len(records))


class RankedImport:
    """Rank 0's part of an engine that reads blocks of others. Implements core's `BlockImport`."""

    def __init__(self, own: PeerStore, tiers: RankRecords, followers: Followers) -> None:
        self._own = own
        self._tiers = tiers
        self._followers = followers

    def announce(self, handed: HandedBlocks) -> None:
        self._followers.start_call("kv_announce", msgspec.json.encode(handed).decode())
        self._own.announce(handed)
        self._tiers.found_again([record.key for record in handed.records])


def follower_calls(peer: PeerExport | PeerStore, rank: int) -> dict[str, Callable[..., object]]:
    """What another rank than rank 0 does when rank 0 says so, by name."""
    if isinstance(peer, PeerStore):
        store = peer

        def announce(text: str) -> None:
            handed = msgspec.json.decode(text, type=HandedBlocks)
            records = [
                PeerRecord(each.key, each.others[rank - 1])
                for each in handed.records
                if len(each.others)
                >= rank  # an engine with fewer ranks is refused by the handshake
            ]
            store.announce(handed._replace(records=records))

        return {"kv_announce": announce}
    export = peer

    def expect(*keys: str) -> None:
        export.expect(map(bytes.fromhex, keys))

    def exported(*keys: str) -> bytes:
        return b"".join(_SEQUENCE.pack(export.sequence(bytes.fromhex(key))) for key in keys)

    def handed_over(*keys: str) -> None:
        export.hand_over(map(bytes.fromhex, keys))

    return {"kv_expect": expect, "kv_exported": exported, "kv_handed": handed_over}


def _texts(keys: Sequence[bytes]) -> list[str]:
    return [key.hex() for key in keys]
