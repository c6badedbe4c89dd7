"""What adapters add to a product on CUDA: two launches for all adapters and all parts of a layer.

The first (shrink) brings inputs down to an adapter's rank, with K cut into parts whose sums stay
apart. The second (expand) comes behind the base's product, adds the sums up and goes on to the
outputs, and where a norm follows through that. In decode steps every token is by itself, limited by reading its adapter, and shrink runs
beside the product on a stream of its own; in others pieces of one row share what they read. A part
that an adapter does not change has rank 0, and so has slot 0: their programs end at once. All that
differs from step to step lies on the device, so that steps can be recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from windlass.kernels.batch import LORA_TILE, AdapterRows
from windlass.kernels.gemm import Norm
from windlass.kernels.lora import RANK_TILE, LoraKernel, SiluMul, Stacks
from windlass.kernels.rounded import Inputs
from windlass.kernels.triton import pdl
from windlass.kernels.triton.lora_codes import shrink_codes_kernel
from windlass.kernels.triton.lora_kernels import (
    expand_gated_kernel,
    expand_kernel,
    expand_norm_kernel,
    shrink_kernel,
)
from windlass.kernels.triton.lora_tiles import expand_tile_kernel, shrink_tile_kernel

_MOST_PARTS = 3
_MOST_NORMED = 8192  # outputs of a token that one program holds with their ranks


@dataclass(frozen=True, slots=True)
class Shrunk:
    """Inputs brought down to the ranks of their adapters: the first half of the work."""

    adapters: AdapterRows  # of these tokens
    x: Tensor  # kept as long as it may be read beside the product
    sums: Tensor  # [splits, tokens, parts, most ranks] float32
    splits: int
    waiting: (
        Callable[[], object] | None
    )  # what is to run beside the product, once that was launched


@dataclass(frozen=True, slots=True)
class _Way:
    """Kernels that belong together, and how the work is cut: the same in every step of its kind, so
    that a token's sums never differ."""

    shrink: Any
    expand: Any
    expand_gated: Any  # None: there is none
    block: int  # inputs that are read at once
    most_splits: int  # of the inputs
    outputs: int  # of a program
    warps: tuple[int, int]  # of shrink and of expand
    options: dict[str, int]  # of all kernels

    def cut(self, num_in: int) -> tuple[int, int]:
        """Inputs of a part of the sums, and how many parts there are."""
        blocks = triton.cdiv(num_in, self.block)
        span = triton.cdiv(blocks, self.most_splits) * self.block
        return span, triton.cdiv(num_in, span)

    def options_of(self, kernel: Any, splits: int) -> dict[str, int]:
        """Those that one of the kernels has, and how it is launched."""
        cut = {"BLOCK_K": self.block, "OUTPUTS": self.outputs}
        given = {**self.options, **cut, "SPLITS": triton.next_power_of_2(splits)}
        own = {name: value for name, value in given.items() if name in kernel.arg_names}
        return {**own, **pdl.options(), "num_warps": self.warps[kernel is not self.shrink]}


