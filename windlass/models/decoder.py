"""The decoder that all families build from their HParams.

Module names are those of Llama's checkpoints, and merged layers name their parts; families with other
names list rules (tensor_rules.py).
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from windlass.core.kv_layout import KVLayout
from windlass.core.moe import ExpertPlacement
from windlass.core.recurrent import Recurrence
from windlass.kernels.batch import (
    AdapterRows,
    Heads,
    LogitsIndices,
    StepBatch,
    attention_layout,
    latent_layout,
)
from windlass.kernels.compile_only import is_compiling
from windlass.kernels.experts import ExpertKernels
from windlass.kernels.gemm import Norm
from windlass.kernels.gemm_io import Inputs
from windlass.kernels.token_split import TokenSplit
from windlass.layers.attention import Attention, AttentionLayer, AttentionShape, ScoreGrowth
from windlass.layers.delta import DeltaNet
from windlass.layers.embedding import Embedding, PackedEmbedding, TiedEmbedding
from windlass.layers.expert_combine import ExpertSpread
from windlass.layers.head import Head
from windlass.layers.linear import Linear
from windlass.layers.mamba import Mamba
from windlass.layers.mla import MLA, MLAShape
from windlass.layers.mlp import GatedMLP, PlainMLP
from windlass.layers.moe import MoE, MoEBesideMLP, MoEShape
from windlass.layers.norm import LayerNorm, NoNorm, RMSNorm, ScaledStream, after
from windlass.layers.per_layer import PerLayerEmbedding, PerLayerInput
from windlass.layers.recurrent import ConvMixer, RecurrentShape, rank_recurrent_heads
from windlass.layers.rotary import Rotary
from windlass.layers.short_conv import ShortConv
from windlass.models.hparams import HParams, MoEHParams
from windlass.models.launches import launches
from windlass.models.network import Network, Parts, rank_heads
from windlass.models.rope import frequencies
from windlass.models.rope_config import RopeConfig
from windlass.models.stages import LAYER, Stage
from windlass.parallel.mesh import Mesh, SingleRank
from windlass.quant.packed_method import PackedMethod

# Modules of the first and of the last pipeline stage.
_FIRST, _LAST = ("model.embed_tokens.", "model.embed_positions."), ("model.norm.", "lm_head.")
# Recurrent mixers, with the names of their modules in checkpoints.
_RECURRENT: dict[Recurrence, tuple[str, type[Mamba] | type[DeltaNet] | type[ShortConv]]] = {
    "mamba": ("mamba", Mamba),
    "delta": ("linear_attn", DeltaNet),
    "conv": ("conv", ShortConv),
}


class Block(nn.Module):
    """A decoder layer: a mixer and, in most, an MLP, each with a residual addition.

    The input is already normalised, and the output is normalised by the next layer's norm, so that
    a kernel can fuse a GEMM with the norm after it.
    """

    def __init__(self, index: int, hparams: HParams, parts: Parts, first: int = 0) -> None:
        """`first`: the first layer of this rank's stage."""
        super().__init__()
        placement = hparams.norm.placement
        self._scale = hparams.residual_scale
        self.input_layernorm = NoNorm() if placement == "post" else norm_of(hparams, parts)
        self.self_attn: Attention | MLA | None = None
        self._recurrent: str | None = None  # the module's name
        per_layer = hparams.kv_per_layer
        kv_index = per_layer * (hparams.kv_layer_of(index) - first)
        if hparams.has_attention(index):
            self.self_attn = _attention(index, hparams, parts, kv_index)
        if hparams.recurrent is not None and hparams.is_recurrent(index):
            self._recurrent, _ = _RECURRENT[hparams.recurrent.kind]
            state_index = per_layer * (index - first + 1) - 1
            self.add_module(self._recurrent, _recurrent(index, hparams, parts, state_index))
        self.post_attention_layernorm: RMSNorm | LayerNorm | None = None
        self.pre_feedforward_layernorm: RMSNorm | LayerNorm | NoNorm | None = None
        self.post_feedforward_layernorm: RMSNorm | LayerNorm | None = None
        self.mlp = _mlp(index, hparams, parts) if hparams.has_mlp(index) else None
        self.layer_scalar: nn.Parameter | None = None
        if hparams.layer_scales:
            scalar = torch.empty(1, dtype=parts.dtype)
            self.layer_scalar = nn.Parameter(scalar, requires_grad=False)
        self.per_layer = _per_layer_input(index, hparams, parts)
        self.moe = _moe_beside(index, hparams, parts)
        self.is_parallel = placement == "parallel"
        if self.mlp is None:
            assert placement == "pre", placement
            assert self.layer_scalar is None
            assert self.per_layer is None
        elif not self.is_parallel or hparams.norm.mlp_norm:
            self.post_attention_layernorm = norm_of(hparams, parts)
        if placement in ("sandwich", "post"):
            self.pre_feedforward_layernorm = (
                NoNorm() if placement == "post" else norm_of(hparams, parts)
            )
            self.post_feedforward_layernorm = norm_of(hparams, parts)
        if placement in ("pre", "sandwich"):
            if len(self.mixers) == 1:
                _prepare_for(self.input_layernorm, self.mixers[0].first_proj)
            if isinstance(self.mlp, GatedMLP):
                before_mlp = self.pre_feedforward_layernorm or self.post_attention_layernorm
                _prepare_for(before_mlp, self.mlp.gate_up_proj)

    @property
    def mixers(self) -> list[AttentionLayer]:
        """The sublayers that mix tokens: attention, a recurrent mixer, or both, whose outputs are added."""
        found = [] if self._recurrent is None else [self.get_submodule(self._recurrent)]
        return cast("list[AttentionLayer]", [*filter(None, [self.self_attn]), *found])

    @property
    def mixture(self) -> MoE | None:
        """The layer's mixture of experts, in place of the dense MLP or beside it."""
        return self.mlp if isinstance(self.mlp, MoE) else self.moe

    def forward(
        self,
        x: Inputs,
        residual: Tensor,
        next_norm: Norm,
        batch: StepBatch,
        cos_sin: Tensor | None,
        logits_indices: LogitsIndices | None = None,
        layer_inputs: Tensor | None = None,
    ) -> tuple[Inputs, Tensor]:
        """Return outputs of the `logits_indices` tokens, or of all; writes the KV cache of all.

        With `batch.split`, inputs and outputs of all tokens are those of this rank's tokens.
        `layer_inputs`: the tokens' embeddings for all layers, if the model has them.
        """
        if self.is_parallel:
            assert isinstance(x, Tensor)
            return self._parallel(x, residual, next_norm, batch, cos_sin, logits_indices)
        adapters = batch.adapters if logits_indices is None else logits_indices.adapters
        if self.mlp is None:
            norm = after(None, self._scale, next_norm)
            return self._mixed(x, residual, norm, batch, cos_sin, logits_indices)
        output_norm, input_norm = self.post_attention_layernorm, self.pre_feedforward_layernorm
        if input_norm is None:
            assert output_norm is not None
            norm = after(None, self._scale, output_norm)
        else:
            norm = after(output_norm, self._scale, input_norm)
        x, residual = self._mixed(x, residual, norm, batch, cos_sin, logits_indices)
        if self.layer_scalar is not None:
            next_norm = ScaledStream(self.layer_scalar, next_norm)
        last = next_norm if self.per_layer is None else NoNorm()
        last = after(self.post_feedforward_layernorm, self._scale, last)
        split = batch.split if logits_indices is None else None
        x = batch.all_tokens(x) if logits_indices is None else x
        if self.moe is None:
            x, residual = self.mlp(x, residual, last, adapters, split)
        else:
            y = self.moe.beside(self.mlp.output(x, adapters, split), residual, adapters, split)
            x, residual = last.add(y, residual, _is_unquantised(last, adapters, split))
        if self.per_layer is None:
            return x, residual
        assert layer_inputs is not None
        if logits_indices is not None:
            layer_inputs = self.mixers[0].logits_rows(layer_inputs, batch, logits_indices)
        return self.per_layer(residual, layer_inputs, next_norm, adapters is not None)

    def _mixed(
        self,
        x: Inputs,
        residual: Tensor,
        norm: Norm,
        batch: StepBatch,
        cos_sin: Tensor | None,
        logits_indices: LogitsIndices | None,
    ) -> tuple[Inputs, Tensor]:
        """Add the mixers' outputs to the residual stream and normalise."""
        first, *others = self.mixers
        if not others:
            return first(x, residual, norm, batch, cos_sin, logits_indices)
        every = batch.all_tokens(x)
        y = first.output(every, batch, cos_sin, logits_indices)
        for mixer in others:
            y = y + mixer.output(every, batch, cos_sin, logits_indices)
        adapters, split = batch.adapters, batch.split
        if logits_indices is not None:
            residual = first.logits_rows(residual, batch, logits_indices)
            adapters, split = logits_indices.adapters, None
        return norm.add(y, residual, _is_unquantised(norm, adapters, split))

    def _parallel(
        self,
        x: Tensor,
        residual: Tensor,
        next_norm: Norm,
        batch: StepBatch,
        cos_sin: Tensor | None,
        logits_indices: LogitsIndices | None,
    ) -> tuple[Inputs, Tensor]:
        assert self.mlp is not None
        (mixer,) = self.mixers
        every = batch.all_tokens(x)
        attended = mixer.output(every, batch, cos_sin, logits_indices)
        adapters, split = batch.adapters, batch.split
        if logits_indices is not None:
            every = mixer.ops.gather(every, logits_indices.tokens)
            residual = mixer.logits_rows(residual, batch, logits_indices)
            adapters, split = logits_indices.adapters, None
        if self.post_attention_layernorm is not None:
            every = self.post_attention_layernorm(residual)
            every = every if split is None else split.gather(every)
        y = attended + self.mlp.output(every, adapters, split)
        norm = after(None, self._scale, next_norm)
        return norm.add(y, residual, _is_unquantised(norm, adapters, split))


