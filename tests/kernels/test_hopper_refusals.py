"""What the attention kernel of Hopper refuses, and why."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from windlass.kernels.attention_options import AttentionOptions
from windlass.kernels.triton import hopper_attention
from windlass.kernels.triton.int4_many import Int4ManyGemm


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


def test_int4_of_many_rows_needs_aligned_outputs() -> None:
    assert Int4ManyGemm.refuse(4096) is None
    assert "100" in str(Int4ManyGemm.refuse(100))
