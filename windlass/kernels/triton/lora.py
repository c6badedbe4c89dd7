"""What adapters add to a product on CUDA: two launches for all adapters and all parts of a layer.

The first (shrink) brings inputs down to an adapter's rank, with K cut into parts whose sums stay
apart: it comes before the base's product, which fetches its weights meanwhile. The second (expand)
comes behind it, adds the sums up and goes on to the outputs. In decode steps every token is
by itself, limited by reading its adapter; in others pieces of one row share what they read. A part
that an adapter does not change has rank 0, and so has slot 0: their programs end at once. All that
differs from step to step lies on the device, so that steps can be recorded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from windlass.kernels.batch import PIECE, AdapterRows
from windlass.kernels.lora import SiluMul, Stacks
from windlass.kernels.rounded import Inputs
from windlass.kernels.triton import chain
from windlass.kernels.triton.lora_kernels import (
    expand_gated_kernel,
    expand_kernel,
    expand_tile_kernel,
    shrink_kernel,
    shrink_tile_kernel,
)

_MOST_PARTS = 3
_OUTPUTS = 256  # of a program, where every token is by itself


@dataclass(frozen=True, slots=True)
class _Cut:
    """How a layer's inputs are cut: by their number alone, so that a token's sums never differ."""

    span: int  # inputs of a part of the sums
    splits: int
    block: int  # inputs that are read at once

    @classmethod
    def _of(cls, num_in: int, block: int, most: int) -> _Cut:
        span = triton.cdiv(triton.cdiv(num_in, block), most) * block
        return cls(span, triton.cdiv(num_in, span), block)

    @classmethod
    def alone(cls, num_in: int) -> _Cut:
        return cls._of(num_in, 256, 16)

    @classmethod
    def in_pieces(cls, num_in: int) -> _Cut:
        return cls._of(num_in, 128, 4)


@dataclass(frozen=True, slots=True)
class Shrunk:
    """Inputs brought down to the ranks of their adapters: the first half of the work."""

    sums: Tensor  # [splits, tokens, parts, most ranks] float32
    splits: int


class TritonLora:
    """As `kernels.lora.LoraKernel` says; reads the slots and pieces of the adapters."""

    def begin(self, x: Tensor, stacks: Stacks, adapters: AdapterRows) -> Shrunk:
        assert len(stacks.sizes) <= _MOST_PARTS
        assert x.is_contiguous()
        alone = adapters.tiles is None
        cut = _Cut.alone(x.shape[1]) if alone else _Cut.in_pieces(x.shape[1])
        shape = (cut.splits, x.shape[0], len(stacks.sizes), stacks.down.shape[2])
        sums = x.new_empty(shape, dtype=torch.float32)
        shrink = shrink_kernel if alone else shrink_tile_kernel
        shrink[_pieces(adapters), len(stacks.sizes), cut.splits](
            *(x, stacks.down, *_which(stacks, adapters), sums, *x.shape, cut.span),
            stacks.ranks.stride(0),
            BLOCK_K=cut.block,
            **_options(stacks, adapters),
        )
        return Shrunk(sums, cut.splits)

    def end(self, y: Tensor, low: Shrunk, stacks: Stacks, adapters: AdapterRows) -> Tensor:
        assert y.is_contiguous()
        alone, parts = adapters.tiles is None, len(stacks.sizes)
        outputs = _OUTPUTS if alone else 64
        num_tiles = sum(triton.cdiv(size, outputs) for size in stacks.sizes)
        sizes = (*stacks.sizes, *[0] * (_MOST_PARTS - parts))
        expand = expand_kernel if alone else expand_tile_kernel
        expand[_pieces(adapters), num_tiles](
            *(y, stacks.up, *_which(stacks, adapters), low.sums, *y.shape, *sizes, low.splits),
            stacks.ranks.stride(0),
            OUTPUTS=outputs,
            **({"SPLITS": triton.next_power_of_2(low.splits)} if alone else {}),
            **_options(stacks, adapters),
        )
        return y

    def gated(
        self, y: Tensor, low: Shrunk, stacks: Stacks, adapters: AdapterRows, silu_mul: SiluMul
    ) -> Inputs:
        if adapters.tiles is not None:
            return silu_mul(self.end(y, low, stacks, adapters))
        assert y.is_contiguous()
        tokens, width = y.shape[0], y.shape[1] // 2
        out = y.new_empty((tokens, width))
        expand_gated_kernel[tokens, triton.cdiv(width, _OUTPUTS)](
            *(y, stacks.up, *_which(stacks, adapters), low.sums, out, tokens, width, low.splits),
            stacks.ranks.stride(0),
            OUTPUTS=_OUTPUTS,
            SPLITS=triton.next_power_of_2(low.splits),
            **_options(stacks, adapters),
        )
        return out


def _which(stacks: Stacks, adapters: AdapterRows) -> tuple[Tensor, ...]:
    """What tells a program its adapter and its tokens."""
    tiles = () if adapters.tiles is None else (adapters.tiles,)
    return (stacks.ranks, adapters.slots, *tiles)


def _pieces(adapters: AdapterRows) -> int:
    """Tokens, or pieces of several."""
    return len(adapters.slots if adapters.tiles is None else adapters.tiles)


def _options(stacks: Stacks, adapters: AdapterRows) -> dict[str, int]:
    whole = not any(size % 8 for size in (stacks.down.shape[3], *stacks.sizes))  # 16 bytes each
    rows = {} if adapters.tiles is None else {"ROWS": PIECE}
    return {
        "PARTS": len(stacks.sizes),
        "MOST": stacks.down.shape[2],
        "FETCH": whole and stacks.down.itemsize == 2,
        "num_warps": 4,
        **rows,
        **chain.options(),
    }