def _is_unquantised(norm: Norm, adapters: AdapterRows | None, split: TokenSplit | None) -> bool:
    """Whether the step's readers of the norm's result need a tensor."""
    return adapters is not None or (split is not None and split.is_unquantised(norm))


class DecoderModel(nn.Module):
    """Embedding, decoder layers and the last norm, as far as they belong to the stage."""

    def __init__(
        self, hparams: HParams, parts: Parts, stage: Stage, table: TiedEmbedding | None = None
    ) -> None:
        super().__init__()
        self.stage = stage
        self.embed_tokens: nn.Module | None = None
        self._scale = torch.tensor(hparams.embedding_scale, dtype=parts.dtype, device="cpu").item()
        self.embed_positions: Embedding | None = None
        if stage.is_first or (stage.is_last and parts.embeds_drafts):
            self.embed_tokens = table or _embedding(hparams, parts)
        if stage.is_first and hparams.learned_positions:
            sizes = hparams.learned_positions, hparams.hidden_size
            self.embed_positions = Embedding(*sizes, parts.dtype, parts.ops, SingleRank())
        self.per_layer = _per_layer_embedding(hparams, parts) if stage.is_first else None
        self.layers = nn.ModuleList()
        for index in stage.layers:  # under the checkpoint's number, also on later stages
            self.layers.add_module(str(index), Block(index, hparams, parts, stage.start))
        # Stages exchange the residual stream: the next one normalises it.
        self.norm = norm_of(hparams, parts) if stage.is_last else NoNorm()
        self._ropes = [hparams.rope_of(layer) for layer in stage.layers]
        self.rotary = nn.ModuleList(
            _rotary(rope, parts) for rope in dict.fromkeys(self._ropes) if rope is not None
        )

    @property
    def cos_sin(self) -> list[Tensor | None]:
        """The RoPE table of each layer."""
        ropes = [rope for rope in dict.fromkeys(self._ropes) if rope is not None]
        rotaries = zip(ropes, self.rotary, strict=True)
        tables = {rope: cast(Rotary, rotary).cos_sin for rope, rotary in rotaries}
        return [None if rope is None else tables[rope] for rope in self._ropes]

    @cached_property
    def _distinct_layers(self) -> list[int]:
        """Layers that launch all kernels of the stage: the last one, and the first of each kind."""
        kinds: dict[Hashable, int] = {}
        for i, block, rope in zip(self.stage.layers, self.layers, self._ropes, strict=True):
            kinds.setdefault((launches(block), rope), i)
        return sorted({*kinds.values(), self.stage.layers[-1]})

    def embed(self, ids: Tensor, split: TokenSplit | None = None) -> Tensor:
        """The token embeddings, scaled; with `split`, of this rank's tokens."""
        assert self.embed_tokens is not None, "this stage has no embedding"
        x = self.embed_tokens(ids, split)
        return x if self._scale == 1.0 else x * self._scale

    def forward(
        self, inputs: Tensor, batch: StepBatch, aux_hidden_states: dict[int, Tensor] | None = None
    ) -> Tensor:
        layers = self._distinct_layers if is_compiling() else list(self.stage.layers)
        blocks = [cast(Block, self.layers.get_submodule(str(i))) for i in layers]
        first, *next_norms = [cast(Norm, block.input_layernorm) for block in blocks]
        split = batch.split
        unquantised = batch.adapters is not None or (
            split is not None and split.is_unquantised(first)
        )
        embedded = self._residual(inputs, batch)
        per_layer = None
        if self.per_layer is not None:
            per_layer = self.per_layer(inputs, embedded, split)
        x, residual = first.add(embedded, None, unquantised)
        tables = self.cos_sin
        num_layers = self.stage.num_layers
        reads_all = (
            self.stage.is_last and aux_hidden_states is not None and num_layers in aux_hidden_states
        )
        for i, block, norm in zip(layers, blocks, [*next_norms, self.norm], strict=True):
            if aux_hidden_states is not None and i in aux_hidden_states:
                # A copy, since layers may change it in place.
                aux_hidden_states[i] = (
                    residual.clone() if split is None else split.gather_rows(residual)
                )
            gathers = i + 1 == num_layers and not reads_all
            logits_indices = batch.logits_indices if gathers else None
            table = tables[i - self.stage.start]
            x, residual = block(x, residual, norm, batch, table, logits_indices, per_layer)
        if logits_indices is None:
            x = batch.all_tokens(x)
        assert isinstance(x, Tensor)  # the last norm never quantises its output
        if aux_hidden_states is not None and reads_all:
            aux_hidden_states[num_layers] = x
            return x if batch.logits_indices is None else x[batch.logits_indices.tokens]
        return x

    def _residual(self, inputs: Tensor, batch: StepBatch) -> Tensor:
        """The residual stream before this stage's first layer."""
        split = batch.split
        if not self.stage.is_first:
            return inputs if split is None else split.own(inputs)
        embedded = self.embed(inputs, split)
        if self.embed_positions is not None:
            embedded = embedded + self.embed_positions(batch.positions, split)
        return embedded


