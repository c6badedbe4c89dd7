"""CUDA graphs for mixed steps (prompt chunks and decodes), padded to fixed shapes.

The GPU computes a step of few tokens faster than the host launches its kernels, so graphs are
captured for several token counts. Unused entries are padding: they point to the last token, which
belongs to no request, or to nothing. Graphs of small models reach further: their layers take so
little time that the host limits steps of thousands of tokens, too.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from windlass.kernels.batch import (
    LORA_TILE,
    AdapterRows,
    AttentionWork,
    LogitsIndices,
    LongChunks,
    StepBatch,
)
from windlass.kernels.storages import Held
from windlass.runner.adapters import lora_tiles
from windlass.runner.cuda.graphs import AtStart, CapturedSizes, Graph, GraphSet, StagedInputs
from windlass.runner.cuda.metadata import (
    LONG_TILE,
    MIN_LONG,
    ChunkTiles,
    DeviceMetadata,
    attention_tiles,
    chunk_tiles,
)
from windlass.runner.cuda.stage import GraphStage
from windlass.runner.drafter import Drafter, DrafterInputs
from windlass.runner.eager import RunnerParts
from windlass.runner.executor import Executor, PendingStep
from windlass.runner.inputs import StepInputs, StepShape
from windlass.runner.slots import SlotTables

# Captured token counts of every model.
_SIZES = (32, 64, 96, 128, 192, 256, 320, 384, 512, 640, 768, 896, 1024)
# Token counts of models whose layers the GPU computes faster than the host launches them.
_LARGE_SIZES = (1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
_PADDING = 16  # tokens beside those of a large size, so that a step of just that size fits
_MAX_CHUNKS = 32  # prompt chunks per step
_TOKENS_PER_CHUNK = 64  # of large steps, on average at least
_MAX_CACHED = 2048  # tokens before a chunk of a large graph, which reads them from their pages
_MAX_DRAFTING_ROWS = 32  # max rows of a mixed step that also drafts


def mixed_sizes(max_tokens: int, launch_bound: int = 0) -> list[int]:
    """Token counts to capture for an engine whose steps have at most `max_tokens`.

    `launch_bound`: tokens up to which the host launches a step slower than the GPU computes it.
    """
    large = [size + _PADDING for size in _up_to(max_tokens, _LARGE_SIZES) if size <= launch_bound]
    return _up_to(max_tokens, _SIZES) + (large if max_tokens >= _SIZES[-1] else [])


def _up_to(count: int, sizes: Sequence[int]) -> list[int]:
    """The sizes below `count`, and the next one."""
    return list(sizes[: bisect_left(sizes, count) + 1])


@dataclass(frozen=True, slots=True)
class Arrays:
    """Views into one input buffer, on the host or on the device."""

    tokens: Tensor  # [3, tokens]: ids (-1: last sampled token), positions, slots
    singles: Tensor  # [rows]: tokens of one-token rows
    tiles: Tensor  # [tiles, 5]
    long_tiles: Tensor  # [tiles, 4] or empty: tiles of `LongChunks`
    other_tiles: Tensor  # [tiles, 5] or empty: those of the other chunks
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
    drafting: int  # draft tokens per row for the next step

    @property
    def tiles(self) -> int:
        return self.tokens // self.tile + self.chunks

    @property
    def num_lora_tiles(self) -> int:
        return self.tokens // LORA_TILE + self.chunks if self.adapted else 0

    @property
    def is_large(self) -> bool:
        """Whether long chunks attend to contiguous keys and values, as in eager steps."""
        return self.tokens > _SIZES[-1]

    @property
    def num_long_tiles(self) -> int:
        return self.tokens // LONG_TILE + self.tokens // MIN_LONG if self.is_large else 0

    @property
    def chunks(self) -> int:
        if self.is_large:
            return self.tokens // _TOKENS_PER_CHUNK
        return min(_MAX_CHUNKS, self.tokens // 2)

    @property
    def _shapes(self) -> list[tuple[int, ...]]:
        adapted = self.tokens if self.adapted else 0
        rows, ends = (self.rows,), (2, self.rows if self.drafting else 0)
        others = self.tiles if self.is_large else 0
        return [
            (3, self.tokens),
            rows,
            (self.tiles, 5),
            (self.num_long_tiles, 4),
            (others, 5),
            rows,
            (2, adapted),
            (self.num_lora_tiles, 2),
            ends,
        ]

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

    def clear(self, input_buffer: Tensor, padding: int) -> None:
        """Write a step of padding to a host buffer. `padding`: the slot of padding rows."""
        arrays, last = self.parts(input_buffer), self.tokens - 1
        input_buffer.zero_()
        arrays.tokens[2] = padding
        arrays.singles[:] = last
        self._put_tiles(arrays, [], ChunkTiles([], [], []), padding)
        arrays.logits_indices[:] = last
        _put(arrays.lora_tiles, (), (last, 0))
        if self.drafting:
            arrays.ends[0] = last

    def fill(self, input_buffer: Tensor, inputs: StepInputs, padding: int) -> None:
        """Write a step to a host buffer, with padding in all unused entries."""
        rows, spans, last = inputs.rows, inputs.spans, self.tokens - 1
        arrays = self.parts(input_buffer)
        ends = [span.first + span.count for span in spans]
        logits_indices = [end - 1 for row, end in zip(rows, ends, strict=True) if row.sample]
        tokens = arrays.tokens.numpy()
        tokens[:] = np.array([[0], [0], [padding]])
        inputs.pack(tokens)
        _put(arrays.singles, [span.first for span in spans if span.count == 1], last)
        tiles = attention_tiles(rows, spans, self.tile)
        of_chunks = ChunkTiles([], [], [])
        if self.is_large:
            of_chunks = chunk_tiles(rows, spans, self.tile, with_cached=False)
        self._put_tiles(arrays, tiles, of_chunks, padding)
        _put(arrays.logits_indices, logits_indices, last)
        if self.adapted:
            counts = inputs.counts
            slots = inputs.token_adapters
            single_slots = slots * (np.repeat(counts, counts) == 1)
            _put(arrays.adapters[0], slots, 0)
            _put(arrays.adapters[1], single_slots, 0)
            _put(arrays.lora_tiles, lora_tiles(slots - single_slots, counts), (last, 0))
        if self.drafting:
            unsampled = [end - 1 for row, end in zip(rows, ends, strict=True) if not row.sample]
            _put(arrays.ends[0], unsampled, last)
            _put(arrays.ends[1], inputs.following(), 0)

    def _put_tiles(
        self,
        arrays: Arrays,
        tiles: list[tuple[int, ...]],
        of_chunks: ChunkTiles,
        padding: int,
    ) -> None:
        last = self.tokens - 1
        _put(arrays.tiles, tiles, (last, 0, padding, 0, 0))
        # Programs of long tiles have at least one key.
        _put(arrays.long_tiles, of_chunks.long, (last, 0, last, 1))
        _put(arrays.other_tiles, of_chunks.others, (last, 0, padding, 0, 0))

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


class Forward(Protocol):
    """Computes a mixed step: tokens, followed by draft tokens if the graph drafts, and logits.

    A stage before the last returns the hidden states of all tokens.
    """

    def attach(self, drafter: Drafter) -> None: ...

    def __call__(self, shape: GraphShape, arrays: Arrays) -> tuple[Tensor, ...]: ...


class MixedGraphs(Executor):
    """Owns the mixed graphs and the input buffers of each."""

    name = "mixed graph"

    def __init__(
        self,
        forward: Forward,
        stage: GraphStage,
        slots: SlotTables,
        *,
        tile: int,
        sizes: Sequence[int],
        draft_length: int,
        at_start: AtStart = AtStart.ALL,
    ) -> None:
        """`tile`: prompt tokens per attention tile; `sizes`: token counts to capture, ascending.

        `draft_length`: draft tokens per row that graphs with a drafter make. `at_start`: the sizes to
        capture now.
        """
        self._forward = forward
        self._stage = stage
        self._slots = slots
        self._padding = slots.num_slots  # the slot of padding rows
        self._tile = tile
        self._sizes = CapturedSizes(sizes, at_start)
        self._drafts = False  # whether graphs with a drafter are captured too
        self._draft_length = draft_length
        self._inputs: dict[GraphShape, StagedInputs] = {}
        inputs = self._inputs
        self._graphs: GraphSet[GraphShape] = GraphSet(
            stage.backend, lambda shape: forward(shape, shape.parts(inputs[shape].on_device))
        )
        self._max_small = max(size for size in sizes if size <= _SIZES[-1])
        self.max_mixed_tokens = self._max_small - 1  # the last is padding
        for tokens in self._sizes.at_start:
            self._capture(self._shape(tokens))

    def attach(self, drafter: Drafter) -> None:
        if not self._stage.is_whole:
            return
        self._forward.attach(drafter)
        self._drafts = True
        for tokens in self._sizes.at_start:
            if tokens <= self._max_small:
                self._capture(self._shape(tokens, draft_length=self._draft_length))

    @property
    def num_missing(self) -> int:
        return len(self._sizes.missing)

    def capture_next(self) -> bool:
        tokens = self._sizes.next_missing()
        if tokens is None:
            return False
        self._capture(self._shape(tokens))
        if self._drafts and tokens <= self._max_small:
            self._capture(self._shape(tokens, draft_length=self._draft_length))
        return True

    def _shape(self, tokens: int, adapted: bool = False, draft_length: int = 0) -> GraphShape:
        # One token is padding, and a step of one-token rows only would be a decode step.
        rows = min(tokens - 2, self._padding)
        if draft_length:
            rows = min(rows, _MAX_DRAFTING_ROWS)
        return GraphShape(
            tokens=tokens, rows=rows, tile=self._tile, adapted=adapted, drafting=draft_length
        )

    def _capture(self, shape: GraphShape) -> Graph:
        inputs = self._staged(shape)
        graph = self._graphs.get(shape)
        if graph is None:
            inputs.stage()
            shape.clear(inputs.staged, self._padding)
            inputs.send()
            graph = self._graphs.capture(shape)
        return graph

    def _staged(self, shape: GraphShape) -> StagedInputs:
        if shape not in self._inputs:
            self._inputs[shape] = self._stage.staged_inputs(shape.numbers)
        return self._inputs[shape]

    def storages(self) -> Iterator[Held]:
        for inputs in self._inputs.values():
            yield from inputs.storages()

    def refuses(self, shape: StepShape) -> str | None:
        if shape.batch_invariant:
            return "a row is deterministic"
        if shape.draft_length and not self._stage.is_whole:
            return "heads draft behind several stages"
        if self._stage.is_last and (why := self._refuses_results(shape)):
            return why
        graph = self._for(shape)
        if graph is None:
            return "more tokens than captured"
        if shape.num_rows > graph.rows:
            return "more rows than captured"
        if graph.is_large and shape.max_chunk_start > _MAX_CACHED:
            return "a chunk follows many cached tokens"
        return "more chunks than captured" if shape.num_chunks > graph.chunks else None

    def _refuses_results(self, shape: StepShape) -> str | None:
        if shape.needs_all_hidden or shape.scores_prompts:
            return "all hidden states are read"
        if shape.has_drafts:
            return "a row verifies draft tokens"
        if shape.draft_length and shape.special_sampling:
            return "heads draft after tokens that are sampled again"
        return None

    def _for(self, shape: StepShape) -> GraphShape | None:
        """The shape of the smallest graph with a token left for padding."""
        # Large graphs are of plain steps: every other kind would need memory for graphs of its own.
        is_plain = not (shape.draft_length or shape.adapted)
        if shape.num_tokens >= (self._sizes.largest if is_plain else self._max_small):
            return None
        draft_length = self._draft_length if shape.draft_length else 0
        return self._shape(self._sizes.fit(shape.num_tokens + 1), shape.adapted, draft_length)

    def launch(self, inputs: StepInputs) -> PendingStep:
        shape = self._for(inputs.shape)
        assert shape is not None
        graph, staged = self._capture(shape), self._staged(shape)
        self._slots.send(inputs.grown)
        staged.stage()
        shape.fill(staged.staged, inputs, self._padding)
        staged.send()
        self._sizes.ran(inputs.shape.num_tokens + 1)
        return self._stage.run(graph, inputs)


class MixedForward:
    """Computes a mixed step with the network and the drafter."""

    def __init__(self, parts: RunnerParts, stage: GraphStage, metadata: DeviceMetadata) -> None:
        self._parts = parts
        self._stage = stage
        self._metadata = metadata
        self._drafter: Drafter | None = None

    def attach(self, drafter: Drafter) -> None:
        self._drafter = drafter

    def __call__(self, shape: GraphShape, arrays: Arrays) -> tuple[Tensor, ...]:
        parts, metadata = self._parts, self._metadata
        ids, positions, token_slots = arrays.tokens
        adapters, of_indices = shape.adapters(arrays)
        work = AttentionWork(
            singles=arrays.singles,
            tiles=arrays.tiles,
            splits=metadata.splits(shape.rows),
            counters=metadata.counters,
            long=LongChunks(arrays.long_tiles, arrays.other_tiles) if shape.is_large else None,
        )
        batch = StepBatch(
            positions=positions,
            token_slots=token_slots,
            tables=parts.slots.tables,
            spans=[],
            kv=parts.cache.layers,
            work=work,
            adapters=adapters,
            logits_indices=LogitsIndices(arrays.logits_indices, of_indices),
        )
        ids = parts.slots.fill_last(ids, token_slots)
        drafter = self._drafter if shape.drafting else None
        aux_hidden_states = {} if drafter is None else dict.fromkeys(drafter.layers, ids)
        hidden = parts.network(self._stage.inputs(ids), batch, aux_hidden_states)
        sampler = self._stage.sampler
        if sampler is None:
            return (hidden,)
        logits = parts.network.logits(hidden, of_indices)
        at = arrays.logits_indices
        tokens = sampler.draw(logits, token_slots[at], positions[at])
        if drafter is None:
            return tokens, logits, hidden
        following = ids.roll(-1)
        following[arrays.ends[0]] = arrays.ends[1]
        following[at] = tokens
        found = DrafterInputs(
            hidden=hidden,
            read=torch.arange(shape.rows, device=ids.device),
            aux_hidden_states=aux_hidden_states,
            following=following,
            last=at,
            batch=batch,
            decode_batch=metadata.decode_batch,
        )
        drafts = drafter.draft(found, shape.drafting)
        return torch.cat((tokens[:, None], drafts), dim=1), logits, hidden
