"""Recurrent layers against their definition: any cut of a row into steps, states in pages, prefix hits."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.recurrences import DELTA, KINDS, MAMBA, SIZE
from windlass.core.kv_layout import KVGroup, KVLayout
from windlass.kernels.batch import LayerKV, attention_layout

CUTS = [[0, 22], [0, 1, 2, 3, 22], [0, 4, 8, 9, 19, 22], [0, 7, 15, 22]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("cuts", CUTS)
def test_any_cut_gives_the_recurrence(cuts: list[int], batch_invariant: bool, kind: str) -> None:
    """Two rows of different lengths, cut into steps at and between the ends of blocks."""
    layer = KINDS[kind]
    want = [layer.by_definition(row) for row in layer.rows(22, 9)]
    got = layer.in_steps(cuts, 22, 9, batch_invariant=batch_invariant)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_every_full_block_has_the_state_at_its_end(kind: str) -> None:
    """Another row continues from any of them, as after a prefix hit."""
    layer = KINDS[kind]
    (row,) = layer.rows(22)
    want = layer.by_definition(row)
    for end in (4, 8, 12, 16, 20):
        cache = layer.cache(48)
        layer.step([(0, 0, row)], cache, layer=0)
        got, _ = layer.step([(0, end, row[end:])], cache, layer=0)
        torch.testing.assert_close(got, want[end:], atol=1e-5, rtol=1e-4)


def test_equal_keys_without_decay_replace_the_same_value() -> None:
    """The system of a chunk is as far from the identity as it can be: every key is the one before."""
    heads = DELTA.heads
    row = torch.zeros_like(DELTA.rows(22)[0])
    row[:, : heads.inner] = 1.0
    row[:, heads.inner : 2 * heads.inner] = torch.randn(22, heads.inner)
    row[:, 2 * heads.inner : -2 * heads.num_heads] = 3.0
    row[:, -2 * heads.num_heads :] = 20.0  # beta is 1
    row[:, -heads.num_heads :] = -60.0  # nothing decays
    cache = DELTA.cache(48)
    got, _ = DELTA.step([(0, 0, row)], cache, layer=0)
    torch.testing.assert_close(got, DELTA.by_definition(row), atol=1e-5, rtol=1e-4)


def test_pages_of_all_kinds_are_parts_of_the_same_blocks() -> None:
    cache = MAMBA.cache(5)
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
