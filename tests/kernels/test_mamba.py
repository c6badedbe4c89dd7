"""Mamba-2 kernels: the recurrence by its definition, states in pages, mixed batches."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.nn import functional

from windlass.core.kv_layout import KVGroup, KVLayout
from windlass.core.mamba import MambaHeads
from windlass.kernels import mamba
from windlass.kernels.batch import (
    AttentionWork,
    KVCache,
    LayerKV,
    Span,
    StepBatch,
    attention_layout,
)

CPU = torch.device("cpu")
HEADS = MambaHeads(num_heads=4, dim=8, num_groups=2, state_size=16, conv_size=4)
SIZE = 4
Weights = tuple[torch.Tensor, torch.Tensor, mamba.ScanWeights]


def weights_of(heads: MambaHeads) -> Weights:
    torch.manual_seed(1)
    conv = torch.randn(heads.channels, heads.conv_size), torch.randn(heads.channels)
    decay = -torch.rand(heads.num_heads) - 0.1
    decay[0] = 0.05  # a state may also grow
    return *conv, mamba.ScanWeights(
        decay=decay,
        skip=torch.randn(heads.num_heads),
        dt_bias=torch.randn(heads.num_heads),
    )


def make_cache(heads: MambaHeads, num_blocks: int) -> KVCache:
    """Two layers with states around one with attention."""
    layout = attention_layout(
        (None, None, None),
        num_kv_heads=2,
        dim=8,
        block_size=SIZE,
        dtype=torch.float16,
        states=dict.fromkeys((0, 2), heads.num_values),
    )
    cache = KVCache(layout, num_blocks, torch.float16, CPU)
    cache._owned[0].fill_(0x7F)  # NaN: no kernel reads a state that was not written
    return cache


def by_definition(projected: torch.Tensor, heads: MambaHeads, weights: Weights) -> torch.Tensor:
    """One row from its first token on, token by token."""
    conv, bias, scan = weights
    gate, inputs, dt = projected.split([heads.inner, heads.channels, heads.num_heads], dim=-1)
    padded = functional.pad(inputs, (0, 0, heads.conv_size - 1, 0))
    dt = functional.softplus(dt + scan.dt_bias)
    state = torch.zeros(heads.num_heads, heads.dim, heads.state_size)
    shared, out = heads.num_heads // heads.num_groups, []
    for t in range(len(projected)):
        mixed = (padded[t : t + heads.conv_size] * conv.T).sum(0) + bias
        x, b, c = functional.silu(mixed).split(
            [heads.inner, heads.group_features, heads.group_features]
        )
        x = x.view(heads.num_heads, heads.dim)
        b, c = (each.view(heads.num_groups, -1).repeat_interleave(shared, 0) for each in (b, c))
        decay = torch.exp(dt[t] * scan.decay)
        state = state * decay[:, None, None] + (dt[t, :, None] * x)[..., None] * b[:, None]
        y = (state * c[:, None]).sum(-1) + scan.skip[:, None] * x
        out.append(y.flatten() * functional.silu(gate[t]))
    return torch.stack(out)


def step(
    rows: list[tuple[int, int, torch.Tensor]],
    cache: KVCache,
    layer: int,
    kernels: Any = mamba,
    heads: MambaHeads = HEADS,
    **options: Any,
) -> tuple[torch.Tensor, StepBatch]:
    """Compute rows of (slot, first position, projected tokens) in one batch."""
    spans, positions, slots = [], [], []
    for slot, start, projected in rows:
        spans.append(Span(len(positions), len(projected), start))
        positions += range(start, start + len(projected))
        slots += [slot] * len(projected)
    if kernels is not mamba and "work" not in options:
        options["work"] = work_of(rows, spans, options.get("batch_invariant", False))
    tables = torch.arange(2 * 3 * 8, dtype=torch.int32).view(3, 2, 8).transpose(0, 1).contiguous()
    batch = StepBatch(
        positions=torch.tensor(positions, dtype=torch.int32),
        token_slots=torch.tensor(slots, dtype=torch.int32),
        tables=tables,
        spans=spans,
        kv=cache.layers,
        **options,
    )
    conv, bias, scan = weights_of(heads)
    projected = torch.cat([each for _, _, each in rows])
    state = batch.state_of(layer)
    mixed = kernels.causal_conv(projected, conv, bias, heads, state, batch)
    return kernels.selective_scan(projected, mixed, scan, heads, state, batch), batch


def work_of(
    rows: list[tuple[int, int, torch.Tensor]], spans: list[Span], batch_invariant: bool
) -> AttentionWork:
    """Tiles of 3 tokens, in any order, and one of padding."""
    singles = [span.first for span in spans if span.count == 1 and not batch_invariant]
    tiles = [
        (span.first + at, min(3, span.count - at), slot, span.start + at, span.start)
        for span, (slot, _, _) in zip(spans, rows, strict=True)
        if span.count > 1 or batch_invariant
        for at in range(0, span.count, 3)
    ]
    return AttentionWork(
        singles=torch.tensor(singles, dtype=torch.int32),
        tiles=torch.tensor([*tiles[::-1], (0, 0, 0, 0, 0)], dtype=torch.int32),
        splits=1,
        counters=torch.zeros(1, dtype=torch.int32),
    )


def random_rows(*counts: int, heads: MambaHeads = HEADS) -> list[torch.Tensor]:
    torch.manual_seed(2)
    width = heads.inner + heads.channels + heads.num_heads
    return [torch.randn(count, width) for count in counts]


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("cuts", [[0, 22], [0, 1, 2, 3, 22], [0, 4, 8, 9, 19, 22], [0, 7, 15, 22]])
def test_any_cut_gives_the_recurrence(cuts: list[int], batch_invariant: bool) -> None:
    """Two rows of different lengths, cut into steps at and between the ends of blocks."""
    rows, cache = random_rows(22, 9), make_cache(HEADS, 48)
    want = [by_definition(row, HEADS, weights_of(HEADS)) for row in rows]
    got: list[list[torch.Tensor]] = [[], []]
    for start, stop in pairwise(cuts):
        parts = [
            (slot, start, row[start:stop]) for slot, row in enumerate(rows) if len(row) > start
        ]
        out, batch = step(parts, cache, layer=2, batch_invariant=batch_invariant)
        for span, (slot, _, _) in zip(batch.spans, parts, strict=True):
            got[slot].append(out[span.first : span.first + span.count])
    for own, expected in zip(got, want, strict=True):
        torch.testing.assert_close(torch.cat(own), expected, atol=1e-5, rtol=1e-4)


def test_every_full_block_has_the_state_at_its_end() -> None:
    """Another row continues from any of them, as after a prefix hit."""
    (row,) = random_rows(22)
    want = by_definition(row, HEADS, weights_of(HEADS))
    for end in (4, 8, 12, 16, 20):
        cache = make_cache(HEADS, 48)
        step([(0, 0, row)], cache, layer=0)
        got, _ = step([(0, end, row[end:])], cache, layer=0)
        torch.testing.assert_close(got, want[end:], atol=1e-5, rtol=1e-4)


def test_pages_of_all_kinds_are_parts_of_the_same_blocks() -> None:
    cache = make_cache(HEADS, 5)
    cache._owned[0].zero_()
    first, kv, last = cache.layers
    assert isinstance(kv, LayerKV)
    assert kv.keys.stride(0) * 2 == cache._owned[0].shape[1]
    kv.values[3] = 2.0
    cache.copy([(3, 1)])
    assert bool((kv.values[1] == 2.0).all())
    assert not kv.values[2].any()
    for state in (first, last):
        state.pages[4] = 1.0
        cache.copy([(4, 0)])
        assert bool((state.pages[0] == 1.0).all())
    assert cache.num_bytes == cache._owned[0].numel()
    assert cache.pages is None


def test_blocks_hold_whole_vectors_and_aligned_states() -> None:
    group = KVGroup(kind="full", layers=(0,), page=(2, 1, SIZE, 24), item_bytes=2)
    layout = attention_layout(
        (None, None),
        num_kv_heads=1,
        dim=24,
        block_size=SIZE,
        dtype=torch.float16,
        states={1: 1001},
    )
    assert KVLayout.of([group], SIZE).block_bytes < layout.block_bytes
    assert layout.block_bytes % (24 * 2) == 0
    assert layout.block_bytes % 16 == 0
