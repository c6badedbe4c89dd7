"""Experts divided among ranks, for every kernel: the sum over the ranks must be the whole."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from windlass.kernels.experts import ExpertWeights
from windlass.kernels.packed import Packed
from windlass.kernels.reference_experts import expert_rows, route
from windlass.quant.join import join


def held(weights: ExpertWeights, experts: tuple[int, ...]) -> ExpertWeights:
    """The weights of a rank that holds these experts, and counts its tokens."""
    sizes = 2 * weights.intermediate_size, weights.hidden_size
    codes = weights.down if isinstance(weights.down, Tensor) else weights.down.codes
    count = weights.routing.num_experts

    def rows(form: Packed | Tensor, size: int) -> Packed | Tensor:
        (joined,) = join([expert_rows(form, expert * size, size) for expert in experts])
        return joined

    def biases(bias: Tensor | None) -> Tensor | None:
        return None if bias is None else bias[list(experts)]

    return replace(
        weights,
        gate_up=rows(weights.gate_up, sizes[0]),
        down=rows(weights.down, sizes[1]),
        gate_up_bias=biases(weights.gate_up_bias),
        down_bias=biases(weights.down_bias),
        experts=experts,
        load=torch.zeros(count, dtype=torch.int64, device=codes.device),
    )


def check_choice(weights: ExpertWeights, logits: Tensor, chosen: Tensor, calls: int) -> None:
    """The choice that a kernel reports, and the load that it counted in so many equal calls."""
    _, want = route(logits, weights.correction_bias, weights.routing)
    assert torch.equal(chosen.long(), want)
    counts = want.flatten().bincount(minlength=weights.routing.num_experts)
    assert weights.load is not None
    assert torch.equal(weights.load, calls * counts)
