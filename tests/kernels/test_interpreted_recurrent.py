"""The kernels of recurrent layers in Triton's interpreter, against the definition.

The cases run in a separate process, like those of test_interpreted.py.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.kernels.conftest import Check
from tests.kernels.recurrences import SIZE, DeltaRule, MambaScan, ShortConv, heads_of
from tests.kernels.test_interpreted import INTERPRETED, inside, make_batch
from windlass.kernels import reference
from windlass.kernels.attention_options import AttentionOptions, RopeOptions
from windlass.kernels.batch import Heads, LayerKV

pytest.importorskip("triton")

LAYERS = {
    "mamba, small": MambaScan(heads_of(4, 16, 2)),
    "mamba, 48 features": MambaScan(heads_of(4, 48, 2)),
    "mamba, large state": MambaScan(replace(heads_of(2, 16, 1), state_size=256)),
    "mamba, large": MambaScan(heads_of(2, 64, 1, conv_size=2)),
    "delta, small": DeltaRule(heads_of(4, 16, 2)),
    "delta, tiled": DeltaRule(heads_of(6, 64, 2, tiled=True)),
    "short conv": ShortConv(72),
    "short conv without bias": ShortConv(64, conv_size=2, conv_bias=False),
}


def kernels() -> SimpleNamespace:
    from windlass.kernels.triton import delta, mamba, recurrent

    return SimpleNamespace(
        causal_conv=recurrent.causal_conv,
        selective_scan=mamba.selective_scan,
        delta_rule=delta.delta_rule,
        short_conv=recurrent.short_conv,
    )


@pytest.mark.skipif(INTERPRETED, reason="starts the interpreter's process")
def test_kernels_in_the_interpreter(interpreted: Check) -> None:
    interpreted(__file__)


@inside
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("cuts", [[0, 22], [0, 1, 2, 3, 22], [0, 4, 8, 9, 19, 22], [0, 7, 15, 22]])
def test_any_cut_gives_the_recurrence(cuts: list[int], kind: str, batch_invariant: bool) -> None:
    layer = LAYERS[kind]
    want = [layer.by_definition(row) for row in layer.rows(22, 9)]
    got = layer.in_steps(cuts, 22, 9, kernels=kernels(), batch_invariant=batch_invariant)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@inside
@pytest.mark.parametrize("kind", ["mamba, small", "delta, small", "short conv"])
def test_every_full_block_has_the_state_at_its_end(kind: str) -> None:
    layer = LAYERS[kind]
    (row,) = layer.rows(11)
    want = layer.by_definition(row)
    for end in (SIZE, 2 * SIZE):
        cache = layer.cache(48)
        layer.step([(0, 0, row)], cache, layer=0, kernels=kernels())
        got, _ = layer.step([(0, end, row[end:])], cache, layer=0, kernels=kernels())
        torch.testing.assert_close(got, want[end:], atol=1e-4, rtol=1e-4)


@inside
def test_attention_pages_may_lie_apart() -> None:
    """Keys and values are parts of larger blocks, as beside states."""
    from windlass.kernels.triton.attention import attend, attention
    from windlass.kernels.triton.rope import rope_write

    heads = Heads(6, 2, 24)
    for rows, width in (([(60, 1), (5, 1)], 2), ([(60, 1), (5, 20)], 21)):
        kv, batch = make_batch(heads, rows)
        pages = torch.zeros(len(kv.keys), 3, *kv.keys.shape[1:])
        pages[:, 1], pages[:, 2] = kv.keys, kv.values
        apart = LayerKV(keys=pages[:, 1], values=pages[:, 2])
        assert apart.stride == 3 * kv.stride
        qkv, options = torch.randn(width, 10 * 24), AttentionOptions(0.2)
        want = reference.rope_write(qkv, heads, RopeOptions(None), kv, batch)
        want = reference.attention(want, kv, batch, options)
        got = attend(qkv, heads, RopeOptions(None), apart, batch, options)
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-3)
        queries = rope_write(qkv, heads, RopeOptions(None), apart, batch)
        got = attention(queries, apart, batch, options)
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(apart.keys, kv.keys)
        assert not pages[:, 0].any()
