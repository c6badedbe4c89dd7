"""Products with quantised weights on a real GPU, against what their forms mean."""

from __future__ import annotations

import pytest
import torch

from windlass.kernels import reference
from windlass.kernels.linears import Linears
from windlass.kernels.packed import Float8, Int4Group, Int8Group, pack_nibbles
from windlass.kernels.plain_linear import PlainLinear
from windlass.kernels.rounded import Inputs, Rounded, Rounding, Scaled
from windlass.quant.rounding import SCHEMES, quantise

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda")
E4M3 = (
    0.03  # what rounding to three bits after the point costs a sum of normal numbers, and a little
)
ROWS = [1, 7, 8, 9, 33, 64, 65, 256, 257]


def close(got: torch.Tensor, want: torch.Tensor, bound: float) -> None:
    assert got.shape == want.shape
    error = (got.float() - want.float()).norm() / want.float().norm()
    assert error < bound, float(error)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("outputs", "size", "group"), [(960, 576, 64), (4096, 14336, 128)])
@pytest.mark.parametrize(("bits", "activation"), [(4, "none"), (4, "token"), (8, "none")])
@pytest.mark.parametrize("ordered", [False, True])
def test_groups_of_whole_numbers(
    rows: int, outputs: int, size: int, group: int, bits: int, activation, ordered: bool
) -> None:
    from windlass.kernels.triton.grouped_linear import GroupedLinear

    scales = (torch.rand(outputs, size // group, device=CUDA) + 0.5).half()
    order = torch.randperm(size, device=CUDA) if ordered else None
    form: Int4Group | Int8Group
    if bits == 4:
        codes = pack_nibbles(torch.randint(0, 16, (outputs, size), device=CUDA))
        form = Int4Group(codes, scales, -8 * scales, order, activation)
    else:
        whole = torch.randint(-127, 128, (outputs, size), device=CUDA, dtype=torch.int8)
        form = Int8Group(whole, scales / 16, perm=order)
    kernel = GroupedLinear()
    assert kernel.refuse(form, CUDA, torch.bfloat16) is None
    product = kernel.prepare(form)
    x = torch.randn(rows, size, device=CUDA).bfloat16()
    want = x.double() @ form.dequantise().double().T
    bound = 2**-8 if activation == "none" or rows <= 16 else 1.5 * E4M3
    for _ in "ab":
        close(product.apply(x), want, bound)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("outputs", "size"), [(960, 576), (4096, 14336)])
@pytest.mark.parametrize("per_output", [False, True])
def test_fp8(rows: int, outputs: int, size: int, per_output: bool) -> None:
    from windlass.kernels.triton.fp8_linear import Fp8Linear
    from windlass.kernels.triton.rounding import round_rows

    codes = torch.randn(outputs, size, device=CUDA).to(torch.float8_e4m3fn)
    scales = torch.rand(outputs if per_output else 1, 1, device=CUDA) + 0.5
    form = Float8(codes, scales, activation="token")
    kernel = Fp8Linear()
    assert kernel.refuse(form, CUDA, torch.bfloat16) is None
    x = torch.randn(rows, size, device=CUDA).bfloat16()
    product = kernel.prepare(form)
    exact = x.double() @ form.dequantise().double().T
    want = PlainLinear().prepare(form).apply(x)
    for _ in "ab":
        close(product.apply(x), exact, E4M3)
        close(product.apply(round_rows(x)), want, 2**-6)


def fp8_form(outputs: int, size: int) -> Float8:
    codes = torch.randn(outputs, size, device=CUDA).to(torch.float8_e4m3fn)
    return Float8(codes, torch.rand(outputs, 1, device=CUDA) * 0.02 + 0.01, activation="token")


def randn(rows: int, size: int) -> torch.Tensor:
    return torch.randn(rows, size, device=CUDA).bfloat16()


def values(x: Inputs) -> torch.Tensor:
    """What rounded inputs stand for."""
    if isinstance(x, Rounded):
        return x.codes.float() * x.scales
    assert isinstance(x, torch.Tensor)
    return x


class Norm:
    """A norm before a product that wants its inputs rounded."""

    eps = 1e-5

    def __init__(self, size: int, rounds: bool) -> None:
        self.weight = torch.randn(size, device=CUDA).bfloat16()
        self.rounds = rounds

    def rounding(self, num_rows: int) -> Rounding | None:
        del num_rows
        return Rounding("rows") if self.rounds else None

    def add(self, x: torch.Tensor | Scaled, residual: torch.Tensor | None) -> tuple:
        from windlass.kernels.triton.norm import add_rms_norm

        return add_rms_norm(x, residual, self.weight, self.eps, self.rounding(len(residual)))


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 8, 9, 16, 17, 300])
@pytest.mark.parametrize(("outputs", "size"), [(960, 576), (4096, 1536)])
def test_fp8_and_the_norm_behind_it(rows: int, outputs: int, size: int, rounds: bool) -> None:
    from windlass.kernels.triton.fp8_linear import Fp8Linear

    form, norm = fp8_form(outputs, size), Norm(outputs, rounds)
    x = torch.randn(rows, size, device=CUDA).bfloat16()
    before = torch.randn(rows, outputs, device=CUDA).bfloat16()
    plain = (x.double() @ form.dequantise().double().T).bfloat16()
    want, want_residual = reference.add_rms_norm(plain, before.clone(), norm.weight, norm.eps)
    product = Fp8Linear().prepare(form)
    for _ in "ab":
        got, residual = product.then(x, before.clone(), norm)
        assert isinstance(got, Rounded) == rounds
        close(values(got), want, 2 * E4M3 if rounds else E4M3)
        close(residual, want_residual, E4M3)


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("rows", [1, 16, 17, 300])
@pytest.mark.parametrize(("width", "size"), [(480, 576), (1536, 1024)])
def test_fp8_gate(rows: int, width: int, size: int, rounded: bool) -> None:
    from windlass.kernels.triton.fp8_linear import Fp8Linear
    from windlass.kernels.triton.norm import silu_mul
    from windlass.kernels.triton.rounding import round_rows

    form = fp8_form(2 * width, size)
    x = torch.randn(rows, size, device=CUDA).bfloat16()
    want = reference.silu_mul((x.double() @ form.dequantise().double().T).bfloat16())
    product = Fp8Linear().prepare(form)
    got = product.gated(round_rows(x) if rounded else x, silu_mul)
    close(values(got), want, 2 * E4M3)
    if rows > 16:
        codes = product.gated(x, lambda y: silu_mul(y, rounding=Rounding("rows")))
        assert isinstance(codes, Rounded)
        close(values(codes), want, 3 * E4M3)


