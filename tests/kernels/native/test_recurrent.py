"""Native recurrent layers against the definition, and the same bits for any cut of a row."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from tests.kernels.recurrences import KINDS, PLAIN, DeltaRule, heads_of
from windlass.kernels.native.compiler import find_compilers
from windlass.kernels.native.ops import NativeOps

_COMPILERS, _ = find_compilers()
pytestmark = pytest.mark.skipif(not _COMPILERS, reason="no C++ compiler")
LAYERS = {**KINDS, "long": DeltaRule(heads_of(2, 64, 1))}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("cuts", [[0, 22], [0, 1, 2, 3, 22], [0, 4, 8, 9, 19, 22], [*range(23)]])
def test_any_cut_gives_the_same_bits(ops: NativeOps, cuts: list[int], kind: str) -> None:
    layer = LAYERS[kind]
    row, other = layer.rows(22, 3)
    want, _ = layer.step([(0, 0, row)], layer.cache(48), layer=0, kernels=ops, work=None)
    torch.testing.assert_close(want, layer.by_definition(row), atol=1e-5, rtol=1e-4)
    cache, got = layer.cache(48), []
    for start, stop in pairwise(cuts):
        rows = [(1, 0, other), (0, start, row[start:stop])]
        out, _ = layer.step(rows, cache, layer=0, kernels=ops, work=None)
        got.append(out[len(other) :])
    assert torch.equal(torch.cat(got), want)


@pytest.mark.parametrize("kind", LAYERS)
def test_states_are_those_of_the_reference(ops: NativeOps, kind: str) -> None:
    layer, found = LAYERS[kind], []
    rows = [(slot, 0, row) for slot, row in enumerate(layer.rows(22, 9))]
    for kernels in (ops, PLAIN):
        cache = layer.cache(48)
        cache._owned[0].zero_()
        layer.step(rows, cache, layer=2, kernels=kernels, work=None)
        found.append(cache.layers[2].pages)
    assert int((found[1] != 0).any(1).sum()) == 6 + 3
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-4)
