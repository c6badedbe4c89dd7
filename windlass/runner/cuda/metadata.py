"""Attention and LoRA metadata of a step for the Triton kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np
import torch
from torch import Tensor

from windlass.core.types import Row
from windlass.kernels.batch import (
    AdapterRows,
    AttentionWork,
    CachedContext,
    LongChunks,
    Span,
    StepBatch,
)
from windlass.kernels.storages import Held, held
from windlass.runner.adapters import in_tiles
from windlass.runner.inputs import StepInputs
from windlass.runner.slots import SlotTables, to_device

# Positions from which the contexts of few rows are read by more splits with smaller tiles.
LONG_CONTEXT = 16_384
MAX_LONG_ROWS = 16
_MAX_SPLITS, _MAX_LONG_SPLITS = 16, 64


def num_splits(num_rows: int, num_kv_heads: int, *, multiprocessors: int, max_splits: int) -> int:
    """Number of KV splits per row, so that few or uneven rows fill the device."""
    programs = max(1, num_rows * num_kv_heads)
    if programs >= 15 * multiprocessors:
        return 1
    return max(2, min(max_splits, _power_below(4 * multiprocessors // programs)))


def _power_below(number: int) -> int:
    """The largest power of two <= number."""
    return 1 << max(0, number.bit_length() - 1)


MIN_LONG = 256  # tokens; gathering contiguous keys and values pays from here
LONG_TILE = 128  # tokens


def attention_tiles(
    rows: Sequence[Row], spans: Sequence[Span], tile: int, singles: bool = False
) -> list[tuple[int, ...]]:
    """Attention tiles of the chunks (see `AttentionWork.tiles`), longest context first.

    `singles`: rows of one token become tiles too.
    """
    tiles: list[tuple[int, ...]] = [
        (span.first + at, min(tile, span.count - at), row.slot, span.start + at, span.start)
        for row, span in zip(rows, spans, strict=True)
        if span.count > 1 or singles
        for at in range(0, span.count, tile)
    ]
    tiles.sort(key=lambda item: -item[3])
    return tiles


@dataclass(frozen=True, slots=True)
class ChunkTiles:
    """The tiles of a step's chunks, as `LongChunks` has them: of the long ones, and of the others."""

    long: list[tuple[int, ...]]
    others: list[tuple[int, ...]]
    cached: list[tuple[int, int, slice]]  # slot and cached tokens of a long chunk, and its tiles


def chunk_tiles(
    rows: Sequence[Row], spans: Sequence[Span], tile: int, *, with_cached: bool = True
) -> ChunkTiles:
    """Cut the chunks of a step into tiles. `tile`: prompt tokens per tile of the chunks that read pages.

    Without `with_cached`, chunks behind cached tokens read pages too, however long they are.
    """
    tiles: list[tuple[int, ...]] = []
    cached: list[tuple[int, int, slice]] = []
    is_long = [span.count >= MIN_LONG and (with_cached or not span.start) for span in spans]
    for row, span in compress(zip(rows, spans, strict=True), is_long):
        starts = range(0, span.count, LONG_TILE)
        if span.start:
            cached.append((row.slot, span.start, slice(len(tiles), len(tiles) + len(starts))))
        tiles += [
            (span.first + at, min(LONG_TILE, span.count - at), span.first, at)
            for at in reversed(starts)  # the longest first
        ]
    short = [not each for each in is_long]
    others = attention_tiles(list(compress(rows, short)), list(compress(spans, short)), tile)
    return ChunkTiles(tiles, others, cached)


def long_chunks(
    rows: Sequence[Row], spans: Sequence[Span], tile: int, device: torch.device
) -> LongChunks | None:
    """The long chunks of a step, or None. `tile`: prompt tokens per tile of the short chunks."""
    if max(span.count for span in spans) < MIN_LONG:
        return None
    tiles = chunk_tiles(rows, spans, tile)
    on_device = to_device(np.array(tiles.long, dtype=np.int32), device)
    return LongChunks(
        on_device,
        to_device(np.array(tiles.others, dtype=np.int32).reshape(-1, 5), device),
        tuple(CachedContext(slot, start, on_device[own]) for slot, start, own in tiles.cached),
    )


