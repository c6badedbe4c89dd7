"""GEMMs with quantised weights on a GPU, against the definition of their forms."""

from __future__ import annotations

import pytest
import torch

from windlass.kernels import reference
from windlass.kernels.copied import MAX_PACKED_ROWS, CopiedGemm
from windlass.kernels.gemm_io import (
    InputQuant,
    Inputs,
    PlaneInputs,
    QuantisedInputs,
    UnscaledOutputs,
)
from windlass.kernels.gpu import gpu_of
from windlass.kernels.linears import Linears
from windlass.kernels.packed import Float8, Int4Group, Int8Group, pack_nibbles
from windlass.kernels.reference_linear import ReferenceLinear
from windlass.quant.rounding import SCHEMES, quantise

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda")
E4M3 = 0.03  # relative error of a sum of normal values rounded to 3 mantissa bits, with a margin
ROWS = [1, 7, 8, 9, 33, 64, 65, 256, 257]


def close(got: torch.Tensor, want: torch.Tensor, bound: float) -> None:
    assert got.shape == want.shape
    error = (got.float() - want.float()).norm() / want.float().norm()
    assert error < bound, float(error)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("outputs", "size", "group"), [(960, 576, 64), (4096, 14336, 128)])
@pytest.mark.parametrize(("bits", "activation"), [(4, "none"), (4, "token"), (8, "none")])
@pytest.mark.parametrize("permuted", [False, True])
def test_group_wise_gemm(
    rows: int, outputs: int, size: int, group: int, bits: int, activation, permuted: bool
) -> None:
    from windlass.kernels.triton.grouped_linear import GroupedLinear

    scales = (torch.rand(outputs, size // group, device=CUDA) + 0.5).half()
    perm = torch.randperm(size, device=CUDA) if permuted else None
    form: Int4Group | Int8Group
    if bits == 4:
        codes = pack_nibbles(torch.randint(0, 16, (outputs, size), device=CUDA))
        form = Int4Group(codes, scales, -8 * scales, perm, activation)
    else:
        codes = torch.randint(-127, 128, (outputs, size), device=CUDA, dtype=torch.int8)
        form = Int8Group(codes, scales / 16, perm=perm)
    kernel = GroupedLinear()
    assert kernel.refuse(form, CUDA, torch.bfloat16) is None
    gemm = kernel.prepare(form)
    x = torch.randn(rows, size, device=CUDA).bfloat16()
    want = x.double() @ form.dequantise().double().T
    bound = 2**-8 if activation == "none" or rows <= 16 else 1.5 * E4M3
    for _ in "ab":
        close(gemm.apply(x), want, bound)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("outputs", "size"), [(960, 576), (4096, 14336)])
@pytest.mark.parametrize("per_output", [False, True])
def test_fp8(rows: int, outputs: int, size: int, per_output: bool) -> None:
    from windlass.kernels.triton.fp8_linear import Fp8Linear
    from windlass.kernels.triton.quantise import quantise_rows

    codes = torch.randn(outputs, size, device=CUDA).to(torch.float8_e4m3fn)
    scales = torch.rand(outputs if per_output else 1, 1, device=CUDA) + 0.5
    form = Float8(codes, scales, activation="token")
    kernel = Fp8Linear()
    assert kernel.refuse(form, CUDA, torch.bfloat16) is None
    x = torch.randn(rows, size, device=CUDA).bfloat16()
    gemm = kernel.prepare(form)
    exact = x.double() @ form.dequantise().double().T
    want = ReferenceLinear().prepare(form).apply(x)
    for _ in "ab":
        close(gemm.apply(x), exact, E4M3)
        close(gemm.apply(quantise_rows(x)), want, 2**-6)


def fp8_form(outputs: int, size: int) -> Float8:
    codes = torch.randn(outputs, size, device=CUDA).to(torch.float8_e4m3fn)
    return Float8(codes, torch.rand(outputs, 1, device=CUDA) * 0.02 + 0.01, activation="token")


def randn(rows: int, size: int) -> torch.Tensor:
    return torch.randn(rows, size, device=CUDA).bfloat16()


def values(x: Inputs) -> torch.Tensor:
    """Dequantise inputs."""
    if isinstance(x, QuantisedInputs):
        return x.codes.float() * x.scales
    if isinstance(x, PlaneInputs):
        rows, size = x.shape
        blocks = x.codes.float().unflatten(1, (len(x.scales), -1)) * x.scales.T[:, :, None]
        return (blocks[:rows] + blocks[rows:]).flatten(1)[:, :size]
    return x if isinstance(x, torch.Tensor) else x.normalised()


class Norm:
    """A norm before a GEMM that wants quantised inputs."""

    eps = 1e-5

    def __init__(self, size: int, wanted: InputQuant | None) -> None:
        self.weight = torch.randn(size, device=CUDA).bfloat16()
        self.wanted = wanted

    def input_quant(self, num_rows: int) -> InputQuant | None:
        del num_rows
        return self.wanted

    def defers(self, num_rows: int) -> bool:
        del num_rows
        return False

    def add(self, x: torch.Tensor | UnscaledOutputs, residual: torch.Tensor | None) -> tuple:
        from windlass.kernels.triton.norm import add_rms_norm

        return add_rms_norm(x, residual, self.weight, self.eps, self.input_quant(len(residual)))


@pytest.mark.parametrize("wanted", [None, InputQuant("rows"), InputQuant("planes", 256, 128)])
@pytest.mark.parametrize("rows", [1, 3, 8, 9, 16, 17, 300])
@pytest.mark.parametrize(("outputs", "size"), [(960, 576), (4096, 1536)])
def test_fp8_with_a_norm(rows: int, outputs: int, size: int, wanted: InputQuant | None) -> None:
    from windlass.kernels.triton.fp8_linear import Fp8Linear

    form, norm = fp8_form(outputs, size), Norm(outputs, wanted)
    x = torch.randn(rows, size, device=CUDA).bfloat16()
    before = torch.randn(rows, outputs, device=CUDA).bfloat16()
    unfused = (x.double() @ form.dequantise().double().T).bfloat16()
    want, want_residual = reference.add_rms_norm(unfused, before.clone(), norm.weight, norm.eps)
    gemm = Fp8Linear().prepare(form)
    for _ in "ab":
        got, residual = gemm.then(x, before.clone(), norm)
        kinds = {None: torch.Tensor, "rows": QuantisedInputs, "planes": PlaneInputs}
        assert isinstance(got, kinds[None if wanted is None else wanted.kind])
        close(values(got), want, 2 * E4M3 if isinstance(got, QuantisedInputs) else E4M3)
        close(residual, want_residual, E4M3)


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("rows", [1, 16, 17, 300])
@pytest.mark.parametrize(("width", "size"), [(480, 576), (1536, 1024)])
def test_fp8_gate(rows: int, width: int, size: int, quantised: bool) -> None:
    from windlass.kernels.triton.fp8_linear import Fp8Linear
    from windlass.kernels.triton.norm import silu_mul
    from windlass.kernels.triton.quantise import quantise_rows

    form = fp8_form(2 * width, size)
    x = torch.randn(rows, size, device=CUDA).bfloat16()
    want = reference.silu_mul((x.double() @ form.dequantise().double().T).bfloat16())
    gemm = Fp8Linear().prepare(form)
    got = gemm.gated(quantise_rows(x) if quantised else x, silu_mul)
    close(values(got), want, 2 * E4M3)
    if rows > 16:
        codes = gemm.gated(x, lambda y: silu_mul(y, input_quant=InputQuant("rows")))
        assert isinstance(codes, QuantisedInputs)
        close(values(codes), want, 3 * E4M3)


@pytest.mark.parametrize("activation", ["none", "token"])
@pytest.mark.parametrize("rows", [1, 16, 17, 64, 65, 300])
def test_int4_between_a_norm_and_a_gate(rows: int, activation) -> None:
    """The norm quantises its outputs if the GEMM wants it."""
    from windlass.kernels.triton.grouped_linear import GroupedLinear
    from windlass.kernels.triton.norm import rms_norm, silu_mul

    outputs, size, group = 1536, 576, 64
    codes = pack_nibbles(torch.randint(0, 16, (outputs, size), device=CUDA))
    scales = (torch.rand(outputs, size // group, device=CUDA) + 0.5).half() / 64
    form = Int4Group(codes, scales, -8 * scales, None, activation)
    gemm = GroupedLinear().prepare(form)
    x, gains = randn(rows, size), torch.ones(size, device=CUDA).bfloat16()
    plain = rms_norm(x, gains, 1e-5)
    want = reference.silu_mul((plain.double() @ form.dequantise().double().T).bfloat16())
    normed = rms_norm(x, gains, 1e-5, gemm.input_quant(rows))
    bound = 2**-7 if activation == "none" or rows <= 16 else 2 * E4M3
    close(values(gemm.gated(normed, silu_mul)), want, bound)


@pytest.mark.parametrize("rows", [1, 3, 16, 17, 64])
@pytest.mark.parametrize(("block", "group"), [(64, 32), (128, 64), (256, 128), (256, 256)])
@pytest.mark.parametrize("size", [576, 4096, 14336])
def test_planes_from_norms_and_activations(rows: int, block: int, group: int, size: int) -> None:
    """As those of the 16-bit result; a norm of another layout may round its sum of squares differently."""
    from windlass.kernels.triton.norm import add_rms_norm, rms_norm, silu_mul
    from windlass.kernels.triton.quantise import quantise_blocks

    wanted = InputQuant("planes", block, group)
    gate_up = randn(rows, 2 * size)
    want = quantise_blocks(silu_mul(gate_up), block, group)  # type: ignore[arg-type]
    got = silu_mul(gate_up, wanted)
    assert isinstance(got, PlaneInputs)
    assert torch.equal(got.codes, want.codes)
    assert torch.equal(got.scales, want.scales)
    assert torch.equal(got.sums, want.sums)

    x, residual, gains = randn(rows, size), randn(rows, size), randn(1, size)[0]
    normed, total = add_rms_norm(x, residual.clone(), gains, 1e-5)
    planes, ours = add_rms_norm(x, residual.clone(), gains, 1e-5, wanted)
    assert torch.equal(ours, total)
    pairs = [(planes, normed), (rms_norm(x, gains, 1e-5, wanted), rms_norm(x, gains, 1e-5))]
    for got, plain in pairs:
        assert isinstance(got, PlaneInputs)
        close(values(got), values(plain), 2**-10)
        sums = values(got).new_zeros(rows, got.codes.shape[1])
        sums[:, :size] = values(got)
        found = got.sums.T[:rows] + got.sums.T[rows:]
        close(found, sums.unflatten(1, (-1, group)).sum(2), 2**-12)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("outputs", "size"), [(960, 576), (4096, 14336)])
@pytest.mark.parametrize("name", ["w8a8", "fp8-block", "nf4"])
def test_other_forms(name: str, rows: int, outputs: int, size: int) -> None:
    """Equal to the reference; e4m3 inputs may be rounded to a neighbouring code."""
    form = quantise(torch.randn(outputs, size, device=CUDA), SCHEMES[name])
    packed = Linears(CUDA, torch.bfloat16).prepare(form)
    if name != "nf4" or size % 128 == 0:
        assert packed.kernel.startswith("triton")
    x = randn(rows, size)
    want = ReferenceLinear().prepare(form).apply(x)
    for _ in "ab":
        close(packed.prepared.apply(x), want, 2**-7)


@pytest.mark.parametrize("name", ["int4", "int8", "nf4"])
def test_copies_equal_the_packed_weight(name: str) -> None:
    form = quantise(torch.randn(1536, 1024, device=CUDA), SCHEMES[name])
    packed = Linears(CUDA, torch.bfloat16).prepare(form)
    copied = Linears(CUDA, torch.bfloat16, copies=True).prepare(form)
    assert isinstance(copied.prepared, CopiedGemm)
    for rows in (1, MAX_PACKED_ROWS, MAX_PACKED_ROWS + 1, 600):
        x = randn(rows, 1024)
        close(copied.prepared.apply(x), packed.prepared.apply(x), 2**-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "outputs", "size", "group"),
    [
        (17, 4096, 4096, 64),
        (33, 6144, 4096, 64),
        (97, 11528, 576, 64),
        (97, 128, 128, 128),
        (129, 4096, 14336, 128),
        (200, 11528, 512, 128),
        (257, 4000, 576, 64),
        (300, 28672, 4096, 128),
        (320, 8192, 4096, 4096),
        (512, 4096, 14336, 128),
        (640, 6144, 4096, 64),
        (1000, 4000, 576, 64),
        (2048, 1536, 256, 256),
    ],
)
def test_int4_on_hopper(rows: int, outputs: int, size: int, group: int, dtype: torch.dtype) -> None:
    """Each kernel alone, and the plan: sums that are split, outputs and rows that do not fill tiles."""
    from windlass.kernels.triton.grouped_linear import GroupedLinear
    from windlass.kernels.triton.int4_wide import MAX_ROWS

    if reason := gpu_of(CUDA).lacks_warpgroups():
        pytest.skip(reason)
    scales = (torch.rand(outputs, size // group, device=CUDA) * 0.1 + 0.05).half()
    codes = pack_nibbles(torch.randint(0, 16, (outputs, size), device=CUDA))
    form = Int4Group(codes, scales, -8 * scales, None, "none")
    gemm = GroupedLinear().prepare(form)
    x = torch.randn(rows, size, device=CUDA, dtype=dtype)
    want = x.double() @ form.dequantise().double().T
    hopper = gemm._hopper
    assert hopper is not None
    for _ in "ab":
        close(gemm.apply(x), want, 2**-8)
        for kernel in (hopper._many, hopper._wide if rows <= MAX_ROWS else None):
            if kernel is None:
                continue
            out = x.new_full((rows, outputs), float("nan"))
            kernel.apply(x, out)
            close(out, want, 2**-8)
