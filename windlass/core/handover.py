"""Hands the blocks of a prompt from the engine that computed them to another engine.

The store between the engines is tiers/peer.py; the front tells the other engine where the blocks are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

_RETRY_S = 0.1
_MAX_TRANSFER_S = 5.0


class PeerRecord(NamedTuple):
    """A sealed block in the buffer of the engine that computed it."""

    key: bytes  # of the prefix cache
    sequence: int  # the number of the record in that buffer
    others: tuple[int, ...] = ()  # its numbers in the buffers of the engine's other ranks


class HandedBlocks(NamedTuple):
    """The exported blocks of one prompt. The other engine computes missing blocks itself."""

    source: str  # the buffer: the number of a replica, or "host:port"
    records: list[PeerRecord]
    num_failed: int = 0  # blocks that could not be stored


class BlockExport(Protocol):
    """Where other engines read the blocks of this one."""

    def expect(self, keys: Sequence[bytes]) -> None:
        """Accept only records of these keys from now on."""

    def contains(self, key: bytes) -> bool: ...

    def hand_over(self, keys: Sequence[bytes]) -> HandedBlocks:
        """The locations of these blocks for another engine. Blocks that are not stored count as failed."""
        ...


class BlockImport(Protocol):
    """Where this engine reads the blocks of others."""

    def announce(self, handed: HandedBlocks) -> None: ...


class NoExport:
    """Exports nothing: other engines compute all blocks themselves."""

    def expect(self, keys: Sequence[bytes]) -> None:
        del keys

    def contains(self, key: bytes) -> bool:
        del key
        return True

    def hand_over(self, keys: Sequence[bytes]) -> HandedBlocks:
        del keys
        return HandedBlocks("", [])


@dataclass(slots=True)
class _Transfer:
    keys: list[bytes]
    began: float
    tried: float
    num_stored: int = 0  # of the first keys


class Transfers:
    """Owns the prompts whose blocks are being exported. `save` copies blocks to the export."""

    def __init__(self, export: BlockExport, save: Callable[[Sequence[bytes]], None]) -> None:
        self._export = export
        self._save = save
        self._open: dict[str, _Transfer] = {}

    def __bool__(self) -> bool:
        return bool(self._open)

    def begin(self, request_id: str, keys: list[bytes], now: float) -> None:
        self._start(keys)
        self._open[request_id] = _Transfer(keys, now, now)

    def _start(self, keys: Sequence[bytes]) -> None:
        self._export.expect(keys)
        self._save(keys)

    def ended(self, now: float) -> list[tuple[str, HandedBlocks]]:
        """The requests whose blocks are all exported, or were not exported in time. A block that was refused
        because too many copies were in progress is tried again.
        """
        found, contains = [], self._export.contains
        for request_id, each in list(self._open.items()):
            keys = each.keys
            while each.num_stored < len(keys) and contains(keys[each.num_stored]):
                each.num_stored += 1
            if each.num_stored == len(keys) or now - each.began > _MAX_TRANSFER_S:
                del self._open[request_id]
                found.append((request_id, self._export.hand_over(keys)))
            elif now - each.tried > _RETRY_S:
                self._start([key for key in keys[each.num_stored :] if not contains(key)])
                each.tried = now
        return found