class TritonLora(LoraKernel):
    """As `kernels.lora.LoraKernel` says; reads the slots and pieces of the adapters."""

    def __init__(self) -> None:
        self._side: torch.cuda.Stream | None = None  # made where there is a device

    def by_output(
        self, dtype: torch.dtype, inputs: torch.dtype, most: int, sizes: Sequence[int]
    ) -> bool:
        """Codes, where 16 bytes are 16 ranks of an output."""
        whole = not any(size % RANK_TILE for size in (most, *sizes))
        return dtype is torch.int8 and inputs.itemsize == 2 and whole

    def begin(self, x: Tensor, stacks: Stacks, adapters: AdapterRows) -> tuple[Shrunk, ...]:
        """One after the other: pieces, and tokens by themselves."""
        return tuple(self._begin(x, stacks, kind) for kind in _kinds(adapters))

    def _begin(self, x: Tensor, stacks: Stacks, adapters: AdapterRows) -> Shrunk:
        assert len(stacks.sizes) <= _MOST_PARTS
        assert x.is_contiguous()
        way = _way(x, stacks, adapters)
        span, splits = way.cut(x.shape[1])
        shape = (splits, x.shape[0], len(stacks.sizes), stacks.down.shape[2])
        sums = x.new_empty(shape, dtype=torch.float32)
        options = way.options_of(way.shrink, splits)
        beside = x.is_cuda and adapters.tiles is None
        if beside:
            options |= {"PDL": False, "launch_pdl": False}  # what it follows is elsewhere
        shrink = partial(
            way.shrink[_pieces(adapters), len(stacks.sizes), splits],
            *(x, stacks.down, stacks.scales, *_which(stacks, adapters), sums, *x.shape, span),
            stacks.ranks.stride(0),
            **options,
        )
        if beside:
            # Launched behind the product: what comes first in a recording starts first, and the
            # product takes longer.
            self._fork()
            return Shrunk(adapters, x, sums, splits, shrink)
        shrink()
        return Shrunk(adapters, x, sums, splits, None)

    def end(
        self, y: Tensor, low: tuple[Shrunk, ...], stacks: Stacks, adapters: AdapterRows
    ) -> Tensor:
        del adapters  # are known in parts
        for each in low:
            self._end(y, each, stacks)
        return y

    def _end(self, y: Tensor, low: Shrunk, stacks: Stacks) -> None:
        assert y.is_contiguous()
        adapters = low.adapters
        way = _way(y, stacks, adapters)
        num_tiles = sum(triton.cdiv(size, way.outputs) for size in stacks.sizes)
        sizes = (*stacks.sizes, *[0] * (_MOST_PARTS - len(stacks.sizes)))
        self._join(low)
        way.expand[_pieces(adapters), num_tiles](
            *(y, stacks.up, *_which(stacks, adapters), low.sums, *y.shape, *sizes, low.splits),
            stacks.ranks.stride(0),
            **way.options_of(way.expand, low.splits),
        )

    def gated(
        self,
        y: Tensor,
        low: tuple[Shrunk, ...],
        stacks: Stacks,
        adapters: AdapterRows,
        silu_mul: SiluMul,
    ) -> Inputs:
        *pieces, last = low
        way = _way(y, stacks, last.adapters)
        if way.expand_gated is None:
            return super().gated(y, low, stacks, adapters, silu_mul)
        self.end(y, tuple(pieces), stacks, adapters)
        return self._gated(y, last, stacks, way)

    def _gated(self, y: Tensor, low: Shrunk, stacks: Stacks, way: _Way) -> Inputs:
        assert y.is_contiguous()
        adapters = low.adapters
        tokens, width = y.shape[0], y.shape[1] // 2
        out = y.new_empty((tokens, width))
        self._join(low)
        way.expand_gated[tokens, triton.cdiv(width, way.outputs)](
            *(y, stacks.up, *_which(stacks, adapters), low.sums, out, tokens, width, low.splits),
            stacks.ranks.stride(0),
            **way.options_of(way.expand_gated, low.splits),
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
        *pieces, last = low
        whole = triton.next_power_of_2(y.shape[1]) <= _MOST_NORMED and len(stacks.sizes) == 1
        if last.adapters.tiles is not None or not whole:
            return super().then(y, low, stacks, adapters, residual, norm)
        self.end(y, tuple(pieces), stacks, adapters)
        return self._then(y, last, stacks, residual, norm)

    def _then(
        self, y: Tensor, low: Shrunk, stacks: Stacks, residual: Tensor, norm: Norm
    ) -> tuple[Inputs, Tensor]:
        assert y.is_contiguous()
        (tokens, size), adapters = y.shape, low.adapters
        width = triton.next_power_of_2(size)
        way, out = _way(y, stacks, adapters), torch.empty_like(y)
        options = way.options_of(expand_norm_kernel, low.splits)
        # A thread has all ranks of as many outputs as 16 bytes hold.
        options["num_warps"] = min(16, max(1, width * stacks.up.itemsize // (32 * 16)))
        self._join(low)
        expand_norm_kernel[(tokens,)](
            *(y, stacks.up, *_which(stacks, adapters), low.sums, residual, norm.weight, out),
            *(tokens, low.splits, stacks.ranks.stride(0), norm.eps),
            SIZE=size,
            WIDTH=width,
            **options,
        )
        return out, residual

    def _fork(self) -> None:
        """A stream of its own goes on from here."""
        if self._side is None:
            # Its programs are few and short: they come first where both wait for room.
            self._side = torch.cuda.Stream(priority=-1)
        self._side.wait_stream(torch.cuda.current_stream())

    def _join(self, low: Shrunk) -> None:
        if low.waiting is None:
            return
        assert self._side is not None
        with torch.cuda.stream(self._side):
            low.waiting()
        torch.cuda.current_stream().wait_stream(self._side)


def _kinds(adapters: AdapterRows) -> tuple[AdapterRows, ...]:
    """Pieces before tokens by themselves, where a step has both."""
    if adapters.alone is None:
        return (adapters,)
    return replace(adapters, alone=None), AdapterRows(adapters.alone)


def _way(x: Tensor, stacks: Stacks, adapters: AdapterRows) -> _Way:
    """For tokens by themselves expand has one warp, whose threads hold their outputs' ranks."""
    each = stacks.down.itemsize
    unit = 16 // each  # values of the 16 bytes that are read at once
    whole = each < 4 and not any(size % unit for size in (stacks.down.shape[3], *stacks.sizes))
    options = {
        "PARTS": len(stacks.sizes),
        "MOST": stacks.down.shape[2],
        "UNIT": unit if whole else 1,
        "FETCH": whole,
        "SCALED": stacks.scales is not None,
        "ROWS": LORA_TILE,
        "BY_OUTPUT": stacks.by_output,
        "ASM": x.is_cuda,
    }
    if adapters.tiles is not None:
        return _Way(shrink_tile_kernel, expand_tile_kernel, None, 128, 4, 64, (4, 4), options)
    expands = (expand_kernel, expand_gated_kernel)
    if each == 1 and whole and x.itemsize == 2:
        return _Way(shrink_codes_kernel, *expands, 1024, 32, 256, (4, 1), options)
    return _Way(shrink_kernel, *expands, 256, 32, 128, (1, 1), options)


def _which(stacks: Stacks, adapters: AdapterRows) -> tuple[Tensor, ...]:
    """What tells a program its adapter and its tokens."""
    tiles = () if adapters.tiles is None else (adapters.tiles,)
    return (stacks.ranks, adapters.slots, *tiles)


def _pieces(adapters: AdapterRows) -> int:
    """Tokens, or pieces of several."""
    return len(adapters.slots if adapters.tiles is None else adapters.tiles)
