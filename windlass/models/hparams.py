"""The hyper-parameters of a decoder, independent of the file format.

models/families/ reads them from a config.json's dictionary, gguf_config.py converts GGUF metadata to
that form, and models/decoder.py builds the network from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from windlass.core.mla import LatentHeads
from windlass.core.moe import ExpertActivation, Routing
from windlass.core.recurrent import Recurrence, RecurrentHeads
from windlass.models.pooling_head import PoolingHead
from windlass.models.rope_config import RopeConfig
from windlass.models.transformers_model import TransformersModel

Activation = Literal["silu", "gelu", "gelu_tanh", "relu2"]
# Where a layer normalises. pre: inputs of attention and MLP. post: their outputs, before the residual
# addition. sandwich: both. parallel: attention and MLP read the same normalised input.
NormPlacement = Literal["pre", "post", "sandwich", "parallel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NormHParams:
    """The norms of all layers."""

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    bias: bool = False  # layer only
    placement: NormPlacement = "pre"
    mlp_norm: bool = False  # parallel only: the MLP's input has a norm of its own
    float32: bool = False  # weights are kept in float32


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEHParams:
    """The mixture-of-experts layers."""

    routing: Routing
    intermediate_size: int  # of one expert
    layers: tuple[bool, ...]  # whether a layer is a mixture; others have the dense MLP
    activation: ExpertActivation = field(default_factory=ExpertActivation)
    correction_bias: bool = False  # of the router: added to scores for the choice only
    router_bias: bool = False
    expert_bias: bool = False
    shared_intermediate_size: int = 0  # of the expert that every token uses; 0: there is none
    jitter: float | None = None  # of sparsemixer routing; None: `routing` alone decides
    shared_gate: bool = False  # the shared expert's output is multiplied by a sigmoid gate
    # The sigmoid of a token's largest router logit scales the input of its only expert.
    scales_inputs: bool = False
    # The mixture is beside the dense MLP: both read the residual stream, with norms of their own, and their
    # normalised outputs are summed. The router has a norm too, and results have a weight per expert.
    beside_dense: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAHParams:
    """Latent attention (MLA)."""

    heads: LatentHeads
    q_rank: int | None  # features between the two projections of queries; None: one projection
    split_up: bool = False  # the file has kv_b_proj as two tensors, as llama.cpp stores it


@dataclass(frozen=True, slots=True, kw_only=True)
class KVHeads:
    """The KV heads of one layer, and the size of its heads."""

    num: int
    dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PerLayerInputs:
    """Embeddings of the tokens that each layer gets beside the residual stream."""

    vocab_size: int
    size: int  # of a layer's embedding
    activation: Activation


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthHParams:
    """Scores that grow with the position p of the query, in layers that do not rotate.

    They are multiplied by 1 + beta * log(1 + floor((p + 1) / length)).
    """

    beta: float
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentHParams:
    """The recurrent layers."""

    kind: Recurrence
    heads: RecurrentHeads
    layers: tuple[bool, ...]  # whether a layer is recurrent; others have attention
    conv_bias: bool = True
    proj_bias: bool = False
    norm_groups: int = 1  # of Mamba-2: parts that are normalised alone; 0: there is no norm
    beside_attention: bool = False  # recurrent layers have attention, too; both outputs are added
    # Factors of the weights of each layer, by the ends of their names, which a family's rules apply. None: the
    # weights of the file contain factors that it does not name.
    multipliers: tuple[tuple[str, float], ...] | None = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HParams:
    """A network's hyper-parameters."""

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int  # the most and the largest, if layers differ (layer_kv_heads)
    head_dim: int
    intermediate_size: int
    vocab_size: int
    norm: NormHParams
    rope: RopeConfig
    max_positions: int  # maximum context length, with RoPE scaling
    sliding_windows: tuple[int | None, ...]  # per layer; None: full attention
    # Windows are chunks: a token sees those of positions [i * window, (i + 1) * window) up to itself.
    chunked_windows: bool = False
    activation: Activation = "silu"
    gated_mlp: bool = True
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    lm_head_bias: bool = False
    # Norms of q and k, as in layers/attention.py: of each head with one weight for all heads or with a
    # weight for each, or of all heads together. unit: of each head without a weight, in layers that rotate.
    qk_norm: Literal["head", "each_head", "whole", "unit"] | None = None
    qk_norm_kind: Literal["rms", "layer"] = "rms"
    layer_ropes: tuple[RopeConfig | None, ...] = ()  # per layer, None: no rotation; empty: `rope`
    layer_kv_heads: tuple[KVHeads, ...] = ()  # per layer; empty: num_kv_heads and head_dim
    # The last layers have no keys and values: each reads those of the last layer before them with a window,
    # or without one, as it has.
    num_kv_shared_layers: int = 0
    layer_intermediate_sizes: tuple[int, ...] = ()  # per layer; empty: intermediate_size
    # Layers without a window have no v_proj in the checkpoint: k_proj gives keys and values.
    keys_are_values: bool = False
    value_norm: bool = False  # values are normalised per head, without a weight
    layer_scales: bool = False  # the residual stream after a layer is multiplied by a stored number
    per_layer_inputs: PerLayerInputs | None = None
    rope_interleaved: bool = False  # pairs are (2 i, 2 i + 1), not (i, i + dim / 2)
    attention_scale: float | None = None  # None: head_dim ** -0.5
    attention_soft_cap: float | None = None
    attention_sinks: bool = False
    unrotated_growth: GrowthHParams | None = None
    attention_gates: bool = False  # q_proj has a gate of each head's output behind the head
    learned_positions: int = 0  # rows of a table of position embeddings; 0: there is none
    embedding_scale: float = 1.0  # rounded to the activations' dtype
    residual_scale: float = 1.0  # of what attention and MLP add to the residual stream
    logit_scale: float = 1.0
    logit_soft_cap: float | None = None
    moe: MoEHParams | None = None
    # If set, attention is MLA, and num_kv_heads and head_dim are those of the latents.
    mla: MLAHParams | None = None
    recurrent: RecurrentHParams | None = None
    mlp_layers: tuple[bool, ...] = ()  # whether a layer has an MLP; empty: each has
    num_mtp_layers: int = 0  # after the others, for drafting (models/mtp.py)
    dtype: str | None = None  # of the checkpoint: "bfloat16"
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    quantization: Mapping[str, Any] = field(
        default_factory=dict
    )  # the raw quantization_config; quant/ reads it
    source: str = "config.json"  # the file, for error messages
    pooling: PoolingHead = field(default_factory=PoolingHead)
    transformers: TransformersModel | None = None  # set: transformers' own code computes the layers

    @property
    def table(self) -> str:
        """The module of the token embedding in the checkpoint."""
        return "model.embed_tokens" if self.transformers is None else self.transformers.table

    @property
    def head(self) -> str:
        """The module of the LM head in the checkpoint."""
        return "lm_head" if self.transformers is None else self.transformers.head

    @property
    def norm_eps(self) -> float:
        return self.norm.eps

    def is_recurrent(self, layer: int) -> bool:
        """Whether a layer has a recurrent mixer."""
        return self.recurrent is not None and self.recurrent.layers[layer]

    def has_attention(self, layer: int) -> bool:
        beside = self.recurrent is not None and self.recurrent.beside_attention
        return beside or not self.is_recurrent(layer)

    @property
    def kv_per_layer(self) -> int:
        """Entries of each layer in the KV layout: 2 if it has attention and a recurrent state."""
        return 2 if self.recurrent is not None and self.recurrent.beside_attention else 1

    def intermediate_size_of(self, layer: int) -> int:
        """The inner size of a layer's dense MLP."""
        sizes = self.layer_intermediate_sizes
        return sizes[layer] if sizes else self.intermediate_size

    def kv_heads_of(self, layer: int) -> KVHeads:
        """The KV heads of a layer."""
        if self.layer_kv_heads:
            return self.layer_kv_heads[layer]
        return KVHeads(num=self.num_kv_heads, dim=self.head_dim)

    @property
    def mixes_heads(self) -> bool:
        """Whether some layers keep keys and values of other sizes than others."""
        return len(set(self.layer_kv_heads)) > 1

    def kv_layer_of(self, layer: int) -> int:
        """The layer whose keys and values a layer reads: its own, unless it shares."""
        first = self.num_layers - self.num_kv_shared_layers
        if layer < first:
            return layer
        slides = self.sliding_windows[layer] is not None
        kinds = [window is not None for window in self.sliding_windows[:first]]
        return max(index for index, kind in enumerate(kinds) if kind == slides)

    def has_mlp(self, layer: int) -> bool:
        return not self.mlp_layers or self.mlp_layers[layer]

    def has_dense_mlp(self, layer: int) -> bool:
        """Whether a layer has an MLP that every token uses, alone or beside experts."""
        is_moe = self.moe is not None and self.moe.layers[layer] and not self.moe.beside_dense
        return self.has_mlp(layer) and not is_moe

    def rope_of(self, layer: int) -> RopeConfig | None:
        """The RoPE of a layer; None: it does not rotate."""
        return self.layer_ropes[layer] if self.layer_ropes else self.rope
