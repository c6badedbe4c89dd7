"""EAGLE: a decoder layer, trained on the model's hidden states, drafts token by token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from windlass.core.card import Capacity
from windlass.core.kv_layout import KVLayout
from windlass.errors import CheckpointError
from windlass.kernels.batch import KVCache, attention_layout
from windlass.kernels.ops import choose_ops
from windlass.kernels.storages import Held
from windlass.layers.linear import Linear
from windlass.models.draft_steps import DraftHead
from windlass.models.eagle import Eagle, EagleNorms, aux_layers_of
from windlass.models.families.registry import read_hparams
from windlass.models.hparams import HParams
from windlass.models.loader import load
from windlass.models.network import Network, Parts, kernel_need, rank_heads
from windlass.quant.unquantised import Unquantised
from windlass.runner.assemble import DrafterKV
from windlass.runner.drafter import DrafterInputs
from windlass.speculative.base import Proposer, SpeculationContext
from windlass.speculative.heads import (
    IGNORED_TENSORS,
    HeadFiles,
    attach,
    check_d2t,
    draft_vocab,
    open_head,
)

if TYPE_CHECKING:
    from windlass.runner.assemble import Assembled
    from windlass.runner.load import Loaded

_RENAMED = {"layers.0.": "midlayer."}  # the layer's name in newer exports


class EagleDrafter:
    """Owns the head and its KV cache, which every drafting step of the target extends."""

    num_siblings = 0

    def __init__(
        self, head: DraftHead, network: Network, layers: tuple[int, ...], cache: KVCache
    ) -> None:
        self.layers = layers
        self._head = head
        self._network = network
        self._steps = head.steps(network)
        self._cache = cache

    def draft(self, inputs: DrafterInputs, count: int, siblings: int = 0) -> Tensor:
        assert not siblings
        head, steps, network, kv = self._head, self._steps, self._network, self._cache.layers
        known = head.fuse_aux_hidden_states(
            [inputs.aux_hidden_states[layer] for layer in self.layers]
        )
        batch = replace(inputs.batch, kv=kv)
        normed, hidden = head(steps.inputs(inputs.following, known), known, batch)
        if not inputs.last.shape[0]:
            return inputs.last.new_empty((0, count), dtype=torch.int32)
        normed, hidden, positions, slots = steps.select(
            inputs.last,
            normed,
            hidden=hidden,
            positions=batch.positions,
            slots=batch.token_slots,
        )
        tokens, positions, both = steps.advance(head.logits(normed, network), hidden, positions)
        drafted = [tokens]
        while len(drafted) < count:
            decode = replace(inputs.decode_batch(positions, slots), kv=kv)
            normed, hidden = head(both, hidden, decode)
            tokens, positions, both = steps.advance(head.logits(normed, network), hidden, positions)
            drafted.append(tokens)
        return torch.stack(drafted, dim=1)

    def storages(self) -> Iterator[Held]:
        yield from self._head.storages()
        yield from self._cache.storages()

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._cache.copy(pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftHeadLoader(ABC):
    """A head with its weights loaded; `make_kv` allocates its KV cache, and `start` attaches it to the runner."""

    head: DraftHead
    hparams: HParams  # of the head
    layers: tuple[int, ...]  # whose hidden states it reads
    max_draft_tokens: int
    loaded: Loaded
    identity: str  # of its files, if they are not the model's own

    @abstractmethod
    def layout(self, block_size: int) -> KVLayout:
        """The KV layout of the head on this rank."""

    @abstractmethod
    def describe(self) -> str:
        """Describe the head for the start-up table."""

    @property
    def token_bytes(self) -> int:
        return self.layout(block_size=1).token_bytes

    def make_kv(self, capacity: Capacity) -> DrafterKV:
        """A KV cache with the target's blocks, and one more for writes past the end of a request's."""
        parts = self.loaded.parts
        cache = KVCache(
            self.layout(capacity.block_size),
            capacity.num_blocks + 1,
            dtype=parts.dtype,
            device=parts.device,
        )
        return DrafterKV(cache, self.identity)

    def start(self, made: Assembled) -> Proposer:
        assert made.drafter_kv is not None
        drafter = EagleDrafter(
            self.head, self.loaded.network, layers=self.layers, cache=made.drafter_kv.cache
        )
        return attach(made, drafter)


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleLoader(DraftHeadLoader):
    """An EAGLE head."""

    head: Eagle

    def layout(self, block_size: int) -> KVLayout:
        return attention_layout(
            (None,),
            num_kv_heads=rank_heads(self.hparams, self.loaded.parts.mesh).num_kv,
            dim=self.hparams.head_dim,
            block_size=block_size,
            dtype=self.loaded.parts.dtype,
        )

    def describe(self) -> str:
        vocabulary = self.head.d2t.shape[0]
        return (
            f"eagle, up to {self.max_draft_tokens} draft tokens, vocabulary of {vocabulary:,}, "
            f"reads layers {self.layers}"
        )


def open_loader(context: SpeculationContext) -> EagleLoader:
    files = open_head(context, _RENAMED, IGNORED_TENSORS)
    config: dict[str, Any] = {**files.config, "architectures": ["LlamaForCausalLM"]}
    hparams = read_hparams(config, files.source)
    layers = aux_layers_of(config, context.hparams.num_layers, files.source)
    vocab_size = draft_vocab(files, hparams.vocab_size) or hparams.vocab_size
    parts = _parts(context.loaded, hparams)
    with torch.device("meta"):
        head = Eagle(
            hparams=hparams,
            draft_vocab=vocab_size,
            parts=parts,
            norms=EagleNorms.of(config, files.source),
        )
    _load(head, files, parts.device, full_vocab=vocab_size == hparams.vocab_size)
    check_d2t(head.d2t, files, hparams.vocab_size)
    linears = [module for module in head.modules() if isinstance(module, Linear)]
    context.loaded.gemm.tune([each.weight for each in linears if each.weight is not None])
    return EagleLoader(
        head=head,
        hparams=hparams,
        layers=layers,
        max_draft_tokens=context.config.speculation.max_draft_tokens,
        loaded=context.loaded,
        identity=f"eagle {files.digest}",
    )


def _load(head: Eagle, files: HeadFiles, device: torch.device, *, full_vocab: bool) -> None:
    """Read the head's tensors. A head with the full vocabulary may have no d2t."""
    meta = head.d2t
    unmapped = full_vocab and "d2t" not in files.tensors.names()
    if unmapped:
        del head.d2t
    try:
        load(head, files.tensors, device)
    except CheckpointError as error:
        raise CheckpointError(f"--spec-model {files.source}: {error}") from error
    if unmapped:
        head.d2t = nn.Parameter(torch.zeros_like(meta, device=device), requires_grad=False)


def _parts(loaded: Loaded, hparams: HParams) -> Parts:
    """The network's device and dtype, with kernels for the head's own shape."""
    own = loaded.parts
    need = kernel_need(
        hparams, device=own.device, dtype=own.dtype, workers=own.workers, mesh=own.mesh
    )
    ops = choose_ops(need)
    plain = Unquantised(own.dtype, loaded.gemm)
    return replace(own, ops=ops, method_for=lambda _prefix, _parts: plain)