class DeviceMetadata:
    """Owns the index and counter buffers that the attention kernels of all steps share."""

    def __init__(
        self,
        slots: SlotTables,
        *,
        tile: int,
        num_kv_heads: int,
        num_positions: int,
        multiprocessors: int,
        latent: bool = False,
    ) -> None:
        """`tile`: prompt tokens per attention tile; `num_positions`: max single tokens of a step.

        `latent`: MLA, whose decode kernel merges KV splits sequentially.
        """
        self._max_long_splits = _MAX_SPLITS if latent else _MAX_LONG_SPLITS
        self.tile = tile
        self.num_kv_heads = num_kv_heads
        self._slots = slots
        device, count = slots.device, max(num_positions, slots.num_slots + 1)
        self._multiprocessors = multiprocessors
        self.indices = torch.arange(count, dtype=torch.int32, device=device)
        self.counters = torch.zeros(count * num_kv_heads, dtype=torch.int32, device=device)
        self.no_tiles = torch.empty((0, 5), dtype=torch.int32, device=device)

    def storages(self) -> Iterator[Held]:
        return held("tables", self.indices, self.counters)

    def splits(self, num_rows: int, long_contexts: bool = False) -> int:
        most = self._max_long_splits if long_contexts else _MAX_SPLITS
        return num_splits(
            num_rows, self.num_kv_heads, multiprocessors=self._multiprocessors, max_splits=most
        )

    def singles(self, count: int, long_contexts: bool = False) -> AttentionWork:
        """Metadata of `count` rows of one token."""
        return AttentionWork(
            singles=self.indices[:count],
            tiles=self.no_tiles,
            splits=self.splits(count, long_contexts),
            counters=self.counters,
            long_contexts=long_contexts,
        )

    def tiles_only(self, tiles: Tensor) -> AttentionWork:
        """Metadata of tiles, which never split their context: batch-invariant."""
        return AttentionWork(
            singles=self.indices[:0], tiles=tiles, splits=1, counters=self.counters
        )

    def adapters(
        self, slots: Sequence[int], counts: Sequence[int], batch_invariant: bool
    ) -> AdapterRows | None:
        """Adapter rows for the LoRA kernels: per token for decodes and batch invariance, else tiles."""
        if not any(slots):
            return None
        of_tokens = np.repeat(np.array(slots, dtype=np.int32), counts)
        if max(counts) == 1 or batch_invariant:
            return AdapterRows(to_device(of_tokens, self._slots.device))
        return in_tiles(of_tokens, counts, self._slots.device)

    def attention(self, inputs: StepInputs) -> AttentionWork:
        """One-token rows, and chunks cut into tiles. Batch-invariant steps use tiles only."""
        batch_invariant, device = inputs.shape.batch_invariant, self._slots.device
        rows, spans = inputs.rows, inputs.spans
        singles = [span.first for span in spans if span.count == 1 and not batch_invariant]
        tiles = attention_tiles(rows, spans, self.tile, singles=batch_invariant)
        return AttentionWork(
            singles=to_device(np.array(singles, dtype=np.int32), device),
            tiles=to_device(np.array(tiles, dtype=np.int32).reshape(-1, 5), device),
            splits=self.splits(len(singles)),
            counters=self.counters,
            long=None
            if batch_invariant
            else long_chunks(rows, spans, tile=self.tile, device=device),
        )

    def decode_batch(self, positions: Tensor, slots: Tensor) -> StepBatch:
        return StepBatch(
            positions=positions,
            token_slots=slots,
            tables=self._slots.tables,
            spans=[],
            kv=[],
            work=self.singles(positions.shape[0]),
        )
