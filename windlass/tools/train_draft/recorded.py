"""Training steps on CUDA as graphs: a step is a thousand small kernels, and launching them one by one
takes far longer than they do.

A graph is of one shape, so steps are filled up to shapes that recur. The first step of a shape runs as
it is, and makes ready what a recording may not; the second is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from windlass.tools.train_draft.batches import Batch, Shape, lay_out
from windlass.tools.train_draft.head import Figures
from windlass.tools.train_draft.writing import Text


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A graph, what it reads anew each time, and what it leaves."""

    graph: torch.cuda.CUDAGraph
    numbers: Tensor
    figures: Figures


class RecordedSteps:
    """Owns the graphs, and the memory that they all compute in: no two run at once."""

    def __init__(self, update: Callable[[Batch], Figures], batch_tokens: int) -> None:
        """`update` must do the same for every batch of a shape, and wait for nothing."""
        self._update = update
        self._batch_tokens = batch_tokens
        self._pool = torch.cuda.graph_pool_handle()
        self._steps: dict[Shape, _Recorded | None] = {}  # None: seen once

    def run(self, texts: Sequence[Text], firsts: NDArray[Any]) -> Figures:
        """One step. Its figures are good until the next."""
        shape = Shape.one_of_few(texts, self._batch_tokens)
        numbers = torch.from_numpy(lay_out(texts, firsts, shape)).pin_memory()
        if shape not in self._steps:
            self._steps[shape] = None
            return self._update(Batch.over(texts, shape, numbers.cuda(non_blocking=True)))
        step = self._steps[shape]
        if step is None:
            step = self._steps[shape] = self._record(texts, shape)
        step.numbers.copy_(numbers, non_blocking=True)
        step.graph.replay()
        return step.figures

    def _record(self, texts: Sequence[Text], shape: Shape) -> _Recorded:
        size = 2 * (shape.texts * shape.width + shape.labels)
        numbers = torch.zeros(size, dtype=torch.int64, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            figures = self._update(Batch.over(texts, shape, numbers))
        return _Recorded(graph, numbers, figures)
