"""Steps on CUDA: graphs for decode steps and small mixed steps, eager for the rest.

The host never waits within a step. A decode step is one copy of four numbers per row to the device
(five with adapters), one graph launch, and one copy back. The graph covers inputs, network and
sampling. The next step reads the sampled tokens on the device, so the host plans and launches it
while they are being copied back. mixed.py has the graphs of steps with prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from windlass.core.types import Row, RowResult, StepPlan, StepResult, TokenLogprob
from windlass.errors import OutOfMemory
from windlass.kernels.batch import (
    AdapterRows,
    AttentionWork,
    LogitsIndices,
    Span,
    StepBatch,
)
from windlass.runner.adapters import in_tiles
from windlass.runner.device_sampler import DeviceSampler
from windlass.runner.drafter import DrafterInputs
from windlass.runner.mixed import Arrays, GraphShape, MixedStep, attention_tiles, mixed_sizes
from windlass.runner.runner import CompletedStep, PendingStep, Runner, RunnerParts
from windlass.runner.slots import to_device

_MAX_DRAFTING_ROWS = 32  # max rows of a mixed step that also drafts


def num_splits(num_rows: int, num_kv_heads: int, multiprocessors: int) -> int:
    """Number of KV splits per row, so that few or uneven rows fill the device."""
    programs = max(1, num_rows * num_kv_heads)
    if programs >= 15 * multiprocessors:
        return 1
    return max(2, min(16, _power_below(4 * multiprocessors // programs)))


def _power_below(number: int) -> int:
    """The largest power of two <= number."""
    return 1 << max(0, number.bit_length() - 1)


def graph_sizes(max_rows: int) -> list[int]:
    """Batch sizes to capture: dense where padding is expensive, sparse where it is not."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, 1025, 32)]
    return [size for size in sizes if size < max_rows] + [max_rows]


@dataclass(frozen=True, slots=True)
class _Key:
    """The shape of a decode graph. Batch-invariant and LoRA graphs are captured on first use."""

    size: int
    batch_invariant: bool = False
    adapted: bool = False  # some rows use LoRA adapters

    @property
    def numbers(self) -> int:
        """Input numbers per row."""
        return 5 if self.adapted else 4


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    tokens: Tensor
    logits: Tensor


def _sampled(rows: Sequence[Row]) -> list[int]:
    return [i for i, row in enumerate(rows) if row.sample]


