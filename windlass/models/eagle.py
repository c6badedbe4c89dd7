"""EAGLE-3: one decoder layer that continues a network's hidden states, with a small vocabulary.

Names and shapes are those of the public checkpoints. Input at a position is what the network knew
there (three taps of its residual stream, or the layer's own output for a guess) and the token that
follows; embeddings are the network's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from windlass.errors import CheckpointError
from windlass.kernels.batch import Heads, StepBatch
from windlass.layers.attention import Attention, AttentionShape
from windlass.layers.linear import Linear
from windlass.layers.mlp import GatedMLP
from windlass.layers.norm import RMSNorm
from windlass.layers.rotary import Rotary
from windlass.models.fields import Fields
from windlass.models.hparams import HParams
from windlass.models.network import Network, Parts, Weights
from windlass.models.rope import frequencies

if TYPE_CHECKING:
    from windlass.kernels.triton.eagle import FusedSteps

NUM_AUX_LAYERS = 3


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """Low, middle and high: the layers whose inputs are read where a checkpoint does not say."""
    if 2 < num_layers // 2 < num_layers - 3:
        return (2, num_layers // 2, num_layers - 3)
    return (0, 1, 2) if num_layers == 3 else (1, num_layers // 2, num_layers - 1)


@dataclass(frozen=True, slots=True)
class EagleNorms:
    """Where a head normalises beside what all of them do, by the names in their configs."""

    norm_before_residual: bool = False  # what the layer adds to is normalised too
    norm_before_fc: bool = False  # the taps, side by side
    fc_norm: bool = False  # each tap by itself
    norm_output: bool = False  # the next guess goes on from the normalised output

    @classmethod
    def of(cls, config: Mapping[str, Any], source: str) -> EagleNorms:
        fields = Fields(config, source)
        norms = cls(*(fields.flag(name, False) for name in cls.__slots__))
        if norms.norm_before_fc and norms.fc_norm:
            raise CheckpointError(
                f"{source}: norm_before_fc and fc_norm are both true, and either of them "
                "normalises what fc reads. Set the one that the head was not trained with to false."
            )
        return norms


_USUAL = EagleNorms()


class EagleLayer(nn.Module):
    """A decoder layer whose attention sees the token's embedding beside the hidden state."""

    def __init__(self, hparams: HParams, parts: Parts) -> None:
        super().__init__()
        size = hparams.hidden_size
        shape = AttentionShape(
            size,
            Heads(hparams.num_heads, hparams.num_kv_heads, hparams.head_dim),
            hparams.qkv_bias,
            hparams.o_bias,
            input_size=2 * size,
        )
        norm = partial(RMSNorm, size, hparams.norm_eps, parts.dtype, parts.ops)
        self.hidden_norm = norm()
        self.input_layernorm = norm()
        self.self_attn = Attention(
            0,
            shape,
            partial(parts.method_for, "midlayer.self_attn."),
            parts.ops,
            parts.mesh.tp,
            parts.dtype,
        )
        self.post_attention_layernorm = norm()
        self.mlp = GatedMLP(
            size,
            hparams.intermediate_size,
            partial(parts.method_for, "midlayer.mlp."),
            parts.ops,
            parts.mesh.tp,
        )

    def forward(
        self, both: Tensor, hidden: Tensor, batch: StepBatch, cos_sin: Tensor, norm: RMSNorm
    ) -> tuple[Tensor, Tensor]:
        """(normalised output for the head, the output itself)"""
        x, residual = self.self_attn(both, hidden, self.post_attention_layernorm, batch, cos_sin)
        x, residual = self.mlp(x, residual, norm, batch.adapters)
        assert isinstance(x, Tensor)  # nobody asked the last norm to round
        return x, residual


