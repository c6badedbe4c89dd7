"""Training steps as CUDA graphs: a step has a thousand small kernels, whose launches take far longer
than the kernels.

A graph has one shape, so steps are padded to recurring shapes. The first step of a shape runs eagerly,
which initialises what a capture may not; the second is captured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from windlass.tools.train_draft.batches import Batch, Shape, pack
from windlass.tools.train_draft.corpus import Text
from windlass.tools.train_draft.head import StepMetrics


@dataclass(frozen=True, slots=True)
class _CapturedStep:
    """A captured graph, its input buffer, and its outputs."""

    graph: torch.cuda.CUDAGraph
    packed: Tensor
    metrics: StepMetrics


class CapturedSteps:
    """Owns the captured graphs and their shared memory pool: no two run at the same time."""

    def __init__(self, update: Callable[[Batch], StepMetrics], batch_tokens: int) -> None:
        """`update` must run the same kernels for every batch of a shape, without synchronisation."""
        self._update = update
        self._batch_tokens = batch_tokens
        self._pool = torch.cuda.graph_pool_handle()
        self._steps: dict[Shape, _CapturedStep | None] = {}  # None: ran once

    def run(self, texts: Sequence[Text], offsets: NDArray[Any]) -> StepMetrics:
        """Run one step. Its metrics are valid until the next step."""
        shape = Shape.padded(texts, self._batch_tokens)
        packed = torch.from_numpy(pack(texts, offsets, shape)).pin_memory()
        if shape not in self._steps:
            self._steps[shape] = None
            return self._update(Batch.from_packed(texts, shape, packed.cuda(non_blocking=True)))
        step = self._steps[shape]
        if step is None:
            step = self._steps[shape] = self._capture(texts, shape)
        step.packed.copy_(packed, non_blocking=True)
        step.graph.replay()
        return step.metrics

    def _capture(self, texts: Sequence[Text], shape: Shape) -> _CapturedStep:
        size = 2 * (shape.texts * shape.width + shape.labels)
        packed = torch.zeros(size, dtype=torch.int64, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            metrics = self._update(Batch.from_packed(texts, shape, packed))
        return _CapturedStep(graph, packed, metrics)
