"""The reference's norms, activations and gates against their definitions in float64."""

from __future__ import annotations

import math

import pytest
import torch

from windlass.kernels import reference


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)) * 3


@pytest.mark.parametrize("has_bias", [False, True])
def test_layer_norm(has_bias: bool) -> None:
    x, weight = _x(3, 20), _x(20)
    bias = weight.flip(0) if has_bias else None
    wide = x.double()
    wide = wide - wide.mean(-1, keepdim=True)
    want = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    if bias is not None:
        want = want + bias
    torch.testing.assert_close(reference.layer_norm(x, weight, bias, 1e-5), want.float())
    added, residual = reference.add_layer_norm(x / 2, x / 2, weight, bias, 1e-5)
    torch.testing.assert_close(added, want.float())
    assert torch.equal(residual, x)


def test_activations() -> None:
    x = _x(4, 12)
    wide = x.double()
    tanh = 0.5 * wide * (1 + torch.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))
    want = {
        "gelu": 0.5 * wide * (1 + torch.erf(wide / math.sqrt(2))),
        "gelu_tanh": tanh,
        "relu2": wide.clamp(min=0) ** 2,
        "silu": wide / (1 + (-wide).exp()),
    }
    for kind in ("gelu", "gelu_tanh", "relu2", "silu"):
        torch.testing.assert_close(reference.activate(x, kind), want[kind].float())
    gated = (tanh[:, :6] * wide[:, 6:]).float()
    torch.testing.assert_close(reference.gelu_mul(x), gated)


def test_gate_and_soft_cap() -> None:
    x, gate = _x(4, 12), _x(4, 1)
    torch.testing.assert_close(reference.sigmoid_gate(x, gate), x / (1 + (-gate).exp()))
    logits = torch.cat([gate - 1, gate, gate - 2], -1)
    torch.testing.assert_close(
        reference.scale_by_top_score(x, logits), reference.sigmoid_gate(x, gate)
    )
    capped = reference.soft_cap(x * 10, 5.0)
    torch.testing.assert_close(capped, 5 * torch.tanh(x * 2))
    assert capped.abs().max() <= 5
