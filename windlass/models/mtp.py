"""Multi-token prediction (MTP): the layer after the last one, which DeepSeek and GLM MoE models draft with.

At each position it reads the embedding of the next token and the target's final hidden state, normalised
and projected to one vector, and predicts the token after the next. It continues from its own output as
from a hidden state of the target. The embedding is the target's; the LM head is too, unless the checkpoint
has another one for the layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from windlass.config import ModelConfig
from windlass.core.kv_layout import KVLayout
from windlass.kernels.batch import StepBatch
from windlass.layers.head import Head
from windlass.layers.linear import Linear
from windlass.layers.norm import RMSNorm
from windlass.layers.rotary import Rotary
from windlass.models.card import open_checkpoint
from windlass.models.checkpoint import Checkpoint
from windlass.models.decoder import Block, Decoder
from windlass.models.draft_steps import PlainSteps, steps_of
from windlass.models.hparams import HParams
from windlass.models.network import Network, Parts, Weights
from windlass.models.rope import frequencies
from windlass.models.source import ModelFiles
from windlass.models.tensor_rules import Rule, mapped
from windlass.parallel.mesh import Mesh
from windlass.quant.shard import Shard

if TYPE_CHECKING:
    from windlass.kernels.triton.eagle import FusedSteps

_COMPARED_ROWS = 4096  # of the LM heads at a time


def mtp_hparams(hparams: HParams) -> HParams:
    """The hyper-parameters with the first MTP layer as one more layer, like the one before it."""
    moe = hparams.moe
    return replace(
        hparams,
        num_layers=hparams.num_layers + 1,
        sliding_windows=(*hparams.sliding_windows, hparams.sliding_windows[-1]),
        moe=None if moe is None else replace(moe, layers=(*moe.layers, moe.layers[-1])),
        num_mtp_layers=0,
    )


def mtp_kv_layout(hparams: HParams, block_size: int, dtype: torch.dtype, mesh: Mesh) -> KVLayout:
    """The KV that this rank's part of the layer keeps."""
    one = replace(hparams, num_layers=1, sliding_windows=hparams.sliding_windows[-1:])
    return Decoder.kv_layout(one, block_size, dtype, mesh)


def has_mtp(files: ModelFiles, config: ModelConfig, hparams: HParams) -> bool:
    """Whether the checkpoint has an MTP layer; conversions often leave it out."""
    if not hparams.num_mtp_layers:
        return False
    names = open_checkpoint(files, config, hparams=mtp_hparams(hparams)).names()
    return not names or f"{_prefix(hparams)}eh_proj.weight" in names


def open_mtp(files: ModelFiles, config: ModelConfig, hparams: HParams) -> Checkpoint:
    """The tensors of the layer. An LM head that equals the target's is not among them."""
    whole = open_checkpoint(files, config, hparams=mtp_hparams(hparams))
    if not whole.names():  # random weights
        return whole
    prefix = _prefix(hparams).replace(".", r"\.")
    unused = [rf"(?!{prefix}).*", rf"{prefix}embed_tokens\.weight"]
    if _shares_head(whole, hparams):
        unused.append(rf"{prefix}shared_head\.head\.weight")
    return mapped(whole, [Rule(pattern=pattern, name="") for pattern in unused])


def has_own_head(checkpoint: Checkpoint, hparams: HParams) -> bool:
    """Whether `open_mtp` found an LM head for the layer alone."""
    return _head_name(hparams) in checkpoint.names()


def _prefix(hparams: HParams) -> str:
    return f"model.layers.{hparams.num_layers}."


def _head_name(hparams: HParams) -> str:
    return f"{_prefix(hparams)}shared_head.head.weight"


def _shares_head(checkpoint: Checkpoint, hparams: HParams) -> bool:
    own = _head_name(hparams)
    target = f"{hparams.table if hparams.tie_embeddings else hparams.head}.weight"
    if own not in checkpoint.names() or target not in checkpoint.names():
        return False
    stored = checkpoint.stored(own), checkpoint.stored(target)
    if (stored[0].shape, stored[0].format) != (stored[1].shape, stored[1].format):
        return False
    shape = stored[0].shape
    regions = [(slice(at, at + _COMPARED_ROWS),) for at in range(0, shape[0], _COMPARED_ROWS)]
    return all(
        torch.equal(*(checkpoint.read(name, shape, region) for name in (own, target)))
        for region in regions
    )


