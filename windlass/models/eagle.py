"""EAGLE-3 draft head: one decoder layer over the target's hidden states, with a draft vocabulary.

Names and shapes are those of the public checkpoints. The input at a position is a hidden state (three
aux hidden states of the target, or the head's own output for a draft token) and the next token's
embedding, from the target's table.
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
from windlass.layers.head import Head
from windlass.layers.linear import Linear
from windlass.layers.mlp import GatedMLP
from windlass.layers.norm import RMSNorm
from windlass.layers.rotary import Rotary
from windlass.models.draft_steps import PlainSteps, steps_of
from windlass.models.fields import Fields
from windlass.models.hparams import HParams
from windlass.models.network import Network, Parts, Weights
from windlass.models.rope import frequencies
from windlass.quant.shard import Shard

if TYPE_CHECKING:
    from windlass.kernels.triton.eagle import FusedSteps

NUM_AUX_LAYERS = 3


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """The default aux layers (low, middle, high), for checkpoints that do not list them."""
    if 2 < num_layers // 2 < num_layers - 3:
        return (2, num_layers // 2, num_layers - 3)
    return (0, 1, 2) if num_layers == 3 else (1, num_layers // 2, num_layers - 1)


@dataclass(frozen=True, slots=True)
class EagleNorms:
    """Optional norms of a head, named as in the configs."""

    norm_before_residual: bool = False  # normalise the residual input too
    norm_before_fc: bool = False  # normalise the concatenated aux hidden states
    fc_norm: bool = False  # normalise each aux hidden state
    norm_output: bool = False  # the next draft token reads the normalised output

    @classmethod
    def of(cls, config: Mapping[str, Any], source: str) -> EagleNorms:
        fields = Fields(config, source)
        norms = cls(**{name: fields.flag(name, False) for name in cls.__slots__})
        if norms.norm_before_fc and norms.fc_norm:
            raise CheckpointError(
                f"{source}: norm_before_fc and fc_norm are both true, but both normalise the input "
                "of fc. Set the one that the head was not trained with to false."
            )
        return norms


_DEFAULT_NORMS = EagleNorms()


class EagleLayer(nn.Module):
    """A decoder layer whose attention reads the token's embedding and the hidden state."""

    def __init__(self, hparams: HParams, parts: Parts) -> None:
        super().__init__()
        size = hparams.hidden_size
        shape = AttentionShape(
            hidden_size=size,
            heads=Heads(hparams.num_heads, hparams.num_kv_heads, hparams.head_dim),
            qkv_bias=hparams.qkv_bias,
            o_bias=hparams.o_bias,
            input_size=2 * size,
        )
        norm = partial(RMSNorm, size, hparams.norm_eps, parts.dtype, parts.ops)
        self.hidden_norm = norm()
        self.input_layernorm = norm()
        self.self_attn = Attention(
            index=0,
            shape=shape,
            method_for=partial(parts.method_for, "midlayer.self_attn."),
            ops=parts.ops,
            group=parts.mesh.tp,
            dtype=parts.dtype,
        )
        self.post_attention_layernorm = norm()
        self.mlp = GatedMLP(
            hidden_size=size,
            intermediate_size=hparams.intermediate_size,
            method_for=partial(parts.method_for, "midlayer.mlp."),
            ops=parts.ops,
            group=parts.mesh.tp,
        )

    def forward(
        self, both: Tensor, hidden: Tensor, batch: StepBatch, cos_sin: Tensor, norm: RMSNorm
    ) -> tuple[Tensor, Tensor]:
        """Return (normalised output for lm_head, output)."""
        x, residual = self.self_attn(both, hidden, self.post_attention_layernorm, batch, cos_sin)
        x, residual = self.mlp(x, residual, norm, batch.adapters)
        assert isinstance(x, Tensor)  # the last norm never quantises its output
        return x, residual


