"""The Llama family: Llama 2 and 3, Mistral (sliding window), SmolLM2, TinyLlama, and Qwen 2 and 3.

Qwen2 adds a bias to q, k and v, Qwen3 a norm to q and k, as HParams specifies. Module names are
those of the checkpoints, so the loader needs no name table; merged layers name their parts.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from windlass.core.kv_layout import KVLayout
from windlass.kernels.batch import (
    AdapterRows,
    Heads,
    LogitsIndices,
    StepBatch,
    attention_layout,
)
from windlass.kernels.gemm_io import Inputs
from windlass.layers.attention import Attention, AttentionShape
from windlass.layers.embedding import Embedding, PackedEmbedding, TiedEmbedding
from windlass.layers.head import Head
from windlass.layers.mlp import GatedMLP
from windlass.layers.norm import RMSNorm
from windlass.layers.rotary import Rotary
from windlass.models.hparams import HParams
from windlass.models.network import Network, Parts
from windlass.models.rope import frequencies
from windlass.quant.packed_method import PackedMethod


class Block(nn.Module):
    """A decoder layer: attention and MLP, each with a residual addition.

    The input is already normalised, and the output is normalised by the next layer's norm, so that
    a kernel can fuse a GEMM with the norm after it.
    """

    def __init__(self, index: int, hparams: HParams, parts: Parts) -> None:
        super().__init__()
        name = f"model.layers.{index}"
        shape = AttentionShape(
            hidden_size=hparams.hidden_size,
            heads=Heads(hparams.num_heads, hparams.num_kv_heads, hparams.head_dim),
            qkv_bias=hparams.qkv_bias,
            o_bias=hparams.o_bias,
            norm_eps=hparams.norm_eps,
            qk_norm="head" if hparams.qk_norm else None,
            window=hparams.sliding_windows[index],
        )
        self.input_layernorm = RMSNorm(
            size=hparams.hidden_size, eps=hparams.norm_eps, dtype=parts.dtype, ops=parts.ops
        )
        self.self_attn = Attention(
            index=index,
            shape=shape,
            method_for=partial(parts.method_for, f"{name}.self_attn."),
            ops=parts.ops,
            group=parts.mesh.tp,
            dtype=parts.dtype,
        )
        self.post_attention_layernorm = RMSNorm(
            size=hparams.hidden_size, eps=hparams.norm_eps, dtype=parts.dtype, ops=parts.ops
        )
        self.mlp = GatedMLP(
            hidden_size=hparams.hidden_size,
            intermediate_size=hparams.intermediate_size,
            method_for=partial(parts.method_for, f"{name}.mlp."),
            ops=parts.ops,
            group=parts.mesh.tp,
            bias=parts.dtype if hparams.mlp_bias else None,
        )
        self.input_layernorm.input_quant = self.self_attn.qkv_proj.input_quant
        self.post_attention_layernorm.input_quant = self.mlp.gate_up_proj.input_quant

    def forward(
        self,
        x: Inputs,
        residual: Tensor,
        next_norm: RMSNorm,
        batch: StepBatch,
        cos_sin: Tensor,
        logits_indices: LogitsIndices | None = None,
    ) -> tuple[Inputs, Tensor]:
        """Return outputs of the `logits_indices` tokens, or of all; writes the KV cache of all."""
        norm = self.post_attention_layernorm
        x, residual = self.self_attn(x, residual, norm, batch, cos_sin, logits_indices)
        adapters = batch.adapters if logits_indices is None else logits_indices.adapters
        return self.mlp(x, residual, next_norm, adapters)


class LlamaModel(nn.Module):
    """Embedding, decoder layers and the last norm."""

    def __init__(self, hparams: HParams, parts: Parts, table: TiedEmbedding | None = None) -> None:
        super().__init__()
        self.embed_tokens = table or _embedding(hparams, parts)
        self.layers = nn.ModuleList(Block(i, hparams, parts) for i in range(hparams.num_layers))
        self.norm = RMSNorm(
            size=hparams.hidden_size, eps=hparams.norm_eps, dtype=parts.dtype, ops=parts.ops
        )
        inv_freq, scale = frequencies(hparams.rope)
        self.rotary = Rotary(
            inv_freq=inv_freq, scale=scale, max_positions=parts.max_positions, device=parts.device
        )

    def forward(
        self, ids: Tensor, batch: StepBatch, aux_hidden_states: dict[int, Tensor] | None = None
    ) -> Tensor:
        norms: list[RMSNorm] = [block.input_layernorm for block in self.layers]  # type: ignore[misc]
        first, *next_norms = norms
        whole = batch.adapters is not None
        x, residual = first.add(self.embed_tokens(ids), None, whole)
        for i, (block, norm) in enumerate(zip(self.layers, [*next_norms, self.norm], strict=True)):
            if aux_hidden_states is not None and i in aux_hidden_states:
                aux_hidden_states[i] = residual.clone()  # layers may change it in place
            logits_indices = batch.logits_indices if norm is self.norm else None
            x, residual = block(x, residual, norm, batch, self.rotary.cos_sin, logits_indices)
        assert isinstance(x, Tensor)  # the last norm never quantises its output
        return x


def _embedding(hparams: HParams, parts: Parts) -> nn.Module:
    """An untied embedding table, packed if its method can read rows of this rank's shard."""
    sizes, group = (hparams.vocab_size, hparams.hidden_size), parts.mesh.tp
    if parts.table_method is not None:
        packed = PackedEmbedding(*sizes, parts.table_method, parts.dtype, group)
        if parts.table_method.gives_rows(packed.parts["embed_tokens"], packed.num_in):
            return packed
    return Embedding(*sizes, parts.table_dtype or parts.dtype, parts.ops, group)


class Llama(Network):
    """The whole network. `lm_head` shares the embedding's weight if the embeddings are tied."""

    def __init__(self, hparams: HParams, parts: Parts) -> None:
        super().__init__()
        self.tied = hparams.tie_embeddings
        method = parts.method_for("", ["lm_head"])
        name = "model.embed_tokens" if self.tied else "lm_head"
        head = Head(
            name=name,
            vocab_size=hparams.vocab_size,
            hidden_size=hparams.hidden_size,
            method=method,
            group=parts.mesh.tp,
        )
        reads_rows = isinstance(method, PackedMethod) and method.gives_rows(
            head.parts[name], head.num_in
        )
        table = TiedEmbedding(head, parts.dtype) if self.tied and reads_rows else None
        self.model = LlamaModel(hparams, parts, table)
        self.lm_head = head

    @classmethod
    def kv_layout(cls, hparams: HParams, block_size: int, dtype: torch.dtype) -> KVLayout:
        return attention_layout(
            hparams.sliding_windows,
            num_kv_heads=hparams.num_kv_heads,
            dim=hparams.head_dim,
            block_size=block_size,
            dtype=dtype,
        )

    @property
    def table(self) -> Tensor | None:
        table = self.model.embed_tokens
        if isinstance(table, Embedding) and table.rows.is_whole:
            return table.weight
        return None

    def embed(self, ids: Tensor) -> Tensor:
        return self.model.embed_tokens(ids)

    def forward(
        self, ids: Tensor, batch: StepBatch, aux_hidden_states: dict[int, Tensor] | None = None
    ) -> Tensor:
        return self.model(ids, batch, aux_hidden_states)

    def logits(self, hidden: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        return self.lm_head(hidden, adapters)
