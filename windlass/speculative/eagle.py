"""EAGLE: a decoder layer trained to go on from the model's hidden states guesses token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from windlass.errors import CheckpointError
from windlass.kernels.batch import Heads, KVCache, kv_token_bytes
from windlass.kernels.ops import choose_ops
from windlass.kernels.select import Need
from windlass.layers.linear import Linear
from windlass.models.eagle import Eagle, EagleNorms, aux_layers_of, steps_of
from windlass.models.hparams import HParams
from windlass.models.loader import load
from windlass.models.network import Network, Parts
from windlass.quant.unquantised import Unquantised
from windlass.runner.drafter import DrafterInputs
from windlass.speculative.base import Proposer, SpeculationContext
from windlass.speculative.heads import UNREAD, HeadFiles, attach, check_map, draft_vocab, open_head

if TYPE_CHECKING:
    from windlass.runner.assemble import Assembled, Loaded

_RENAMED = {"layers.0.": "midlayer."}  # what newer exports call the layer


class EagleDrafter:
    """Owns the head and its pages. Steps feed it, so that it knows what the network knows."""

    num_siblings = 0

    def __init__(
        self, head: Eagle, network: Network, layers: tuple[int, ...], cache: KVCache
    ) -> None:
        self.layers = layers
        self._head = head
        self._steps = steps_of(head, network)
        self._cache = cache

    def draft(self, found: DrafterInputs, count: int, siblings: int = 0) -> Tensor:
        assert not siblings
        head, steps, pages = self._head, self._steps, self._cache.layers
        known = head.fuse_aux_hidden_states(
            [found.aux_hidden_states[layer] for layer in self.layers]
        )
        batch = replace(found.batch, kv=pages)
        normed, hidden = head(steps.inputs(found.following, known), known, batch)
        if not found.last.shape[0]:
            return found.last.new_empty((0, count), dtype=torch.int32)
        at = (batch.positions, batch.token_slots)
        normed, hidden, positions, slots = steps.select(found.last, normed, hidden, *at)
        tokens, positions, both = steps.advance(head.lm_head(normed), hidden, positions)
        guesses = [tokens]
        while len(guesses) < count:
            alone = replace(found.decode_batch(positions, slots), kv=pages)
            normed, hidden = head(both, hidden, alone)
            tokens, positions, both = steps.advance(head.lm_head(normed), hidden, positions)
            guesses.append(tokens)
        return torch.stack(guesses, dim=1)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._cache.copy(pairs)


@dataclass(frozen=True, slots=True)
class EagleLoader:
    """The head with its weights; pages come with the runner's."""

    head: Eagle
    hparams: HParams
    layers: tuple[int, ...]
    most: int
    loaded: Loaded

    @property
    def token_bytes(self) -> int:
        hparams = self.hparams
        return kv_token_bytes(1, hparams.num_kv_heads, hparams.head_dim, self.loaded.parts.dtype)

    def start(self, made: Assembled) -> Proposer:
        hparams, parts = self.hparams, self.loaded.parts
        capacity = made.capacity
        # One page more: what is written past the blocks that a request has.
        shape = (
            capacity.num_blocks + 1,
            hparams.num_kv_heads,
            capacity.block_size,
            hparams.head_dim,
        )
        cache = KVCache(1, shape, parts.dtype, parts.device)
        network = self.loaded.network
        return attach(made, EagleDrafter(self.head, network, self.layers, cache))

    def describe(self) -> str:
        vocabulary = self.head.d2t.shape[0]
        return f"eagle, {self.most} guesses of {vocabulary:,} tokens, over layers {self.layers}"


def open_loader(context: SpeculationContext) -> EagleLoader:
    files = open_head(context, _RENAMED, UNREAD)
    config: dict[str, Any] = {**files.config, "architectures": ["LlamaForCausalLM"]}
    hparams = HParams.from_hf(config, files.source)
    layers = aux_layers_of(config, context.hparams.num_layers, files.source)
    num_guessed = draft_vocab(files, hparams.vocab_size) or hparams.vocab_size
    parts = _parts(context.loaded, hparams)
    with torch.device("meta"):
        head = Eagle(hparams, num_guessed, parts, EagleNorms.of(config, files.source))
    _fill(head, files, parts.device, whole=num_guessed == hparams.vocab_size)
    check_map(head.d2t, files, hparams.vocab_size)
    layers_of = [module for module in head.modules() if isinstance(module, Linear)]
    context.loaded.gemm.tune([one.weight for one in layers_of if one.weight is not None])
    return EagleLoader(
        head, hparams, layers, context.config.speculation.max_draft_tokens, context.loaded
    )


def _fill(head: Eagle, files: HeadFiles, device: torch.device, whole: bool) -> None:
    """Read the head's tensors. One that guesses among the whole vocabulary may have no map."""
    meta = head.d2t
    unmapped = whole and "d2t" not in files.tensors.names()
    if unmapped:
        del head.d2t
    try:
        load(head, files.tensors, device)
    except CheckpointError as error:
        raise CheckpointError(f"--spec-model {files.source}: {error}") from error
    if unmapped:
        head.d2t = nn.Parameter(torch.zeros_like(meta, device=device), requires_grad=False)


def _parts(loaded: Loaded, hparams: HParams) -> Parts:
    """The network's device and arithmetic, with kernels for the head's own shape."""
    own = loaded.parts
    heads = Heads(hparams.num_heads, hparams.num_kv_heads, hparams.head_dim)
    ops = choose_ops(
        Need(own.device, own.dtype, heads, hparams.rope.dim, kv_dtype=None, plain=False)
    )
    plain = Unquantised(own.dtype, loaded.gemm)
    return replace(own, ops=ops, method_for=lambda _prefix, _parts: plain)