class Eagle(Weights):
    """The head without storage until a loader fills it; `d2t` turns its ids into the network's."""

    def __init__(
        self, hparams: HParams, draft_vocab: int, parts: Parts, norms: EagleNorms = _USUAL
    ) -> None:
        super().__init__()
        size = hparams.hidden_size
        method = parts.method_for("", ["fc"])
        norm = partial(RMSNorm, eps=hparams.norm_eps, dtype=parts.dtype, ops=parts.ops)
        self.norms = norms
        self.input_norm = norm(NUM_AUX_LAYERS * size) if norms.norm_before_fc else None
        each = range(NUM_AUX_LAYERS if norms.fc_norm else 0)
        self.fc_norm = nn.ModuleList(norm(size) for _ in each)
        self.fc = Linear({"fc": size}, NUM_AUX_LAYERS * size, method, parts.mesh.tp)
        self.midlayer = EagleLayer(hparams, parts)
        self.norm = norm(size)
        self.lm_head = Linear({"lm_head": draft_vocab}, size, method, parts.mesh.tp)
        self.d2t = nn.Parameter(torch.empty(draft_vocab, dtype=torch.int64), requires_grad=False)
        inv_freq, scale = frequencies(hparams.rope)
        self.rotary = Rotary(inv_freq, scale, parts.max_positions, parts.device)

    def known(self, aux_hidden_states: Sequence[Tensor]) -> Tensor:
        """What the network knew at each place, from its taps."""
        if self.norms.fc_norm:
            aux_hidden_states = [
                _normed(norm, aux_hidden_state)
                for norm, aux_hidden_state in zip(self.fc_norm, aux_hidden_states, strict=True)
            ]
        beside = torch.cat(tuple(aux_hidden_states), dim=-1)
        if self.input_norm is not None:
            beside = _normed(self.input_norm, beside)
        return self.fc(beside)

    def forward(self, both: Tensor, hidden: Tensor, batch: StepBatch) -> tuple[Tensor, Tensor]:
        """(what the head reads, what the next guess goes on from)

        `both`: the vector of the token that follows beside the hidden state, each normalised.
        """
        if self.norms.norm_before_residual:
            hidden = both[:, -hidden.shape[1] :].contiguous()
        normed, hidden = self.midlayer(both, hidden, batch, self.rotary.cos_sin, self.norm)
        return normed, normed if self.norms.norm_output else hidden

    @property
    def longest(self) -> int:
        return self.rotary.cos_sin.shape[0]


def _normed(norm: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(norm, RMSNorm)
    normed, _ = norm.add(x, None, whole=True)
    assert isinstance(normed, Tensor)
    return normed


@dataclass(frozen=True, slots=True)
class PlainSteps:
    """What happens between the products, operator by operator."""

    head: Eagle
    network: Network

    def inputs(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """What the layer reads: the tokens that follow, and what is known at each place."""
        layer = self.head.midlayer
        beside, _ = layer.input_layernorm.add(self.network.embed(ids), None)
        own, _ = layer.hidden_norm.add(hidden, None)
        return torch.cat((beside, own), dim=-1)  # type: ignore[arg-type]

    def select(
        self, places: Tensor, normed: Tensor, hidden: Tensor, positions: Tensor, slots: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The places from which guesses go on."""
        return normed[places], hidden[places], positions[places], slots[places]

    def advance(
        self, logits: Tensor, hidden: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The likeliest tokens, their positions, and what the layer reads to go on from them."""
        best = logits.argmax(-1)
        tokens = (best + self.head.d2t[best]).to(torch.int32)
        positions = (positions + 1).clamp(max=self.head.longest - 1)
        return tokens, positions, self.inputs(tokens, hidden)


def steps_of(head: Eagle, network: Network) -> PlainSteps | FusedSteps:
    """Fused where the head's other kernels are Triton's and the network's table is at hand."""
    layer, table = head.midlayer, network.table
    if not layer.self_attn.ops.is_triton or table is None:
        return PlainSteps(head, network)
    from windlass.kernels.triton.eagle import FusedSteps

    norms = (layer.input_layernorm, layer.hidden_norm)
    gains, hidden_gains = (norm.weight for norm in norms)
    return FusedSteps(table, gains, hidden_gains, norms[0].eps, head.d2t, head.longest)


def aux_layers_of(config: Mapping[str, Any], num_layers: int, source: str) -> tuple[int, ...]:
    """The layers that a checkpoint's config names, or the usual ones."""
    section = Fields(Fields(config, source).mapping("eagle_config"), source)
    named = section.sequence("eagle_aux_hidden_state_layer_ids")
    aux_hidden_states = tuple(named) if named else default_aux_layers(num_layers)
    if len(aux_hidden_states) != NUM_AUX_LAYERS or not all(
        layer in range(num_layers) for layer in aux_hidden_states
    ):
        raise CheckpointError(
            f"{source}: reads the inputs of layers {list(aux_hidden_states)}, but the network has "
            f"{num_layers} layers, and three of them are read."
        )
    return aux_hidden_states
