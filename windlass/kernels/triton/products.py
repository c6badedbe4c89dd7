"""Products on CUDA: for few rows the skinny kernel where it was measured to be faster, else cuBLAS."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from windlass.kernels.products import TorchProducts
from windlass.kernels.triton import skinny
from windlass.kernels.triton.norm import silu_mul as triton_silu_mul
from windlass.kernels.triton.skinny import Tiling

_TILINGS = [
    *[Tiling(16, stages=8), Tiling(32, stages=8), Tiling(32), Tiling(64)],
    *[Tiling(n, s) for n in (32, 64) for s in (2, 4, 8)],
    *[Tiling(32, s, 8) for s in (2, 4)],
]
_GATED = [Tiling(16), Tiling(16, stages=8), Tiling(32), Tiling(64)]
_MANY_ROWS = [Tiling(64, s) for s in (1, 2, 4)] + [Tiling(128, s, 3) for s in (1, 2, 4)]
_MANY_GATED = [Tiling(64), Tiling(64, stages=3), Tiling(128, stages=2)]
_MOST_SPLIT = 16384  # outputs; a larger weight fills the device without splitting K
# Rows: the second stands for 2 to 16, the third for the rest up to the kernel's most.
_MEASURED_AT = (1, 8, 64)
_MARGIN = 0.98  # a choice must win by more than the measurement's noise
_COLD_BYTES = 128 * 2**20  # rotate over at least so much weight, more than a cache holds

Shape = tuple[int, ...]


class MeasuredProducts(TorchProducts):
    """Owns the choices by shape and number of rows, and the space that parts of products share."""

    def __init__(self) -> None:
        self._linear: dict[tuple[Shape, int], Tiling] = {}
        self._gated: dict[tuple[Shape, int], Tiling] = {}
        self._space: skinny.Workspace | None = None

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        rows = x.shape[0]
        if rows <= skinny.MAX_ROWS:
            tiling = self._linear.get((weight.shape, _bucket(rows)))
            if tiling is not None and self._space is not None:
                return skinny.linear(x, weight, tiling, self._space)
        return linear(x, weight)

    def gated(self, x: Tensor, weight: Tensor, silu_mul: Callable[[Tensor], Tensor]) -> Tensor:
        rows = x.shape[0]
        if rows <= skinny.MAX_ROWS:
            tiling = self._gated.get((weight.shape, _bucket(rows)))
            if tiling is not None:
                return skinny.gated(x, weight, tiling)
        return silu_mul(self.linear(x, weight))

    @torch.inference_mode()
    def tune(self, weights: Iterable[Tensor]) -> tuple[str, str]:
        """Time every candidate on every shape, cold weights first in the cache's way."""
        by_shape: dict[Shape, list[Tensor]] = defaultdict(list)
        for weight in weights:
            if weight.dtype in (torch.bfloat16, torch.float16) and weight.shape[1] % 64 == 0:
                by_shape[tuple(weight.shape)].append(weight)
        if not by_shape:
            return "torch", "no weight has a shape that the narrow kernels take"
        device = next(iter(by_shape.values()))[0].device
        self._space = skinny.Workspace(device, _MOST_SPLIT, _TILINGS, _MANY_ROWS)
        for shape, group in by_shape.items():
            for rows in _MEASURED_AT:
                self._tune_shape(shape, group, rows)
        measured = len(_MEASURED_AT) * len(by_shape)
        chosen = f"narrow for {len(self._linear)}, gated for {len(self._gated)} of {measured}"
        return chosen, "measured on these shapes; cuBLAS for the rest"

    def _tune_shape(self, shape: Shape, group: list[Tensor], rows: int) -> None:
        x = torch.randn((rows, shape[1]), dtype=group[0].dtype, device=group[0].device)
        space = self._space
        assert space is not None
        best = _MARGIN * _time(group, lambda weight: linear(x, weight))
        for tiling in _candidates(shape[0], rows):
            took = _time(group, partial(_skinny_linear, x, tiling, space))
            if took < best:
                best = took
                self._linear[torch.Size(shape), _bucket(rows)] = tiling
        if shape[0] % 2 or len(group) == 1:  # a head is no gate
            return
        best = _MARGIN * _time(group, lambda weight: triton_silu_mul(self.linear(x, weight)))
        for tiling in _GATED if rows <= 16 else _MANY_GATED:
            took = _time(group, partial(_skinny_gated, x, tiling))
            if took < best:
                best = took
                self._gated[torch.Size(shape), _bucket(rows)] = tiling


def _candidates(num_outputs: int, rows: int) -> list[Tiling]:
    tilings = _TILINGS if rows <= 16 else _MANY_ROWS
    return [tiling for tiling in tilings if tiling.splits == 1 or num_outputs <= _MOST_SPLIT]


def _skinny_linear(x: Tensor, tiling: Tiling, space: skinny.Workspace, weight: Tensor) -> Tensor:
    return skinny.linear(x, weight, tiling, space)


def _skinny_gated(x: Tensor, tiling: Tiling, weight: Tensor) -> Tensor:
    return skinny.gated(x, weight, tiling)


def _bucket(rows: int) -> int:
    return 1 if rows == 1 else skinny.padded(rows)


def _rotation(group: list[Tensor]) -> Iterator[Tensor]:
    """Enough calls over different weights that none is still in the cache when it comes again."""
    count = max(4, min(len(group), -(-_COLD_BYTES // group[0].nbytes)))
    for i in range(count):
        yield group[i % len(group)]


def _time(group: list[Tensor], product: Callable[[Tensor], Tensor]) -> float:
    """Milliseconds of one recorded round over the weights: the best of three."""
    product(group[0])  # compile outside of the recording
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in _rotation(group):
            product(weight)
    times = []
    for _ in range(4):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return min(times[1:])
