"""Native GEMMs against the definition of each form, over odd shapes, few rows and many.

Where inputs are quantised to int8, the definition uses inputs quantised the same way, so that only the
order of float32 sums may differ. The error against the exact GEMM is bounded too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.native.backends import PORTABLE, Backend
from windlass.kernels.native.compiler import find_compilers
from windlass.kernels.native.linear import NativeLinear
from windlass.kernels.native.pool import Pool, Workers
from windlass.kernels.packed import Float8, Int4Group, Int8Group, Packed, Table4
from windlass.kernels.reference_linear import ReferenceLinear, form_bytes

CPU = torch.device("cpu")
ROWS = (1, 2, 3, 7, 8, 16, 33, 128)
SHAPES = (  # outputs, inputs, group
    (1, 32, 32),
    (8, 64, 64),
    (13, 96, 32),
    (50, 160, 16),
    (9, 288, 48),
    (33, 576, 32),
    (21, 2560, 128),
    (7, 4352, 4352),
)
SUM_TOLERANCE = 1e-5  # of |x| @ |w|: float32 sums in another order
QUANTISED = 0.012  # of the norm of the result: normal inputs quantised to int8
QUANTISED_TWICE = 1e-4  # inputs quantised twice: 5.3e-5 with outliers
OUTLIER = 16.0  # kOutlier of panels.cpp
_COMPILERS, _ = find_compilers()

pytestmark = pytest.mark.skipif(not _COMPILERS, reason="no C++ compiler")


@pytest.fixture(scope="module")
def kernel() -> NativeLinear:
    return NativeLinear(Workers(2))


def int4(num_out: int, num_in: int, group: int, seed: int, centred: bool = False) -> Int4Group:
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (num_out, num_in // 2), generator=g, dtype=torch.uint8)
    scales = (0.01 * torch.randn(num_out, num_in // group, generator=g)).half()
    offsets = (0.05 * torch.randn(num_out, num_in // group, generator=g)).half()
    return Int4Group(codes, scales, -8 * scales if centred else offsets)


def int8(num_out: int, num_in: int, group: int, seed: int, affine: bool = False) -> Int8Group:
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 128, (num_out, num_in), generator=g, dtype=torch.int8)
    scales = (0.001 * torch.randn(num_out, num_in // group, generator=g)).half()
    offsets = (0.05 * torch.randn(num_out, num_in // group, generator=g)).half()
    return Int8Group(codes, scales, offsets if affine else None)


def int6(num_out: int, num_in: int, group: int, seed: int, affine: bool = False) -> Int8Group:
    whole = int8(num_out, num_in, group, seed, affine)
    return replace(whole, codes=whole.codes // 4, scales=whole.scales * 4, bits=6)


def table4(num_out: int, num_in: int, group: int, seed: int) -> Table4:
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (num_out, num_in // 2), generator=g, dtype=torch.uint8)
    table = torch.randn(16, generator=g)
    return Table4(codes, table, torch.rand(num_out, num_in // group, generator=g))


# Like the codebooks of GGUF: signed magnitudes, and an asymmetric table.
CODEBOOKS = {
    "signed": [8, 25, 43, 0, 0, 0, 0, 0, -8, -25, -43, 0, 0, 0, 0, 0],
    "skewed": [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113],
}


def codebook(num_out: int, num_in: int, group: int, seed: int, two_levels: bool = False) -> Table4:
    """Use two levels of scales if the groups fill super-groups of 8."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (num_out, num_in // 2), generator=g, dtype=torch.uint8)
    values = CODEBOOKS["signed" if two_levels else "skewed"]
    table = torch.tensor(values, dtype=torch.int8)
    groups = num_in // group
    supers = groups // 8 if two_levels and groups % 8 == 0 else groups
    scales = (0.001 * torch.randn(num_out, supers, generator=g)).half()
    subs = torch.randint(-32, 32, (num_out, groups), generator=g, dtype=torch.int8)
    return Table4(codes, table, scales, subs if two_levels else None, 1 / 8)


def inputs(rows: int, num_in: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, num_in, generator=torch.Generator().manual_seed(seed))


def heavy_tailed(rows: int, num_in: int, seed: int = 0) -> Tensor:
    """Return heavy-tailed inputs: about a third of the blocks have an outlier."""
    return inputs(rows, num_in, seed) ** 3