def norm_of(hparams: HParams, parts: Parts) -> RMSNorm | LayerNorm:
    """A norm of the residual stream."""
    norm = hparams.norm
    dtype = torch.float32 if norm.float32 else parts.dtype
    size, ops = hparams.hidden_size, parts.ops
    if norm.kind == "rms":
        return RMSNorm(size=size, eps=norm.eps, dtype=dtype, ops=ops)
    return LayerNorm(size=size, eps=norm.eps, dtype=dtype, ops=ops, bias=norm.bias)


def _prepare_for(norm: nn.Module | None, reader: Linear) -> None:
    """Make a norm quantise its result, or leave it to the reader, as the layer that reads it wants."""
    if isinstance(norm, RMSNorm):
        norm.input_quant = reader.input_quant
        norm.defers = reader.takes_unnormalised


def _rotary(rope: RopeConfig, parts: Parts) -> Rotary:
    inv_freq, scale = frequencies(rope, parts.max_positions)
    return Rotary(
        inv_freq=inv_freq, scale=scale, max_positions=parts.max_positions, device=parts.device
    )


def _attention(index: int, hparams: HParams, parts: Parts, kv_index: int) -> Attention | MLA:
    """The layer's attention over keys and values, or over latents; `kv_index`: in the KV cache."""
    method_for = partial(parts.method_for, f"model.layers.{index}.self_attn.")
    if hparams.mla is not None:
        assert hparams.attention_scale is not None
        shape = MLAShape(
            hidden_size=hparams.hidden_size,
            heads=hparams.mla.heads,
            scale=hparams.attention_scale,
            q_rank=hparams.mla.q_rank,
            split_up=hparams.mla.split_up,
        )
        return MLA(
            index=kv_index,
            shape=shape,
            method_for=method_for,
            ops=parts.ops,
            group=parts.mesh.tp,
            dtype=parts.dtype,
        )
    return Attention(
        index=kv_index,
        shape=_attention_shape(index, hparams, parts.max_positions),
        method_for=method_for,
        ops=parts.ops,
        group=parts.mesh.tp,
        dtype=parts.dtype,
        device=parts.device,
    )


