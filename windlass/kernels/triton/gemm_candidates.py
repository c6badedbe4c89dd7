"""Which tilings of the kernels for few rows are measured for a 16-bit weight, by kind of GEMM."""

from __future__ import annotations

from collections.abc import Collection

import triton

from windlass.kernels.triton import gemv
from windlass.kernels.triton.skinny import Tiling, padded

Shape = tuple[int, ...]

# deferred norm: outputs before their RMS norm; norm linear, norm gated: inputs before theirs.
KINDS = ("linear", "deferred norm", "gated", "overlapped", "norm linear", "norm gated")
# Measured row counts: 4 stands for 2 to 4 rows, 8 for up to 16, 64 for up to the kernel's maximum.
MEASURED_AT = (1, 4, 8, 64)
MAX_SPLIT_OUTPUTS = 16384  # a larger weight fills the device without splitting K
SMALL_OUTPUTS = 256

_FEW_ROWS = 16
FEW = [
    *[Tiling(16, stages=8), Tiling(32, stages=8), Tiling(32), Tiling(64)],
    *[Tiling(n, s) for n in (32, 64) for s in (2, 4, 8)],
    *[Tiling(32, s, 8) for s in (2, 4)],
]
MANY = [Tiling(64, s) for s in (1, 2, 4)] + [Tiling(128, s, 3) for s in (1, 2, 4)]
# For weights of few outputs, such as routers, which would give few programs.
_SMALL = [Tiling(16, s) for s in (4, 8)]
_MANY_SMALL = [Tiling(n, s) for n in (16, 32) for s in (1, 2, 4)]
_MAX_MANY_SMALL = 4096  # outputs
_GATED = [Tiling(16), Tiling(16, stages=8), Tiling(32), Tiling(64)]
_MANY_GATED = [Tiling(64), Tiling(64, stages=3), Tiling(128, stages=2)]
_MANY_SMALL_GATED = [Tiling(16), Tiling(32)]
_WHOLE_ROWS = [Tiling(n, stages=0) for n in (2, 4, 8)]
_MAX_TILES = 1024  # whose sums of squares the next GEMM adds, in every program

_ALL = (FEW, MANY, _SMALL, _MANY_SMALL, _GATED, _MANY_GATED, _MANY_SMALL_GATED, _WHOLE_ROWS)
KNOWN = frozenset(tiling for tilings in _ALL for tiling in tilings)


def kinds_of(shape: Shape, count: int, others: Collection[Shape]) -> tuple[str, ...]:
    """The kinds of GEMM that `count` weights of a shape can have in a network with such `others`.

    A norm follows outputs that are added to the residual stream, and precedes the GEMMs that read it. The
    gated half of other outputs is multiplied by the next weight. A single weight is an LM head, without
    any of these.
    """
    outputs, size = shape
    sizes = {size, *(size for _, size in others)}
    streams = {n for n, _ in (shape, *others) if n in sizes and n <= MAX_SPLIT_OUTPUTS}
    kinds = ["linear"]
    if count > 1:
        is_gated = outputs % 2 == 0 and outputs // 2 in sizes
        kinds += ["deferred norm"] if outputs in streams else []
        kinds += ["gated"] if is_gated else []
        kinds += ["norm linear"] if size in streams else []
        kinds += ["norm gated"] if size in streams and is_gated else []
    return tuple(kinds)


def bucket(rows: int) -> int:
    """The largest row count that shares a choice with `rows`."""
    return 1 if rows == 1 else 4 if rows <= 4 else padded(rows)


def candidates(kind: str, shape: Shape, rows: int) -> list[Tiling]:
    """The tilings to measure for a kind of GEMM."""
    if "norm" in kind:
        whole_rows = _whole_rows(shape, tiles=2 if "gated" in kind else 1) if rows == 1 else []
        few = kind != "deferred norm"
        return [each for each in whole_rows if few or shape[0] <= each.outputs * _MAX_TILES]
    return _gated(shape, rows) if kind == "gated" else _linear(shape, rows)


def _linear(shape: Shape, rows: int) -> list[Tiling]:
    outputs = shape[0]
    if rows == 1:
        whole_rows = _whole_rows(shape)
        if whole_rows:
            return whole_rows
    if rows <= _FEW_ROWS:
        known = FEW + (_SMALL if outputs <= SMALL_OUTPUTS else [])
    else:
        known = MANY + (_MANY_SMALL if outputs <= _MAX_MANY_SMALL else [])
    return [tiling for tiling in known if tiling.splits == 1 or outputs <= MAX_SPLIT_OUTPUTS]


def _gated(shape: Shape, rows: int) -> list[Tiling]:
    if rows == 1:
        return _whole_rows(shape, tiles=2) or _GATED
    if rows <= _FEW_ROWS:
        return _GATED
    return _MANY_GATED + (_MANY_SMALL_GATED if shape[0] <= 2 * _MAX_MANY_SMALL else [])


def _whole_rows(shape: Shape, tiles: int = 1) -> list[Tiling]:
    """The tilings of whole rows to measure for a GEMM of one row, with so many tiles per program.

    They are faster than all others; without any, a row of the weight does not fit into registers.
    """
    if shape[1] > gemv.MAX_SIZE:
        return []
    outputs = gemv.MAX_VALUES // (tiles * triton.next_power_of_2(shape[1]))
    return [tiling for tiling in _WHOLE_ROWS if tiling.outputs <= outputs]
