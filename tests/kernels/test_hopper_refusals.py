"""What the attention kernel of Hopper refuses, and why."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from windlass.kernels.attention_options import AttentionOptions
from windlass.kernels.triton import hopper_attention
from windlass.kernels.triton.int4_hopper import Int4HopperGemm


class OnGpu(torch.Tensor):
    """Queries that say they are on a GPU, which this machine need not have."""

    is_cuda = True


@pytest.mark.parametrize(
    ("dim", "dtype", "value_dim", "rope", "soft_cap", "reason"),
    [
        (128, torch.float32, 128, 0, None, "16-bit"),
        (96, torch.bfloat16, 96, 0, None, "heads of 96"),
        (128, torch.bfloat16, 64, 0, None, "heads of 128"),
        (128, torch.bfloat16, 128, 0, 30.0, "soft cap"),
    ],
)
def test_refusals(
    dim: int, dtype: torch.dtype, value_dim: int, rope: int, soft_cap: float | None, reason: str
) -> None:
    options = AttentionOptions(1.0, soft_cap=soft_cap)
    queries = torch.empty(4, 2, dim, dtype=dtype)
    assert "CUDA" in str(hopper_attention.refuse(queries, value_dim, rope, options))
    on_gpu = queries.as_subclass(OnGpu)
    assert reason in str(hopper_attention.refuse(on_gpu, value_dim, rope, options))


@pytest.mark.parametrize(
    ("num_in", "num_out", "half", "reason"),
    [
        (4100, 4096, 128, "4100 inputs"),
        (4096, 4096, 32, "these have 32"),
        (4096, 100, 64, "100 outputs"),
        (4096, 100, 64, "groups of 64"),
    ],
)
def test_int4_refusals(num_in: int, num_out: int, half: int, reason: str) -> None:
    cuda = torch.device("cuda")
    assert reason in str(Int4HopperGemm.refuse(cuda, num_in, num_out, half))
    assert "CUDA" in str(Int4HopperGemm.refuse(torch.device("cpu"), num_in, num_out, half))
