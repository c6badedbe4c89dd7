"""Captured decode steps: one token per row.

A step is one copy of four numbers per row to the device (five with adapters), one graph launch, and
one copy back. The graph covers inputs, network and sampling. The next step reads the sampled tokens
on the device, so the host plans and launches it while they are being copied back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from windlass.kernels.batch import AdapterRows, StepBatch
from windlass.kernels.storages import Held
from windlass.runner.cuda.graphs import AtStart, CapturedSizes, Graph, GraphSet
from windlass.runner.cuda.metadata import LONG_CONTEXT, MAX_LONG_ROWS, DeviceMetadata
from windlass.runner.cuda.stage import GraphStage
from windlass.runner.eager import RunnerParts
from windlass.runner.executor import Executor, PendingStep
from windlass.runner.inputs import StepInputs, StepShape
from windlass.runner.slots import SlotTables


def graph_sizes(max_rows: int) -> list[int]:
    """Batch sizes to capture: dense where padding is expensive, sparse where it is not."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, 1025, 32)]
    return [size for size in sizes if size < max_rows] + [max_rows]


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """The shape of a decode graph. Batch-invariant and LoRA graphs are captured on first use."""

    size: int
    batch_invariant: bool = False
    adapted: bool = False  # some rows use LoRA adapters
    long_contexts: bool = False

    @property
    def numbers(self) -> int:
        """Input numbers per row: token, position, slot, new block and adapter."""
        return 5 if self.adapted else 4


def _may_be_long(size: int, context: int) -> bool:
    """Whether decode attention of `size` rows uses more KV splits: few rows with a long context."""
    return size <= MAX_LONG_ROWS and context >= LONG_CONTEXT


# (tokens, logits) of a step, or (hidden states,) on a stage before the last
Compute = Callable[[DecodeShape, Tensor], tuple[Tensor, ...]]


class DecodeGraphs(Executor):
    """Owns the decode graphs and their input buffer."""

    name = "decode graph"

    def __init__(
        self,
        compute: Compute,
        stage: GraphStage,
        slots: SlotTables,
        *,
        max_rows: int,
        at_start: AtStart = AtStart.ALL,
    ) -> None:
        """`max_rows`: the largest batch to capture. `at_start`: the sizes to capture now."""
        self._stage = stage
        self._slots = slots
        self._padding = np.array([[0], [0], [slots.num_slots], [-1], [0]], dtype=np.int32)
        self._sizes = CapturedSizes(graph_sizes(max_rows), at_start)
        # Contiguous for each size: only copies from contiguous pinned memory are asynchronous.
        self._inputs = inputs = stage.staged_inputs(5 * self._sizes.largest)
        self._graphs: GraphSet[DecodeShape] = GraphSet(
            stage.backend, lambda shape: compute(shape, inputs.on_device)
        )
        self._max_context = slots.tables.shape[-1] * slots.size
        for size in self._sizes.at_start:
            self._capture_size(size)

    def capture_next(self) -> bool:
        size = self._sizes.next_missing()
        if size is not None:
            self._capture_size(size)
        return size is not None

    @property
    def num_missing(self) -> int:
        return sum(len(self._shapes(size)) for size in self._sizes.missing)

    def _capture_size(self, size: int) -> None:
        for shape in self._shapes(size):
            self._capture(shape)

    def _shapes(self, size: int) -> list[DecodeShape]:
        """The shapes of a size that are captured before a step uses them."""
        is_long = (False, True) if _may_be_long(size, self._max_context) else (False,)
        return [DecodeShape(size, long_contexts=each) for each in is_long]

    def _capture(self, shape: DecodeShape) -> Graph:
        self._view(shape)[:] = self._padding[: shape.numbers]
        self._inputs.send(shape.numbers * shape.size)
        return self._graphs.capture(shape)

    def _view(self, shape: DecodeShape) -> NDArray[Any]:
        numbers = shape.numbers * shape.size
        return self._inputs.stage()[:numbers].reshape(shape.numbers, shape.size)

    def storages(self) -> Iterator[Held]:
        yield from self._inputs.storages()
        yield from self._stage.storages()

    def refuses(self, shape: StepShape) -> str | None:
        if not shape.decodes or shape.max_row_tokens > 1:
            return "not every row decodes one token"
        if shape.draft_length:
            return "heads draft in the step"
        if shape.num_rows > self._sizes.largest:
            return "more rows than captured"
        if shape.max_new_blocks > self._slots.num_groups:
            return "a row has several new blocks"
        if shape.needs_all_hidden or shape.scores_prompts:
            return "all hidden states are read"
        if shape.pools:
            return "hidden states are pooled"
        return None

    def launch(self, inputs: StepInputs) -> PendingStep:
        size = self._sizes.fit(inputs.shape.num_rows)
        shape = DecodeShape(
            size,
            batch_invariant=inputs.shape.batch_invariant,
            adapted=inputs.shape.adapted,
            long_contexts=_may_be_long(size, inputs.shape.max_start),
        )
        graph = self._graphs.get(shape) or self._capture(shape)
        view, count = self._view(shape), inputs.shape.num_rows
        inputs.pack(view)
        if self._slots.num_groups == 1:
            view[3, :count] = inputs.new_blocks
        else:
            self._slots.send(inputs.grown)
            view[3, :count] = -1
        if shape.adapted:
            view[4, :count] = inputs.adapters
        view[:, count:] = self._padding[: shape.numbers]
        self._inputs.send(shape.numbers * size)
        self._sizes.ran(count)
        return self._stage.run(graph, inputs)


def decode_forward(parts: RunnerParts, stage: GraphStage, metadata: DeviceMetadata) -> Compute:
    """The computation of a decode step, from packed inputs to tokens and logits."""
    from windlass.kernels.triton import pdl
    from windlass.kernels.triton.sample import decode_inputs_kernel

    slots = parts.slots

    def compute(shape: DecodeShape, inputs: Tensor) -> tuple[Tensor, ...]:
        size = shape.size
        # Aligned rows for every size: Triton compiles another variant for unaligned pointers.
        aligned = (3, -(-size // 4) * 4)
        rows = torch.empty(aligned, dtype=torch.int32, device=inputs.device)[:, :size]
        ids, positions, row_slots = rows.unbind()
        decode_inputs_kernel[(size,)](
            inputs,
            slots.last,
            slots.tables,
            ids,
            positions,
            row_slots,
            size,
            slots.tables.stride(1),
            SIZE=slots.size,
            num_warps=1,
            **pdl.options(),
        )
        work = metadata.singles(size, shape.long_contexts)
        if shape.batch_invariant:
            columns = (work.singles, torch.ones_like(positions), row_slots, positions, positions)
            work = metadata.tiles_only(torch.stack(columns, dim=1))
        adapters = AdapterRows(inputs[4 * size : 5 * size]) if shape.adapted else None
        batch = StepBatch(
            positions=positions,
            token_slots=row_slots,
            tables=slots.tables,
            spans=[],
            kv=parts.cache.layers,
            work=work,
            batch_invariant=shape.batch_invariant,
            adapters=adapters,
        )
        gemm, network = parts.gemm, parts.network
        with gemm.batch_invariant(shape.batch_invariant), gemm.overlapped(shape.adapted):
            hidden = network(stage.inputs(ids), batch)
            if stage.sampler is None:
                return (hidden,)
            logits = network.logits(hidden, adapters)
        return stage.sampler.draw(logits, row_slots, positions), logits

    return compute
