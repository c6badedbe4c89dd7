"""The Mamba-2 kernels in Triton's interpreter, against the definition.

The cases run in a separate process, like those of test_interpreted.py.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from tests.kernels.conftest import Check
from tests.kernels.test_interpreted import INTERPRETED, inside, make_batch
from tests.kernels.test_mamba import (
    SIZE,
    by_definition,
    make_cache,
    random_rows,
    step,
    weights_of,
)
from windlass.core.mamba import MambaHeads
from windlass.kernels import reference
from windlass.kernels.attention_options import AttentionOptions, RopeOptions
from windlass.kernels.batch import Heads, LayerKV

pytest.importorskip("triton")

HEADS = MambaHeads(num_heads=4, dim=16, num_groups=2, state_size=16, conv_size=4)
LARGE = MambaHeads(num_heads=2, dim=64, num_groups=1, state_size=16, conv_size=2)


@pytest.mark.skipif(INTERPRETED, reason="starts the interpreter's process")
def test_kernels_in_the_interpreter(interpreted: Check) -> None:
    interpreted(__file__)


@inside
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("heads", [HEADS, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("cuts", [[0, 22], [0, 1, 2, 3, 22], [0, 4, 8, 9, 19, 22], [0, 7, 15, 22]])
def test_any_cut_gives_the_recurrence(
    cuts: list[int], heads: MambaHeads, batch_invariant: bool
) -> None:
    from windlass.kernels.triton import mamba

    rows, cache = random_rows(22, 9, heads=heads), make_cache(heads, 48)
    want = [by_definition(row, heads, weights_of(heads)) for row in rows]
    got: list[list[torch.Tensor]] = [[], []]
    for start, stop in pairwise(cuts):
        parts = [
            (slot, start, row[start:stop]) for slot, row in enumerate(rows) if len(row) > start
        ]
        out, batch = step(
            parts, cache, layer=2, kernels=mamba, heads=heads, batch_invariant=batch_invariant
        )
        for span, (slot, _, _) in zip(batch.spans, parts, strict=True):
            got[slot].append(out[span.first : span.first + span.count])
    for own, expected in zip(got, want, strict=True):
        torch.testing.assert_close(torch.cat(own), expected, atol=1e-4, rtol=1e-4)


@inside
def test_every_full_block_has_the_state_at_its_end() -> None:
    from windlass.kernels.triton import mamba

    (row,) = random_rows(11, heads=HEADS)
    want = by_definition(row, HEADS, weights_of(HEADS))
    for end in (SIZE, 2 * SIZE):
        cache = make_cache(HEADS, 48)
        step([(0, 0, row)], cache, layer=0, kernels=mamba, heads=HEADS)
        got, _ = step([(0, end, row[end:])], cache, layer=0, kernels=mamba, heads=HEADS)
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
