"""The Medusa kernel on a real GPU, against torch."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize(("size", "vocab"), [(576, 49152), (200, 1000)])
def test_the_kernel_returns_the_likeliest_tokens(rows: int, size: int, vocab: int) -> None:
    from windlass.kernels.triton.medusa import most_likely

    torch.manual_seed(0)
    kind = {"device": "cuda", "dtype": torch.bfloat16}
    hidden = torch.randn((2 * rows, size), **kind)
    positions = torch.randperm(2 * rows, device="cuda", dtype=torch.int32)[:rows]
    blocks = [(torch.randn((3, size, size), **kind) / size, torch.randn((3, 1, size), **kind))]
    matrices = torch.randn((3, vocab, size), **kind)
    offsets = torch.arange(vocab, device="cuda")
    x = hidden[positions.long()].float().expand(3, rows, size)
    for matrix, bias in blocks:
        x = x + silu(torch.baddbmm(bias.float(), x, matrix.float().mT))
    logits = torch.bmm(x, matrices.float().mT)
    got = most_likely(hidden, positions, blocks, matrices, offsets, 4)
    assert (got[:, 3] == 0).all()
    chosen = (got[:, :3].T // 2).long()  # each token is twice its row
    best = logits.amax(-1)
    own = logits.gather(-1, chosen[..., None])[..., 0]
    assert ((best - own) <= 0.02 * best.abs()).all()