@pytest.mark.parametrize("activation", ["none", "token"])
@pytest.mark.parametrize("rows", [1, 16, 17, 64, 65, 300])
def test_int4_between_a_norm_and_a_gate(rows: int, activation) -> None:
    """Inputs come rounded where the product asks for it."""
    from windlass.kernels.triton.grouped_linear import GroupedLinear
    from windlass.kernels.triton.norm import rms_norm, silu_mul

    outputs, size, group = 1536, 576, 64
    codes = pack_nibbles(torch.randint(0, 16, (outputs, size), device=CUDA))
    scales = (torch.rand(outputs, size // group, device=CUDA) + 0.5).half() / 64
    form = Int4Group(codes, scales, -8 * scales, None, activation)
    product = GroupedLinear().prepare(form)
    x, gains = randn(rows, size), torch.ones(size, device=CUDA).bfloat16()
    plain = rms_norm(x, gains, 1e-5)
    want = reference.silu_mul((plain.double() @ form.dequantise().double().T).bfloat16())
    normed = rms_norm(x, gains, 1e-5, product.rounding(rows))
    bound = 2**-7 if activation == "none" or rows <= 16 else 2 * E4M3
    close(values(product.gated(normed, silu_mul)), want, bound)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("outputs", "size"), [(960, 576), (4096, 14336)])
@pytest.mark.parametrize("name", ["w8a8", "fp8-block", "nf4"])
def test_other_forms(name: str, rows: int, outputs: int, size: int) -> None:
    """As the plain version; inputs of e4m3 may be rounded to a neighbour."""
    form = quantise(torch.randn(outputs, size, device=CUDA), SCHEMES[name])
    held = Linears(CUDA, torch.bfloat16).hold(form)
    if name != "nf4" or size % 128 == 0:
        assert held.kernel.startswith("triton")
    x = randn(rows, size)
    want = PlainLinear().prepare(form).apply(x)
    for _ in "ab":
        close(held.prepared.apply(x), want, 2**-7)