class Eagle(Weights):
    """The draft head, filled by the loader. `d2t` maps draft ids to target ids (as differences)."""

    def __init__(
        self, hparams: HParams, draft_vocab: int, parts: Parts, norms: EagleNorms = _DEFAULT_NORMS
    ) -> None:
        super().__init__()
        size = hparams.hidden_size
        method = parts.method_for("", ["fc"])
        norm = partial(RMSNorm, eps=hparams.norm_eps, dtype=parts.dtype, ops=parts.ops)
        self.norms = norms
        self.input_norm = norm(NUM_AUX_LAYERS * size) if norms.norm_before_fc else None
        indices = range(NUM_AUX_LAYERS if norms.fc_norm else 0)
        self.fc_norm = nn.ModuleList(norm(size) for _ in indices)
        self.fc = Linear(
            outputs={"fc": Shard(size)},
            inputs=Shard(NUM_AUX_LAYERS * size),
            method=method,
            group=parts.mesh.tp,
        )
        self.midlayer = EagleLayer(hparams, parts)
        self.norm = norm(size)
        self.lm_head = Head(
            name="lm_head",
            vocab_size=draft_vocab,
            hidden_size=size,
            method=method,
            group=parts.mesh.tp,
        )
        self.d2t = nn.Parameter(torch.empty(draft_vocab, dtype=torch.int64), requires_grad=False)
        inv_freq, scale = frequencies(hparams.rope, parts.max_positions)
        self.rotary = Rotary(
            inv_freq=inv_freq, scale=scale, max_positions=parts.max_positions, device=parts.device
        )

    def fuse_aux_hidden_states(self, aux_hidden_states: Sequence[Tensor]) -> Tensor:
        """Fuse the target's aux hidden states into one hidden state per position."""
        if self.norms.fc_norm:
            aux_hidden_states = [
                _normed(norm, hidden)
                for norm, hidden in zip(self.fc_norm, aux_hidden_states, strict=True)
            ]
        fused = torch.cat(tuple(aux_hidden_states), dim=-1)
        if self.input_norm is not None:
            fused = _normed(self.input_norm, fused)
        return self.fc(fused)

    def forward(self, both: Tensor, hidden: Tensor, batch: StepBatch) -> tuple[Tensor, Tensor]:
        """Return (input of lm_head, hidden state for the next draft token).

        `both`: the next token's embedding and the hidden state, each normalised, concatenated.
        """
        if self.norms.norm_before_residual:
            hidden = both[:, -hidden.shape[1] :].contiguous()
        normed, hidden = self.midlayer(both, hidden, batch, self.rotary.cos_sin, self.norm)
        return normed, normed if self.norms.norm_output else hidden

    def logits(self, normed: Tensor, network: Network) -> Tensor:
        """Logits over the draft vocabulary."""
        del network
        return self.lm_head(normed)

    def steps(self, network: Network) -> PlainSteps | FusedSteps:
        """The operations between the GEMMs, with the network's embedding."""
        return steps_of(
            network,
            norm=self.midlayer.input_layernorm,
            hidden_norm=self.midlayer.hidden_norm,
            d2t=self.d2t,
            max_positions=self.rotary.cos_sin.shape[0],
        )


def _normed(norm: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(norm, RMSNorm)
    normed, _ = norm.add(x, None, unquantised=True)
    assert isinstance(normed, Tensor)
    return normed


def aux_layers_of(config: Mapping[str, Any], num_layers: int, source: str) -> tuple[int, ...]:
    """The aux layers that a checkpoint's config lists, or the default ones."""
    section = Fields(Fields(config, source).mapping("eagle_config"), source)
    named = section.sequence("eagle_aux_hidden_state_layer_ids")
    layers = tuple(named) if named else default_aux_layers(num_layers)
    if len(layers) != NUM_AUX_LAYERS or not all(layer in range(num_layers) for layer in layers):
        raise CheckpointError(
            f"{source}: lists aux layers {list(layers)}; expected {NUM_AUX_LAYERS} layers of the "
            f"target's {num_layers}."
        )
    return layers
