"""Medusa: heads beside the LM head, each of which drafts one position further ahead."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from windlass.errors import CheckpointError, ConfigError
from windlass.kernels.storages import Held, held
from windlass.models.checkpoint import Checkpoint
from windlass.models.fields import Fields
from windlass.models.network import Network
from windlass.runner.drafter import DrafterInputs
from windlass.speculative.base import Proposer, SpeculationContext
from windlass.speculative.heads import HeadFiles, attach, check_d2t, draft_vocab, open_head

if TYPE_CHECKING:
    from windlass.runner.assemble import Assembled
    from windlass.runner.load import Loaded

_RENAMED = {"medusa_head.": ""}
_KNOWN = re.compile(
    r"\d+\.\d+\.(linear\.)?(weight|bias)|blocks\.\d+\.layers\.\d+\.(weight|bias)"
    r"|lm_heads\.\d+\.weight|d2t|t2d"
)
_MAX_SHOWN = 5  # names in an error message
_MAX_FUSED_ROWS = 64  # that the Triton kernels compute in one launch


@dataclass(frozen=True, slots=True)
class MedusaWeights:
    """Stacked weights of the heads: residual blocks in order, then the vocabulary matrices."""

    blocks: list[tuple[Tensor, Tensor]]  # [heads, hidden, hidden] and [heads, 1, hidden] each
    matrices: Tensor | None  # [heads, vocabulary, hidden]; None: the model's LM head
    d2t: Tensor | None  # [vocabulary], int64: token id minus matrix row; None: they are equal

    @property
    def num_heads(self) -> int:
        return self.blocks[0][0].shape[0]


class MedusaDrafter:
    """Owns the heads. They read one hidden state, so there is no KV cache."""

    layers: tuple[int, ...] = ()

    def __init__(
        self, weights: MedusaWeights, network: Network, *, fused: bool, num_siblings: int
    ) -> None:
        """`fused`: Triton kernels compute heads with their own matrices."""
        self.num_siblings = num_siblings
        self._weights = weights
        self._network = network
        # The kernels take each sibling token from another tile of the vocabulary.
        large = weights.matrices is not None and weights.matrices.shape[1] > 128 * (
            1 + num_siblings
        )
        self._fused = fused and large

    def draft(self, inputs: DrafterInputs, count: int, siblings: int = 0) -> Tensor:
        if self._fused and 0 < len(inputs.read) <= _MAX_FUSED_ROWS:
            return self._draft_fused(inputs, count, siblings)
        weights = self._weights
        hidden = inputs.hidden[inputs.read]
        rows = hidden.shape[0]
        if not rows:
            return inputs.last.new_empty((0, count + siblings), dtype=torch.int32)
        requested, count = count, min(count, weights.num_heads)
        x = hidden.expand(count, rows, hidden.shape[1])
        for matrix, bias in weights.blocks:
            x = x + silu(torch.baddbmm(bias[:count], x, matrix[:count].mT))
        if weights.matrices is None:
            logits = self._network.logits(x.flatten(0, 1)).view(count, rows, -1)
        else:
            logits = torch.bmm(x, weights.matrices[:count].mT)
        tokens = self._token_ids(logits.argmax(-1))
        # Positions without a head get token 0, whose low acceptance the governor measures.
        drafted = pad(tokens.T, (0, requested - count))
        if not siblings:
            return drafted
        sibling_tokens = self._token_ids(logits[0].topk(1 + siblings).indices[:, 1:])
        return torch.cat((drafted, sibling_tokens), dim=1)

    def _token_ids(self, rows: Tensor) -> Tensor:
        """Token ids of rows of the matrices."""
        d2t = self._weights.d2t
        return (rows if d2t is None else rows + d2t[rows]).to(torch.int32)

    def _draft_fused(self, inputs: DrafterInputs, count: int, siblings: int) -> Tensor:
        from windlass.kernels.triton.medusa import most_likely

        weights = self._weights
        assert weights.matrices is not None
        return most_likely(
            inputs.hidden,
            inputs.read,
            blocks=weights.blocks,
            matrices=weights.matrices,
            offsets=weights.d2t,
            count=count,
            siblings=siblings,
        )

    def storages(self) -> Iterator[Held]:
        weights = self._weights
        for block in weights.blocks:
            yield from held("weights", *block)
        yield from held("weights", weights.matrices, weights.d2t)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        del pairs


@dataclass(frozen=True, slots=True)
class MedusaLoader:
    """The heads with their weights loaded."""

    weights: MedusaWeights
    loaded: Loaded
    num_siblings: int
    token_bytes: int = 0

    def start(self, made: Assembled) -> Proposer:
        parts = self.loaded.parts
        fused = parts.ops.is_triton and parts.dtype.itemsize == 2
        drafter = MedusaDrafter(
            self.weights, self.loaded.network, fused=fused, num_siblings=self.num_siblings
        )
        return attach(made, drafter)

    def describe(self) -> str:
        weights = self.weights
        owner = "the model's" if weights.matrices is None else "their own"
        size = "" if weights.d2t is None else f" of {len(weights.d2t):,} tokens"
        siblings = ""
        if self.num_siblings:
            siblings = f", {self.num_siblings} alternatives to the first draft token"
        return f"medusa, {weights.num_heads} heads with {owner} vocabulary matrix{size}{siblings}"


def open_loader(context: SpeculationContext) -> MedusaLoader:
    files = open_head(context, _RENAMED, ())
    return MedusaLoader(
        _read(context, files), context.loaded, context.config.speculation.spec_alternatives
    )


def _read(context: SpeculationContext, files: HeadFiles) -> MedusaWeights:
    config, tensors = Fields(files.config, files.source), files.tensors
    num_heads = config.count("medusa_num_heads", 0)
    num_blocks = config.positive_int("medusa_num_layers", 1)
    if num_heads < 1:
        raise CheckpointError(f"{files.source}: has no medusa_num_heads; it is no Medusa head.")
    count = _num_used(context.config.speculation.spec_tokens, num_heads)
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
    _refuse_unknown_tensors(files)
    d2t = _read_d2t(files, context.hparams.vocab_size)
    matrices = None
    if d2t is not None or any(name in tensors.names() for name in own):
        rows = context.hparams.vocab_size if d2t is None else len(d2t)
        matrices = read(own, (rows, size))
    return MedusaWeights(blocks, matrices, None if d2t is None else d2t.to(parts.device))


def _num_used(requested: int | None, num_heads: int) -> int:
    """The number of heads to use: one per requested draft token, or all."""
    if requested is not None and requested > num_heads:
        raise ConfigError(
            f"--spec-tokens {requested}: the head has {num_heads} heads, one per draft token. Give "
            f"at most {num_heads}, or remove the flag."
        )
    return requested or num_heads


def _refuse_unknown_tensors(files: HeadFiles) -> None:
    """Refuse tensors that belong to no head. More heads than the config names are allowed: the
    checkpoints of Medusa's authors have them.
    """
    unknown = sorted(name for name in files.tensors.names() if not _KNOWN.fullmatch(name))
    if unknown:
        more = ", ..." if len(unknown) > _MAX_SHOWN else ""
        raise CheckpointError(
            f"{files.source}: {len(unknown)} tensors belong to no Medusa head: "
            f"{', '.join(unknown[:_MAX_SHOWN])}{more}. Use a folder that holds only heads."
        )


def _read_d2t(files: HeadFiles, vocab_size: int) -> Tensor | None:
    """Read `d2t` if the config has a draft vocabulary."""
    size = draft_vocab(files, vocab_size)
    if size is None:
        return None
    d2t = files.tensors.read("d2t", (size,)).to(torch.int64, copy=True)
    check_d2t(d2t, files, vocab_size)
    return d2t


def _name(tensors: Checkpoint, head: int, block: int, what: str) -> str:
    """The name of a tensor in either of two naming schemes; the error names the first."""
    other = f"blocks.{head}.layers.{block}.{what}"
    return other if other in tensors.names() else f"{head}.{block}.linear.{what}"


def _matrix(tensors: Checkpoint, head: int, num_blocks: int) -> str:
    other = f"lm_heads.{head}.weight"
    return other if other in tensors.names() else f"{head}.{num_blocks}.weight"
