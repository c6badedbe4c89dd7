"""The interface of networks and their building blocks.

The decoder (decoder.py) is the network of every family; other architectures may run through
transformers (transformers_fallback.py).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from windlass.config import CombineRule
from windlass.core.card import Choice
from windlass.core.kv_layout import KVLayout
from windlass.core.moe import ExpertPlacement
from windlass.kernels.batch import AdapterRows, Heads, StepBatch
from windlass.kernels.experts import ExpertKernels
from windlass.kernels.native.pool import Workers
from windlass.kernels.ops import Ops
from windlass.kernels.select import Need
from windlass.kernels.storages import Held, held
from windlass.layers.embedding import Embedding, PackedEmbedding
from windlass.layers.linear import Linear
from windlass.layers.recurrent import rank_recurrent_heads
from windlass.layers.stored import StoredWeight
from windlass.models.hparams import HParams
from windlass.models.stages import Stage
from windlass.parallel.mesh import Mesh
from windlass.quant.base import LinearMethod
from windlass.quant.packed_method import PackedMethod
from windlass.quant.shard import Shard

_DECODER = "windlass.models.decoder:Decoder"
DEFAULT_BLOCK_SIZE = 16
_KV_BYTES = 2  # of a number in the KV cache, whatever its format: blocks of all formats are as long
_TRANSFORMERS = "windlass.models.transformers_fallback:TransformersNetwork"


@dataclass(frozen=True, slots=True)
class Parts:
    """Choices that all layers of a network share, made before it is built."""

    dtype: torch.dtype
    device: torch.device
    max_positions: int
    ops: Ops
    method_for: Callable[
        [str, Iterable[str]], LinearMethod
    ]  # from a layer's path prefix and its parts
    mesh: Mesh = field(default_factory=Mesh)
    table_dtype: torch.dtype | None = None  # of the embedding; None: `dtype`
    table_method: PackedMethod | None = None  # of an untied embedding that may stay packed
    per_layer_table_method: PackedMethod | None = None  # the same for the per-layer embeddings
    workers: Workers = field(default_factory=Workers)  # of native kernels
    experts: ExpertKernels | None = None  # None: the reference
    stage: Stage | None = None  # the layers that this rank computes; None: all
    embeds_drafts: bool = False  # the last stage has the embedding too, for a proposer
    placements: Mapping[int, ExpertPlacement] = field(default_factory=dict)  # of some layers
    expert_combine: CombineRule = "auto"


class Weights(nn.Module):
    """A module that the loader fills from a checkpoint."""

    tied = False  # whether the head shares the embedding's weight in the checkpoint

    def is_elsewhere(self, name: str) -> bool:
        """Whether another pipeline stage reads this tensor of the checkpoint."""
        del name
        return False

    def storages(self) -> Iterator[Held]:
        yield from held("weights", *self.parameters(), *self.buffers())
        for module in self.modules():
            if isinstance(module, StoredWeight):
                yield from module.storages()

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights; shared weights count once."""
        stored = [module for module in self.modules() if isinstance(module, StoredWeight)]
        plain = sum(parameter.nbytes for parameter in self.parameters())
        return plain + sum(module.gemm_bytes for module in stored)

    @property
    def table_bytes(self) -> int:
        """Bytes of embedding tables that are not shared with the head."""
        modules = list(self.modules())
        shared = {id(module.weight) for module in modules if isinstance(module, Linear)}
        tables = [module.weight for module in modules if isinstance(module, Embedding)]
        packed = [module for module in modules if isinstance(module, PackedEmbedding)]
        plain = sum(table.nbytes for table in tables if id(table) not in shared)
        return plain + sum(module.gemm_bytes for module in packed)


