"""Mamba-2: the causal convolution and the selective scan, and their state pages.

A layer's state after a token is its recurrent state and the last inputs of its convolution, in float32.
A row reads the state at its start from the block of the token before. It writes the state after its last
token to the block of that token, and the state at the end of every block that it fills: a prefix hit and
the next step start from there.

    positions       0 ... 15 | 16 ... 31 | 32 ... 36     one row, blocks of 16
    states written        ^            ^           ^
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from windlass.core.mamba import MambaHeads
from windlass.kernels.batch import LayerState, Span, StepBatch

_SCAN_CHUNK = 64  # tokens whose outputs are computed together


@dataclass(frozen=True, slots=True)
class ScanWeights:
    """Weights of the selective scan, one number per head, in float32."""

    decay: Tensor  # A, negative: a state shrinks by exp(A dt)
    skip: Tensor  # D: of a token's own input
    dt_bias: Tensor


def recurrent_pages(state: LayerState, heads: MambaHeads) -> Tensor:
    """The recurrent states: [blocks, heads, dim, state_size]."""
    shape = (heads.num_heads, heads.dim, heads.state_size)
    return state.pages[:, : heads.num_recurrent].unflatten(1, shape)


def conv_pages(state: LayerState, heads: MambaHeads) -> Tensor:
    """The convolution's last inputs: [blocks, channels, conv_size - 1]."""
    start = heads.num_recurrent
    shape = (heads.channels, heads.conv_size - 1)
    return state.pages[:, start : start + heads.num_conv].unflatten(1, shape)


def causal_conv(
    projected: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    heads: MambaHeads,
    state: LayerState,
    batch: StepBatch,
) -> Tensor:
    """silu(causal convolution) of the columns of `projected` after the gate: [tokens, channels].

    `weight` is [channels, conv_size]. Writes the convolution's states.
    """
    pages, before = conv_pages(state, heads), heads.conv_size - 1
    inputs = projected[:, heads.inner : heads.inner + heads.channels]
    out = torch.empty_like(inputs, memory_format=torch.contiguous_format)
    for span in batch.spans:
        table = _table(state, batch, span)
        known = pages.new_zeros(heads.channels, before)
        if span.start:
            known = pages[table[(span.start - 1) // state.block_size]]
        own = inputs[span.first : span.first + span.count].float()
        line = torch.cat([known, own.T], dim=1)
        mixed = functional.conv1d(
            line[None], weight.float()[:, None], _float(bias), groups=heads.channels
        )
        out[span.first : span.first + span.count] = functional.silu(mixed[0].T).to(out.dtype)
        for begin, end in _pieces(span, state.block_size):
            pages[table[begin // state.block_size]] = line[:, end - span.start :][:, :before]
    return out


def selective_scan(
    projected: Tensor,
    mixed: Tensor,
    weights: ScanWeights,
    heads: MambaHeads,
    state: LayerState,
    batch: StepBatch,
) -> Tensor:
    """The heads' outputs times silu(gate): [tokens, heads * dim]. Writes the recurrent states.

    Of `projected`, the first columns are the gate and the last are dt; `mixed` are the outputs of
    `causal_conv`: inputs of the heads, B, C.
    """
    pages = recurrent_pages(state, heads)
    gate = projected[:, : heads.inner].float()
    dt = functional.softplus(projected[:, -heads.num_heads :].float() + weights.dt_bias)
    parts = [heads.inner, heads.group_features, heads.group_features]
    x, b, c = mixed.float().split(parts, dim=-1)
    x = x.unflatten(1, (heads.num_heads, heads.dim))
    shared = heads.num_heads // heads.num_groups
    b, c = (
        each.unflatten(1, (heads.num_groups, heads.state_size)).repeat_interleave(shared, 1)
        for each in (b, c)
    )
    y = torch.empty_like(x)
    # One token at a time, sums do not depend on how a prompt is cut into steps.
    chunk = 1 if batch.batch_invariant else _SCAN_CHUNK
    for span in batch.spans:
        table = _table(state, batch, span)
        current = torch.zeros_like(pages[0])
        if span.start:
            current = pages[table[(span.start - 1) // state.block_size]]
        for begin, end in _pieces(span, state.block_size):
            for at in range(begin, end, chunk):
                first = span.first + at - span.start
                rows = slice(first, first + min(chunk, end - at))
                log_decay = dt[rows] * weights.decay
                y[rows], current = _scan(
                    x[rows] * dt[rows, :, None], b[rows], c[rows], log_decay, current
                )
            pages[table[begin // state.block_size]] = current
    y = y + weights.skip[:, None] * x
    return (y.flatten(1) * functional.silu(gate)).to(projected.dtype)


def _scan(
    x: Tensor, b: Tensor, c: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs [tokens, heads, dim] of some tokens and the state after them, given the one before.

    state_t = exp(log_decay_t) state_{t-1} + x_t b_t; y_t = state_t c_t. All tokens are computed at
    once, as attention whose weights decay with the distance.
    """
    total = log_decay.cumsum(0)  # [tokens, heads]
    count = len(x)
    square = torch.ones(count, count, dtype=torch.bool, device=x.device)
    # From token s (second) to token t (first): summed, since differences of `total` would round badly.
    steps = log_decay[:, None].expand(count, count, -1).masked_fill(square.triu()[..., None], 0.0)
    decay = steps.cumsum(0).masked_fill(square.triu(1)[..., None], -torch.inf).exp()
    scores = torch.einsum("thn,shn->tsh", c, b) * decay
    y = torch.einsum("tsh,shd->thd", scores, x)
    y = y + torch.einsum("thn,hdn->thd", c, state) * total.exp()[..., None]
    rest = (total[-1] - total).exp()
    added = torch.einsum("shd,shn->hdn", x * rest[..., None], b)
    return y, state * total[-1].exp()[:, None, None] + added


def _table(state: LayerState, batch: StepBatch, span: Span) -> Tensor:
    return batch.table_of(state)[batch.token_slots[span.first]]


def _pieces(span: Span, block_size: int) -> Iterator[tuple[int, int]]:
    """The positions [begin, end) of a row, block by block."""
    begin, stop = span.start, span.context
    while begin < stop:
        end = min(stop, (begin // block_size + 1) * block_size)
        yield begin, end
        begin = end


def _float(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.float()
