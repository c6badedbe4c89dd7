"""CUDA graphs for mixed steps (prompt chunks and decodes), padded to fixed shapes.

The GPU computes a step of few tokens faster than the host launches its kernels, so graphs are
captured for several token counts. Unused entries are padding: they point to the last token, which
belongs to no request, or to nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from windlass.core.types import Row, SlotId
from windlass.kernels.batch import LORA_TILE, AdapterRows, Span
from windlass.runner.adapters import lora_tiles
from windlass.runner.slots import pack, spans_of

# Captured token counts. Larger steps keep the GPU busy longer than the host needs to launch them.
_SIZES = (32, 64, 96, 128, 192, 256, 320, 384, 512, 768, 1024)
_MAX_CHUNKS = 32  # prompt chunks per step


def mixed_sizes(max_tokens: int) -> list[int]:
    """Token counts to capture for an engine whose steps have at most `max_tokens`."""
    within = [size for size in _SIZES if size < max_tokens]
    return within + [size for size in _SIZES if size >= max_tokens][:1]


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
class Arrays:
    """Views into one input buffer, on the host or on the device."""

    tokens: Tensor  # [3, tokens]: ids (-1: last sampled token), positions, slots
    singles: Tensor  # [rows]: tokens of one-token rows
    tiles: Tensor  # [tiles, 5]
    logits_indices: Tensor  # [rows]: sampled tokens
    adapters: Tensor  # [2, tokens] or empty: of all tokens, and of one-token rows
    lora_tiles: Tensor  # [tiles, 2] or empty: LoRA tiles of chunks
    ends: Tensor  # [2, rows] or empty: last tokens of unsampled rows, and their next tokens


@dataclass(frozen=True, slots=True)
class GraphShape:
    """The padded sizes of a captured mixed step."""

    tokens: int
    rows: int
    tile: int  # tokens per attention tile
    adapted: bool  # rows may use LoRA adapters
    drafting: int = 0  # draft tokens per row for the next step

    @property
    def tiles(self) -> int:
        return self.tokens // self.tile + self._chunks

    @property
    def num_lora_tiles(self) -> int:
        return self.tokens // LORA_TILE + self._chunks if self.adapted else 0

    @property
    def _chunks(self) -> int:
        return min(_MAX_CHUNKS, self.tokens // 2)

    @property
    def _shapes(self) -> list[tuple[int, ...]]:
        adapted = self.tokens if self.adapted else 0
        rows, ends = (self.rows,), (2, self.rows if self.drafting else 0)
        wide = (3, self.tokens)
        return [wide, rows, (self.tiles, 5), rows, (2, adapted), (self.num_lora_tiles, 2), ends]

    @property
    def numbers(self) -> int:
        """Int32 entries of the input buffer. Every view is 16-byte aligned, as kernels assume."""
        return sum(_aligned(math.prod(shape)) for shape in self._shapes)

    def parts(self, input_buffer: Tensor) -> Arrays:
        """Split an input buffer into its views."""
        views, at = [], 0
        for shape in self._shapes:
            count = math.prod(shape)
            views.append(input_buffer[at : at + count].view(shape))
            at += _aligned(count)
        return Arrays(*views)

    def fill(
        self,
        input_buffer: Tensor,
        rows: Sequence[Row],
        padding: SlotId,
        following: Sequence[int] = (),
    ) -> bool:
        """Write a step into a host buffer. False: it does not fit.

        `following`: the next prompt tokens of unsampled rows, for drafting.
        """
        spans, last = spans_of(rows), self.tokens - 1
        arrays = self.parts(input_buffer)
        tiles = attention_tiles(rows, spans, self.tile)
        if (
            len(tiles) > self.tiles
            or len(rows) > self.rows
            or spans[-1].first + spans[-1].count > last
        ):
            return False
        ends = [span.first + span.count for span in spans]
        logits_indices = [end - 1 for row, end in zip(rows, ends, strict=True) if row.sample]
        unsampled = [end - 1 for row, end in zip(rows, ends, strict=True) if not row.sample]
        tokens = arrays.tokens.numpy()
        tokens[:] = np.array([[0], [0], [padding]])
        pack(rows, spans, tokens)
        _put(arrays.singles, [span.first for span in spans if span.count == 1], last)
        _put(arrays.tiles, tiles, (last, 0, padding, 0, 0))
        _put(arrays.logits_indices, logits_indices, last)
        if self.adapted:
            counts = [span.count for span in spans]
            slots = np.repeat(np.array([row.adapter for row in rows], dtype=np.int32), counts)
            single_slots = slots * (np.repeat(counts, counts) == 1)
            _put(arrays.adapters[0], slots, 0)
            _put(arrays.adapters[1], single_slots, 0)
            _put(arrays.lora_tiles, lora_tiles(slots - single_slots, counts), (last, 0))
        if self.drafting:
            _put(arrays.ends[0], unsampled, last)
            _put(arrays.ends[1], following, 0)
        return True

    def adapters(self, arrays: Arrays) -> tuple[AdapterRows | None, AdapterRows | None]:
        """The adapters of all tokens, and of the sampled ones."""
        if not self.adapted:
            return None, None
        slots, single_slots = arrays.adapters
        return AdapterRows(slots, arrays.lora_tiles, single_slots=single_slots), AdapterRows(
            slots[arrays.logits_indices]
        )


def _aligned(count: int) -> int:
    return -(-count // 4) * 4


def _put(target: Tensor, values: Sequence[object] | NDArray[Any], padding: object) -> None:
    array, count = target.numpy(), len(values)
    if count:
        array[:count] = values
    array[count:] = padding


class MixedStep:
    """Owns a captured graph and two pinned input buffers, one of which may be in flight."""

    def __init__(self, shape: GraphShape, device: torch.device, padding: SlotId) -> None:
        self.shape = shape
        self._padding = padding
        self._input_buffer = torch.zeros(shape.numbers, dtype=torch.int32, device=device)
        self._sent = [torch.zeros(shape.numbers, dtype=torch.int32).pin_memory() for _ in "ab"]
        self._graph = torch.cuda.CUDAGraph()
        # Outputs of the sampled rows; with drafting, each token is followed by its draft tokens.
        self.tokens = self.logits = self._input_buffer[:0]

    def capture(self, compute: Callable[[Arrays], tuple[Tensor, Tensor]], pool: Any) -> None:
        """Capture `compute`, which returns the tokens and logits of a step."""
        padding_row = Row("", self._padding, 0, 1, (0,), (), True)
        assert self.write([padding_row])
        self._input_buffer.copy_(self._sent[0])
        arrays = self.shape.parts(self._input_buffer)
        compute(arrays)  # compiles kernels outside of the capture
        torch.cuda.synchronize()
        # Another thread may pin memory for an adapter during the capture.
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self.tokens, self.logits = compute(arrays)

    def write(self, rows: Sequence[Row], following: Sequence[int] = ()) -> bool:
        """Stage a step. False: it does not fit."""
        self._sent.reverse()
        return self.shape.fill(self._sent[0], rows, self._padding, following)

    def launch(self) -> None:
        """Replay the graph on the staged step."""
        self._input_buffer.copy_(self._sent[0], non_blocking=True)
        self._graph.replay()