def _recurrent(index: int, hparams: HParams, parts: Parts, kv_index: int) -> ConvMixer:
    """The layer's recurrent mixer; `kv_index`: in the KV cache."""
    assert hparams.recurrent is not None
    name, kind = _RECURRENT[hparams.recurrent.kind]
    shape = RecurrentShape(
        hidden_size=hparams.hidden_size,
        heads=hparams.recurrent.heads,
        norm_eps=hparams.norm_eps,
        norm_groups=hparams.recurrent.norm_groups,
        conv_bias=hparams.recurrent.conv_bias,
        proj_bias=hparams.recurrent.proj_bias,
    )
    return kind(
        index=kv_index,
        shape=shape,
        method_for=partial(parts.method_for, f"model.layers.{index}.{name}."),
        ops=parts.ops,
        group=parts.mesh.tp,
        dtype=parts.dtype,
    )


def _state_sizes(hparams: HParams, mesh: Mesh) -> dict[int, int]:
    """The numbers of this rank's part of the recurrent state, of each layer that has one."""
    if hparams.recurrent is None:
        return {}
    size = rank_recurrent_heads(hparams.recurrent.heads, mesh.tp).num_values
    return {layer: size for layer in range(hparams.num_layers) if hparams.is_recurrent(layer)}


def _growth(hparams: HParams, rope: RopeConfig | None, max_positions: int) -> ScoreGrowth | None:
    """The growth of the scores with the position; None if no position is beyond the original context."""
    if rope is None and (found := hparams.unrotated_growth) is not None:
        growth = ScoreGrowth(found.beta, found.length, first=1)
    elif rope is not None and rope.score_beta is not None:
        growth = ScoreGrowth(rope.score_beta, rope.original_max_positions)
    else:
        return None
    return growth if max_positions + growth.first > growth.length else None


