"""What an engine's memory is used for, now: plain values that travel to the server."""

from __future__ import annotations

from dataclasses import dataclass

from windlass.core.card import MemoryReport


@dataclass(frozen=True, slots=True)
class BlockUse:
    """What the KV cache's blocks are used for; the three kinds make all of them."""

    num_used: int
    num_cached: int  # free, but findable
    num_free: int
    block_size: int
    num_unfilled: int  # tokens that would still fit into the last blocks of running requests


@dataclass(frozen=True, slots=True)
class Memory:
    """The ledger. `held` None: nothing but the blocks is known."""

    blocks: BlockUse
    asleep: bool
    held: MemoryReport | None = None
