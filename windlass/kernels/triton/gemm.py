"""GEMMs on CUDA: the skinny kernel for few rows if it measured faster, else cuBLAS."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from windlass.kernels.capture import garbage_kept
from windlass.kernels.compile_only import is_compiling
from windlass.kernels.gemm import Norm, OverlappedGemm, TorchGemm, batch_invariant_linear
from windlass.kernels.gemm_io import Inputs, Outputs, UnnormalisedInputs
from windlass.kernels.storages import Held
from windlass.kernels.triton import deferred_norm, gemv, skinny, wide
from windlass.kernels.triton.deferred_norm import RowInputs
from windlass.kernels.triton.gemm_candidates import (
    FEW,
    KINDS,
    KNOWN,
    MANY,
    MAX_SPLIT_OUTPUTS,
    MEASURED_AT,
    SMALL_OUTPUTS,
    Shape,
    bucket,
    candidates,
    kinds_of,
)
from windlass.kernels.triton.norm import add_rms_norm, rms_norm, silu_mul
from windlass.kernels.triton.precompile import compiling
from windlass.kernels.triton.skinny import Tiling
from windlass.kernels.triton.tiling_cache import TilingCache
from windlass.measurement_cache import MeasurementCache

_BATCH_INVARIANT = Tiling(64)  # K is not split, so it is summed in order
# A skinny kernel may measure slightly slower: in a step it starts while the previous kernel ends (PDL),
# which these measurements show only in part.
_MARGIN = 1.04
_SMALL_MARGIN = 1.25  # such a kernel takes about as long as it waits for the previous one
# A GEMM that normalises its inputs reads what the kernel before has just written: in a step it is slower
# than measured here. With 4,096 inputs it measured 2 % faster to 2 % slower, and steps took 11 % longer.
_NORM_MARGIN = 0.95
_TIMED_MS = 0.5  # min duration of one measurement
_EPS = 1e-5  # of measured norms
_NORM_TILE = 4  # outputs per sum of squares before a norm
_COLD_BYTES = 128 * 2**20  # min bytes of weights per rotation, more than the L2 cache holds

_NUMBERS = 4 + len(fields(Tiling))  # of a choice: kind, shape, bucket and tiling

_Key = tuple[str, Shape, int]


@dataclass(frozen=True, slots=True)
class _Group:
    """Weights of one shape, and the kinds of GEMM that read them."""

    weights: list[Tensor]
    kinds: tuple[str, ...]

    @property
    def shape(self) -> Shape:
        return tuple(self.weights[0].shape)


class TunedGemm(TorchGemm):
    """Owns the tilings chosen by shape and row count, and the workspace of split-K GEMMs."""

    def __init__(
        self,
        agree: Callable[[list[int]], list[int]] | None = None,
        cache: TilingCache | None = None,
    ) -> None:
        """`agree`: returns the numbers of one rank on all ranks that share layers; None: one rank.

        `cache`: choices of earlier starts; None: every start measures.
        """
        super().__init__()
        self._agree = agree
        self._cache = cache or TilingCache(MeasurementCache())
        self._chosen: dict[_Key, Tiling] = {}
        self._measured: set[Shape] = set()
        self._measured_overlapped: set[Shape] = set()
        self._space: skinny.Workspace | None = None

    def twin(self) -> TunedGemm:
        twin = TunedGemm(cache=self._cache)
        twin._chosen = dict(self._chosen)
        twin._measured = set(self._measured)
        if self._space is not None:
            twin._space = _workspace(self._space.counters.device)
        return twin

    def storages(self) -> Iterator[Held]:
        return iter(()) if self._space is None else self._space.storages()

    def takes_unnormalised(self, weight: Tensor, num_rows: int) -> bool:
        kinds = "norm linear", "norm gated"
        return any(self._tiling(kind, num_rows, weight) is not None for kind in kinds)

    def linear(self, x: Inputs, weight: Tensor) -> Tensor:
        assert isinstance(x, RowInputs)
        if self._batch_invariant:
            assert isinstance(x, Tensor)
            return self._batch_invariant_linear(x, weight)
        overlapped = self._overlapped and weight.shape in self._measured_overlapped
        inputs, tiling = self._choice("overlapped" if overlapped else "linear", x, weight)
        if tiling is None:
            assert isinstance(inputs, Tensor)
            return linear(inputs, weight)
        return self._skinny(inputs, weight, tiling)

    def gated(self, x: Inputs, weight: Tensor, silu_mul: Callable[[Outputs], Inputs]) -> Inputs:
        assert isinstance(x, RowInputs)
        inputs, tiling = self._choice("gated", x, weight)
        if tiling is None:
            return silu_mul(self.linear(inputs, weight))
        return _gated(inputs, weight, tiling)

    def linear_norm(
        self, x: Inputs, weight: Tensor, residual: Tensor, norm: Norm
    ) -> tuple[Inputs, Tensor]:
        tiling = self._tiling("deferred norm", x.shape[0], weight)
        if tiling is None or not norm.defers(x.shape[0]):
            return super().linear_norm(x, weight, residual, norm)
        assert isinstance(x, RowInputs)
        return _linear_residual(x, weight, tiling, residual, norm.weight, norm.eps), residual

    def _choice(self, kind: str, x: RowInputs, weight: Tensor) -> tuple[RowInputs, Tiling | None]:
        """The inputs as the kernel reads them, and its tiling; None if another kernel was faster."""
        if isinstance(x, UnnormalisedInputs):
            tiling = self._tiling(f"norm {kind}", x.shape[0], weight)
            if tiling is not None:
                return x, tiling
        inputs = _normalised(x)
        return inputs, self._tiling(kind, inputs.shape[0], weight)

    def _tiling(self, kind: str, rows: int, weight: Tensor) -> Tiling | None:
        """Tiling of the skinny kernel for this GEMM; None if another kernel was faster."""
        if self._batch_invariant or rows > skinny.MAX_ROWS:
            return None
        return self._chosen.get((kind, weight.shape, bucket(rows)))

    def _skinny(self, x: RowInputs, weight: Tensor, tiling: Tiling) -> Tensor:
        if tiling.whole_rows:
            return gemv.linear(x, weight, tiling.outputs)
        assert self._space is not None
        assert isinstance(x, Tensor)
        return skinny.linear(x, weight, tiling, self._space)

    def _batch_invariant_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """x @ weight.T by kernels that sum over K in order for any number of rows."""
        if not _supports(weight) or self._space is None:
            return batch_invariant_linear(x, weight)
        if x.shape[0] <= skinny.MAX_ROWS:
            return self._skinny(x, weight, _BATCH_INVARIANT)
        return wide.linear(x, weight)

    # ---- measuring ---------------------------------------------------------------------------

    @torch.inference_mode()
    def tune(self, weights: Iterable[Tensor]) -> tuple[str, str]:
        """Choose for every new shape: as an earlier start did, or by timing every candidate."""
        by_shape: dict[Shape, list[Tensor]] = defaultdict(list)
        for weight in weights:
            if _supports(weight) and tuple(weight.shape) not in self._measured:
                by_shape[tuple(weight.shape)].append(weight)
        if not by_shape and not self._measured:
            self._adopt()
            return "torch", "the skinny kernels support no weight of this model"
        if self._space is None:  # captured graphs keep its address
            device = next(iter(by_shape.values()))[0].device
            self._space = _workspace(device)
        shapes = {*by_shape, *self._measured}
        groups = [
            _Group(group, kinds_of(shape, len(group), shapes)) for shape, group in by_shape.items()
        ]
        unknown = [group for group in groups if not self._recall(group)]
        if unknown:
            with compiling():  # one after the other, dozens of tilings take most of a first start
                self._tune_groups(unknown)
            self._tune_groups(unknown)
        self._measured.update(by_shape)
        self._adopt()
        for group in unknown:
            self._keep(group)
        counts = Counter(kind for kind, *_ in self._chosen)
        chosen = ", ".join(f"{kind} {count}" for kind, count in counts.items())
        of = f"of {len(MEASURED_AT) * len(self._measured)} shapes and batch sizes"
        reason = "measured now" if unknown else "measured by an earlier start"
        if self._cache.problem is not None:
            reason += f" ({self._cache.problem})"
        return f"skinny for {chosen or 'none'} {of}", f"{reason}; cuBLAS for the rest"

    def _recall(self, group: _Group) -> bool:
        """Take the choices of an earlier start; False: there are none."""
        found = self._cache.find(group.weights, group.kinds, KNOWN)
        if found is None:
            return False
        shape = group.shape
        self._chosen |= {(kind, shape, rows): tiling for (kind, rows), tiling in found.items()}
        return True

    def _keep(self, group: _Group) -> None:
        """Keep the choices for later starts."""
        chosen = self._chosen.items()
        choices = {(kind, n): each for (kind, shape, n), each in chosen if shape == group.shape}
        self._cache.keep(group.weights, group.kinds, choices)

    @torch.inference_mode()
    def tune_overlapped(self, weights: Sequence[tuple[Tensor, OverlappedGemm]]) -> None:
        """Measure and choose for `overlapped` GEMMs, each together with its side work.

        cuBLAS kernels may take all registers of a multiprocessor, so that nothing runs concurrently.
        A slower GEMM kernel that leaves registers free may be faster overall.
        """
        by_shape: dict[Shape, list[Tensor]] = defaultdict(list)
        for weight, _ in weights:
            if tuple(weight.shape) in self._measured:
                by_shape[tuple(weight.shape)].append(weight)
        overlap = {weight.data_ptr(): run for weight, run in weights}
        for shape, group in by_shape.items():
            for rows in MEASURED_AT:
                x = torch.randn((rows, shape[1]), dtype=group[0].dtype, device=group[0].device)
                self._tune_shape_overlapped(overlap, group, x)
        self._measured_overlapped.update(by_shape)
        self._adopt()

    def _adopt(self) -> None:
        """Take the choices of the first rank for the shapes that it has.

        Ranks that compute the same values must sum in the same order. A shape that only some ranks have
        is of a weight that is divided among them.
        """
        if self._agree is None:
            return
        known = [number for shape in self._measured for number in shape]
        shapes = set(_in_pairs(self._agree(known)))
        own = [
            number
            for (kind, shape, rows), tiling in self._chosen.items()
            for number in (KINDS.index(kind), *shape, rows, *astuple(tiling))
        ]
        found = self._agree(own)
        chosen = {key: tiling for key, tiling in self._chosen.items() if key[1] not in shapes}
        for at in range(0, len(found), _NUMBERS):
            kind, n, k, rows, *tiling = found[at : at + _NUMBERS]
            if (n, k) in self._measured:
                chosen[KINDS[kind], (n, k), rows] = Tiling(*tiling)
        self._chosen = chosen

    def _tune_shape_overlapped(
        self, overlap: dict[int, OverlappedGemm], group: list[Tensor], x: Tensor
    ) -> None:
        def default(weight: Tensor) -> Tensor:
            return overlap[weight.data_ptr()](x, partial(linear, x, weight))

        def skinny_gemm(x: RowInputs, weight: Tensor, tiling: Tiling) -> Tensor:
            assert isinstance(x, Tensor)
            return overlap[weight.data_ptr()](x, partial(self._skinny, x, weight, tiling))

        self._try("overlapped", group, x, default, skinny_gemm)

    def _tune_groups(self, groups: Iterable[_Group]) -> None:
        for group in groups:
            for rows in MEASURED_AT:
                self._tune_group(group, rows)

    def _tune_group(self, group: _Group, rows: int) -> None:
        """Measure each kind of fused GEMM against the fastest unfused version."""
        weights, (outputs, size) = group.weights, group.shape
        x = torch.randn((rows, size), dtype=weights[0].dtype, device=weights[0].device)
        self._try("linear", weights, x, lambda w: linear(x, w), self._skinny)
        if "deferred norm" in group.kinds:
            residual, gains = x.new_zeros((rows, outputs)), x.new_ones(outputs)

            def normless(x: RowInputs, weight: Tensor, tiling: Tiling) -> Inputs:
                return _linear_residual(x, weight, tiling, residual, gains, _EPS)

            def unfused(weight: Tensor) -> Inputs:
                return add_rms_norm(self.linear(x, weight), residual, gains, _EPS)[0]

            self._try("deferred norm", weights, x, unfused, normless)
        if "gated" in group.kinds:
            self._try("gated", weights, x, lambda w: silu_mul(self.linear(x, w)), _gated)
        # Against the norm's kernel, then a GEMM of normalised inputs.
        before = deferred_norm.allocate(x, _NORM_TILE, x.new_ones(size), _EPS)
        if "norm linear" in group.kinds:
            self._try("norm linear", weights, before, partial(self.linear, before), self._skinny)
        if "norm gated" in group.kinds:
            unfused = partial(self.gated, before, silu_mul=silu_mul)
            self._try("norm gated", weights, before, unfused, _gated)

    def _try(
        self,
        kind: str,
        group: list[Tensor],
        x: RowInputs,
        default: Callable[[Tensor], Inputs],
        skinny_gemm: Callable[[RowInputs, Tensor, Tiling], Inputs],
    ) -> None:
        """Choose the fastest tiling for a kind of GEMM, if it is faster than `default`.

        While `compiling`, only compile them.
        """
        shape = tuple(group[0].shape)
        tilings = candidates(kind, shape, x.shape[0])
        if is_compiling():
            for tiling in tilings:
                skinny_gemm(x, group[0], tiling)
        if is_compiling() or not tilings:
            return
        margin = _SMALL_MARGIN if shape[0] <= SMALL_OUTPUTS else _MARGIN
        if isinstance(x, UnnormalisedInputs):
            margin = _NORM_MARGIN
        best = margin * _time(group, default)
        for tiling in tilings:
            took = _time(group, partial(_with, tiling, skinny_gemm, x))
            if took < best:
                best = took
                self._chosen[kind, shape, bucket(x.shape[0])] = tiling


def _workspace(device: torch.device) -> skinny.Workspace:
    return skinny.Workspace(device, MAX_SPLIT_OUTPUTS, FEW, MANY)


def _supports(weight: Tensor) -> bool:
    """Whether the skinny kernels support this weight."""
    return weight.dtype in (torch.bfloat16, torch.float16) and weight.shape[1] % 64 == 0


def _normalised(x: RowInputs) -> Tensor:
    if isinstance(x, Tensor):
        return x
    normed = rms_norm(x.residual, x.weight, x.eps)
    assert isinstance(normed, Tensor)
    return normed


def _gated(x: RowInputs, weight: Tensor, tiling: Tiling) -> Tensor:
    if tiling.whole_rows:
        return gemv.gated(x, weight, tiling.outputs)
    assert isinstance(x, Tensor)
    return skinny.gated(x, weight, tiling)


def _linear_residual(
    x: RowInputs, weight: Tensor, tiling: Tiling, residual: Tensor, gains: Tensor, eps: float
) -> UnnormalisedInputs:
    """residual += x @ weight.T, in place; returns the inputs of the GEMM after the norm."""
    into = deferred_norm.allocate(residual, tiling.outputs, gains, eps)
    gemv.linear_residual(x, weight, tiling.outputs, into)
    return into


def _with(
    tiling: Tiling,
    skinny_gemm: Callable[[RowInputs, Tensor, Tiling], Inputs],
    x: RowInputs,
    weight: Tensor,
) -> Inputs:
    return skinny_gemm(x, weight, tiling)


def _in_pairs(numbers: list[int]) -> Iterator[Shape]:
    return zip(numbers[::2], numbers[1::2], strict=True)


def _rotation(group: list[Tensor]) -> Iterator[Tensor]:
    """Weights of one measurement, so many that each has left the cache before it repeats."""
    count = max(4, min(len(group), -(-_COLD_BYTES // group[0].nbytes)))
    for i in range(count):
        yield group[i % len(group)]


def _time(group: list[Tensor], gemm: Callable[[Tensor], Inputs]) -> float:
    """Milliseconds of a captured graph over the weights: the best of three.

    Short graphs are replayed several times in a row: small weights take microseconds, and so do the
    launch of a graph and its variation.
    """
    gemm(group[0])  # compile before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with garbage_kept(), torch.cuda.graph(graph):
        for weight in _rotation(group):
            gemm(weight)
    replays = math.ceil(_TIMED_MS / max(_replayed(graph, 2), 1e-3))
    return min(_replayed(graph, replays) for _ in range(3))


def _replayed(graph: torch.cuda.CUDAGraph, count: int) -> float:
    """Milliseconds of a replay, the mean of `count`."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / count
