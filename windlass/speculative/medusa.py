"""Medusa: heads beside the model's own, each of which guesses one position further ahead."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from windlass.errors import CheckpointError
from windlass.models.checkpoint import Checkpoint
from windlass.models.fields import Fields
from windlass.models.network import Network
from windlass.runner.drafter import DrafterInputs
from windlass.speculative.base import Proposer, SpeculationContext
from windlass.speculative.heads import HeadFiles, at_most, attach, check_map, draft_vocab, open_head

if TYPE_CHECKING:
    from windlass.runner.assemble import Assembled, Loaded

_RENAMED = {"medusa_head.": ""}
_KNOWN = re.compile(
    r"\d+\.\d+\.(linear\.)?(weight|bias)|blocks\.\d+\.layers\.\d+\.(weight|bias)"
    r"|lm_heads\.\d+\.weight|d2t|t2d"
)
_SHOWN = 5  # names in an error
_MOST_FUSED = 64  # rows that the kernels compute together


@dataclass(frozen=True, slots=True)
class MedusaWeights:
    """Of the heads that guess: residual blocks in their order, and the matrices behind them."""

    blocks: list[tuple[Tensor, Tensor]]  # [heads, hidden, hidden] and [heads, 1, hidden] each
    matrices: Tensor | None  # [heads, vocabulary, hidden]; None: the model's own head
    d2t: Tensor | None  # [vocabulary], int64: token id minus row of the matrices; None: they agree

    @property
    def num_heads(self) -> int:
        return self.blocks[0][0].shape[0]


class MedusaDrafter:
    """Owns the heads. What they guess depends on one hidden state, so there are no pages."""

    layers: tuple[int, ...] = ()

    def __init__(
        self, weights: MedusaWeights, network: Network, fused: bool, num_siblings: int = 0
    ) -> None:
        """`fused`: Triton's kernels compute heads that have their own matrices."""
        self.num_siblings = num_siblings
        self._weights = weights
        self._network = network
        # The kernels find alternatives in other tiles of the vocabulary.
        large = weights.matrices is not None and weights.matrices.shape[1] > 128 * (
            1 + num_siblings
        )
        self._fused = fused and large

    def draft(self, found: DrafterInputs, count: int, siblings: int = 0) -> Tensor:
        if self._fused and 0 < len(found.read) <= _MOST_FUSED:
            return self._draft_fused(found, count, siblings)
        weights = self._weights
        hidden = found.hidden[found.read]
        rows = hidden.shape[0]
        if not rows:
            return found.last.new_empty((0, count + siblings), dtype=torch.int32)
        asked, count = count, min(count, weights.num_heads)
        x = hidden.expand(count, rows, hidden.shape[1])
        for matrix, bias in weights.blocks:
            x = x + silu(torch.baddbmm(bias[:count], x, matrix[:count].mT))
        if weights.matrices is None:
            scores = self._network.logits(x.flatten(0, 1)).view(count, rows, -1)
        else:
            scores = torch.bmm(x, weights.matrices[:count].mT)
        tokens = self._named(scores.argmax(-1))
        # What no head guesses is guessed to be token 0: the governor will see that it never is.
        guesses = pad(tokens.T, (0, asked - count))
        if not siblings:
            return guesses
        return torch.cat((guesses, self._named(scores[0].topk(1 + siblings).indices[:, 1:])), dim=1)

    def _named(self, rows: Tensor) -> Tensor:
        """Token ids of rows of the matrices."""
        d2t = self._weights.d2t
        return (rows if d2t is None else rows + d2t[rows]).to(torch.int32)

    def _draft_fused(self, found: DrafterInputs, count: int, siblings: int) -> Tensor:
        from windlass.kernels.triton.medusa import most_likely

        weights = self._weights
        assert weights.matrices is not None
        own = (weights.blocks, weights.matrices, weights.d2t)
        return most_likely(found.hidden, found.read, *own, count, siblings)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        del pairs