def _attention_shape(index: int, hparams: HParams, max_positions: int) -> AttentionShape:
    rope, kv_heads = hparams.rope_of(index), hparams.kv_heads_of(index)
    return AttentionShape(
        hidden_size=hparams.hidden_size,
        heads=Heads(hparams.num_heads, kv_heads.num, kv_heads.dim),
        qkv_bias=hparams.qkv_bias,
        o_bias=hparams.o_bias,
        norm_eps=hparams.norm_eps,
        window=hparams.sliding_windows[index],
        chunked=hparams.chunked_windows and hparams.sliding_windows[index] is not None,
        scale=hparams.attention_scale,
        soft_cap=hparams.attention_soft_cap,
        sinks=hparams.attention_sinks,
        rope=rope is not None,
        interleaved=hparams.rope_interleaved,
        qk_norm=None if hparams.qk_norm == "unit" and rope is None else hparams.qk_norm,
        norm_kind=hparams.qk_norm_kind,
        float32_norms=hparams.norm.float32,
        growth=_growth(hparams, rope, max_positions),
        gated=hparams.attention_gates,
        value_norm=hparams.value_norm,
        shares_kv=hparams.kv_layer_of(index) != index,
    )


def _mlp(index: int, hparams: HParams, parts: Parts) -> GatedMLP | PlainMLP | MoE:
    """The layer's MLP: dense, or a mixture of experts."""
    moe = hparams.moe
    if moe is not None and moe.layers[index] and not moe.beside_dense:
        return MoE(**_moe_options(index, hparams, moe, parts, name="mlp"))
    method_for = partial(parts.method_for, f"model.layers.{index}.mlp.")
    kind = GatedMLP if hparams.gated_mlp else PlainMLP
    return kind(
        hidden_size=hparams.hidden_size,
        intermediate_size=hparams.intermediate_size_of(index),
        method_for=method_for,
        ops=parts.ops,
        group=parts.mesh.tp,
        bias=parts.dtype if hparams.mlp_bias else None,
        activation=hparams.activation,
    )


