"""Products with quantised weights on a real GPU, against what their forms mean."""

from __future__ import annotations

import pytest
import torch

from windlass.kernels.packed import Float8, Int4Group, Int8Group, pack_nibbles
from windlass.kernels.plain_linear import PlainLinear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda")
ROWS = [1, 7, 8, 9, 33, 64, 65, 256, 257]


def close(got: torch.Tensor, want: torch.Tensor, bound: float) -> None:
    assert got.shape == want.shape
    error = (got.float() - want.float()).norm() / want.float().norm()
    assert error < bound, float(error)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("outputs", "size", "group"), [(960, 576, 64), (4096, 14336, 128)])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("ordered", [False, True])
def test_groups_of_whole_numbers(
    rows: int, outputs: int, size: int, group: int, bits: int, ordered: bool
) -> None:
    from windlass.kernels.triton.grouped_linear import GroupedLinear

    scales = (torch.rand(outputs, size // group, device=CUDA) + 0.5).half()
    order = torch.randperm(size, device=CUDA) if ordered else None
    form: Int4Group | Int8Group
    if bits == 4:
        codes = pack_nibbles(torch.randint(0, 16, (outputs, size), device=CUDA))
        form = Int4Group(codes, scales, -8 * scales, order)
    else:
        whole = torch.randint(-127, 128, (outputs, size), device=CUDA, dtype=torch.int8)
        form = Int8Group(whole, scales / 16, order=order)
    kernel = GroupedLinear()
    assert kernel.refuse(form, CUDA, torch.bfloat16) is None
    product = kernel.prepare(form)
    x = torch.randn(rows, size, device=CUDA).bfloat16()
    want = x.double() @ form.dequantise().double().T
    for _ in "ab":
        close(product.apply(x), want, 2**-8)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("outputs", "size"), [(960, 576), (4096, 14336)])
@pytest.mark.parametrize("per_output", [False, True])
def test_fp8(rows: int, outputs: int, size: int, per_output: bool) -> None:
    from windlass.kernels.triton.fp8_linear import Fp8Linear

    codes = torch.randn(outputs, size, device=CUDA).to(torch.float8_e4m3fn)
    scales = torch.rand(outputs if per_output else 1, 1, device=CUDA) + 0.5
    form = Float8(codes, scales, activation="token")
    kernel = Fp8Linear()
    assert kernel.refuse(form, CUDA, torch.bfloat16) is None
    x = torch.randn(rows, size, device=CUDA).bfloat16()
    want = PlainLinear().prepare(form).apply(x)
    product = kernel.prepare(form)
    for _ in "ab":
        close(product.apply(x), want, 2**-6)