class PendingGraphStep:
    """A step whose tokens are being copied to the host."""

    def __init__(
        self,
        rows: list[Row],
        sampled: list[int],
        tokens: Tensor,
        scores: dict[int, list[TokenLogprob] | None],
    ) -> None:
        self._rows = rows
        self._sampled = sampled
        self._scores = scores
        self._host = torch.empty(len(sampled), dtype=torch.int32, pin_memory=True)
        self._host.copy_(tokens[: len(sampled)], non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record()

    def wait(self) -> StepResult:
        self._arrived.synchronize()
        tokens = self._host.tolist()
        if len(tokens) == len(self._rows) and not self._scores:
            return StepResult([RowResult([token]) for token in tokens])
        results = [RowResult([])] * len(self._rows)
        for i, (row, token) in enumerate(zip(self._sampled, tokens, strict=True)):
            results[row] = RowResult([token], self._scores.get(i))
        return StepResult(results)


class CudaRunner(Runner):
    """Owns the captured graphs and their buffers."""

    def __init__(self, parts: RunnerParts, *, tile: int, graph_rows: int, max_tokens: int) -> None:
        """`tile`: prompt tokens per attention tile. `graph_rows`: largest captured decode batch; 0
        captures no graphs. `max_tokens`: largest step.
        """
        super().__init__(parts)
        slots = parts.slots
        self._device_sampler = DeviceSampler(slots, parts.sampler)
        self._tile = tile
        self._num_kv_heads = parts.cache.layers[0].keys.shape[1]
        self._multiprocessors = torch.cuda.get_device_properties(self._device).multi_processor_count
        self._sizes = graph_sizes(graph_rows) if graph_rows else []
        self._graphs: dict[_Key, _Graph] = {}
        self._mixed_sizes = mixed_sizes(max_tokens) if graph_rows else []
        self._mixed: dict[GraphShape, MixedStep] = {}
        self._pool = torch.cuda.graph_pool_handle()
        max_rows = max(self._sizes, default=1)
        # Slot, position, token, new block and adapter of every row, contiguous: only copies from
        # contiguous pinned memory are asynchronous.
        self._inputs = torch.zeros(5 * max_rows, dtype=torch.int32, device=self._device)
        self._staging = [
            torch.empty(5 * max_rows, dtype=torch.int32, pin_memory=True) for _ in "ab"
        ]
        self._turn = 0
        self._singles = torch.arange(max_rows, dtype=torch.int32, device=self._device)
        rows = slots.num_slots + 1
        self._counters = torch.zeros(
            rows * self._num_kv_heads, dtype=torch.int32, device=self._device
        )
        self._no_tiles = torch.empty((0, 5), dtype=torch.int32, device=self._device)

    @property
    def max_mixed_tokens(self) -> int:
        return max(self._mixed_sizes, default=1) - 1  # the last is padding

    # ---- capture -----------------------------------------------------------------------------

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture all graphs, the largest first, so that smaller ones reuse its memory."""
        for tokens in reversed(self._mixed_sizes):
            self._mixed_step(self._graph_shape(tokens))
        for size in reversed(self._sizes):
            self._capture(_Key(size))

    def _capture(self, key: _Key) -> _Graph:
        self._stage([], key)
        self._decode(key)  # compiles kernels outside of the capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Another thread may pin memory for an adapter during the capture.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            tokens, logits = self._decode(key)
        self._graphs[key] = _Graph(graph, tokens, logits)
        return self._graphs[key]

    def _decode(self, key: _Key) -> tuple[Tensor, Tensor]:
        """One decode step: from packed inputs to tokens and logits."""
        from windlass.kernels.triton import pdl
        from windlass.kernels.triton.sample import decode_inputs_kernel

        slots, size, batch_invariant = self._slots, key.size, key.batch_invariant
        # Aligned rows for every size: Triton compiles another variant for unaligned pointers.
        shape = (3, -(-size // 4) * 4)
        rows = torch.empty(shape, dtype=torch.int32, device=self._device)[:, :size]
        ids, positions, row_slots = rows.unbind()
        decode_inputs_kernel[(size,)](
            self._inputs,
            slots.last,
            slots.tables,
            ids,
            positions,
            row_slots,
            size,
            slots.tables.stride(0),
            SIZE=slots.size,
            num_warps=1,
            **pdl.options(),
        )
        singles, tiles = self._singles[:size], self._no_tiles
        if batch_invariant:
            one = torch.ones_like(positions)
            tiles = torch.stack((singles, one, row_slots, positions, positions), dim=1)
            singles = singles[:0]
        work = AttentionWork(
            singles=singles, tiles=tiles, splits=self._splits(size), counters=self._counters
        )
        pages = self._cache.layers
        adapters = AdapterRows(self._inputs[4 * size : 5 * size]) if key.adapted else None
        batch = StepBatch(
            positions=positions,
            token_slots=row_slots,
            tables=slots.tables,
            spans=[],
            kv=pages,
            work=work,
            batch_invariant=batch_invariant,
            adapters=adapters,
        )
        with (
            self._gemm.batch_invariant(batch_invariant),
            self._gemm.overlapped(key.adapted),
        ):
            logits = self._network.logits(self._network(ids, batch), adapters)
        return self._device_sampler.draw(logits, row_slots, positions), logits

    def _splits(self, num_rows: int) -> int:
        return num_splits(num_rows, self._num_kv_heads, self._multiprocessors)

    # ---- steps -------------------------------------------------------------------------------

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> PendingStep:
        """Launch a step and return while the device computes."""
        try:
            return self._submit(plan)
        except torch.cuda.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            raise OutOfMemory(
                f"a step of {plan.num_tokens} tokens does not fit beside the KV cache: {error} "
                "Lower --max-num-batched-tokens or --memory-share."
            ) from error

    def _submit(self, plan: StepPlan) -> PendingStep:
        self._put_adapters(plan)
        self._note_batch_invariant(plan)
        self._device_sampler.forget(plan.freed)
        self._device_sampler.admit(plan.admitted)
        grown = self._slots.apply(plan)
        self._cache.copy(plan.copies)
        rows = plan.rows
        size = self._graph_for(rows)
        batch_invariant = self._is_batch_invariant(rows)
        if size is None:
            mixed = None if batch_invariant else self._mixed_for(plan)
            if mixed is not None:
                self._slots.send(grown)
                mixed.launch()
                return self._collect(rows, _sampled(rows), mixed.tokens, mixed.logits)
            with self._gemm.batch_invariant(batch_invariant):
                return self._submit_eager(plan, grown)
        key = _Key(size, batch_invariant, any(row.adapter for row in rows))
        graph = self._graphs.get(key) or self._capture(key)
        self._stage(rows, key)
        graph.graph.replay()
        return self._collect(rows, list(range(len(rows))), graph.tokens, graph.logits)

    def _mixed_for(self, plan: StepPlan, drafting: int = 0) -> MixedStep | None:
        """A mixed graph with the plan's rows staged; None if no graph covers them."""
        rows = plan.rows
        if plan.options.needs_all_hidden or self._scores_prompts(rows):
            return None
        total = sum(row.num_tokens for row in rows)
        tokens = next((size for size in self._mixed_sizes if size > total), None)
        if tokens is None:
            return None
        step = self._mixed_step(
            self._graph_shape(tokens, any(row.adapter for row in rows), drafting)
        )
        following = [self._next_prompt_token(row) for row in rows if drafting and not row.sample]
        return step if step.write(rows, following) else None

    def _graph_shape(self, tokens: int, adapted: bool = False, drafting: int = 0) -> GraphShape:
        # One token is padding, and a step of one-token rows only would be a decode step.
        rows = min(tokens - 2, self._slots.num_slots)
        if drafting:
            rows = min(rows, _MAX_DRAFTING_ROWS)
        return GraphShape(
            tokens=tokens, rows=rows, tile=self._tile, adapted=adapted, drafting=drafting
        )

    def _mixed_step(self, shape: GraphShape) -> MixedStep:
        if shape not in self._mixed:
            step = MixedStep(shape, self._device, self.padding)
            step.capture(partial(self._compute_mixed, shape), self._pool)
            self._mixed[shape] = step
        return self._mixed[shape]

    def _compute_mixed(self, shape: GraphShape, arrays: Arrays) -> tuple[Tensor, Tensor]:
        ids, positions, token_slots = arrays.tokens
        adapters, of_indices = shape.adapters(arrays)
        work = AttentionWork(
            singles=arrays.singles,
            tiles=arrays.tiles,
            splits=self._splits(shape.rows),
            counters=self._counters,
        )
        batch = StepBatch(
            positions=positions,
            token_slots=token_slots,
            tables=self._slots.tables,
            spans=[],
            kv=self._cache.layers,
            work=work,
            adapters=adapters,
            logits_indices=LogitsIndices(arrays.logits_indices, of_indices),
        )
        ids = self._slots.fill_last(ids, token_slots)
        drafter = self.drafter if shape.drafting else None
        aux_hidden_states = dict.fromkeys(drafter.layers, ids) if drafter is not None else {}
        hidden = self._network(ids, batch, aux_hidden_states)
        logits = self._network.logits(hidden, of_indices)
        slots, sampled_positions = (
            token_slots[arrays.logits_indices],
            positions[arrays.logits_indices],
        )
        tokens = self._device_sampler.draw(logits, slots, sampled_positions)
        if drafter is None:
            return tokens, logits
        following = ids.roll(-1)
        following[arrays.ends[0]] = arrays.ends[1]
        following[arrays.logits_indices] = tokens
        read = torch.arange(shape.rows, device=self._device)
        found = DrafterInputs(
            hidden=hidden,
            read=read,
            aux_hidden_states=aux_hidden_states,
            following=following,
            last=arrays.logits_indices,
            batch=batch,
            decode_batch=self._decode_batch,
        )
        drafts = drafter.draft(found, shape.drafting)
        return torch.cat((tokens[:, None], drafts), dim=1), logits

    def _graph_for(self, rows: list[Row]) -> int | None:
        """The smallest captured batch size for these rows; None when not all are decodes."""
        if not self._sizes or len(rows) > self._sizes[-1]:
            return None
        for row in rows:
            if row.num_tokens != 1 or not row.sample or len(row.blocks) > 1:
                return None
        return next(size for size in self._sizes if size >= len(rows))

    def _stage(self, rows: list[Row], key: _Key) -> None:
        """Copy slot, position, token, new block and adapter of every row to the device, padded."""
        self._turn ^= 1
        size, count = key.size, len(rows)
        staging = self._staging[self._turn][: key.numbers * size]
        packed = staging.numpy().reshape(key.numbers, size)
        packed[0, :count] = [row.slot for row in rows]
        packed[1, :count] = [row.start for row in rows]
        packed[2, :count] = [row.tokens[0] if row.tokens else -1 for row in rows]
        packed[3, :count] = [row.blocks[0] if row.blocks else -1 for row in rows]
        packed[:4, count:] = np.array([[self._slots.num_slots], [0], [0], [-1]])
        if key.adapted:
            packed[4, :count] = [row.adapter for row in rows]
            packed[4, count:] = 0
        self._inputs[: len(staging)].copy_(staging, non_blocking=True)

    def _adapters(self, rows: Sequence[Row], counts: Sequence[int]) -> AdapterRows | None:
        """Adapter rows for the LoRA kernels: per token for decodes and batch invariance, else tiles."""
        if not any(row.adapter for row in rows):
            return None
        slots = np.repeat(np.array([row.adapter for row in rows], dtype=np.int32), counts)
        if max(counts) == 1 or self._is_batch_invariant(rows):
            return AdapterRows(to_device(slots, self._device))
        return in_tiles(slots, counts, self._device)

    def _batch(self, plan: StepPlan) -> tuple[Tensor, StepBatch]:
        ids, batch = super()._batch(plan)
        return ids, replace(batch, work=self._work(plan.rows, batch.spans, batch.batch_invariant))

    def _submit_eager(self, plan: StepPlan, grown: list[Row]) -> PendingStep:
        self._slots.send(grown)
        rows = plan.rows
        ids, batch = self._batch(plan)
        hidden = self._network(ids, batch)
        sampled = _sampled(rows)
        tokens = logits = self._singles[:0]  # a chunk within a prompt samples nothing
        if sampled:
            logits, logits_indices = self._logits(rows, batch, hidden)
            slots, positions = (
                batch.token_slots[logits_indices.tokens],
                batch.positions[logits_indices.tokens],
            )
            tokens = self._device_sampler.draw(logits, slots, positions)
        pending = self._collect(rows, sampled, tokens, logits)
        if self._device_sampler.special([row.slot for row in rows]):
            results = pending.wait().rows
            self._score_prompts(rows, batch.spans, hidden, results)
            return CompletedStep(StepResult(results))
        return pending

    def _work(self, rows: list[Row], spans: list[Span], batch_invariant: bool) -> AttentionWork:
        """One-token rows, and chunks cut into tiles.

        Batch-invariant steps use tiles only: a tile never splits its context.
        """
        singles = [span.first for span in spans if span.count == 1 and not batch_invariant]
        tiles = attention_tiles(rows, spans, self._tile, singles=batch_invariant)
        return AttentionWork(
            singles=to_device(np.array(singles, dtype=np.int32), self._device),
            tiles=to_device(np.array(tiles, dtype=np.int32).reshape(-1, 5), self._device),
            splits=self._splits(len(singles)),
            counters=self._counters,
        )

    def _collect(
        self, rows: list[Row], sampled: list[int], tokens: Tensor, logits: Tensor
    ) -> PendingGraphStep:
        slots = [rows[i].slot for i in sampled]
        special = self._device_sampler.special(slots)
        scores: dict[int, list[TokenLogprob] | None] = {}
        if special:
            scores = self._device_sampler.resample(logits, tokens, slots, special)
        return PendingGraphStep(rows=rows, sampled=sampled, tokens=tokens, scores=scores)
