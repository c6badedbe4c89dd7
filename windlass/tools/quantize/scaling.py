"""AWQ and SmoothQuant: scales that make weights or activations easier to quantise.

A scale multiplies the columns of a linear layer's weight and divides the rows of the module before it,
so that the network computes the same. A Llama block has four such pairs: the two norms, the value
projection before the output projection, and the up projection before the down projection. Query heads
that share a KV head share its scales. A norm that several layers read, as attention and MLP in parallel
or a router and its experts, has none; nor has an MLP without a gate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from windlass.kernels.batch import Heads
from windlass.layers.attention import Attention
from windlass.layers.linear import Linear
from windlass.layers.mlp import GatedMLP, PlainMLP
from windlass.layers.norm import LayerNorm, RMSNorm
from windlass.models.decoder import Block
from windlass.tools.quantize.experts import Experts
from windlass.tools.quantize.layer import InputStats
from windlass.tools.quantize.weights import Grid, round_to_nearest

_MIN_SMOOTHING = 1e-5
_MIN_SIZE = 1e-4
_STEPS = 20  # strengths from 0 (no scaling) to 1
_MAX_ROWS = 256  # outputs that the AWQ search reads; a sample is enough to choose the strength
_CLIPS = tuple(1.0 - 0.05 * step for step in range(11))  # shares of a group's range


@dataclass(frozen=True, slots=True)
class Fold:
    """A linear layer, and the tensors whose rows produce its inputs."""

    name: str  # of the linear layer in its block: "mlp.down_proj"
    linear: Linear
    producers: Sequence[Tensor]  # a norm's weight, or rows of a weight and its bias
    sources: Tensor  # [K]: the producers' row that produces input k
    is_norm: bool

    def apply(self, scale: Tensor) -> None:
        """Divide the producers' rows by `scale`, and multiply the layer's columns by it."""
        self.linear.get_parameter("weight").mul_(scale[self.sources])
        for tensor in self.producers:
            tensor.div_(scale if tensor.ndim == 1 else scale[:, None])


def folds_of(block: Block) -> list[Fold]:
    """Return the folds of a block, in the order of computation."""
    attention, mlp = block.self_attn, block.mlp
    assert isinstance(attention, Attention)
    qkv = attention.qkv_proj
    values = qkv.parts["q_proj"] + qkv.parts["k_proj"]
    found = [
        *_norm_fold("self_attn.qkv_proj", qkv, _norm_before_attention(block)),
        Fold(
            name="self_attn.o_proj",
            linear=attention.o_proj,
            producers=_rows(qkv, values),
            sources=_shared_heads(attention.heads, qkv.get_parameter("weight").device),
            is_norm=False,
        ),
    ]
    before = _norm_before_mlp(block)
    if isinstance(mlp, PlainMLP):
        return [*found, *_norm_fold("mlp.up_proj", mlp.up_proj, before)]
    if isinstance(mlp, GatedMLP):
        found += _norm_fold("mlp.gate_up_proj", mlp.gate_up_proj, before)
        return [*found, _gate_fold("mlp.down_proj", mlp.gate_up_proj, mlp.down_proj)]
    assert mlp is not None
    if isinstance(mlp.shared_expert, GatedMLP):
        shared, name = mlp.shared_expert, "mlp.shared_expert.down_proj"
        found.append(_gate_fold(name, shared.gate_up_proj, shared.down_proj))
    return found + _expert_folds(mlp.get_submodule("experts"))


def _norm_before_attention(block: Block) -> nn.Module | None:
    """The norm whose output only qkv_proj reads."""
    shared = block.is_parallel and block.post_attention_layernorm is None
    return None if shared else block.input_layernorm


def _norm_before_mlp(block: Block) -> nn.Module | None:
    """The norm whose output only the MLP reads."""
    return block.pre_feedforward_layernorm or block.post_attention_layernorm


def _norm_fold(name: str, linear: Linear, norm: nn.Module | None) -> list[Fold]:
    if not isinstance(norm, RMSNorm | LayerNorm):
        return []
    bias = norm.bias if isinstance(norm, LayerNorm) else None
    return [
        Fold(
            name=name,
            linear=linear,
            producers=[norm.weight] if bias is None else [norm.weight, bias],
            sources=_identity(linear),
            is_norm=True,
        )
    ]


def _gate_fold(name: str, gate_up: Linear, down: Linear) -> Fold:
    """The up projection's outputs are multiplied by the gates, and read by the down projection."""
    ups = sum(gate_up.parts.values()) // 2
    return Fold(
        name=name,
        linear=down,
        producers=_rows(gate_up, ups),
        sources=_identity(down),
        is_norm=False,
    )


