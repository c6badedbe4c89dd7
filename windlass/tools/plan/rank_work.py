"""The kernels and collectives of one rank's part of a step, read off its network of meta tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import cast

from windlass.config import CombineRule
from windlass.core.kv_layout import KVLayout
from windlass.errors import UnsupportedError
from windlass.layers.attention import Attention
from windlass.layers.linear import Linear
from windlass.layers.mla import MLA, AbsorbedWeight
from windlass.layers.mlp import GatedMLP, PlainMLP
from windlass.layers.moe import Experts, MoE
from windlass.layers.stored import StoredWeight
from windlass.models.decoder import Block
from windlass.models.hparams import HParams
from windlass.models.rank_weights import RankNetwork, count_bytes
from windlass.models.stages import Stage
from windlass.tools.plan.fabric import Collective, CollectiveKind
from windlass.tools.plan.kernel_times import Kernel, KernelKind

_NORM_PASSES = 4  # a norm reads and writes the residual stream and its result
_SAMPLING_KERNELS = 6


@dataclass(frozen=True, slots=True)
class StepSize:
    """One step: packed tokens, of which `rows` are sampled, after `context` tokens of each row."""

    tokens: int
    rows: int
    context: float  # KV tokens that a token reads, on average

    @property
    def has_prompts(self) -> bool:
        return self.tokens > self.rows

    @classmethod
    def decode(cls, rows: int, context: int) -> StepSize:
        return cls(tokens=rows, rows=rows, context=context)

    @classmethod
    def prefill(cls, tokens: int) -> StepSize:
        return cls(tokens=tokens, rows=1, context=(tokens + 1) / 2)


@dataclass(frozen=True, slots=True)
class StageWork:
    """What a rank of one pipeline stage does in a step."""

    kernels: tuple[Kernel, ...]
    collectives: tuple[Collective, ...]


@dataclass(frozen=True, slots=True)
class RankWork:
    """Computes the work of a rank's stages."""

    network: RankNetwork
    hparams: HParams
    tp: int
    layout: KVLayout  # of all layers on this rank
    item_bytes: int  # of activations
    min_split_tokens: int | None = None  # prompt tokens from which a step is split; None: none is

    def _is_split(self, size: StepSize) -> bool:
        """Whether the ranks divide the tokens of a step (kernels/token_split.py)."""
        least = self.min_split_tokens
        return least is not None and self.tp > 1 and size.tokens - size.rows >= least

    def stage(self, stage: Stage, size: StepSize) -> StageWork:
        """The work of a stage; after the last layer's attention only sampled rows go on."""
        kernels: list[Kernel] = []
        collectives: list[Collective] = []
        is_split = self._is_split(size)
        if stage.is_first:
            kernels.append(self._small(size.tokens * self.hparams.hidden_size, passes=2))
            collectives += self._reduce(size.tokens, split=is_split)
            collectives += self._per_layer_reduce(size.tokens, split=is_split)
        for index in stage.layers:
            is_last = index + 1 == stage.num_layers
            after = size.rows if is_last else size.tokens
            block = cast(Block, self.network.layer(index))
            kernels += self._attention(block, index, size, after)
            kernels += self._mlp(block, after, split=is_split and not is_last)
            if is_split:
                collectives += self._split_layer(block, size, is_last=is_last)
            else:
                collectives += self._layer_reduces(block, size.tokens, after)
        if stage.is_last:
            kernels += self._head(size.rows)
            num_bytes = size.rows * self.hparams.vocab_size * self.item_bytes
            collectives.append(Collective("all-gather", num_bytes, self.tp))
        else:
            stream = self._stream_bytes(size.tokens)
            collectives += [Collective("all-gather", stream, self.tp)] * is_split
            collectives.append(Collective("send", stream, 2))
        kept = tuple(each for each in collectives if each.num_ranks > 1)
        return StageWork(tuple(kernels), kept)

    def expert_combine(self, tokens: int) -> dict[CombineRule, list[Collective]]:
        """How the mixtures of a step can sum what the ranks' experts give (layers/expert_combine.py).

        With all-to-all, a rank gets the rows of its slice of the tokens, from ranks that have some of a
        token's experts, and the summed slices are gathered.
        """
        layers = (self.network.layer(index) for index in range(len(self.network.same_as)))
        found = [cast(Block, layer).mixture for layer in layers]
        mixtures = [mixture for mixture in found if mixture is not None]
        if not mixtures:
            return {}
        used = 1 - (1 - 1 / self.tp) ** mixtures[0].experts.routing.top_k
        stream = self._stream_bytes(tokens)
        both = [
            Collective("all-to-all", int(used * stream), self.tp),
            Collective("all-gather", stream, self.tp),
        ]
        return {
            "all-reduce": self._reduce(tokens, count=len(mixtures)),
            "all-to-all": both * len(mixtures),
        }

    def step_bytes(self, tokens: int, rows: int) -> int:
        """An estimate of a step's largest tensors: residual stream, MLP activations and logits."""
        hidden, widths = self.hparams.hidden_size, []
        for index in set(self.network.same_as):
            block = cast(Block, self.network.layer(index))
            if block.mixture is not None:
                experts = block.mixture.experts
                share = len(experts.down.parts) / experts.routing.num_experts
                pairs = experts.routing.top_k * share  # of this rank, per token
                widths.append(pairs * (3 * experts.down.num_in + hidden))
            if block.mlp is not None and not isinstance(block.mlp, MoE):
                widths.append(3 * block.mlp.down_proj.num_in)
        logits = rows * self.hparams.vocab_size * (self.item_bytes + 4)
        return int(tokens * (2 * hidden + max(widths)) * self.item_bytes) + logits

    def _stream_bytes(self, tokens: int) -> int:
        return tokens * self.hparams.hidden_size * self.item_bytes

    def _reduce(self, tokens: int, count: int = 1, split: bool = False) -> list[Collective]:
        kind: CollectiveKind = "reduce-scatter" if split else "all-reduce"
        return [Collective(kind, self._stream_bytes(tokens), self.tp)] * count

    def _per_layer_reduce(self, tokens: int, split: bool = False) -> list[Collective]:
        """The sum of the ranks' per-layer embeddings."""
        found = self.hparams.per_layer_inputs
        if found is None:
            return []
        num_bytes = tokens * self.hparams.num_layers * found.size * self.item_bytes
        return [Collective("reduce-scatter" if split else "all-reduce", num_bytes, self.tp)]

    def norm(self, tokens: float) -> Kernel:
        """A norm with its residual addition."""
        return self._small(tokens * self.hparams.hidden_size, _NORM_PASSES)

    def _small(self, values: float, passes: float) -> Kernel:
        return Kernel("small", values * passes * self.item_bytes)

    def _layer_reduces(self, block: Block, tokens: int, after: int) -> list[Collective]:
        attention = _attention_of(block)
        found = self._qk_norm(attention, tokens)
        found += self._reduce(after, count=int(attention.o_proj.is_partial))
        return found + self._mlp_reduces(block, after)

    def _split_layer(self, block: Block, size: StepSize, *, is_last: bool) -> list[Collective]:
        """The collectives of a layer whose tokens are split; the last one goes on with sampled rows."""
        attention = _attention_of(block)
        found = self._gathered(attention.qkv_proj, size.tokens)
        if _projects_slices(attention):
            width = sum(attention.qkv_proj.parts.values())
            found = [Collective("all-gather", size.tokens * width * self.item_bytes, self.tp)]
        found += self._qk_norm(attention, size.tokens)
        if is_last:  # the residual stream of sampled rows, and the sums
            found += self._reduce(size.rows, count=1 + attention.o_proj.is_partial)
            found += self._mlp_reduces(block, size.rows)
            return found + self._per_layer_reduce(size.rows)
        found += self._reduce(size.tokens, count=int(attention.o_proj.is_partial), split=True)
        mlp = block.mlp
        reader = mlp.gate_up_proj if isinstance(mlp, GatedMLP) else None
        found += self._gathered(reader, size.tokens)
        reduces = self._mlp_reduces(block, size.tokens, split=True)
        if (
            block.moe is not None
        ):  # after the dense MLP, the inputs of the router and of the experts
            stream = self._stream_bytes(size.tokens)
            reduces[1:1] = [Collective("all-gather", stream, self.tp)] * 2
        return found + reduces

    def _gathered(self, reader: Linear | None, tokens: int) -> list[Collective]:
        """The normalised inputs of a layer; if it reads 8-bit codes, those and a scale per token."""
        sizes = [self._stream_bytes(tokens)]
        if reader is not None and _gemm_kind(reader) == "fp8":
            sizes = [tokens * self.hparams.hidden_size, tokens * 4]
        return [Collective("all-gather", num_bytes, self.tp) for num_bytes in sizes]

    def _qk_norm(self, attention: Attention | MLA, tokens: int) -> list[Collective]:
        if isinstance(attention, Attention) and attention.shape.qk_norm == "whole":
            return [Collective("all-reduce", tokens * 2 * 4, self.tp)]
        return []

    def _mlp_reduces(self, block: Block, tokens: int, split: bool = False) -> list[Collective]:
        mlp = block.mlp
        found = self._reduce(tokens, split=split) if block.mixture is not None else []
        dense = mlp.shared_expert if isinstance(mlp, MoE) else mlp
        if dense is not None:
            found += self._reduce(tokens, int(dense.down_proj.is_partial), split)
        return found

    def _attention(self, block: Block, index: int, size: StepSize, after: int) -> Iterator[Kernel]:
        attention, is_split = _attention_of(block), self._is_split(size)
        own = -(-size.tokens // self.tp) if is_split else size.tokens
        yield self.norm(own if after == size.tokens else after)
        for child in attention.modules():
            if isinstance(child, Linear):
                tokens = after if child is attention.o_proj else size.tokens
                is_own = child is attention.qkv_proj and _projects_slices(attention)
                yield self.gemm(child, own if is_own else tokens)
            elif isinstance(child, AbsorbedWeight) and not size.has_prompts:
                yield from [self.absorbed(child, size.tokens)] * 2
        if isinstance(attention, Attention) and not size.has_prompts:  # RoPE and the KV write
            yield self._small(size.tokens * _num_qkv(attention), 2)
        yield self.attend(attention, index, size)

    def absorbed(self, layer: AbsorbedWeight, tokens: int) -> Kernel:
        """One of the two kernels that read a half of the weight each: for queries, and for outputs."""
        both = self.gemm(layer, tokens)
        return Kernel("latent projection", both.num_bytes / 2, both.num_flops / 2)

    def attend(self, attention: Attention | MLA, index: int, size: StepSize) -> Kernel:
        """Attention over the KV cache of layer `index`."""
        layer = self.layout.per_layer * self.hparams.kv_layer_of(index)
        group, _ = self.layout.place(layer)
        kept = self.layout.groups[group]
        context = min(size.context, kept.window or size.context)
        token_bytes = kept.layer_bytes / self.layout.block_size
        # A row's keys and values are read once for all of its tokens.
        read = size.rows * context * token_bytes * (1 if size.tokens == size.rows else 2)
        has_codes = kept.item_bytes == 1
        if isinstance(attention, MLA):
            latent = attention.heads
            if size.has_prompts:
                return self._expanded(attention, size.tokens, context)
            flops = 2 * size.tokens * context * latent.num_q * (latent.dim + latent.rank)
            kind: KernelKind = "8-bit latent attention" if has_codes else "latent attention"
            return Kernel(kind, read, flops)
        kind = "8-bit attention" if has_codes else "attention"
        heads = attention.heads
        if size.has_prompts:  # with RoPE and the KV write
            read += 2 * size.tokens * _num_qkv(attention) * self.item_bytes
        return Kernel(kind, read, 4 * size.tokens * context * heads.num_q * heads.dim)

    def _expanded(self, attention: MLA, tokens: int, context: float) -> Kernel:
        """Attention of prompts: a GEMM makes keys and values of all heads from the latents."""
        heads = attention.heads
        sizes = heads.num_q * (heads.nope_dim + heads.value_dim)  # keys and values of a token
        scores = context * heads.num_q * (heads.query_dim + heads.value_dim)
        num_values = heads.rank * sizes + tokens * (2 * sizes + heads.num_q * heads.query_dim)
        return Kernel(
            "latent prompts",
            num_bytes=num_values * self.item_bytes,
            num_flops=2 * tokens * (heads.rank * sizes + scores),
        )

    def _mlp(self, block: Block, tokens: int, split: bool = False) -> Iterator[Kernel]:
        if block.mlp is None:
            return
        yield self.norm(-(-tokens // self.tp) if split else tokens)
        parts = [part for part in (block.mlp, block.moe, block.per_layer) if part is not None]
        for child in chain(*(part.modules() for part in parts)):
            if isinstance(child, Linear):
                yield self.gemm(child, tokens)
            elif isinstance(child, Experts):
                yield self._experts(child, tokens)
            elif isinstance(child, GatedMLP | PlainMLP):
                yield self._small(tokens * child.down_proj.num_in, 3)
        if isinstance(block.mlp, MoE) and block.mlp.shared_expert is not None:
            yield self._small(tokens * self.hparams.hidden_size, 3)

    def gemm(self, layer: StoredWeight, tokens: int) -> Kernel:
        """The product of a weight with some tokens."""
        num_out, num_in = sum(layer.parts.values()), layer.num_in
        moved = tokens * (num_out + num_in) * self.item_bytes
        return Kernel(
            kind=_gemm_kind(layer),
            num_bytes=count_bytes([layer]) + moved,
            num_flops=2 * tokens * num_out * num_in,
        )

    def _experts(self, experts: Experts, tokens: int) -> Kernel:
        """The experts of the busiest rank; all experts are equally likely."""
        routing, num_local = experts.routing, len(experts.down.parts)
        pairs = busiest_pairs(tokens * routing.top_k, routing.num_experts // num_local)
        return self.grouped(experts, pairs, expert_share(pairs, num_local))

    def grouped(self, experts: Experts, pairs: float, share: float) -> Kernel:
        """The grouped GEMMs of some (token, expert) pairs, which read a share of the experts."""
        num_weights = sum(experts.gate_up.parts.values()) * experts.gate_up.num_in
        num_weights += sum(experts.down.parts.values()) * experts.down.num_in
        moved = pairs * 2 * self.hparams.hidden_size * self.item_bytes
        prepared = experts.down.prepared
        return Kernel(
            kind=_expert_kind("" if prepared is None else prepared.form),
            num_bytes=share * experts.num_bytes + moved,
            num_flops=2 * pairs * num_weights / len(experts.down.parts),
        )

    def _head(self, rows: int) -> Iterator[Kernel]:
        head, vocab = self.network.head, self.hparams.vocab_size
        yield self.norm(rows)
        yield self.gemm(head, rows)
        yield from [Kernel("small", rows * vocab * 4 / 2)] * _SAMPLING_KERNELS


def _attention_of(block: Block) -> Attention | MLA:
    *others, last = block.mixers
    if not others and isinstance(last, Attention | MLA):
        return last
    raise UnsupportedError(
        f"layers of {type(last).__name__} are not part of the model of several GPUs."
    )


def _num_qkv(attention: Attention) -> int:
    """Queries, keys and values of a token."""
    return (attention.heads.num_q + 2 * attention.heads.num_kv) * attention.heads.dim


def _projects_slices(attention: Attention | MLA) -> bool:
    """Whether ranks project their own tokens if these are split: all have the same weights."""
    return isinstance(attention, MLA) and attention.q_b_proj is not None


def busiest_pairs(num_pairs: int, num_groups: int) -> float:
    """Expected (token, expert) pairs of the group of experts with the most, out of equal groups.

    A normal distribution's maximum of n draws is about sqrt(2 ln n) deviations above its mean. Some
    group has at least the mean, rounded up.
    """
    if num_groups == 1:
        return num_pairs
    mean = num_pairs / num_groups
    deviation = math.sqrt(mean * (1 - 1 / num_groups))
    most = max(math.ceil(mean), mean + deviation * math.sqrt(2 * math.log(num_groups)))
    return min(num_pairs, most)


def expert_share(num_pairs: float, num_experts: int) -> float:
    """The expected share of experts that some of the pairs choose."""
    return 1 - (1 - 1 / num_experts) ** num_pairs if num_experts > 1 else min(1.0, num_pairs)


def _gemm_kind(layer: StoredWeight) -> KernelKind:
    form = layer.gemms[0].form if layer.gemms else ""
    if form.startswith("fp8"):
        return "fp8 blocks" if "blocks" in form else "fp8"
    return "other codes" if form.startswith(("int", "4-bit")) else "bf16"


def _expert_kind(form: str) -> KernelKind:
    if form.startswith("fp8"):
        return "fp8 experts"
    return "other experts" if form.startswith(("int", "4-bit")) else "bf16 experts"
