"""Norms and activations that store int8 planes, in Triton's interpreter: equal to a quantisation after them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import Check
from windlass.kernels.gemm_io import InputQuant, Inputs, PlaneInputs, UnscaledOutputs
from windlass.kernels.packed import Int4Group, Int8Group, pack_nibbles
from windlass.kernels.prepared import Prepared
from windlass.layers.norm import RMSNorm

pytest.importorskip("triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
inside = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter's own process")
EPS = 1e-5
# (bits, group, inputs): one with a program's columns and more, others that blocks do not divide.
SIZES = [(4, 32, 160), (4, 64, 576), (4, 128, 1920), (4, 512, 512), (8, 32, 96), (8, 1152, 1152)]


@pytest.mark.skipif(INTERPRETED, reason="starts the interpreter's process")
def test_planes_in_the_interpreter(interpreted: Check) -> None:
    interpreted(__file__)


@pytest.fixture(autouse=True)
def filled_memory() -> Iterator[None]:
    """New tensors are full of NaN or of the largest integer."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def form_of(bits: int, group: int, size: int, outputs: int = 40) -> Int4Group | Int8Group:
    scales = torch.rand(outputs, size // group) + 0.5
    if bits == 4:
        codes = pack_nibbles(torch.randint(0, 16, (outputs, size)))
        return Int4Group(codes, scales, -8 * scales + torch.randn_like(scales))
    codes = torch.randint(-127, 128, (outputs, size), dtype=torch.int8)
    return Int8Group(codes, scales / 16)


def check(got: Inputs, plain: Tensor, wanted: InputQuant) -> None:
    """The planes are those of the 16-bit result, bit for bit."""
    from windlass.kernels.triton.quantise import quantise_blocks

    assert isinstance(got, PlaneInputs)
    want = quantise_blocks(plain, wanted.block, wanted.group)
    assert (got.shape, got.dtype) == (plain.shape, plain.dtype)
    assert not got.codes[:, plain.shape[1] :].any()
    for ours, theirs in ((got.codes, want.codes), (got.scales, want.scales), (got.sums, want.sums)):
        assert torch.equal(ours, theirs)
    rows = len(plain)
    wide = (got.codes.float().unflatten(1, (-1, wanted.block)) * got.scales.T[:, :, None]).flatten(
        1
    )
    values = (wide[:rows] + wide[rows:])[:, : plain.shape[1]]
    assert (values - plain.float()).abs().max() <= plain.float().abs().max() / 2**15


@inside
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("bits", "group", "size"), SIZES)
def test_planes_equal_those_of_the_result(rows: int, bits: int, group: int, size: int) -> None:
    from windlass.kernels.triton import norm
    from windlass.kernels.triton.grouped_linear import GroupedLinear

    gemm = GroupedLinear().prepare(form_of(bits, group, size))
    wanted = gemm.input_quant(rows)
    assert wanted is not None
    x, residual = (torch.randn(rows, size).half() for _ in "ab")
    gains = torch.randn(size).half()
    plain = norm.rms_norm(x, gains, EPS)
    assert isinstance(plain, Tensor)
    planes = norm.rms_norm(x, gains, EPS, wanted)
    check(planes, plain, wanted)
    assert torch.equal(gemm.apply(planes), gemm.apply(plain))
    # A slice of wider rows, as of the low-rank queries of MLA.
    check(norm.rms_norm(torch.cat([x, x], 1)[:, :size], gains, EPS, wanted), plain, wanted)

    plain, total = norm.add_rms_norm(x, residual.clone(), gains, EPS)
    planes, ours = norm.add_rms_norm(x, residual.clone(), gains, EPS, wanted)
    assert torch.equal(ours, total)
    assert isinstance(plain, Tensor)
    check(planes, plain, wanted)

    gate_up = torch.randn(rows, 2 * size).half()
    plain = norm.silu_mul(gate_up)
    assert isinstance(plain, Tensor)
    planes = norm.silu_mul(gate_up, wanted)
    check(planes, plain, wanted)
    assert torch.equal(gemm.raw(planes), gemm.raw(plain))  # type: ignore[arg-type]


@inside
def test_planes_of_unscaled_outputs() -> None:
    from windlass.kernels.triton import norm

    wanted, size, gains = InputQuant("planes", 64, 32), 288, torch.randn(288).half()
    scales = torch.rand(2, 1) + 0.5
    x = UnscaledOutputs(torch.randn(2, size).half(), scales, torch.rand(size) + 0.5)
    residual = torch.randn(2, size).half()
    plain, _ = norm.add_rms_norm(x, residual.clone(), gains, EPS)
    assert isinstance(plain, Tensor)
    check(norm.add_rms_norm(x, residual.clone(), gains, EPS, wanted)[0], plain, wanted)
    gate_up = UnscaledOutputs(torch.randn(2, 2 * size).half(), scales, torch.rand(2 * size) + 0.5)
    plain = norm.silu_mul(gate_up)
    assert isinstance(plain, Tensor)
    check(norm.silu_mul(gate_up, wanted), plain, wanted)


@inside
def test_float32_gains_are_rounded_first() -> None:
    from windlass.kernels.triton import norm

    wanted, gains = InputQuant("planes", 256, 128), torch.randn(512)
    x = torch.randn(2, 512).half()
    plain = norm.rms_norm(x, gains, EPS)
    assert isinstance(plain, Tensor)
    check(norm.rms_norm(x, gains, EPS, wanted), plain, wanted)


@inside
def test_a_row_of_zeros() -> None:
    from windlass.kernels.triton import norm

    gate_up = torch.zeros(2, 512).half()
    gate_up[1] = 1
    plain, wanted = norm.silu_mul(gate_up), InputQuant("planes", 256, 64)
    assert isinstance(plain, Tensor)
    check(norm.silu_mul(gate_up, wanted), plain, wanted)


def norm_before(reader: Prepared | None, size: int) -> RMSNorm:
    from windlass.kernels.triton import norm

    found = RMSNorm(size, EPS, torch.float16, norm)  # type: ignore[arg-type]
    found.weight.copy_(torch.rand(size) / 64)
    if reader is not None:
        found.input_quant = reader.input_quant
    return found


@inside
@pytest.mark.parametrize("rows", [1, 3])
def test_an_mlp_between_norms(rows: int) -> None:
    """The inputs of both GEMMs are planes, and the results are those of 16-bit inputs."""
    from windlass.kernels.triton.grouped_linear import GroupedLinear
    from windlass.kernels.triton.norm import silu_mul

    up = GroupedLinear().prepare(form_of(4, 64, size=192, outputs=640))
    down = GroupedLinear().prepare(form_of(8, 32, size=320, outputs=192))
    attended, residual = (torch.randn(rows, 192).half() for _ in "ab")
    before, after = norm_before(up, 192), norm_before(None, 192)
    found = []
    for unquantised in (False, True):
        x, total = before.add(attended, residual.clone(), unquantised)
        assert isinstance(x, PlaneInputs) != unquantised
        wanted = None if unquantised else down.input_quant(rows)
        y = up.gated(x, partial(silu_mul, input_quant=wanted))
        assert isinstance(y, PlaneInputs) != unquantised
        found.append(down.then(y, total, after))
    (normed, total), (plain, plain_total) = found
    assert isinstance(normed, Tensor)
    assert isinstance(plain, Tensor)
    assert torch.equal(normed, plain)
    assert torch.equal(total, plain_total)
