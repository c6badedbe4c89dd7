"""The states of recurrent layers in pages, and their causal convolutions.

A layer's state after a token is its recurrent state and the last inputs of its convolution, in float32.
A row reads the state at its start from the block of the token before. It writes the state after its last
token to the block of that token, and the state at the end of every block that it fills: a prefix hit and
the next step start from there.

    positions       0 ... 15 | 16 ... 31 | 32 ... 36     one row, blocks of 16
    states written        ^            ^           ^
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from windlass.core.recurrent import RecurrentHeads
from windlass.kernels.batch import LayerState, Span, StepBatch

_CHUNK = 64  # tokens whose outputs are computed together

# From some tokens and the state before them: their outputs and the state after them.
Advance = Callable[[slice, Tensor], tuple[Tensor, Tensor]]


def recurrent_pages(state: LayerState, heads: RecurrentHeads) -> Tensor:
    """The recurrent states: [blocks, heads, dim, state_size]."""
    shape = (heads.num_heads, heads.dim, heads.state_size)
    return state.pages[:, : heads.num_recurrent].unflatten(1, shape)


def conv_pages(state: LayerState, heads: RecurrentHeads) -> Tensor:
    """The convolution's last inputs: [blocks, channels, conv_size - 1]."""
    start = heads.num_recurrent
    shape = (heads.channels, heads.conv_size - 1)
    return state.pages[:, start : start + heads.num_conv].unflatten(1, shape)


def causal_conv(
    projected: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    heads: RecurrentHeads,
    state: LayerState,
    batch: StepBatch,
) -> Tensor:
    """silu(causal convolution) of the columns of `projected` after the gate: [tokens, channels].

    `weight` is [channels, conv_size]. Writes the convolution's states.
    """
    inputs = projected[:, heads.inner : heads.inner + heads.channels].float()
    mixed = _convolved(inputs, weight, bias, heads, state, batch)
    return functional.silu(mixed).to(projected.dtype)


def short_conv(
    projected: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    heads: RecurrentHeads,
    state: LayerState,
    batch: StepBatch,
) -> Tensor:
    """c * causal convolution of b * x, for the columns b, c and x of `projected`: [tokens, channels].

    `weight` is [channels, conv_size]. Writes the convolution's states.
    """
    b, c, x = projected.float().chunk(3, dim=-1)
    return (c * _convolved(b * x, weight, bias, heads, state, batch)).to(projected.dtype)


def _convolved(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    heads: RecurrentHeads,
    state: LayerState,
    batch: StepBatch,
) -> Tensor:
    """The causal convolution of the inputs, all in float32; writes its states."""
    pages, before = conv_pages(state, heads), heads.conv_size - 1
    out = torch.empty_like(inputs, memory_format=torch.contiguous_format)
    for span in batch.spans:
        table = _table(state, batch, span)
        known = pages.new_zeros(heads.channels, before)
        if span.start:
            known = pages[table[(span.start - 1) // state.block_size]]
        own = inputs[span.first : span.first + span.count]
        line = torch.cat([known, own.T], dim=1)
        mixed = functional.conv1d(
            line[None], weight.float()[:, None], _float(bias), groups=heads.channels
        )
        out[span.first : span.first + span.count] = mixed[0].T
        for begin, end in _pieces(span, state.block_size):
            pages[table[begin // state.block_size]] = line[:, end - span.start :][:, :before]
    return out


def follow(
    out: Tensor, advance: Advance, heads: RecurrentHeads, state: LayerState, batch: StepBatch
) -> Tensor:
    """Compute the rows of `out`, and write the recurrent states.

    `advance` gets tokens of one row and of one block, and the states [heads, dim, state_size].
    """
    pages = recurrent_pages(state, heads)
    # One token at a time, sums do not depend on how a prompt is cut into steps.
    chunk = 1 if batch.batch_invariant else _CHUNK
    for span in batch.spans:
        table = _table(state, batch, span)
        current = torch.zeros_like(pages[0])
        if span.start:
            current = pages[table[(span.start - 1) // state.block_size]]
        for begin, end in _pieces(span, state.block_size):
            for at in range(begin, end, chunk):
                first = span.first + at - span.start
                tokens = slice(first, first + min(chunk, end - at))
                out[tokens], current = advance(tokens, current)
            pages[table[begin // state.block_size]] = current
    return out


def per_head(x: Tensor, heads: RecurrentHeads) -> Tensor:
    """The keys or queries of each head: [tokens, heads, state_size], from [tokens, group_features]."""
    x = x.unflatten(1, (heads.num_groups, heads.state_size))
    shared = heads.num_heads // heads.num_groups
    return x.repeat(1, shared, 1) if heads.tiled else x.repeat_interleave(shared, 1)


def decays(log_decay: Tensor) -> Tensor:
    """The decay from token s (second axis) to token t (first): [tokens, tokens, heads], 0 for s > t.

    Summed from each s on, since differences of sums from the first token on would round badly.
    """
    count = len(log_decay)
    square = torch.ones(count, count, dtype=torch.bool, device=log_decay.device)
    steps = log_decay[:, None].expand(count, count, -1).masked_fill(square.triu()[..., None], 0.0)
    return steps.cumsum(0).masked_fill(square.triu(1)[..., None], -torch.inf).exp()


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