def quantised_inputs(x: Tensor, form: Int4Group | Int8Group | Table4) -> Tensor:
    """Quantise and dequantise inputs as the library does: one scale per 32 inputs, or per 16."""
    stored = None if isinstance(form, Table4) else form.perm
    order = torch.arange(x.shape[1]) if stored is None else stored.long()
    block = 32 if form.group == x.shape[1] or form.group % 32 == 0 else 16
    gathered = torch.nn.functional.pad(x[:, order], (0, -x.shape[1] % block))
    blocks = gathered.view(x.shape[0], -1, block)
    codes, step = quantise_blocks(blocks)
    if isinstance(form, Int8Group) and not is_head(form):  # all inputs are quantised twice
        residual_codes, residual_step = quantise_blocks(blocks - codes * step)
        kept = residual_codes.double() * residual_step.double()
    else:  # an outlier of its block stays in float32
        largest, indices = blocks.abs().topk(2)
        gain = largest[..., :1].square() - largest[..., 1:].square()
        is_outlier = gain > OUTLIER * x.square().mean(dim=-1)[:, None, None]
        peak = torch.zeros_like(blocks).scatter(-1, indices[..., :1], 1.0)
        kept = torch.where(is_outlier, blocks * peak, 0).double()
        codes, step = quantise_blocks(blocks - kept.float())
    flat = (codes.double() * step.double() + kept).flatten(1)[:, : x.shape[1]]
    restored = torch.empty_like(flat)
    restored[:, order] = flat
    return restored


def is_head(form: Int4Group | Int8Group | Table4) -> bool:
    """Whether inputs are quantised once, if the kernel has prepared int4 weights before."""
    return form.shape[0] >= 16 * form.shape[1]


