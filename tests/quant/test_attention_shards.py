"""Ranks of an attention layer: norms over all heads, and the rows of sinks and norm weights."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.quant.ranks import CPU, Group, in_threads, thread_groups
from windlass.kernels import reference
from windlass.kernels.batch import Heads
from windlass.kernels.ops import choose_ops
from windlass.kernels.select import Need
from windlass.layers.attention import Attention, AttentionShape
from windlass.quant.unquantised import Unquantised

HEADS = Heads(8, 2, 16)


def make(group: Group, **options: object) -> Attention:
    return Attention(
        index=0,
        shape=AttentionShape(64, HEADS, norm_eps=1e-5, **options),
        method_for=lambda _: Unquantised(torch.float32),
        ops=choose_ops(Need(CPU, torch.float32, HEADS, plain=True)),
        group=group,
        dtype=torch.float32,
    )


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_normalise_over_all_heads(size: int) -> None:
    """Four ranks hold each of the two kv heads twice."""
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, num * 16, generator=random) for num in (8, 2, 2))
    weights = [torch.randn(part.shape[1], generator=random) for part in (q, k)]
    want = reference.qk_norm(torch.cat([q, k, v], -1), *weights, 1e-5).split([128, 32, 32], -1)

    calls, owned = [], []
    for group in thread_groups(size):
        layer = make(group, qk_norm="whole")
        rows = [slice(norm.rows.start, norm.rows.stop) for norm in (layer.q_norm, layer.k_norm)]
        layer.q_norm.weight.data, layer.k_norm.weight.data = (
            weight[own] for weight, own in zip(weights, rows, strict=True)
        )
        own = [*rows, rows[1]]
        qkv = torch.cat([x[:, at] for x, at in zip((q, k, v), own, strict=True)], -1)
        calls.append(partial(layer._normalise_whole, qkv))
        owned.append(torch.cat([x[:, at] for x, at in zip(want, own, strict=True)], -1))
    for got, expected in zip(in_threads(calls), owned, strict=True):
        torch.testing.assert_close(got, expected)


def test_a_rank_holds_the_rows_of_its_heads() -> None:
    layer = make(thread_groups(2)[1], qk_norm="each_head", sinks=True)
    assert (layer.rows.start, layer.rows.stop, layer.sinks.shape) == (4, 8, (4,))
    assert (layer.q_norm.rows.start, layer.q_norm.weight.shape) == (4, (4, 16))
    assert (layer.k_norm.rows.start, layer.k_norm.weight.shape) == (1, (1, 16))
