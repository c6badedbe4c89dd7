"""GEMMs of int4 weights for up to 2,048 rows on Hopper: two warp groups share the activations.

As in int4_wide.py, the weight is the register operand of the tensor cores, and is unpacked beside them.
With many rows, reading activations from the L2 cache limits that kernel. Here a program has twice as
many outputs: a producer warp copies activations and codes by TMA, and two consumer warp groups multiply
the same activations by 64 outputs each.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from windlass.kernels.triton.int4_wide import (
    Int4Weight,
    group_numbers,
    store_tile,
    unpack_weights,
)
from windlass.kernels.triton.reduce import SplitWorkspace

MAX_ROWS = 2048  # more rows share a dequantised weight
_OUTPUTS = 64  # of a warp group
_STEP = 64  # bytes of codes per output in one step: 128 inputs
_MAX_SPLITS = 2
_PROGRAMS = 132  # of one wave on an H200: one per multiprocessor
TILE_ROWS = 256
_STAGES = 3
# Microseconds for 4,096 inputs, and to add the partial sums of splits, measured on an H200.
_WAVE, _ADD_SPLITS = 47.0, 12.0
_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = 240, 24

_LAYOUT = gl.NVMMASharedLayout.get_default_for


@gluon.jit
def _produce(
    inputs, weight, x_tiles, w_tiles, filled, free, output, row, begin, steps, HALF: gl.constexpr
):
    """Copy the codes of both groups of outputs, and the inputs of both halves of the codes."""
    STEP: gl.constexpr = weight.block_type.shape[1]
    OUTPUTS: gl.constexpr = weight.block_type.shape[0]
    PER: gl.constexpr = HALF // STEP
    STAGES: gl.constexpr = filled.shape[0]
    nbytes: gl.constexpr = 2 * weight.block_type.nbytes + 2 * inputs.block_type.nbytes
    for step in range(steps):
        stage = step % STAGES
        block, sub = begin + step // PER, step % PER
        mbarrier.wait(free.index(stage), ((step // STAGES) & 1) ^ 1)
        bar = filled.index(stage)
        mbarrier.expect(bar, nbytes)
        for each in gl.static_range(2):
            codes = w_tiles.index(2 * stage + each)
            at = [output + each * OUTPUTS, block * HALF + sub * STEP]
            tma.async_copy_global_to_shared(weight, at, bar, codes)
            tile = x_tiles.index(2 * stage + each)
            at = [row, (2 * block + each) * HALF + sub * STEP]
            tma.async_copy_global_to_shared(inputs, at, bar, tile)


@gluon.jit
def _consume(
    x_tiles, w_tiles, bars, result, scales, offsets, out, partial_sums, counters, place, sizes,
    GROUP: gl.constexpr, HALF: gl.constexpr, SPLIT: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """Multiply the tile's rows by the 64 outputs of this warp group."""
    filled, free, done = bars
    output, row, tile, split, begin, end = place
    M, N, blocks, splits = sizes
    STAGES: gl.constexpr = filled.shape[0]
    ROWS: gl.constexpr = x_tiles.shape[1]
    OUTPUTS: gl.constexpr = w_tiles.shape[1]
    STEP: gl.constexpr = w_tiles.shape[2]
    PER: gl.constexpr = HALF // STEP
    dtype: gl.constexpr = x_tiles.dtype
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    first_output = output + WHICH * OUTPUTS
    # Outputs past the end are not stored.
    outputs = gl.minimum(first_output + gl.arange(0, OUTPUTS, gl.SliceLayout(1, operand)), N - 1)
    s1, s2 = group_numbers(scales, gl.minimum(begin, blocks - 1), N, outputs, dtype, GROUP, HALF)
    o1, o2 = group_numbers(offsets, gl.minimum(begin, blocks - 1), N, outputs, dtype, GROUP, HALF)
    acc = gl.zeros([OUTPUTS, ROWS], gl.float32, mma)
    mbarrier.wait(filled.index(0), 0, pred=begin < end)
    codes = w_tiles.index(WHICH).load(operand)
    low, high = unpack_weights(codes, (s1, s2, o1, o2), dtype)
    step = 0
    steps = (end - begin) * PER
    for block in range(begin, end):
        after = gl.minimum(block + 1, blocks - 1)
        next_s1, next_s2 = group_numbers(scales, after, N, outputs, dtype, GROUP, HALF)
        next_o1, next_o2 = group_numbers(offsets, after, N, outputs, dtype, GROUP, HALF)
        for sub in gl.static_range(PER):
            stage, ahead = step % STAGES, step + 1
            first, second = x_tiles.index(2 * stage), x_tiles.index(2 * stage + 1)
            acc = warpgroup_mma(low, first.permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma(high, second.permute((1, 0)), acc, is_async=True)
            if sub == PER - 1:
                s1, s2, o1, o2 = next_s1, next_s2, next_o1, next_o2
            # Unpacked while the tensor cores multiply.
            stage_ahead = ahead % STAGES
            mbarrier.wait(filled.index(stage_ahead), (ahead // STAGES) & 1, pred=ahead < steps)
            codes = w_tiles.index(2 * stage_ahead + WHICH).load(operand)
            next_low, next_high = unpack_weights(codes, (s1, s2, o1, o2), dtype)
            acc, low, high = warpgroup_mma_wait(0, deps=[acc, low, high])
            mbarrier.arrive(free.index(stage), count=1)
            low, high = next_low, next_high
            step += 1
    if SPLIT:
        counter = counters + 2 * tile + WHICH
        store_tile(
            out, acc, partial_sums, counter, split, splits, row, first_output, M, N, True, ROWS
        )
    else:
        # The tiles of activations are free when both groups have read them.
        mbarrier.arrive(done, count=1)
        mbarrier.wait(done, 0)
        buffer = x_tiles.index(WHICH)
        buffer.permute((1, 0)).store(acc.to(dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(result, [row, first_output], buffer)
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "splits"])
def int4_many_kernel(
    inputs, weight, result, scales, offsets, out, partial_sums, counters, M, N, K_PAD, splits,
    GROUP: gl.constexpr, HALF: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """out[M, N] = x[M, K] @ weight[N, K].T for one tile of rows and outputs, and one split of K.

    `result` is the tensor descriptor of `out`.
    """
    ROWS: gl.constexpr = inputs.block_type.shape[0]
    OUTPUTS: gl.constexpr = weight.block_type.shape[0]
    STEP: gl.constexpr = weight.block_type.shape[1]
    tile, split = gl.program_id(0), gl.program_id(1)
    row_tiles = gl.cdiv(M, ROWS)
    output = tile // row_tiles * (2 * OUTPUTS)
    # No tile reaches past the last row: see int4_wide.py.
    row = gl.minimum(tile % row_tiles * ROWS, gl.maximum(M - ROWS, 0))
    blocks = K_PAD // (2 * HALF)
    span = gl.cdiv(blocks, splits)
    begin = split * span
    end = gl.minimum(begin + span, blocks)
    steps = gl.maximum(end - begin, 0) * (HALF // STEP)
    w_tiles = gl.allocate_shared_memory(gl.uint8, [2 * STAGES, OUTPUTS, STEP], weight.layout)
    x_tiles = gl.allocate_shared_memory(inputs.dtype, [2 * STAGES, ROWS, STEP], inputs.layout)
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for each in gl.static_range(STAGES):
        mbarrier.init(filled.index(each), count=1)
        mbarrier.init(free.index(each), count=2)
    mbarrier.init(done, count=2)
    bars = (filled, free, done)
    place = (output, row, tile, split, begin, end)
    sizes = (M, N, blocks, splits)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    x_tiles, w_tiles, bars, result, scales, offsets, out, partial_sums, counters,
                    place, sizes, GROUP, HALF, SPLIT, 0,
                ),
            ),
            (
                _consume,
                (
                    x_tiles, w_tiles, bars, result, scales, offsets, out, partial_sums, counters,
                    place, sizes, GROUP, HALF, SPLIT, 1,
                ),
            ),
            (
                _produce,
                (inputs, weight, x_tiles, w_tiles, filled, free, output, row, begin, steps, HALF),
            ),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


class Int4ManyGemm:
    """Computes with the codes of one weight."""

    def __init__(self, weight: Int4Weight, space: SplitWorkspace) -> None:
        self._weight, self._space = weight, space
        tile = TILE_ROWS * 2 * _OUTPUTS
        space.reserve(weight.codes.device, _PROGRAMS * tile, 2 * _PROGRAMS)

    @staticmethod
    def refuse(num_out: int) -> str | None:
        """Why it refuses a weight that `Int4WideGemm` takes, or None."""
        if num_out % 8:
            return f"TMA needs strides of 16 bytes, and rows have {num_out} outputs"
        return None

    def microseconds(self, num_rows: int) -> float:
        """Estimated for an H200."""
        tiles, splits = self._grid(num_rows)
        waves = triton.cdiv(tiles * splits, _PROGRAMS)
        time = waves * _WAVE * self._weight.padded / splits / 4096
        return time + _ADD_SPLITS * (splits > 1)

    def _grid(self, num_rows: int) -> tuple[int, int]:
        """Tiles, and splits of K."""
        tiles = triton.cdiv(self._weight.num_out, 2 * _OUTPUTS) * triton.cdiv(num_rows, TILE_ROWS)
        return tiles, max(1, min(_MAX_SPLITS, _PROGRAMS // tiles, self._weight.blocks))

    def apply(self, x: Tensor, out: Tensor) -> None:
        """out = x @ weight.T; both contiguous, with rows of 16-bit floats."""
        weight, num_rows = self._weight, x.shape[0]
        tiles, splits = self._grid(num_rows)
        x_box, w_box = [TILE_ROWS, _STEP], [_OUTPUTS, _STEP]
        kind = gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16
        x_layout = _LAYOUT(x_box, kind)
        int4_many_kernel[(tiles, splits)](
            TensorDescriptor.from_tensor(x, x_box, x_layout),
            TensorDescriptor.from_tensor(weight.codes, w_box, _LAYOUT(w_box, gl.uint8)),
            TensorDescriptor.from_tensor(out, [TILE_ROWS, _OUTPUTS], x_layout),
            weight.scales,
            weight.offsets,
            out,
            self._space.partial_sums,
            self._space.counters,
            num_rows,
            weight.num_out,
            weight.padded,
            splits,
            GROUP=weight.group,
            HALF=weight.half,
            STAGES=_STAGES,
            SPLIT=splits > 1,
            CONSUMER_REGISTERS=_CONSUMER_REGISTERS,
            PRODUCER_REGISTERS=_PRODUCER_REGISTERS,
            num_warps=4,
        )
