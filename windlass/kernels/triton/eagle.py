"""The operations between the GEMMs of an EAGLE head or MTP layer on CUDA: three kernels, not a dozen operators.

Drafting a token takes microseconds, most of them for launches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from windlass.kernels.triton import pdl

_TILE = 2048  # logits per iteration


@triton.jit
def _normed(value, gains, at, mask, eps, SIZE: tl.constexpr):
    """RMSNorm of one row."""
    value = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
    gain = tl.load(gains + at, mask=mask, other=0.0)
    return (value * scale).to(gain.dtype) * gain


@triton.jit
def _concatenate(
    token, table, hidden, gains, hidden_gains, out, eps, SIZE: tl.constexpr, WIDTH: tl.constexpr
):
    """Write a token's embedding and a hidden state, each normalised, as the halves of a row."""
    at = tl.arange(0, WIDTH)
    mask = at < SIZE
    embedded = tl.load(table + token.to(tl.int64) * SIZE + at, mask=mask, other=0.0)
    own = tl.load(hidden + at, mask=mask, other=0.0)
    tl.store(out + at, _normed(embedded, gains, at, mask, eps, SIZE), mask=mask)
    tl.store(out + SIZE + at, _normed(own, hidden_gains, at, mask, eps, SIZE), mask=mask)


@triton.jit
def eagle_inputs_kernel(
    ids,
    table,
    hidden,
    gains,
    hidden_gains,
    out,
    eps,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Inputs of the layer at a position: the next token's embedding and the hidden state."""
    pdl.begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    _concatenate(
        tl.load(ids + row),
        table,
        hidden + row * SIZE,
        gains,
        hidden_gains,
        out + row * 2 * SIZE,
        eps,
        SIZE,
        WIDTH,
    )


@triton.jit
def eagle_select_kernel(
    indices,
    normed,
    hidden,
    positions,
    slots,
    normed_out,
    hidden_out,
    positions_out,
    slots_out,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Gather the token of each row after which draft tokens follow."""
    pdl.begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    index = tl.load(indices + row).to(tl.int64)
    at = tl.arange(0, WIDTH)
    mask = at < SIZE
    value = tl.load(normed + index * SIZE + at, mask=mask, other=0.0)
    tl.store(normed_out + row * SIZE + at, value, mask=mask)
    value = tl.load(hidden + index * SIZE + at, mask=mask, other=0.0)
    tl.store(hidden_out + row * SIZE + at, value, mask=mask)
    tl.store(positions_out + row, tl.load(positions + index))
    tl.store(slots_out + row, tl.load(slots + index))


@triton.jit
def eagle_advance_kernel(
    logits,
    offsets,
    tokens,
    positions,
    positions_out,
    table,
    hidden,
    gains,
    hidden_gains,
    out,
    eps,
    num_logits,
    max_positions,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Argmax of a row's logits, and the layer's inputs for the next draft token."""
    pdl.begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    top = tl.full([TILE], float("-inf"), dtype=tl.float32)
    top_at = tl.zeros([TILE], dtype=tl.int32)
    for start in range(0, num_logits, TILE):
        at = start + tl.arange(0, TILE)
        inside = at < num_logits
        x = tl.load(logits + row * num_logits + at, mask=inside, other=float("-inf"))
        x = x.to(tl.float32)
        top_at = tl.where(x > top, at, top_at)
        top = tl.maximum(x, top)
    best = tl.min(tl.where(top == tl.max(top, 0), top_at, 2147483647), 0)
    token = (best + tl.load(offsets + best)).to(tl.int32)
    tl.store(tokens + row, token)
    position = tl.load(positions + row)
    tl.store(positions_out + row, tl.minimum(position + 1, max_positions - 1))
    _concatenate(
        token,
        table,
        hidden + row * SIZE,
        gains,
        hidden_gains,
        out + row * 2 * SIZE,
        eps,
        SIZE,
        WIDTH,
    )


@dataclass(frozen=True, slots=True)
class FusedSteps:
    """The fused operations; same contracts as `models.draft_steps.PlainSteps`."""

    table: Tensor  # [vocabulary, hidden] of the network's embedding
    gains: Tensor
    hidden_gains: Tensor
    eps: float
    offsets: Tensor  # d2t
    max_positions: int

    @property
    def _constants(self) -> dict[str, int]:
        size = self.gains.shape[0]
        return {"SIZE": size, "WIDTH": triton.next_power_of_2(size)}

    def inputs(self, ids: Tensor, hidden: Tensor) -> Tensor:
        out = hidden.new_empty((hidden.shape[0], 2 * hidden.shape[1]))
        eagle_inputs_kernel[(hidden.shape[0],)](
            ids,
            self.table,
            hidden,
            self.gains,
            self.hidden_gains,
            out,
            self.eps,
            **self._constants,
            **pdl.options(),
        )
        return out

    def select(
        self, indices: Tensor, normed: Tensor, hidden: Tensor, positions: Tensor, slots: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        rows = indices.shape[0]
        normed_out, hidden_out = normed.new_empty((2, rows, normed.shape[1])).unbind()
        at = torch.empty((2, -(-rows // 4) * 4), dtype=torch.int32, device=indices.device)
        positions_out, slots_out = at[:, :rows].unbind()
        eagle_select_kernel[(rows,)](
            indices,
            normed,
            hidden,
            positions,
            slots,
            normed_out,
            hidden_out,
            positions_out,
            slots_out,
            **self._constants,
            **pdl.options(),
        )
        return normed_out, hidden_out, positions_out, slots_out

    def advance(
        self, logits: Tensor, hidden: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = logits.shape[0]
        both = torch.empty((2, -(-rows // 4) * 4), dtype=torch.int32, device=logits.device)
        tokens, next_positions = both[:, :rows].unbind()
        out = hidden.new_empty((rows, 2 * hidden.shape[1]))
        eagle_advance_kernel[(rows,)](
            logits,
            self.offsets,
            tokens,
            positions,
            next_positions,
            self.table,
            hidden,
            self.gains,
            self.hidden_gains,
            out,
            self.eps,
            logits.shape[1],
            self.max_positions,
            **self._constants,
            TILE=_TILE,
            num_warps=8,
            **pdl.options(),
        )
        return tokens, next_positions, out