def _moe_beside(index: int, hparams: HParams, parts: Parts) -> MoEBesideMLP | None:
    """The layer's mixture of experts beside its dense MLP."""
    moe = hparams.moe
    if moe is None or not moe.layers[index] or not moe.beside_dense:
        return None

    def norm() -> RMSNorm:
        made = norm_of(hparams, parts)
        assert isinstance(made, RMSNorm)
        return made

    return MoEBesideMLP(norms=norm, **_moe_options(index, hparams, moe, parts, name="moe"))


def _moe_options(
    index: int, hparams: HParams, moe: MoEHParams, parts: Parts, *, name: str
) -> dict[str, Any]:
    """The arguments of a layer's mixture of experts, which is the module `name`."""
    placement = parts.placements.get(index) or ExpertPlacement.contiguous(
        moe.routing.num_experts, parts.mesh.ep.size
    )
    return {
        "shape": MoEShape(
            hidden_size=hparams.hidden_size,
            intermediate_size=moe.intermediate_size,
            routing=moe.routing,
            activation=moe.activation,
            correction_bias=moe.correction_bias,
            router_bias=moe.router_bias,
            expert_bias=moe.expert_bias,
            shared_intermediate_size=moe.shared_intermediate_size,
            shared_gate=moe.shared_gate,
            jitter=moe.jitter,
            expert_scales=moe.beside_dense,
            scales_inputs=moe.scales_inputs,
        ),
        "method_for": partial(parts.method_for, f"model.layers.{index}.{name}."),
        "kernels": parts.experts or ExpertKernels(parts.device, parts.dtype, plain=True),
        "ops": parts.ops,
        "mesh": parts.mesh,
        "spread": ExpertSpread(placement, parts.device, parts.expert_combine),
        "dtype": parts.dtype,
    }


def _per_layer_input(index: int, hparams: HParams, parts: Parts) -> PerLayerInput | None:
    found = hparams.per_layer_inputs
    if found is None:
        return None
    return PerLayerInput(
        index,
        hidden_size=hparams.hidden_size,
        size=found.size,
        activation=found.activation,
        norm=norm_of(hparams, parts),
        method_for=partial(parts.method_for, f"model.layers.{index}.per_layer."),
        ops=parts.ops,
        group=parts.mesh.tp,
    )


def _per_layer_embedding(hparams: HParams, parts: Parts) -> PerLayerEmbedding | None:
    found = hparams.per_layer_inputs
    if found is None:
        return None
    sizes, group = (found.vocab_size, hparams.num_layers * found.size), parts.mesh.tp
    method = parts.per_layer_table_method
    table: nn.Module = Embedding(*sizes, parts.table_dtype or parts.dtype, parts.ops, group)
    if method is not None and method.gives_rows(*sizes):
        table = PackedEmbedding(*sizes, method, parts.dtype, group)
    return PerLayerEmbedding(
        table,
        hidden_size=hparams.hidden_size,
        size=found.size,
        num_layers=hparams.num_layers,
        eps=hparams.norm_eps,
        method_for=partial(parts.method_for, "model.per_layer."),
        ops=parts.ops,
        group=group,
        dtype=parts.dtype,
    )


