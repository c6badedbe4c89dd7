"""A snapshot of the engine's memory use: plain values that travel to the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from windlass.core.card import MemoryReport
from windlass.core.types import AdapterSize


@dataclass(frozen=True, slots=True)
class BlockUse:
    """The use of the KV blocks. Used, cached and free add up to all blocks."""

    num_used: int
    num_cached: int  # free, but in the prefix cache
    num_free: int
    block_size: int
    num_unfilled: int  # unused token slots in the last blocks of running requests


Place = Literal["device", "memory", "disk"]


@dataclass(frozen=True, slots=True)
class AdapterUse:
    """A LoRA adapter: its size, the fastest place that has it, and its requests."""

    name: str
    place: Place
    size: AdapterSize | None  # None: it was never read
    num_running: int
    num_waiting: int
    num_requests: int  # since it was loaded


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory use. `held` is None when the runner reports none."""

    blocks: BlockUse
    asleep: bool
    held: MemoryReport | None = None
    adapters: tuple[AdapterUse, ...] = ()
