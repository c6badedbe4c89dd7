"""GEMMs of int4 weights for 17 to 512 rows on Hopper: 16-bit activations, weights unpacked in registers.

The weight is the register operand of the tensor cores, so that a dequantised weight is never
written. Each program unpacks the codes of the next step while the tensor cores multiply those of the
last; activations and codes arrive by TMA. Written in Gluon: Triton waits for the tensor cores before
it unpacks. The codes are packed as grouped.py reads them.

TMA takes twice as long for boxes that reach past the last row (measured on an H200: 206 us instead of 116
for 160 rows of a gate and up projection). So tiles that the rows do not fill are two boxes each, and a box
that reaches past the last row is moved back: some rows are computed twice.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from windlass.kernels.triton.reduce import SplitWorkspace

# Triton 3.6 calls it thread_barrier.
_barrier = getattr(gl, "thread_barrier", None) or gl.barrier

MAX_ROWS = 512  # more rows: int4_many.py, or a dequantised weight
_OUTPUTS = 64  # of a program
STEP = 64  # bytes of codes per output in one step: 128 inputs
_MAX_SPLITS = 4
_ENOUGH_PROGRAMS = 96  # fewer split K
_MULTIPROCESSORS = 132
# Microseconds of programs for 4,096 inputs by rows of a tile, measured on an H200: two on each
# multiprocessor, and one; then what adding the partial sums of splits takes.
_TWO_PROGRAMS = {32: 18.5, 64: 24.0, 128: 31.0}
_ONE_PROGRAM = {32: 14.0, 64: 17.4, 128: 19.5}
_ADD_SPLITS = 10.0

_LAYOUT = gl.NVMMASharedLayout.get_default_for


def _unpacking(base: str, kind: str) -> gl.constexpr:
    """PTX that unpacks four bytes of two 4-bit codes to 16-bit floats.

    A code in the mantissa of a power of two is that power plus the code, and the difference is exact.
    """
    codes = [f"lop3.b32 sum, {half}, 0x000f000f, base, 0xea;" for half in ("first", "second")]
    low, high = (
        [f"{code} sub.{kind} ${2 * at + i}, sum, base;" for i, code in enumerate(codes)]
        for at in range(2)
    )
    lines = [
        "{ .reg .b32 first, second, base, sum;",
        f"mov.b32 base, {base};",
        "prmt.b32 first, $4, 0, 0x4140;",
        "prmt.b32 second, $4, 0, 0x4342;",
        *low,
        "shr.u32 first, first, 4;",
        "shr.u32 second, second, 4;",
        *high,
        "}",
    ]
    return gl.constexpr("\n".join(lines))


_REGISTERS = gl.constexpr("=r,=r,=r,=r,r")
_TO_BF16 = _unpacking("0x43004300", "bf16x2")
_TO_FP16 = _unpacking("0x64006400", "f16x2")


@gluon.jit
def _unpack(codes, dtype: gl.constexpr):
    """Unpack bytes of two 4-bit codes: (low halves, high halves)."""
    if dtype == gl.bfloat16:
        low, high = gl.inline_asm_elementwise(
            _TO_BF16, _REGISTERS, [codes], (gl.bfloat16, gl.bfloat16), is_pure=True, pack=4
        )
    else:
        low, high = gl.inline_asm_elementwise(
            _TO_FP16, _REGISTERS, [codes], (gl.float16, gl.float16), is_pure=True, pack=4
        )
    return low, high


@gluon.jit
def unpack_weights(codes, groups, dtype: gl.constexpr):
    """The weights of codes: low and high halves; `groups`: scales and offsets of both."""
    s1, s2, o1, o2 = groups
    low, high = _unpack(codes, dtype)
    return low * s1[:, None] + o1[:, None], high * s2[:, None] + o2[:, None]


@gluon.jit
def _box_row(row, M, BOX: gl.constexpr):
    """The first row of a box, moved back if it reaches past the last row."""
    return gl.minimum(row, gl.maximum(M - BOX, 0))


@gluon.jit
def _fill(
    inputs, weight, x_tiles, w_tiles, arrived, stage, output, row, M, block, sub, pred,
    HALF: gl.constexpr,
):  # fmt: skip
    """Start the copies of one step: STEP bytes of codes per output, and the inputs of both halves."""
    STEP: gl.constexpr = weight.block_type.shape[1]
    ROWS: gl.constexpr = x_tiles.shape[1]
    BOX: gl.constexpr = inputs.block_type.shape[0]
    bar = arrived.index(stage)
    nbytes: gl.constexpr = weight.block_type.nbytes + 2 * ROWS // BOX * inputs.block_type.nbytes
    mbarrier.expect(bar, nbytes, pred)
    codes = w_tiles.index(stage)
    tma.async_copy_global_to_shared(weight, [output, block * HALF + sub * STEP], bar, codes, pred)
    for half in gl.static_range(2):
        at = (2 * block + half) * HALF + sub * STEP
        tile = x_tiles.index(2 * stage + half)
        for box in gl.static_range(ROWS // BOX):
            box_row = _box_row(row + box * BOX, M, BOX)
            part = tile.slice(box * BOX, BOX)
            tma.async_copy_global_to_shared(inputs, [box_row, at], bar, part, pred)


@gluon.jit
def group_numbers(
    at, block, N, outputs, dtype: gl.constexpr, GROUP: gl.constexpr, HALF: gl.constexpr
):
    """The numbers of both halves of a block."""
    group = block * 2 * HALF // GROUP
    first = gl.load(at + group * N + outputs).to(dtype)
    second = first
    if GROUP < 2 * HALF:
        second = gl.load(at + (group + 1) * N + outputs).to(dtype)
    return first, second


@gluon.jit
def _tile_rows_of(row, M, ROWS: gl.constexpr, BOX: gl.constexpr, layout: gl.constexpr):
    """The rows that a tile holds: those of its boxes."""
    at = gl.arange(0, ROWS, layout)
    return _box_row(row + at // BOX * BOX, M, BOX) + at % BOX


@gluon.jit
def store_tile(
    out, acc, partial_sums, counter, split, splits, row, output, M, N,
    SPLIT: gl.constexpr, BOX: gl.constexpr,
):  # fmt: skip
    """Store a tile; if K is split, the program that finishes last adds the partial sums in order."""
    OUTPUTS: gl.constexpr = acc.shape[0]
    ROWS: gl.constexpr = acc.shape[1]
    layout: gl.constexpr = gl.BlockedLayout(
        [8, 1], [OUTPUTS // 8, 256 // OUTPUTS], [1, gl.num_warps()], [0, 1]
    )
    if SPLIT:
        rows = _tile_rows_of(row, M, ROWS, BOX, gl.SliceLayout(0, acc.type.layout))
        outputs = output + gl.arange(0, OUTPUTS, gl.SliceLayout(1, acc.type.layout))
        mask = (rows < M)[None, :] & (outputs < N)[:, None]
        gl.store(
            partial_sums + split * M * N + rows[None, :] * N + outputs[:, None], acc, mask=mask
        )
        _barrier()
    rows = _tile_rows_of(row, M, ROWS, BOX, gl.SliceLayout(0, layout))
    outputs = output + gl.arange(0, OUTPUTS, gl.SliceLayout(1, layout))
    mask = (rows < M)[None, :] & (outputs < N)[:, None]
    at = rows[None, :] * N + outputs[:, None]
    if SPLIT:
        if gl.atomic_add(counter, 1, sem="acq_rel") == splits - 1:
            total = gl.zeros([OUTPUTS, ROWS], gl.float32, layout)
            for other in range(splits):
                part = partial_sums + other * M * N + at
                total += gl.load(part, mask=mask, other=0.0, cache_modifier=".cg")
            gl.store(out + at, total.to(out.dtype.element_ty), mask=mask)
            gl.store(counter, 0)
    else:
        result = gl.convert_layout(acc.to(out.dtype.element_ty), layout)
        gl.store(out + at, result, mask=mask)


@gluon.jit(do_not_specialize=["M", "splits"])
def int4_wide_kernel(
    inputs, weight, scales, offsets, out, partial_sums, counters, M, N, K_PAD, splits,
    ROWS: gl.constexpr, GROUP: gl.constexpr, HALF: gl.constexpr, STAGES: gl.constexpr,
    SPLIT: gl.constexpr,
):  # fmt: skip
    """out[M, N] = x[M, K] @ weight[N, K].T for one tile of rows and outputs, and one split of K."""
    OUTPUTS: gl.constexpr = weight.block_type.shape[0]
    STEP: gl.constexpr = weight.block_type.shape[1]
    PER: gl.constexpr = HALF // STEP  # steps of a block
    dtype: gl.constexpr = inputs.dtype
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, ROWS, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    tile, split = gl.program_id(0), gl.program_id(1)
    row_tiles = gl.cdiv(M, ROWS)
    output, row = tile // row_tiles * OUTPUTS, tile % row_tiles * ROWS
    blocks = K_PAD // (2 * HALF)
    span = gl.cdiv(blocks, splits)
    begin = split * span
    end = gl.minimum(begin + span, blocks)
    steps = (end - begin) * PER
    w_tiles = gl.allocate_shared_memory(gl.uint8, [STAGES, OUTPUTS, STEP], weight.layout)
    x_tiles = gl.allocate_shared_memory(dtype, [2 * STAGES, ROWS, STEP], inputs.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for each in gl.static_range(STAGES):
        mbarrier.init(arrived.index(each), count=1)
    for each in gl.static_range(STAGES - 1):
        _fill(
            inputs, weight, x_tiles, w_tiles, arrived, each, output, row, M,
            begin + each // PER, each % PER, each < steps, HALF,
        )  # fmt: skip
    # Outputs past the end are not stored.
    outputs = gl.minimum(output + gl.arange(0, OUTPUTS, gl.SliceLayout(1, operand)), N - 1)
    s1, s2 = group_numbers(scales, gl.minimum(begin, blocks - 1), N, outputs, dtype, GROUP, HALF)
    o1, o2 = group_numbers(offsets, gl.minimum(begin, blocks - 1), N, outputs, dtype, GROUP, HALF)
    acc = warpgroup_mma_init(gl.zeros([OUTPUTS, ROWS], gl.float32, mma))
    low = gl.zeros([OUTPUTS, STEP], dtype, operand)
    high = low
    step = 0
    # The tensor cores read the operands of a step until the next one waits for them. With two steps in an
    # iteration, those of one are unpacked to other registers than those of the other; with one step they
    # would be overwritten (`refuse`).
    gl.static_assert(PER > 1)
    for block in range(begin, end):
        after = gl.minimum(block + 1, blocks - 1)
        next_s1, next_s2 = group_numbers(scales, after, N, outputs, dtype, GROUP, HALF)
        next_o1, next_o2 = group_numbers(offsets, after, N, outputs, dtype, GROUP, HALF)
        for sub in gl.static_range(PER):
            stage = step % STAGES
            mbarrier.wait(arrived.index(stage), (step // STAGES) & 1)
            codes = w_tiles.index(stage).load(operand)
            next_low, next_high = unpack_weights(codes, (s1, s2, o1, o2), dtype)
            acc, low, high = warpgroup_mma_wait(0, deps=[acc, low, high])
            _barrier()
            ahead = step + STAGES - 1
            _fill(
                inputs, weight, x_tiles, w_tiles, arrived, ahead % STAGES, output, row, M,
                begin + ahead // PER, (sub + STAGES - 1) % PER, ahead < steps, HALF,
            )  # fmt: skip
            low, high = next_low, next_high
            first, second = x_tiles.index(2 * stage), x_tiles.index(2 * stage + 1)
            acc = warpgroup_mma(low, first.permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma(high, second.permute((1, 0)), acc, is_async=True)
            step += 1
        s1, s2, o1, o2 = next_s1, next_s2, next_o1, next_o2
    acc, low, high = warpgroup_mma_wait(0, deps=[acc, low, high])
    for each in gl.static_range(STAGES):
        mbarrier.invalidate(arrived.index(each))
    store_tile(
        out, acc, partial_sums, counters + tile, split, splits, row, output, M, N, SPLIT,
        inputs.block_type.shape[0],
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """The codes of one weight [N, K / 2], in blocks of `half` bytes; another object owns them."""

    codes: Tensor
    scales: Tensor  # [groups, N], as `offsets`
    offsets: Tensor
    _: KW_ONLY
    group: int
    half: int

    @property
    def num_out(self) -> int:
        return self.codes.shape[0]

    @property
    def padded(self) -> int:
        """Inputs, with those that fill the last block."""
        return 2 * self.codes.shape[1]

    @property
    def blocks(self) -> int:
        return self.padded // (2 * self.half)


class Int4WideGemm:
    """Computes with the codes of one weight."""

    def __init__(self, weight: Int4Weight, space: SplitWorkspace) -> None:
        self._weight, self._space = weight, space
        # The most rows for which K is split.
        num_tiles = (_ENOUGH_PROGRAMS - 1) // triton.cdiv(weight.num_out, _OUTPUTS)
        num_rows = min(MAX_ROWS, num_tiles * 128)
        space.reserve(
            weight.codes.device, _MAX_SPLITS * num_rows * weight.num_out, _ENOUGH_PROGRAMS
        )

    @staticmethod
    def refuse(half: int) -> str | None:
        """Why it refuses weights that are packed in blocks of `half` bytes, or None."""
        if half < 2 * STEP:
            return f"an iteration needs two steps, and groups of {half} inputs have one"
        return None

    def microseconds(self, num_rows: int) -> float:
        """Estimated for an H200."""
        rows, tiles, splits = self._grid(num_rows)
        waves, rest = divmod(tiles * splits, 2 * _MULTIPROCESSORS)
        last = _TWO_PROGRAMS if rest > _MULTIPROCESSORS else _ONE_PROGRAM
        time = waves * _TWO_PROGRAMS[rows] + (last[rows] if rest else 0.0)
        return time * self._weight.padded / splits / 4096 + _ADD_SPLITS * (splits > 1)

    def _grid(self, num_rows: int) -> tuple[int, int, int]:
        """Rows of a tile, tiles, and splits of K."""
        rows = max(32, min(128, triton.next_power_of_2(num_rows)))
        tiles = triton.cdiv(self._weight.num_out, _OUTPUTS) * triton.cdiv(num_rows, rows)
        splits = 1 if tiles >= _ENOUGH_PROGRAMS else min(_MAX_SPLITS, self._weight.blocks)
        return rows, tiles, splits

    def apply(self, x: Tensor, out: Tensor) -> None:
        """out = x @ weight.T; both contiguous, with up to MAX_ROWS rows of 16-bit floats."""
        weight, num_rows = self._weight, x.shape[0]
        rows, tiles, splits = self._grid(num_rows)
        box_rows = rows if num_rows % rows == 0 else rows // 2
        x_box, w_box = [box_rows, STEP], [_OUTPUTS, STEP]
        kind = gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16
        int4_wide_kernel[(tiles, splits)](
            TensorDescriptor.from_tensor(x, x_box, _LAYOUT(x_box, kind)),
            TensorDescriptor.from_tensor(weight.codes, w_box, _LAYOUT(w_box, gl.uint8)),
            weight.scales,
            weight.offsets,
            out,
            self._space.partial_sums,
            self._space.counters,
            num_rows,
            weight.num_out,
            weight.padded,
            splits,
            ROWS=rows,
            GROUP=weight.group,
            HALF=weight.half,
            STAGES=4 if rows <= 32 else 3,
            SPLIT=splits > 1,
            num_warps=4,
        )
