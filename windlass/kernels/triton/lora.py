"""LoRA deltas on CUDA: two launches for all adapters and all parts of a layer.

The first kernel (shrink) multiplies inputs by `down`, with K split into partial sums. The second
(expand) runs after the base GEMM, adds the partial sums, multiplies by `up`, and may apply the norm
that follows. In decode steps each token is computed separately, limited by reading its adapter, and
shrink runs concurrently with the GEMM on a side stream. In other steps the tokens of a tile share
one read of the adapter. A part that an adapter does not change has rank 0, and so has slot 0: their
programs return immediately. Everything that varies between steps is on the device, so steps can be
captured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
import triton
from torch import Tensor

from windlass.kernels.batch import LORA_TILE, AdapterRows
from windlass.kernels.gemm import Norm
from windlass.kernels.gemm_io import Inputs
from windlass.kernels.gpu import gpu_of
from windlass.kernels.lora import RANK_TILE, LoraKernel, SiluMul, Stacks
from windlass.kernels.triton import pdl
from windlass.kernels.triton.lora_int8 import shrink_codes_kernel
from windlass.kernels.triton.lora_kernels import (
    expand_gated_kernel,
    expand_kernel,
    expand_norm_kernel,
    shrink_kernel,
)
from windlass.kernels.triton.lora_tiles import expand_tile_kernel, shrink_tile_kernel

_MAX_PARTS = 3
_MAX_NORM_OUTPUTS = 8192  # outputs of a token that fit in one program with their ranks


@dataclass(frozen=True, slots=True)
class Shrunk:
    """Results of shrink: partial sums of down @ x."""

    adapters: AdapterRows  # of these tokens
    x: Tensor  # kept alive while the side stream may read it
    sums: Tensor  # [splits, tokens, parts, max rank] float32
    splits: int
    deferred: Callable[[], object] | None  # launches shrink on the side stream, after the GEMM


@dataclass(frozen=True, slots=True)
class _Variant:
    """A set of kernels and their tiling. The tiling is the same in every step, so that a token's sums
    never differ.
    """

    shrink: Any
    expand: Any
    expand_gated: Any  # None: not fused
    block: int  # inputs per iteration
    max_splits: int  # of the inputs
    outputs: int  # per program
    warps: tuple[int, int]  # of shrink and of expand
    options: dict[str, int]  # constants of all kernels

    def split(self, num_in: int) -> tuple[int, int]:
        """Inputs per split, and the number of splits."""
        blocks = triton.cdiv(num_in, self.block)
        span = triton.cdiv(blocks, self.max_splits) * self.block
        return span, triton.cdiv(num_in, span)

    def options_of(self, kernel: Any, splits: int) -> dict[str, int]:
        """Constants and launch options of one of the kernels."""
        tiling = {"BLOCK_K": self.block, "OUTPUTS": self.outputs}
        known = {**self.options, **tiling, "SPLITS": triton.next_power_of_2(splits)}
        used = {name: value for name, value in known.items() if name in kernel.arg_names}
        return {**used, **pdl.options(), "num_warps": self.warps[kernel is not self.shrink]}


class TritonLora(LoraKernel):
    """LoRA kernels in Triton; reads `slots`, `tiles` and `single_slots` of the adapter rows."""

    def __init__(self) -> None:
        self._side: torch.cuda.Stream | None = None  # created on first use

    def by_output(
        self, dtype: torch.dtype, inputs: torch.dtype, max_rank: int, sizes: Sequence[int]
    ) -> bool:
        """For int8 codes, so that 16 bytes are 16 ranks of an output."""
        aligned = not any(size % RANK_TILE for size in (max_rank, *sizes))
        return dtype is torch.int8 and inputs.itemsize == 2 and aligned

    def begin(self, x: Tensor, stacks: Stacks, adapters: AdapterRows) -> tuple[Shrunk, ...]:
        """Run shrink for tiles, then for single tokens."""
        return tuple(self._begin(x, stacks, rows) for rows in _by_kind(adapters))

    def _begin(self, x: Tensor, stacks: Stacks, adapters: AdapterRows) -> Shrunk:
        assert len(stacks.sizes) <= _MAX_PARTS
        assert x.is_contiguous()
        variant = _variant(x, stacks, adapters)
        span, splits = variant.split(x.shape[1])
        shape = (splits, x.shape[0], len(stacks.sizes), stacks.down.shape[2])
        sums = x.new_empty(shape, dtype=torch.float32)
        options = variant.options_of(variant.shrink, splits)
        concurrent = x.is_cuda and adapters.tiles is None
        if concurrent:
            options |= dict.fromkeys(pdl.options(), False)  # its predecessor is on another stream
        shrink = partial(
            variant.shrink[_num_programs(adapters), len(stacks.sizes), splits],
            *(x, stacks.down, stacks.scales, *_index_args(stacks, adapters), sums, *x.shape, span),
            stacks.ranks.stride(0),
            **options,
        )
        if concurrent:
            # Launched after the GEMM: a captured graph starts nodes in capture order, and the GEMM
            # takes longer.
            self._fork()
            return Shrunk(adapters=adapters, x=x, sums=sums, splits=splits, deferred=shrink)
        shrink()
        return Shrunk(adapters=adapters, x=x, sums=sums, splits=splits, deferred=None)

    def end(
        self, y: Tensor, low: tuple[Shrunk, ...], stacks: Stacks, adapters: AdapterRows
    ) -> Tensor:
        del adapters  # each item of `low` has its own
        for each in low:
            self._end(y, each, stacks)
        return y

    def _end(self, y: Tensor, low: Shrunk, stacks: Stacks) -> None:
        assert y.is_contiguous()
        adapters = low.adapters
        variant = _variant(y, stacks, adapters)
        num_tiles = sum(triton.cdiv(size, variant.outputs) for size in stacks.sizes)
        sizes = (*stacks.sizes, *[0] * (_MAX_PARTS - len(stacks.sizes)))
        self._join(low)
        variant.expand[_num_programs(adapters), num_tiles](
            *(y, stacks.up, *_index_args(stacks, adapters), low.sums, *y.shape, *sizes, low.splits),
            stacks.ranks.stride(0),
            **variant.options_of(variant.expand, low.splits),
        )

    def gated(
        self,
        y: Tensor,
        low: tuple[Shrunk, ...],
        stacks: Stacks,
        adapters: AdapterRows,
        silu_mul: SiluMul,
    ) -> Inputs:
        *tiles, last = low
        variant = _variant(y, stacks, last.adapters)
        if variant.expand_gated is None:
            return super().gated(y, low, stacks, adapters, silu_mul)
        self.end(y, tuple(tiles), stacks, adapters)
        return self._gated(y, last, stacks, variant)

    def _gated(self, y: Tensor, low: Shrunk, stacks: Stacks, variant: _Variant) -> Inputs:
        assert y.is_contiguous()
        adapters = low.adapters
        tokens, width = y.shape[0], y.shape[1] // 2
        out = y.new_empty((tokens, width))
        self._join(low)
        variant.expand_gated[tokens, triton.cdiv(width, variant.outputs)](
            *(
                y,
                stacks.up,
                *_index_args(stacks, adapters),
                low.sums,
                out,
                tokens,
                width,
                low.splits,
            ),
            stacks.ranks.stride(0),
            **variant.options_of(variant.expand_gated, low.splits),
        )
        return out

    def then(
        self,
        y: Tensor,
        low: tuple[Shrunk, ...],
        stacks: Stacks,
        adapters: AdapterRows,
        residual: Tensor,
        norm: Norm,
    ) -> tuple[Inputs, Tensor]:
        *tiles, last = low
        fits = triton.next_power_of_2(y.shape[1]) <= _MAX_NORM_OUTPUTS and len(stacks.sizes) == 1
        if last.adapters.tiles is not None or not fits:
            return super().then(y, low, stacks, adapters, residual, norm)
        self.end(y, tuple(tiles), stacks, adapters)
        return self._then(y, last, stacks, residual, norm)

    def _then(
        self, y: Tensor, low: Shrunk, stacks: Stacks, residual: Tensor, norm: Norm
    ) -> tuple[Inputs, Tensor]:
        assert y.is_contiguous()
        (tokens, size), adapters = y.shape, low.adapters
        width = triton.next_power_of_2(size)
        variant, out = _variant(y, stacks, adapters), torch.empty_like(y)
        options = variant.options_of(expand_norm_kernel, low.splits)
        # A thread holds all ranks of the outputs in 16 bytes.
        options["num_warps"] = min(16, max(1, width * stacks.up.itemsize // (32 * 16)))
        self._join(low)
        expand_norm_kernel[(tokens,)](
            *(y, stacks.up, *_index_args(stacks, adapters), low.sums, residual, norm.weight, out),
            *(tokens, low.splits, stacks.ranks.stride(0), norm.eps),
            SIZE=size,
            WIDTH=width,
            **options,
        )
        return out, residual

    def _fork(self) -> None:
        """Make the side stream wait for the current stream."""
        if self._side is None:
            # High priority, because its programs are few and short.
            self._side = torch.cuda.Stream(priority=-1)
        self._side.wait_stream(torch.cuda.current_stream())

    def _join(self, low: Shrunk) -> None:
        """Launch a deferred shrink on the side stream and wait for it."""
        if low.deferred is None:
            return
        assert self._side is not None
        with torch.cuda.stream(self._side):
            low.deferred()
        torch.cuda.current_stream().wait_stream(self._side)


def _by_kind(adapters: AdapterRows) -> tuple[AdapterRows, ...]:
    """Tiles, then single tokens, if a step has both."""
    if adapters.single_slots is None:
        return (adapters,)
    return replace(adapters, single_slots=None), AdapterRows(adapters.single_slots)


def _variant(x: Tensor, stacks: Stacks, adapters: AdapterRows) -> _Variant:
    """Choose kernels and tiling. For single tokens, expand has one warp and a thread holds all ranks
    of its outputs.
    """
    itemsize = stacks.down.itemsize
    unit = 16 // itemsize  # values of a 16-byte load
    aligned = itemsize < 4 and not any(
        size % unit for size in (stacks.down.shape[3], *stacks.sizes)
    )
    options = {
        "PARTS": len(stacks.sizes),
        "MAX_RANK": stacks.down.shape[2],
        "UNIT": unit if aligned else 1,
        "PREFETCH": aligned,
        "SCALED": stacks.scales is not None,
        "ROWS": LORA_TILE,
        "BY_OUTPUT": stacks.by_output,
        "ASM": _has_ptx(x.device),
    }
    if adapters.tiles is not None:
        return _Variant(
            shrink=shrink_tile_kernel,
            expand=expand_tile_kernel,
            expand_gated=None,
            block=128,
            max_splits=4,
            outputs=64,
            warps=(4, 4),
            options=options,
        )
    int8 = itemsize == 1 and aligned and x.itemsize == 2
    return _Variant(
        shrink=shrink_codes_kernel if int8 else shrink_kernel,
        expand=expand_kernel,
        expand_gated=expand_gated_kernel,
        block=1024 if int8 else 256,
        max_splits=32,
        outputs=256 if int8 else 128,
        warps=(4, 1) if int8 else (1, 1),
        options=options,
    )


@cache
def _has_ptx(device: torch.device) -> bool:
    return device.type == "cuda" and gpu_of(device).lacks_ptx() is None


def _index_args(stacks: Stacks, adapters: AdapterRows) -> tuple[Tensor, ...]:
    """Kernel arguments that give a program its adapter and its tokens."""
    tiles = () if adapters.tiles is None else (adapters.tiles,)
    return (stacks.ranks, adapters.slots, *tiles)


def _num_programs(adapters: AdapterRows) -> int:
    """The number of tokens, or of tiles."""
    return len(adapters.slots if adapters.tiles is None else adapters.tiles)
