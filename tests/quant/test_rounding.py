"""Online quantisation: the error is below each scheme's bound, and no scale is zero."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from windlass.errors import UnsupportedError
from windlass.kernels.reference_linear import form_bytes
from windlass.quant.rounding import NF4, SCHEMES, as_half, quantise

# Half a step of the scheme's codes, relative to the absmax of a group.
STEP = {
    "int4": 2 / 15 / 2,
    "w4a8": 2 / 15 / 2,
    "int8": 2 / 255 / 2,
    "w8a8": 1 / 127 / 2,
    "fp8": 2**-4,
    "fp8-block": 2**-4,
    "nf4": max(b - a for a, b in pairwise(NF4)) / 2,
}
BITS = {
    "int4": 4.25,
    "w4a8": 4.25,
    "int8": 9,
    "w8a8": 8.1,
    "fp8": 8.1,
    "fp8-block": 8.1,
    "nf4": 4.26,
}


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("scale", [1.0, 1e-7, 100.0])
@pytest.mark.parametrize("shape", [(1, 128), (300, 384), (129, 64)])
def test_error_is_below_half_a_step(name: str, scale: float, shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * scale
    form = quantise(weight, SCHEMES[name])
    error = (form.dequantise() - weight).abs().max()
    assert error <= 1.01 * STEP[name] * weight.abs().max() + 1e-3 * weight.abs().max()


def test_int8_represents_4_bit_groups_of_32() -> None:
    """256 steps represent the 16 of such a group: 4-bit files lose nothing."""
    g = torch.Generator().manual_seed(2)
    codes = torch.randint(0, 16, (64, 20, 32), generator=g)
    codes[..., 0], codes[..., 1] = 0, 15
    scales = (0.01 + 0.01 * torch.rand(64, 20, 1, generator=g)).half().float()
    weight = (codes * scales + (-0.1 * torch.rand(64, 20, 1, generator=g)).half().float()).flatten(
        1
    )
    error = (quantise(weight, SCHEMES["int8"]).dequantise() - weight).abs().view(64, 20, 32)
    # In steps; half a step is the general bound. Rounding scale and offset to 11 bits moves 0.145.
    assert float((error / (scales * 15 / 255)).max()) < 0.2


@pytest.mark.parametrize("name", SCHEMES)
def test_bits_per_weight(name: str) -> None:
    weight = torch.randn(1024, 1024)
    assert 8 * form_bytes(quantise(weight, SCHEMES[name])) / weight.numel() <= BITS[name]


@pytest.mark.parametrize("name", SCHEMES)
def test_constant_weights_round_trip(name: str) -> None:
    weight = torch.zeros(128, 128)
    weight[3] = 0.25
    weight[5, 7] = 1e-12
    back = quantise(weight, SCHEMES[name]).dequantise()
    assert torch.isfinite(back).all()
    torch.testing.assert_close(back, weight, atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize("name", SCHEMES)
def test_rows_are_quantised_independently(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(700, 128)
    whole = quantise(weight, SCHEMES[name]).dequantise()
    monkeypatch.setattr("windlass.quant.rounding._CHUNK_WEIGHTS", 1)
    assert torch.equal(quantise(weight, SCHEMES[name]).dequantise(), whole)


@pytest.mark.parametrize(
    ("scheme", "num_in", "group"),
    [
        *[("int4", 384, 128), ("int4", 576, 64), ("int4", 96, 32)],
        *[("int8", 384, 32), ("int8", 100, 100), ("nf4", 96, 32)],
    ],
)
def test_first_dividing_group_size_is_used(scheme: str, num_in: int, group: int) -> None:
    assert quantise(torch.randn(4, num_in), SCHEMES[scheme]).group == group


def test_indivisible_inputs_are_rejected() -> None:
    with pytest.raises(
        UnsupportedError, match=r"mlp: int4 needs a group size of 128, 64, 32, .* 80"
    ):
        SCHEMES["int4"].group(80, "mlp")


def test_scales_outside_float16_stay_float32() -> None:
    assert as_half(torch.tensor([1.0, 0.0])).dtype == torch.float16
    assert as_half(torch.tensor([1e6])).dtype == torch.float32
    assert as_half(torch.tensor([1e-9])).dtype == torch.float32