def _embedding(hparams: HParams, parts: Parts) -> nn.Module:
    """An untied embedding table, packed if its method can read rows of this rank's shard."""
    sizes, group = (hparams.vocab_size, hparams.hidden_size), parts.mesh.tp
    if parts.table_method is not None:
        packed = PackedEmbedding(*sizes, parts.table_method, parts.dtype, group)
        if parts.table_method.gives_rows(packed.parts["embed_tokens"], packed.num_in):
            return packed
    return Embedding(*sizes, parts.table_dtype or parts.dtype, parts.ops, group)


class Decoder(Network):
    """The network, or a stage of it. `lm_head` shares the embedding's weight if the embeddings are tied."""

    def __init__(self, hparams: HParams, parts: Parts) -> None:
        super().__init__()
        stage = parts.stage or Stage(0, hparams.num_layers, hparams.num_layers)
        self.tied = hparams.tie_embeddings
        self._ops = parts.ops
        self._logit_scale = hparams.logit_scale
        self._logit_soft_cap = hparams.logit_soft_cap
        method = parts.method_for("", ["lm_head"])
        name = "model.embed_tokens" if self.tied else "lm_head"
        head = Head(
            name=name,
            vocab_size=hparams.vocab_size,
            hidden_size=hparams.hidden_size,
            method=method,
            group=parts.mesh.tp,
            bias=parts.dtype if hparams.lm_head_bias else None,
        )
        reads_rows = isinstance(method, PackedMethod) and method.gives_rows(
            head.parts[name], head.num_in
        )
        table = TiedEmbedding(head, parts.dtype) if self.tied and reads_rows else None
        self.model = DecoderModel(hparams, parts, stage, table)
        # The first stage keeps a tied head as its table.
        has_head = stage.is_last or (stage.is_first and table is not None)
        self.lm_head = head if has_head else None

    def is_elsewhere(self, name: str) -> bool:
        stage = self.model.stage
        if found := LAYER.match(name):
            return int(found[1]) < stage.num_layers and int(found[1]) not in stage.layers
        return (not stage.is_first and name.startswith(_FIRST)) or (
            not stage.is_last and name.startswith(_LAST)
        )

    @classmethod
    def kv_layout(
        cls, hparams: HParams, block_size: int, dtype: torch.dtype, mesh: Mesh
    ) -> KVLayout:
        if hparams.mla is not None:
            return latent_layout(
                hparams.num_layers,
                dim=hparams.mla.heads.dim,
                block_size=block_size,
                dtype=dtype,
            )
        own = range(hparams.num_layers - hparams.num_kv_shared_layers)
        return attention_layout(
            hparams.sliding_windows[: own.stop],
            num_kv_heads=rank_heads(hparams, mesh).num_kv,
            dim=hparams.head_dim,
            block_size=block_size,
            dtype=dtype,
            states=_state_sizes(hparams, mesh),
            layer_heads=[rank_heads(hparams, mesh, layer) for layer in own],
            beside=hparams.kv_per_layer > 1,
        )

    @property
    def table(self) -> Tensor | None:
        table = self.model.embed_tokens
        if isinstance(table, Embedding) and table.rows.is_whole:
            return table.weight
        return None

    def embed(self, ids: Tensor) -> Tensor:
        return self.model.embed(ids)

    def forward(
        self, inputs: Tensor, batch: StepBatch, aux_hidden_states: dict[int, Tensor] | None = None
    ) -> Tensor:
        return self.model(inputs, batch, aux_hidden_states)

    def logits(self, hidden: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        assert self.lm_head is not None, "only the last stage has the head"
        logits = self.lm_head(hidden, adapters)
        if self._logit_scale != 1.0:
            logits = logits * self._logit_scale
        if self._logit_soft_cap is not None:
            logits = self._ops.soft_cap(logits, self._logit_soft_cap)
        return logits
