"""Batch-invariant GEMM for many rows: every output is one sum over K, in order.

cuBLAS is faster for many rows, but splits its sums depending on the number of rows. Here a row's
result is bitwise equal in any batch, and equal to that of the skinny kernel without splits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from windlass.kernels.triton import pdl
from windlass.kernels.triton.fit import fit

_ROWS, _OUTPUTS, _BLOCK_K = 128, 128, 64
_GROUP = 8  # row tiles that share reads of the weight


@triton.jit
def wide_linear_kernel(
    x,
    weight,
    out,
    M,
    N,
    K,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[M, N] = x[M, K] @ weight[N, K].T; one persistent program per multiprocessor."""
    pdl.begin(PDL)
    row_tiles = tl.cdiv(M, ROWS)
    output_tiles = tl.cdiv(N, OUTPUTS)
    for tile in range(tl.program_id(0), row_tiles * output_tiles, tl.num_programs(0)):
        first = tile // (GROUP * output_tiles) * GROUP
        within = tile % (GROUP * output_tiles)
        height = tl.minimum(row_tiles - first, GROUP)
        # No tile reaches past the last row: TMA is slow there.
        row = tl.minimum((first + within % height) * ROWS, tl.maximum(M - ROWS, 0))
        output = within // height * OUTPUTS
        acc = tl.zeros([ROWS, OUTPUTS], dtype=tl.float32)
        for k in range(0, K, BLOCK_K):
            acc = tl.dot(x.load([row, k]), weight.load([output, k]).T, acc)
        out.store([row, output], acc.to(out.dtype))


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T for any number of rows; K must be a multiple of 8."""
    (rows, size), outputs = x.shape, weight.shape[0]
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    tiles = triton.cdiv(rows, _ROWS) * triton.cdiv(outputs, _OUTPUTS)
    multiprocessors = torch.cuda.get_device_properties(x.device).multi_processor_count
    fit(wide_linear_kernel)[(min(tiles, multiprocessors),)](
        TensorDescriptor.from_tensor(x, [_ROWS, _BLOCK_K]),
        TensorDescriptor.from_tensor(weight, [_OUTPUTS, _BLOCK_K]),
        TensorDescriptor.from_tensor(out, [_ROWS, _OUTPUTS]),
        rows,
        outputs,
        size,
        ROWS=_ROWS,
        OUTPUTS=_OUTPUTS,
        BLOCK_K=_BLOCK_K,
        GROUP=_GROUP,
        num_warps=8,
        num_stages=4,
        **pdl.options(),
    )
    return out
