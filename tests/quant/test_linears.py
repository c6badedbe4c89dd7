"""Kernel selection per packed form, the reference GEMM, and unpacking of weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from windlass.kernels import linears as linears_module
from windlass.kernels.linears import Linears, describe
from windlass.kernels.packed import Float8, Int8Group, Packed
from windlass.kernels.reference_linear import ReferenceLinear, form_bytes
from windlass.quant.join import join
from windlass.quant.rounding import SCHEMES, Scheme, quantise

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def weight(num_out: int = 256, num_in: int = 384, seed: int = 0) -> Tensor:
    return torch.randn(num_out, num_in, generator=torch.Generator().manual_seed(seed)) * 0.05


def test_integer_gemms_are_exact() -> None:
    form = quantise(weight(), SCHEMES["w8a8"])
    assert isinstance(form, Int8Group)
    x = torch.randn(5, 384)
    scale = x.abs().amax(1, keepdim=True) / 127
    sums = (x / scale).round().to(torch.int64) @ form.codes.T.to(torch.int64)
    want = sums.double() * scale.double() * form.scales.double().T
    got = ReferenceLinear().prepare(form).apply(x)
    torch.testing.assert_close(got, want.float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["token", "tensor", "block"])
def test_fp8_activations_are_quantised_as_configured(kind: str) -> None:
    given = torch.tensor([0.01]) if kind == "tensor" else None
    form = quantise(weight(), SCHEMES["fp8"])
    assert isinstance(form, Float8)
    form = replace(form, activation=kind, input_scale=given)
    x = torch.randn(3, 384)
    parts = x.view(3, 3, 128) if kind == "block" else x
    scale = given if given is not None else parts.abs().amax(-1, keepdim=True) / 448
    rounded = (parts / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    want = rounded.view(3, 384) @ form.dequantise().T
    torch.testing.assert_close(ReferenceLinear().prepare(form).apply(x), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{"plain": True}, {"reference": True}], ids=str)
def test_int4_quantises_activations_on_request(options: dict[str, bool]) -> None:
    form = quantise(weight(), SCHEMES["w4a8"])
    x = torch.randn(3, 384)
    scale = x.abs().amax(-1, keepdim=True) / 448
    rounded = (x / scale).to(torch.float8_e4m3fn).float() * scale
    held = Linears(CPU, torch.float32, **options, w4a8=True).prepare(form)
    assert held.form == "int4, groups of 128, activations per token"
    want = rounded @ form.dequantise().T
    torch.testing.assert_close(held.prepared.apply(x), want, rtol=1e-5, atol=1e-5)
    exact = Linears(CPU, torch.float32, **options).prepare(form)
    want = x @ form.dequantise().T
    torch.testing.assert_close(exact.prepared.apply(x), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unpacked_matches_reference(name: str, dtype: torch.dtype) -> None:
    form = quantise(weight(), SCHEMES[name])
    x = torch.randn(4, 384).to(dtype)
    plain = Linears(CPU, dtype, plain=True).prepare(form)
    unpacked = Linears(CPU, dtype, reference=True).prepare(form)
    assert (plain.kernel, unpacked.kernel) == ("plain", "torch")
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    got, want = unpacked.prepared.apply(x), plain.prepared.apply(x)
    assert got.dtype == want.dtype == dtype
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    assert plain.prepared.num_bytes == form_bytes(form)
    assert unpacked.prepared.num_bytes == 256 * 384 * dtype.itemsize


class _Int8Only:
    """A kernel that supports int8 only."""

    name = "half"
    batch_invariant = True

    def refuse(self, form: Packed, device: torch.device, dtype: torch.dtype) -> str | None:
        del device, dtype
        return None if isinstance(form, Int8Group) else "only int8"

    def prepare(self, form: Packed) -> object:
        return ReferenceLinear().prepare(form)


def test_first_supporting_kernel_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    where = f"{__name__}:_Int8Only"
    monkeypatch.setattr(linears_module, "_CANDIDATES", {"cpu": (where,), "cuda": ()})
    linears = Linears(CPU, torch.float32)
    int8, int4 = quantise(weight(), SCHEMES["int8"]), quantise(weight(), SCHEMES["int4"])
    assert linears.prepare(int8).kernel == "half"
    assert linears.prepare(int8).reason == "first choice"
    refused = linears.prepare(int4)
    assert refused.kernel == "torch"
    assert refused.reason == "unpacked: no packed kernel takes it (half: only int8)"
    assert refused.refusals == {"half": "only int8"}
    plain = Linears(CPU, torch.float32, plain=True).prepare(int8)
    assert plain.kernel == "plain"
    assert "requested" in plain.reason
    reference = Linears(CPU, torch.float32, reference=True).prepare(int8)
    assert reference.kernel == "torch"
    assert "--dtype float32" in reference.reason


def test_gpu_keeps_weights_packed_without_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears_module, "_CANDIDATES", {"cpu": (), "cuda": ()})
    decision = Linears(CUDA, torch.bfloat16).decide(quantise(weight(), SCHEMES["fp8"]))
    assert decision.unpacked is None
    assert "dequantised on each call" in decision.reason
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    decision = Linears(CUDA, torch.bfloat16).decide(quantise(weight(), SCHEMES["fp8"]))
    assert "fp8 tensor cores need compute capability 8.9" in decision.reason


def test_gpu_unpacks_small_weights() -> None:
    pytest.importorskip("triton")
    linears = Linears(CUDA, torch.bfloat16)
    small = torch.randn(576, 640)
    for scheme in ("int4", "int8", "nf4"):
        assert linears.decide(quantise(small, SCHEMES[scheme])).unpacked is not None
    for scheme in ("fp8", "w8a8", "fp8-block"):
        assert not linears_module._is_small(quantise(small, SCHEMES[scheme]), CUDA)
    assert "faster for weights" in linears.decide(quantise(small, SCHEMES["int4"])).reason
    large = quantise(torch.randn(4096, 1024), SCHEMES["int4"])
    assert linears.decide(large).unpacked is None
    assert linears.decide(large).kernel.name == "triton groups"


@pytest.mark.parametrize(
    ("scheme", "text"),
    [
        ("int4", "int4, groups of 128"),
        ("int8", "int8, groups of 32"),
        ("w8a8", "int8 per row, activations per token"),
        ("fp8", "fp8 per channel, activations per token"),
        ("fp8-block", "fp8, blocks of 128 x 128, activations per block"),
        ("nf4", "4-bit table, groups of 64"),
    ],
)
def test_form_descriptions(scheme: str, text: str) -> None:
    assert describe(quantise(weight(), SCHEMES[scheme])) == text


@pytest.mark.parametrize("name", SCHEMES)
def test_joined_parts_equal_the_whole(name: str) -> None:
    whole = weight(384)
    parts = [quantise(part.contiguous(), SCHEMES[name]) for part in whole.split([256, 128])]
    joined = join(parts)
    assert len(joined) == 1
    assert torch.equal(joined[0].dequantise(), quantise(whole, SCHEMES[name]).dequantise())


def test_different_parts_are_not_joined() -> None:
    token, given = (
        quantise(weight(), Scheme("x", "fp8", (), True, kind)) for kind in ("token", "none")
    )
    assert len(join([token, given, given])) == 2
    one, two = (
        replace(token, activation="tensor", input_scale=torch.tensor([value]))
        for value in (1.0, 2.0)
    )
    assert len(join([one, one, two])) == 2
    cut = quantise(weight(192), SCHEMES["fp8-block"])  # ends inside a block
    assert len(join([cut, cut])) == 2
    tensor = Float8(token.codes, torch.tensor([[0.5]]))
    other = Float8(token.codes, torch.tensor([[0.25]]))
    (joined,) = join([tensor, other])
    assert torch.equal(joined.dequantise(), torch.cat([tensor.dequantise(), other.dequantise()]))
