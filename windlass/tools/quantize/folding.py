"""Scales moved from a linear layer's inputs into what makes them, the network's function unchanged.

A block has four such places: the two norms, the values before the output projection, and the upper
half of the gated feed-forward. Values that several query heads share have one scale for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from windlass.kernels.batch import Heads
from windlass.layers.linear import Linear
from windlass.models.llama import Block

_SMALLEST = 1e-5


@dataclass(frozen=True, slots=True)
class Fold:
    """A linear layer, and the tensors whose rows make its inputs."""

    name: str  # of the linear layer inside its block: "mlp.down_proj"
    linear: Linear
    producers: Sequence[Tensor]  # a norm's weight, or rows of a weight and of its bias
    sources: Tensor  # [K]: the producers' row that makes input k
    is_norm: bool

    def apply(self, scale: Tensor) -> None:
        """Divide the producers' rows by `scale`, multiply the consumer's columns with it."""
        self.linear.get_parameter("weight").mul_(scale[self.sources])
        for tensor in self.producers:
            tensor.div_(scale if tensor.ndim == 1 else scale[:, None])


def folds_of(block: Block) -> list[Fold]:
    """In the order in which the block computes."""
    attention, mlp = block.self_attn, block.mlp
    qkv, out = attention.qkv_proj, attention.o_proj
    gate_up, down = mlp.gate_up_proj, mlp.down_proj
    first, second = block.input_layernorm.weight, block.post_attention_layernorm.weight
    values = qkv.parts["q_proj"] + qkv.parts["k_proj"]
    ups = gate_up.parts["gate_proj"]
    device = first.device
    return [
        Fold("self_attn.qkv_proj", qkv, [first], _same(qkv, device), True),
        Fold("self_attn.o_proj", out, _rows(qkv, values), _shared(attention.heads, device), False),
        Fold("mlp.gate_up_proj", gate_up, [second], _same(gate_up, device), True),
        Fold("mlp.down_proj", down, _rows(gate_up, ups), _same(down, device), False),
    ]


def _same(linear: Linear, device: torch.device) -> Tensor:
    return torch.arange(linear.num_in, device=device)


def _shared(heads: Heads, device: torch.device) -> Tensor:
    """Feature d of query head h is made of feature d of kv head h // group."""
    head = torch.arange(heads.num_q, device=device) // heads.group
    return (head[:, None] * heads.dim + torch.arange(heads.dim, device=device)).flatten()


def _rows(linear: Linear, first: int) -> list[Tensor]:
    weight = linear.get_parameter("weight")
    return [weight[first:]] if linear.bias is None else [weight[first:], linear.bias[first:]]


def smoothing_scale(weight: Tensor, max_abs: Tensor, alpha: float = 0.5) -> Tensor:
    """What to divide each input feature by, and to multiply the weight's column with.

    alpha 0 leaves all the difficulty with the inputs, 1 gives all of it to the weight.
    """
    largest_weight = weight.abs().amax(0).clamp(min=_SMALLEST)
    return (max_abs.clamp(min=_SMALLEST) ** alpha / largest_weight ** (1 - alpha)).clamp(
        min=_SMALLEST
    )
