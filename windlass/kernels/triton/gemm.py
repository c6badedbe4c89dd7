"""Products on CUDA: for few rows the skinny kernel where it was measured to be faster, else cuBLAS."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from windlass.kernels.gemm import Company, Norm, TorchGemm, batch_invariant_linear
from windlass.kernels.rounded import Inputs, Outputs
from windlass.kernels.triton import skinny, wide
from windlass.kernels.triton.norm import add_rms_norm, silu_mul
from windlass.kernels.triton.skinny import Tiling

_TILINGS = [
    *[Tiling(16, stages=8), Tiling(32, stages=8), Tiling(32), Tiling(64)],
    *[Tiling(n, s) for n in (32, 64) for s in (2, 4, 8)],
    *[Tiling(32, s, 8) for s in (2, 4)],
]
_GATED = [Tiling(16), Tiling(16, stages=8), Tiling(32), Tiling(64)]
_MANY_ROWS = [Tiling(64, s) for s in (1, 2, 4)] + [Tiling(128, s, 3) for s in (1, 2, 4)]
_MANY_GATED = [Tiling(64), Tiling(64, stages=3), Tiling(128, stages=2)]
_NORMED = [Tiling(16), Tiling(32), Tiling(16, stages=8), Tiling(32, 2), Tiling(32, 4)]
_FEW_ROWS = 16
_MOST_NORMED = 8  # rows; one program normalises them all
_FIXED = Tiling(64)  # not split: summed from first to last
_MOST_SPLIT = 16384  # outputs; a larger weight fills the device without splitting K
# Of few rows, tilings that cut the sums as that for one row does count as so much faster: guesses are verified by
# the same sums then that plain steps have, and near ties fall the same way.
_KIN = 0.98
# Rows: the second stands for 2 to 4, the third for up to 16, the last for up to the kernel's most.
_MEASURED_AT = (1, 4, 8, 64)
# A narrow kernel may take a little longer alone: it starts while the kernel before it ends, which
# these measurements do not show in full.
_MARGIN = 1.04
_COLD_BYTES = 128 * 2**20  # rotate over at least so much weight, more than a cache holds

Shape = tuple[int, ...]
_Key = tuple[str, Shape, int]


class TunedGemm(TorchGemm):
    """Owns the choices by shape and number of rows, and the space that parts of products share."""

    def __init__(self) -> None:
        super().__init__()
        self._chosen: dict[_Key, Tiling] = {}
        self._measured: set[Shape] = set()
        self._measured_accompanied: set[Shape] = set()
        self._space: skinny.Workspace | None = None

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        if self._batch_invariant:
            return self._fixed_linear(x, weight)
        known = self._accompanied and weight.shape in self._measured_accompanied
        tiling = self._tiling("accompanied" if known else "linear", x, weight)
        return linear(x, weight) if tiling is None else self._skinny(x, weight, tiling)

    def gated(self, x: Tensor, weight: Tensor, silu_mul: Callable[[Outputs], Inputs]) -> Inputs:
        tiling = self._tiling("gated", x, weight)
        if tiling is None:
            return silu_mul(self.linear(x, weight))
        return skinny.gated(x, weight, tiling)

    def linear_norm(
        self, x: Tensor, weight: Tensor, residual: Tensor, norm: Norm
    ) -> tuple[Inputs, Tensor]:
        tiling = self._tiling("with a norm", x, weight)
        rounds = norm.rounding(x.shape[0]) is not None
        if tiling is None or x.shape[0] > _MOST_NORMED or rounds:
            return super().linear_norm(x, weight, residual, norm)
        assert self._space is not None
        gains, eps = norm.weight, norm.eps
        return skinny.linear_norm(x, weight, tiling, self._space, residual, gains, eps), residual

    def _tiling(self, kind: str, x: Tensor, weight: Tensor) -> Tiling | None:
        """How the narrow kernel is cut for this product; None: it was not the fastest."""
        rows = x.shape[0]
        if self._batch_invariant or rows > skinny.MAX_ROWS:
            return None
        return self._chosen.get((kind, weight.shape, _bucket(rows)))

    def _skinny(self, x: Tensor, weight: Tensor, tiling: Tiling) -> Tensor:
        assert self._space is not None
        return skinny.linear(x, weight, tiling, self._space)

    def _fixed_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """Kernels that sum from first to last, whatever the number of rows."""
        if not _takes(weight) or self._space is None:
            return batch_invariant_linear(x, weight)
        if x.shape[0] <= skinny.MAX_ROWS:
            return self._skinny(x, weight, _FIXED)
        return wide.linear(x, weight)

    # ---- measuring ---------------------------------------------------------------------------

    @torch.inference_mode()
    def tune(self, weights: Iterable[Tensor]) -> tuple[str, str]:
        """Time every candidate on every shape that is new, cold weights first in the cache's way."""
        by_shape: dict[Shape, list[Tensor]] = defaultdict(list)
        for weight in weights:
            if _takes(weight) and tuple(weight.shape) not in self._measured:
                by_shape[tuple(weight.shape)].append(weight)
        if not by_shape:
            return "torch", "no weight has a shape that the narrow kernels take"
        if self._space is None:  # recordings keep the addresses of what they were made with
            device = next(iter(by_shape.values()))[0].device
            self._space = skinny.Workspace(device, _MOST_SPLIT, _TILINGS, _MANY_ROWS)
        for shape, group in by_shape.items():
            for rows in _MEASURED_AT:
                self._tune_shape(shape, group, rows)
        self._measured.update(by_shape)
        counts = Counter(kind for kind, *_ in self._chosen)
        chosen = ", ".join(f"{kind} {count}" for kind, count in counts.items())
        of = f"of {len(_MEASURED_AT) * len(by_shape)} shapes and batch sizes"
        return f"narrow for {chosen or 'none'} {of}", "measured here; cuBLAS for the rest"

    @torch.inference_mode()
    def tune_accompanied(self, weights: Sequence[tuple[Tensor, Company]]) -> None:
        """Kernels of cuBLAS may take all registers of a multiprocessor, so that nothing runs beside
        them: a slower one that leaves room may be the faster.
        """
        by_shape: dict[Shape, list[Tensor]] = defaultdict(list)
        for weight, _ in weights:
            if tuple(weight.shape) in self._measured:
                by_shape[tuple(weight.shape)].append(weight)
        company = {weight.data_ptr(): company for weight, company in weights}
        for shape, group in by_shape.items():
            for rows in _MEASURED_AT:
                x = torch.randn((rows, shape[1]), dtype=group[0].dtype, device=group[0].device)
                self._tune_with(company, shape, group, x)
        self._measured_accompanied.update(by_shape)

    def _tune_with(
        self, company: dict[int, Company], shape: Shape, group: list[Tensor], x: Tensor
    ) -> None:
        def usual(weight: Tensor) -> Tensor:
            return company[weight.data_ptr()](x, partial(linear, x, weight))

        def narrow(x: Tensor, weight: Tensor, tiling: Tiling) -> Tensor:
            return company[weight.data_ptr()](x, partial(self._skinny, x, weight, tiling))

        self._try("accompanied", _tilings(shape, x.shape[0]), group, x, usual, narrow)

    def _tune_shape(self, shape: Shape, group: list[Tensor], rows: int) -> None:
        """Each kind of product against what is known to be the fastest way without it."""
        x = torch.randn((rows, shape[1]), dtype=group[0].dtype, device=group[0].device)
        self._try("linear", _tilings(shape, rows), group, x, lambda w: linear(x, w), self._skinny)
        if len(group) == 1:  # a head stands before no norm, and is no gate
            return
        if rows <= _MOST_NORMED and shape[0] <= _MOST_SPLIT:
            residual, gains = x.new_zeros((rows, shape[0])), x.new_ones(shape[0])

            def narrow(x: Tensor, weight: Tensor, tiling: Tiling) -> Tensor:
                assert self._space is not None
                return skinny.linear_norm(x, weight, tiling, self._space, residual, gains, 1e-5)

            def apart(weight: Tensor) -> Inputs:
                return add_rms_norm(self.linear(x, weight), residual, gains, 1e-5)[0]

            self._try("with a norm", _NORMED, group, x, apart, narrow)
        if shape[0] % 2 == 0:
            gates = _GATED if rows <= _FEW_ROWS else _MANY_GATED
            self._try("gated", gates, group, x, lambda w: silu_mul(self.linear(x, w)), skinny.gated)

    def _try(
        self,
        kind: str,
        tilings: list[Tiling],
        group: list[Tensor],
        x: Tensor,
        usual: Callable[[Tensor], Inputs],
        narrow: Callable[[Tensor, Tensor, Tiling], Tensor],
    ) -> None:
        """Keep the fastest tiling of a kind of product, if it beats the usual way."""
        best = _MARGIN * _time(group, usual)
        few, alone = x.shape[0] <= _FEW_ROWS, self._chosen.get((kind, group[0].shape, 1))
        for tiling in tilings:
            took = _time(group, partial(_with, tiling, narrow, x))
            if few and alone is not None and tiling.splits == alone.splits:
                took *= _KIN
            if took < best:
                best = took
                self._chosen[kind, group[0].shape, _bucket(x.shape[0])] = tiling


