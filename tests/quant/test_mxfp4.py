"""MXFP4 experts of gpt-oss checkpoints become a table of 16 values without loss."""

from __future__ import annotations

import pytest
import torch

from windlass.errors import CheckpointError, UnsupportedError
from windlass.kernels.linears import Linears
from windlass.kernels.packed import Table4
from windlass.quant.base import Part
from windlass.quant.detect import detect
from windlass.quant.mxfp4 import Mxfp4
from windlass.quant.rounding import quantise
from windlass.quant.shard import Shard

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def linears() -> Linears:
    return Linears(torch.device("cpu"), torch.float32, plain=True)


def make_part(blocks: torch.Tensor, scales: torch.Tensor) -> Part:
    rows, groups, _ = blocks.shape
    tensors = {"blocks": blocks, "scales": scales}
    return Part("experts.0.down_proj", tensors, Shard(rows), Shard(groups * 32))


def test_codes_and_exponents_are_exact() -> None:
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (6, 3, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(100, 140, (6, 3), dtype=torch.uint8, generator=generator)
    form = Mxfp4(linears()).form(make_part(blocks, scales), (6, 96))
    assert isinstance(form, Table4)
    values = torch.tensor([*E2M1, *(-value for value in E2M1)])
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(2).long()
    expected = values[codes] * 2.0 ** (scales.float() - 127).unsqueeze(-1)
    torch.testing.assert_close(form.dequantise(), expected.flatten(1), rtol=0, atol=0)


def test_dummy_weights_are_rounded_to_the_format() -> None:
    """They have the codes and powers of two of a checkpoint, so the same kernels multiply them."""
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(8, 96, generator=generator) / 50
    weight[0, :32] = 0
    form = quantise(weight, Mxfp4(linears()).scheme)
    assert isinstance(form, Table4)
    assert form.values.tolist() == [*E2M1, *(-value for value in E2M1)]
    scales = form.scales.float()
    assert torch.equal(scales.log2(), scales.log2().round())
    steps = (form.dequantise() - weight).abs().view(8, 3, 32) / scales.unsqueeze(-1)
    assert steps.max() <= 2  # values of 6 to 8 become 6
    assert (steps <= 1).float().mean() > 0.95
    torch.testing.assert_close(
        quantise(form.dequantise(), Mxfp4(linears()).scheme).dequantise(), form.dequantise()
    )


def test_an_invalid_exponent_is_refused() -> None:
    blocks = torch.ones(2, 1, 16, dtype=torch.uint8)
    scales = torch.tensor([[127], [255]], dtype=torch.uint8)
    with pytest.raises(CheckpointError, match=r"down_proj\.scales.*invalid"):
        Mxfp4(linears()).form(make_part(blocks, scales), (2, 32))


def test_groups_must_divide_the_inputs() -> None:
    with pytest.raises(UnsupportedError, match="groups of 32 inputs"):
        Mxfp4(linears()).params("experts.0.down_proj", 4, 40)


def test_only_experts_are_quantised() -> None:
    found = detect({"quant_method": "mxfp4"}, "config.json", linears())
    assert found is not None
    assert found.method("model.layers.0.self_attn.q_proj") is None
    assert isinstance(found.method("model.layers.0.mlp.experts.3.gate_up_proj"), Mxfp4)
