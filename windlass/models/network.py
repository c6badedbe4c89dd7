"""What every network can do, what it is built from, and which one an architecture's name means.

A new model is one file and one line in `_NETWORKS`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import import_module

import torch
from torch import Tensor, nn

from windlass.errors import UnsupportedError
from windlass.kernels.batch import AdapterRows, StepBatch
from windlass.kernels.ops import Ops
from windlass.layers.embedding import Embedding, PackedEmbedding
from windlass.layers.linear import Linear
from windlass.layers.stored import StoredWeight
from windlass.models.hparams import HParams
from windlass.parallel.mesh import Mesh
from windlass.quant.base import LinearMethod

_NETWORKS = {
    "LlamaForCausalLM": "windlass.models.llama:Llama",
    "MistralForCausalLM": "windlass.models.llama:Llama",
    "Qwen2ForCausalLM": "windlass.models.llama:Llama",
    "Qwen3ForCausalLM": "windlass.models.llama:Llama",
}


@dataclass(frozen=True, slots=True)
class Parts:
    """What a network is built from: decided before it is made, the same for all of its layers."""

    dtype: torch.dtype
    device: torch.device
    max_positions: int
    ops: Ops
    method_for: Callable[[str, Iterable[str]], LinearMethod]  # by where a layer is, and its parts
    mesh: Mesh = field(default_factory=Mesh)
    table_dtype: torch.dtype | None = None  # of the embedding's rows, where not `dtype`
    table_method: LinearMethod | None = None  # of an embedding of its own that stays packed


class Weights(nn.Module):
    """Modules that a checkpoint fills."""

    tied = False  # whether the head's weight is the embedding's in the checkpoint

    @property
    def weight_bytes(self) -> int:
        """What all weights take, shared ones counted once."""
        stored = [module for module in self.modules() if isinstance(module, StoredWeight)]
        plain = sum(parameter.nbytes for parameter in self.parameters())
        return plain + sum(module.gemm_bytes for module in stored)

    @property
    def table_bytes(self) -> int:
        """What an embedding's table takes of its own: nothing where it is the head's weight."""
        modules = list(self.modules())
        shared = {id(module.weight) for module in modules if isinstance(module, Linear)}
        tables = [module.weight for module in modules if isinstance(module, Embedding)]
        packed = [module for module in modules if isinstance(module, PackedEmbedding)]
        plain = sum(table.nbytes for table in tables if id(table) not in shared)
        return plain + sum(module.gemm_bytes for module in packed)


class Network(Weights):
    """Hidden states from tokens, logits from hidden states."""

    @property
    def table(self) -> Tensor | None:
        """The embedding's rows, where they lie as plain numbers."""
        return None

    @abstractmethod
    def embed(self, ids: Tensor) -> Tensor:
        """The tokens' vectors [tokens, hidden], as the first layer gets them."""

    @abstractmethod
    def forward(
        self, ids: Tensor, batch: StepBatch, aux_hidden_states: dict[int, Tensor] | None = None
    ) -> Tensor:
        """Hidden states of the batch's wanted tokens [tokens, hidden]; writes the pages of all.

        The keys of `aux_hidden_states` are layers; each gets a copy of the residual stream that enters it.
        """

    @abstractmethod
    def logits(self, hidden: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        """Scores over the vocabulary, in the network's own arithmetic; `adapters`: of these rows."""


def make_network(hparams: HParams, parts: Parts) -> Network:
    """The network without storage, on the meta device; the loader fills it."""
    where = _NETWORKS.get(hparams.architecture)
    if where is None:
        raise UnsupportedError(
            f"architecture {hparams.architecture!r} has no network here. Known: {', '.join(_NETWORKS)}."
        )
    module, name = where.split(":")
    with torch.device("meta"):
        return getattr(import_module(module), name)(hparams, parts)