def _expert_folds(experts: nn.Module) -> list[Fold]:
    assert isinstance(experts, Experts)
    found = []
    for first, second in experts.pairs if experts.can_fold else ():
        gate_up, down = experts.get_submodule(first), experts.get_submodule(second)
        assert isinstance(gate_up, Linear)
        assert isinstance(down, Linear)
        found.append(_gate_fold(f"mlp.experts.{second}", gate_up, down))
    return found


def _identity(linear: Linear) -> Tensor:
    return torch.arange(linear.num_in, device=linear.get_parameter("weight").device)


def _shared_heads(heads: Heads, device: torch.device) -> Tensor:
    """Map feature d of query head h to feature d of KV head h // group."""
    head = torch.arange(heads.num_q, device=device) // heads.group
    return (head[:, None] * heads.dim + torch.arange(heads.dim, device=device)).flatten()


def _rows(linear: Linear, first: int) -> list[Tensor]:
    weight = linear.get_parameter("weight")
    return [weight[first:]] if linear.bias is None else [weight[first:], linear.bias[first:]]


def smoothing_scale(weight: Tensor, max_abs: Tensor, alpha: float = 0.5) -> Tensor:
    """Return SmoothQuant's scale per input: divides the input, multiplies the weight's column.

    alpha 0 leaves outliers in the activations, 1 moves them into the weights.
    """
    max_weight = weight.abs().amax(0).clamp(min=_MIN_SMOOTHING)
    scale = max_abs.clamp(min=_MIN_SMOOTHING) ** alpha / max_weight ** (1 - alpha)
    return scale.clamp(min=_MIN_SMOOTHING)


def search_scale(
    weight: Tensor, inputs: InputStats, grid: Grid, sources: Tensor
) -> tuple[Tensor, float]:
    """Search AWQ's scale, one number per row of the producer; return it with its strength.

    Row sources[k] of the producer makes input k. Strength 0 is included, so the result is no worse than
    rounding alone.
    """
    weight = weight[:: -(-weight.shape[0] // _MAX_ROWS)]
    sizes = inputs.mean_abs.new_zeros(int(sources.max()) + 1)
    sizes = sizes.scatter_reduce(0, sources, inputs.mean_abs, "amax").clamp(min=_MIN_SIZE)
    tried = []
    for step in range(_STEPS + 1):
        scale = sizes ** (step / _STEPS)
        scale = scale / (scale.max() * scale.min()).sqrt()
        wide = scale[sources]
        rounded = round_to_nearest(weight * wide, grid).dequantise() / wide
        tried.append((inputs.output_error(weight, rounded), step, scale))
    _, step, scale = min(tried, key=lambda item: item[:2])
    return scale, step / _STEPS


def search_clip(weight: Tensor, inputs: InputStats, grid: Grid) -> Tensor:
    """Search the clipping range of each output and group, as a share of its range: [N, K / group].

    The criterion is the output error of the group alone.
    """
    num_groups = weight.shape[1] // grid.group
    across = inputs.gram.unflatten(0, (num_groups, -1)).unflatten(2, (num_groups, -1))
    within = torch.stack([across[g, :, g] for g in range(num_groups)])  # [G, group, group]
    best_error = weight.new_full((weight.shape[0], num_groups), float("inf"))
    best = torch.ones_like(best_error)
    for clip in _CLIPS:
        shrink = torch.full_like(best, clip)
        lost = weight - round_to_nearest(weight, grid, shrink).dequantise()
        lost = lost.unflatten(1, (num_groups, -1))
        error = (torch.einsum("ngi,gij->ngj", lost, within) * lost).sum(-1)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best = torch.where(better, shrink, best)
    return best