class Network(Weights):
    """Computes hidden states from tokens, and logits from hidden states."""

    # Why steps can be neither captured nor recorded, and depend on their batch; None: they may.
    why_eager: str | None = None

    @property
    def choices(self) -> list[Choice]:
        """Lines of the start-up table."""
        return []

    def check(self) -> None:
        """Raise UnsupportedError if the network cannot compute steps with its weights."""

    @classmethod
    @abstractmethod
    def kv_layout(
        cls, hparams: HParams, block_size: int, dtype: torch.dtype, mesh: Mesh
    ) -> KVLayout:
        """The KV that this rank's part of the layers keeps, in a cache of `dtype`."""

    @property
    def table(self) -> Tensor | None:
        """The embedding table; None if it is packed, or this rank has some of its rows."""
        return None

    @abstractmethod
    def embed(self, ids: Tensor) -> Tensor:
        """The token embeddings [tokens, hidden], the input of the first layer."""

    @abstractmethod
    def forward(
        self, inputs: Tensor, batch: StepBatch, aux_hidden_states: dict[int, Tensor] | None = None
    ) -> Tensor:
        """Hidden states of the batch's logits tokens [tokens, hidden]; writes the KV cache of all.

        `inputs` are token ids. A pipeline stage after the first reads the residual stream of the stage
        before, and a stage before the last returns it, of all tokens.
        The keys of `aux_hidden_states` are layer indices; each value is set to a copy of the
        residual stream before that layer. The value of the key `num_layers` is set to the LM head's
        input of all tokens.
        """

    @abstractmethod
    def logits(self, hidden: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        """Logits over the vocabulary, in the network's dtype. `adapters` are those of these rows."""


def kernel_need(
    hparams: HParams,
    *,
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    plain: bool = False,
    workers: Workers | None = None,
    mesh: Mesh | None = None,
) -> Need:
    """What this rank's part of the network requires of its kernels."""
    mesh = mesh or Mesh()
    heads, recurrent = rank_heads(hparams, mesh), hparams.recurrent
    latent = None if hparams.mla is None else replace(hparams.mla.heads, num_q=heads.num_q)
    return Need(
        device=device,
        dtype=dtype,
        heads=heads,
        soft_cap=hparams.attention_soft_cap,
        latent=latent,
        recurrent=None if recurrent is None else rank_recurrent_heads(recurrent.heads, mesh.tp),
        recurrence="mamba" if recurrent is None else recurrent.kind,
        sinks=hparams.attention_sinks,
        kv_dtype=kv_dtype,
        plain=plain,
        workers=workers or Workers(),
    )


def make_network(hparams: HParams, parts: Parts) -> Network:
    """Build a network on the meta device; the loader fills it."""
    with torch.device("meta"):
        return _network_class(hparams)(hparams, parts)


def kv_layout(
    hparams: HParams, block_size: int, dtype: torch.dtype, mesh: Mesh | None = None
) -> KVLayout:
    """The KV layout of a model whose network need not exist. `dtype`: of the KV cache."""
    return _network_class(hparams).kv_layout(hparams, block_size, dtype, mesh or Mesh())


def rank_heads(hparams: HParams, mesh: Mesh, layer: int | None = None) -> Heads:
    """The attention heads that this rank computes. Ranks beyond the KV heads share them.

    `layer`: None: the largest of all layers, with the most query heads for each KV head.
    """
    layers = range(hparams.num_layers) if layer is None else (layer,)
    kv_heads = [hparams.kv_heads_of(each) for each in layers]
    q = Shard.even(hparams.num_heads, mesh.tp)
    counts = [Shard.replicated(each.num, mesh.tp, unit=1).count for each in kv_heads]
    return Heads(q.count, min(counts), max(each.dim for each in kv_heads))


def block_size_of(requested: int | None, hparams: HParams) -> int:
    """Tokens per KV block: as requested, or 16, or enough that states fill the blocks of attention.

    A block has the bytes of a layer's state at least, so attention layers would waste smaller blocks.
    """
    if requested is not None or hparams.recurrent is None:
        return requested or DEFAULT_BLOCK_SIZE
    token_bytes = 2 * hparams.num_kv_heads * hparams.head_dim * _KV_BYTES
    wanted = 4 * hparams.recurrent.heads.num_values // token_bytes
    return max(DEFAULT_BLOCK_SIZE, 1 << (wanted - 1).bit_length())


def _network_class(hparams: HParams) -> Any:
    location = _DECODER if hparams.transformers is None else _TRANSFORMERS
    module, name = location.split(":")
    return getattr(import_module(module), name)