def _takes(weight: Tensor) -> bool:
    """Whether the narrow kernels are written for such a weight."""
    return weight.dtype in (torch.bfloat16, torch.float16) and weight.shape[1] % 64 == 0


def _tilings(shape: Shape, rows: int) -> list[Tiling]:
    """Those to try for a product."""
    known = _TILINGS if rows <= _FEW_ROWS else _MANY_ROWS
    return [tiling for tiling in known if tiling.splits == 1 or shape[0] <= _MOST_SPLIT]


def _with(
    tiling: Tiling, narrow: Callable[[Tensor, Tensor, Tiling], Tensor], x: Tensor, weight: Tensor
) -> Tensor:
    return narrow(x, weight, tiling)


def _bucket(rows: int) -> int:
    """The most rows that share a choice with these."""
    return 1 if rows == 1 else 4 if rows <= 4 else skinny.padded(rows)


def _rotation(group: list[Tensor]) -> Iterator[Tensor]:
    """Enough calls over different weights that none is still in the cache when it comes again."""
    count = max(4, min(len(group), -(-_COLD_BYTES // group[0].nbytes)))
    for i in range(count):
        yield group[i % len(group)]


def _time(group: list[Tensor], gemm: Callable[[Tensor], Inputs]) -> float:
    """Milliseconds of one recorded round over the weights: the best of three."""
    gemm(group[0])  # compile outside of the recording
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in _rotation(group):
            gemm(weight)
    times = []
    for _ in range(4):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return min(times[1:])
