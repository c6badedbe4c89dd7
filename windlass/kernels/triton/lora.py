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
# Where every token is by itself: outputs of a program, and inputs that it reads at once. Codes are
# half as large, and a program asks for as many bytes of them.
_WIDTH, _CODES_WIDTH = 256, 512


@dataclass(frozen=True, slots=True)
class _Cut:
    """How a layer's inputs are cut: the same in every step, so that a token's sums never differ."""

    span: int  # inputs of a part of the sums
    splits: int
    block: int  # inputs that are read at once

    @classmethod
    def _of(cls, num_in: int, block: int, most: int) -> _Cut:
        span = triton.cdiv(triton.cdiv(num_in, block), most) * block
        return cls(span, triton.cdiv(num_in, span), block)

    @classmethod
    def alone(cls, num_in: int, width: int) -> _Cut:
        return cls._of(num_in, width, 16)

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
        num_in = x.shape[1]
        cut = _Cut.alone(num_in, _width(stacks)) if alone else _Cut.in_pieces(num_in)
        shape = (cut.splits, x.shape[0], len(stacks.sizes), stacks.down.shape[2])
        sums = x.new_empty(shape, dtype=torch.float32)
        shrink = shrink_kernel if alone else shrink_tile_kernel
        shrink[_pieces(adapters), len(stacks.sizes), cut.splits](
            *(x, stacks.down, stacks.scales, *_which(stacks, adapters), sums, *x.shape, cut.span),
            stacks.ranks.stride(0),
            SCALED=stacks.scales is not None,
            BLOCK_K=cut.block,
            **_options(stacks, adapters),
        )
        return Shrunk(sums, cut.splits)

    def end(self, y: Tensor, low: Shrunk, stacks: Stacks, adapters: AdapterRows) -> Tensor:
        assert y.is_contiguous()
        alone, parts = adapters.tiles is None, len(stacks.sizes)
        outputs = _width(stacks) if alone else 64
        num_tiles = sum(triton.cdiv(size, outputs) for size in stacks.sizes)
        sizes = (*stacks.sizes, *[0] * (_MOST_PARTS - parts))
        expand = expand_kernel if alone else expand_tile_kernel
        expand[_pieces(adapters), num_tiles](
            *(y, stacks.up, *_which(stacks, adapters), low.sums, *y.shape, *sizes, low.splits),
            stacks.ranks.stride(0),
            OUTPUTS=outputs,
            **(_options(stacks, adapters) | (_alone(low) if alone else {})),
        )
        return y

    def gated(
        self, y: Tensor, low: Shrunk, stacks: Stacks, adapters: AdapterRows, silu_mul: SiluMul
    ) -> Inputs:
        if adapters.tiles is not None:
            return silu_mul(self.end(y, low, stacks, adapters))
        assert y.is_contiguous()
        tokens, width, outputs = y.shape[0], y.shape[1] // 2, _width(stacks)
        out = y.new_empty((tokens, width))
        expand_gated_kernel[tokens, triton.cdiv(width, outputs)](
            *(y, stacks.up, *_which(stacks, adapters), low.sums, out, tokens, width, low.splits),
            stacks.ranks.stride(0),
            OUTPUTS=outputs,
            **(_options(stacks, adapters) | _alone(low)),
        )
        return out


def _alone(low: Shrunk) -> dict[str, int]:
    """For outputs of a single token: one warp, in which a thread adds up the ranks of its outputs."""
    return {"SPLITS": triton.next_power_of_2(low.splits), "num_warps": 1}


def _width(stacks: Stacks) -> int:
    return _WIDTH if stacks.scales is None else _CODES_WIDTH


def _which(stacks: Stacks, adapters: AdapterRows) -> tuple[Tensor, ...]:
    """What tells a program its adapter and its tokens."""
    tiles = () if adapters.tiles is None else (adapters.tiles,)
    return (stacks.ranks, adapters.slots, *tiles)


def _pieces(adapters: AdapterRows) -> int:
    """Tokens, or pieces of several."""
    return len(adapters.slots if adapters.tiles is None else adapters.tiles)


def _options(stacks: Stacks, adapters: AdapterRows) -> dict[str, int]:
    each = stacks.down.itemsize
    whole = not any(size * each % 16 for size in (stacks.down.shape[3], *stacks.sizes))  # bytes
    rows = {} if adapters.tiles is None else {"ROWS": PIECE}
    return {
        "PARTS": len(stacks.sizes),
        "MOST": stacks.down.shape[2],
        "FETCH": whole and each < 4,
        "num_warps": 4,
        **rows,
        **chain.options(),
    }