def quantise_blocks(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return integers up to 127, and the scale of each block."""
    peaks = blocks.abs().amax(dim=-1, keepdim=True)
    # 127 / peaks would multiply by a reciprocal, which rounds differently.
    inverse = torch.where(peaks > 1e-30, torch.full_like(peaks, 127) / peaks, 0)
    return (blocks * inverse).round(), peaks / 127


def assert_gemm(found: Tensor, x: Tensor, weight: Tensor) -> None:
    wide, exact = x.double(), weight.double()
    allowed = SUM_TOLERANCE * (wide.abs() @ exact.abs().T) + 1e-30
    assert bool(((found.double() - wide @ exact.T).abs() <= allowed).all())


def assert_near_exact(found: Tensor, x: Tensor, form: Int4Group | Int8Group | Table4) -> None:
    exact = x.double() @ form.dequantise().double().T
    tolerance = QUANTISED_TWICE if isinstance(form, Int8Group) and not is_head(form) else QUANTISED
    # A single value may cancel; the norm of many does not.
    if exact.numel() >= 64:
        assert (found.double() - exact).norm() <= tolerance * exact.norm()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "kind",
    [
        *("int4", "int4 centred", "int6", "int6 affine", "int8", "int8 affine"),
        *("codebook", "codebook with sub-scales"),
    ],
)
def test_integer_gemms(kernel: NativeLinear, kind: str, shape: tuple[int, int, int]) -> None:
    form: Int4Group | Int8Group | Table4
    if kind.startswith("codebook"):
        form = codebook(*shape, seed=1, two_levels="sub-scales" in kind)
    elif kind.startswith("int4"):
        form = int4(*shape, seed=1, centred="centred" in kind)
    else:
        make = int6 if kind.startswith("int6") else int8
        form = make(*shape, seed=1, affine="affine" in kind)
    assert kernel.refuse(form, CPU, torch.float32) is None
    gemm = kernel.prepare(form)
    for rows in ROWS:
        for x in (inputs(rows, shape[1], seed=rows), heavy_tailed(rows, shape[1], seed=rows)):
            found = gemm.apply(x)
            assert_gemm(found, quantised_inputs(x, form), form.dequantise())
            assert_near_exact(found, x, form)


def test_an_lm_head_keeps_15_bits_with_int8_weights() -> None:
    form = int8(1030, 64, 32, seed=14)
    x = inputs(9, 64)
    exact = x.double() @ form.dequantise().double().T
    found = NativeLinear(Workers(1)).prepare(form).apply(x)
    assert (found.double() - exact).norm() <= QUANTISED_TWICE * exact.norm()


@pytest.mark.parametrize(
    "kind", ["int4", "int4 of many groups", "int6 head", "int8 head", "codebook"]
)
def test_many_rows(kernel: NativeLinear, kind: str) -> None:
    """More rows than one chunk of panels, with outliers, and a partial last chunk."""
    form: Int4Group | Int8Group | Table4 = int8(1030, 64, 32, seed=14)
    if kind == "int6 head":
        form = int6(1030, 64, 16, seed=14)
    if kind == "codebook":
        form = codebook(19, 4096, 16, seed=14, two_levels=True)
    elif kind.startswith("int4"):
        form = int4(19, 4128 if "many" in kind else 96, 32, seed=14)
    kernel.prepare(int4(8, 32, 32, seed=14))
    gemm = kernel.prepare(form)
    x = heavy_tailed(301, form.shape[1])
    found = gemm.apply(x)
    assert_gemm(found, quantised_inputs(x, form), form.dequantise())
    for first, rows in ((0, 3), (126, 9), (300, 1)):
        assert torch.equal(gemm.apply(x[first : first + rows]), found[first : first + rows])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["table4", "float16", "bfloat16", "float32"])
def test_float_gemms(kernel: NativeLinear, kind: str, shape: tuple[int, int, int]) -> None:
    num_out, num_in, _ = shape
    form: Table4 | Tensor
    if kind == "table4":
        form = table4(*shape, seed=2)
        weight = form.dequantise()
    else:
        form = inputs(num_out, num_in, seed=3).to(getattr(torch, kind))
        weight = form.float()
    gemm = kernel.prepare(form)
    for rows in ROWS:
        x = inputs(rows, num_in, seed=rows)
        assert_gemm(gemm.apply(x), x, weight)


@settings(max_examples=60, deadline=None)
@given(
    num_out=st.integers(1, 40),
    groups=st.integers(1, 9),
    group=st.sampled_from([16, 32, 48, 64, 128]),
    rows=st.integers(1, 40),
    seed=st.integers(0, 1000),
    make=st.sampled_from([int4, int6, int8, codebook]),
    ordered=st.booleans(),
    tails=st.booleans(),
)
def test_any_shape(
    kernel: NativeLinear,
    num_out: int,
    groups: int,
    group: int,
    rows: int,
    seed: int,
    make: Callable[[int, int, int, int, bool], Int4Group | Int8Group | Table4],
    ordered: bool,
    tails: bool,
) -> None:
    form = make(num_out, groups * group, group, seed, seed % 2 == 0)
    if ordered and not isinstance(form, Table4):
        g = torch.Generator().manual_seed(seed)
        order = torch.randperm(groups * group, generator=g)
        form = replace(form, perm=order)
    x = (heavy_tailed if tails else inputs)(rows, groups * group, seed)
    found = kernel.prepare(form).apply(x)
    assert_gemm(found, quantised_inputs(x, form), form.dequantise())


@pytest.mark.parametrize("num_in", [1, 15, 33, 50, 100])
@pytest.mark.parametrize("make", [int6, int8])
def test_a_row_of_any_length(
    kernel: NativeLinear, make: Callable[..., Int8Group], num_in: int
) -> None:
    form = make(11, num_in, num_in, seed=4)
    x = inputs(5, num_in)
    assert_gemm(kernel.prepare(form).apply(x), quantised_inputs(x, form), form.dequantise())


@pytest.mark.parametrize("activation", ["token", "tensor"])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_activations_quantised_by_the_format(
    kernel: NativeLinear, activation: str, rows: int
) -> None:
    plain = int8(19, 96, 96, seed=5)
    scale = torch.tensor([0.02]) if activation == "tensor" else None
    form = Int8Group(plain.codes, plain.scales, None, None, activation, scale)  # type: ignore[arg-type]
    x = inputs(rows, 96)
    found, oracle = kernel.prepare(form).apply(x), ReferenceLinear().prepare(form).apply(x)
    torch.testing.assert_close(found, oracle, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("factor", [1e-9, 1.0, 1e6])
def test_scales_of_any_size(kernel: NativeLinear, dtype: torch.dtype, factor: float) -> None:
    base = int4(16, 128, 32, seed=6)
    form = Int4Group(
        base.codes,
        (base.scales.float() * factor).to(dtype),
        (base.offsets.float() * factor).to(dtype),
    )
    x = inputs(9, 128)
    found, exact = kernel.prepare(form).apply(x), x @ form.dequantise().T
    assert (found - exact).norm() <= QUANTISED * exact.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_inputs_give_16_bit_outputs(kernel: NativeLinear, dtype: torch.dtype) -> None:
    form = int8(24, 64, 32, seed=7)
    x = inputs(6, 64).to(dtype)
    found = kernel.prepare(form).apply(x)
    assert found.dtype == dtype
    exact = x.double() @ form.dequantise().double().T
    assert (found.double() - exact).norm() <= torch.finfo(dtype).eps * exact.norm()


@pytest.mark.parametrize("num_in", [192, 4352])
def test_gemms_are_batch_invariant(kernel: NativeLinear, num_in: int) -> None:
    forms: list[Packed | Tensor] = [
        int4(20, num_in, 32, seed=8),
        int4(20, num_in, num_in, seed=8),
        int4(20, num_in, 16, seed=8, centred=True),
        int6(20, num_in, 16, seed=8),
        int6(20, num_in, 32, seed=8, affine=True),
        int8(20, num_in, 64, seed=8, affine=True),
        table4(20, num_in, 64, seed=8),
        codebook(20, num_in, 32, seed=8),
        codebook(20, num_in, 16, seed=8, two_levels=True),
        inputs(20, num_in).half(),
        inputs(20, num_in).bfloat16(),
    ]
    assert kernel.batch_invariant
    # Some rows with many outliers, some with one, some with none.
    x = inputs(21, num_in)
    x[::3] = x[::3] ** 3
    x[1::6, 40] *= 100
    for form in forms:
        gemm = kernel.prepare(form)
        together = gemm.apply(x)
        for first, rows in ((0, 1), (5, 3), (8, 4), (3, 16)):
            part = gemm.apply(x[first : first + rows])
            assert torch.equal(part, together[first : first + rows])


@pytest.mark.parametrize("rows", [1, 16])
def test_an_outlier_keeps_the_precision_of_its_block(kernel: NativeLinear, rows: int) -> None:
    form = int8(64, 256, 32, seed=13)
    x = inputs(rows, 256)
    x[:, ::32] *= 200
    form.codes[:, ::32] = 0  # only the small inputs contribute
    exact = x.double() @ form.dequantise().double().T
    assert (kernel.prepare(form).apply(x) - exact).norm() <= 0.005 * exact.norm()


def test_zeros_infinities_and_no_rows(kernel: NativeLinear) -> None:
    gemm = kernel.prepare(int8(16, 64, 32, seed=9))
    assert torch.equal(gemm.apply(torch.zeros(2, 64)), torch.zeros(2, 16))
    assert gemm.apply(torch.zeros(0, 64)).shape == (0, 16)
    for bad in (float("nan"), float("inf")):
        x = torch.ones(2, 64)
        x[1, 3] = bad
        found = gemm.apply(x)
        assert bool(found[0].isfinite().all())
        assert not bool(found[1].isfinite().any())


def test_small_groups_stay_below_six_bits(kernel: NativeLinear) -> None:
    form = int4(64, 576, 32, seed=10)
    assert 8 * kernel.prepare(form).num_bytes / (64 * 576) < 6


@pytest.mark.parametrize("two_levels", [False, True])
def test_rows_of_a_codebook_are_exact(kernel: NativeLinear, two_levels: bool) -> None:
    form = codebook(21, 512, 16, seed=15, two_levels=two_levels)
    rows = torch.tensor([0, 20, 7])
    assert torch.equal(kernel.prepare(form).rows(rows), form.dequantise()[rows])


def test_a_codebook_needs_the_bytes_of_its_form(kernel: NativeLinear) -> None:
    for form in (codebook(64, 512, 32, seed=15), codebook(64, 512, 16, seed=15, two_levels=True)):
        assert kernel.prepare(form).num_bytes == form_bytes(form)


def test_scales_outside_float16_are_kept_as_floats(kernel: NativeLinear) -> None:
    """Powers of two too far apart for one gain, which MXFP4 allows."""
    base = codebook(9, 128, 32, seed=16)
    scales = torch.full((9, 4), 2.0**-60)
    scales[3, 1] = 1.0
    form = replace(base, scales=scales)
    gemm = kernel.prepare(form)
    assert torch.equal(gemm.rows(torch.arange(9)), form.dequantise())
    x = inputs(7, 128)
    assert_gemm(gemm.apply(x), x, form.dequantise())


def test_refusals(kernel: NativeLinear) -> None:
    fp8 = Float8(torch.zeros(8, 32).to(torch.float8_e4m3fn), torch.ones(1, 1))
    odd = int8(8, 40, 8, seed=11)
    cases: list[tuple[Packed, torch.device, str]] = [
        (fp8, CPU, "fp8"),
        (odd, CPU, "groups of 8"),
        (int4(8, 32, 32, seed=11), torch.device("cuda"), "this is cuda"),
    ]
    for form, device, reason in cases:
        assert reason in str(kernel.refuse(form, device, torch.float32))


def test_the_portable_backend_matches_the_definitions(
    built_pool: Callable[[Backend], Pool],
) -> None:
    kernel = NativeLinear(Workers(2, built_pool(PORTABLE)))
    forms = (
        int4(13, 96, 32, seed=12),
        int6(13, 160, 16, seed=12),
        int8(13, 160, 16, seed=12, affine=True),
        codebook(13, 96, 32, seed=12),
        codebook(13, 256, 16, seed=12, two_levels=True),
    )
    for form in forms:
        for rows in (1, 6, 17):
            x = heavy_tailed(rows, form.shape[1])
            assert_gemm(kernel.prepare(form).apply(x), quantised_inputs(x, form), form.dequantise())
    form4 = table4(13, 96, 32, seed=12)
    x = inputs(6, 96)
    assert_gemm(kernel.prepare(form4).apply(x), x, form4.dequantise())