class SharedHead(nn.Module):
    """The norm before the LM head, and the layer's own LM head if it has one."""

    def __init__(self, hparams: HParams, parts: Parts, prefix: str, own_head: bool) -> None:
        super().__init__()
        self.norm = _norm(hparams, parts)
        self.head: Head | None = None
        if own_head:
            self.head = Head(
                name="head",
                vocab_size=hparams.vocab_size,
                hidden_size=hparams.hidden_size,
                method=parts.method_for(f"{prefix}shared_head.", ["head"]),
                group=parts.mesh.tp,
            )


class MTPLayer(Block):
    """A decoder layer whose input is projected from an embedding and a hidden state."""

    def __init__(self, hparams: HParams, parts: Parts, own_head: bool) -> None:
        index, size = hparams.num_layers - 1, hparams.hidden_size
        super().__init__(index, hparams, parts, first=index)  # of the layer's own KV cache
        prefix = f"model.layers.{index}."
        self.enorm = _norm(hparams, parts)
        self.hnorm = _norm(hparams, parts)
        self.eh_proj = Linear(
            outputs={"eh_proj": Shard(size)},
            inputs=Shard(2 * size),
            method=parts.method_for(prefix, ["eh_proj"]),
            group=parts.mesh.tp,
        )
        self.shared_head = SharedHead(hparams, parts, prefix, own_head)

    def predict(self, both: Tensor, batch: StepBatch, cos_sin: Tensor) -> Tensor:
        """The LM head's inputs, from normalised embeddings and hidden states."""
        assert isinstance(self.input_layernorm, RMSNorm)
        projected = self.eh_proj(both)
        x, residual = self.input_layernorm.add(projected, None, batch.adapters is not None)
        normed, _ = self(x, residual, self.shared_head.norm, batch, cos_sin)
        assert isinstance(normed, Tensor)  # the last norm never quantises its output
        return normed


class MTP(Weights):
    """The layer under its names in the checkpoint, filled by the loader."""

    def __init__(self, hparams: HParams, parts: Parts, *, own_head: bool) -> None:
        """`hparams`: from `mtp_hparams`."""
        super().__init__()
        layer = MTPLayer(hparams, parts, own_head)
        layers = nn.ModuleDict({str(hparams.num_layers - 1): layer})
        self.model = nn.ModuleDict({"layers": layers})
        inv_freq, scale = frequencies(hparams.rope, parts.max_positions)
        self.rotary = Rotary(
            inv_freq=inv_freq, scale=scale, max_positions=parts.max_positions, device=parts.device
        )
        d2t = torch.zeros(hparams.vocab_size, dtype=torch.int64, device=parts.device)
        self.register_buffer("d2t", d2t)  # its vocabulary is the target's

    @property
    def layer(self) -> MTPLayer:
        (layer,) = cast(nn.ModuleDict, self.model["layers"]).values()
        return cast(MTPLayer, layer)

    def fuse_aux_hidden_states(self, aux_hidden_states: Sequence[Tensor]) -> Tensor:
        """The target's final hidden states."""
        (hidden,) = aux_hidden_states
        return hidden

    def forward(self, both: Tensor, hidden: Tensor, batch: StepBatch) -> tuple[Tensor, Tensor]:
        """See `DraftHead`. As of the target, the hidden state is the LM head's input."""
        del hidden
        normed = self.layer.predict(both, batch, self.rotary.cos_sin)
        return normed, normed

    def logits(self, normed: Tensor, network: Network) -> Tensor:
        head = self.layer.shared_head.head
        return network.logits(normed) if head is None else head(normed)

    def steps(self, network: Network) -> PlainSteps | FusedSteps:
        """The operations between the GEMMs, with the network's embedding."""
        return steps_of(
            network,
            norm=self.layer.enorm,
            hidden_norm=self.layer.hnorm,
            d2t=cast(Tensor, self.d2t),
            max_positions=self.rotary.cos_sin.shape[0],
        )


def _norm(hparams: HParams, parts: Parts) -> RMSNorm:
    return RMSNorm(size=hparams.hidden_size, eps=hparams.norm_eps, dtype=parts.dtype, ops=parts.ops)