@dataclass(frozen=True, slots=True)
class MedusaLoader:
    """The heads with their weights."""

    weights: MedusaWeights
    loaded: Loaded
    num_siblings: int = 0
    token_bytes: int = 0

    def start(self, made: Assembled) -> Proposer:
        parts = self.loaded.parts
        fused = parts.ops.is_triton and parts.dtype.itemsize == 2
        own = (self.weights, self.loaded.network, fused, self.num_siblings)
        return attach(made, MedusaDrafter(*own))

    def describe(self) -> str:
        weights = self.weights
        whose = "the model's own" if weights.matrices is None else "their own"
        some = "" if weights.d2t is None else f" of {len(weights.d2t):,} tokens"
        siblings = (
            f", {self.num_siblings} alternatives to the first guess" if self.num_siblings else ""
        )
        return f"medusa, {weights.num_heads} heads over {whose} vocabulary matrix{some}{siblings}"


def open_loader(context: SpeculationContext) -> MedusaLoader:
    files = open_head(context, _RENAMED, ())
    return MedusaLoader(
        _read(context, files), context.loaded, context.config.speculation.spec_alternatives
    )


def _read(context: SpeculationContext, files: HeadFiles) -> MedusaWeights:
    config, tensors = Fields(files.config, files.source), files.tensors
    there = config.count("medusa_num_heads", 0)
    num_blocks = config.positive_int("medusa_num_layers", 1)
    if there < 1:
        raise CheckpointError(f"{files.source}: names no medusa_num_heads; it is no Medusa head.")
    count = at_most(context.config.speculation.spec_tokens, there, "heads")
    size, parts = context.hparams.hidden_size, context.loaded.parts

    def read(names: list[str], shape: tuple[int, ...]) -> Tensor:
        found = [tensors.read(name, shape) for name in names]
        return torch.stack(found).to(parts.device, parts.dtype)

    blocks = [
        (
            read([_name(tensors, i, at, "weight") for i in range(count)], (size, size)),
            read([_name(tensors, i, at, "bias") for i in range(count)], (size,))[:, None],
        )
        for at in range(num_blocks)
    ]
    own = [_matrix(tensors, i, num_blocks) for i in range(count)]
    _account(files)
    d2t = _map(files, context.hparams.vocab_size)
    matrices = None
    if d2t is not None or any(name in tensors.names() for name in own):
        rows = context.hparams.vocab_size if d2t is None else len(d2t)
        matrices = read(own, (rows, size))
    return MedusaWeights(blocks, matrices, None if d2t is None else d2t.to(parts.device))


def _account(files: HeadFiles) -> None:
    """Refuse tensors that no head is made of. Heads beyond those that the config names may be
    there: the authors' own checkpoints have such.
    """
    unknown = sorted(name for name in files.tensors.names() if not _KNOWN.fullmatch(name))
    if unknown:
        more = ", ..." if len(unknown) > _SHOWN else ""
        raise CheckpointError(
            f"{files.source}: {len(unknown)} tensors belong to no Medusa head: "
            f"{', '.join(unknown[:_SHOWN])}{more}. Take a folder that holds nothing but heads."
        )


def _map(files: HeadFiles, vocab_size: int) -> Tensor | None:
    """`d2t` where the config names a draft vocabulary."""
    size = draft_vocab(files, vocab_size)
    if size is None:
        return None
    d2t = files.tensors.read("d2t", (size,)).to(torch.int64, copy=True)
    check_map(d2t, files, vocab_size)
    return d2t


def _name(tensors: Checkpoint, head: int, block: int, what: str) -> str:
    """Two spellings are in use; where neither is there, the first is what will be missed."""
    other = f"blocks.{head}.layers.{block}.{what}"
    return other if other in tensors.names() else f"{head}.{block}.linear.{what}"


def _matrix(tensors: Checkpoint, head: int, num_blocks: int) -> str:
    other = f"lm_heads.{head}.weight"
    return other if other in tensors.names() else f"{head}.{num_blocks}.weight"
