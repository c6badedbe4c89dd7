"""Drafting with Medusa heads in Triton's interpreter, against torch."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu

from tests.kernels.conftest import Check
from tests.kernels.test_interpreted import INTERPRETED, inside

pytest.importorskip("triton")

SIZE, VOCAB, HEADS = 72, 300, 3


@pytest.mark.skipif(INTERPRETED, reason="starts the interpreter's process")
def test_kernels_in_the_interpreter(interpreted: Check) -> None:
    interpreted(__file__)


@inside
@pytest.mark.parametrize("num_blocks", [1, 2])
@pytest.mark.parametrize("reduced", [False, True])
def test_drafts_are_the_most_likely_tokens(num_blocks: int, reduced: bool) -> None:
    from windlass.kernels.triton.medusa import most_likely

    torch.manual_seed(0)
    hidden, indices = torch.randn(9, SIZE), torch.tensor([8, 0, 3], dtype=torch.int32)
    blocks = [
        (torch.randn(HEADS, SIZE, SIZE) / 8, torch.randn(HEADS, 1, SIZE)) for _ in range(num_blocks)
    ]
    matrices = torch.randn(HEADS, VOCAB, SIZE)
    offsets = torch.arange(VOCAB) * 2 if reduced else None
    x = hidden[indices.long()].expand(HEADS, 3, SIZE)
    for matrix, bias in blocks:
        x = x + silu(torch.baddbmm(bias, x, matrix.mT))
    want = torch.bmm(x, matrices.mT).argmax(-1).T * (3 if reduced else 1)
    got = most_likely(hidden, indices, blocks, matrices, offsets, HEADS + 1)
    assert got[:, :HEADS].tolist() == want.tolist()
    assert got[:, HEADS].tolist() == [0, 0, 0]
    few = most_likely(hidden, indices, blocks, matrices, offsets, 2)
    assert few.tolist() == want[:, :2].tolist()


@inside
@pytest.mark.parametrize("reduced", [False, True])
def test_siblings_are_the_next_most_likely_tokens_of_other_tiles(reduced: bool) -> None:
    from windlass.kernels.triton.medusa import most_likely

    torch.manual_seed(1)
    hidden, indices = torch.randn(4, SIZE), torch.arange(4, dtype=torch.int32)
    blocks = [(torch.zeros(HEADS, SIZE, SIZE), torch.zeros(HEADS, 1, SIZE))]
    matrices = torch.randn(HEADS, VOCAB, SIZE)
    offsets = torch.arange(VOCAB) * 2 if reduced else None
    scores = hidden @ matrices[0].T
    tiles = [scores[:, first : first + 128].max(1) for first in range(0, VOCAB, 128)]
    order = torch.stack([tile.values for tile in tiles], 1).argsort(1, descending=True)
    tokens = torch.stack([tile.indices + 128 * i for i, tile in enumerate(tiles)], 1)
    want = tokens.gather(1, order) * (3 if reduced else 1)
    got = most_likely(hidden, indices, blocks, matrices, offsets, HEADS, siblings=2)
    assert got.shape == (4, HEADS + 2)
    assert got[:, [0, HEADS, HEADS + 1]].tolist() == want.tolist()
    without = most_likely(hidden, indices, blocks, matrices, offsets, HEADS)
    assert torch.equal(got[:, :HEADS], without)
