"""The target model of a head's training: its hidden states, logits and embedding.

Runs whole texts through the engine's network and kernels, with a KV cache for one step only. Outputs
are copied, so that autograd can use them.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from windlass.errors import UnsupportedError
from windlass.models.eagle import default_aux_layers
from windlass.models.hparams import HParams
from windlass.models.network import Network
from windlass.runner.scoring import Scorer, Window
from windlass.tools.train_draft.batches import Batch, text_offsets
from windlass.tools.train_draft.corpus import Text

_ROWS_PER_CHUNK = 4096


@dataclass(frozen=True, slots=True)
class States:
    """The target's hidden states of concatenated texts [tokens, ...], or of a batch.

    A batch has [texts, positions, ...], undefined after a text's end.
    """

    last: Tensor  # [..., hidden]: input of the model's LM head
    aux_hidden_states: Tensor | None  # [..., aux layers * hidden]

    def at(self, indices: Tensor) -> States:
        """Copy the states at these indices, in the shape of `indices`."""
        return States(
            self.last[indices],
            None if self.aux_hidden_states is None else self.aux_hidden_states[indices],
        )


def aux_layers(hparams: HParams) -> tuple[int, ...]:
    """Three layers, low, middle and high, whose inputs an EAGLE head reads."""
    count = hparams.num_layers
    if count < 3:
        raise UnsupportedError(
            f"--kind eagle reads the inputs of three layers, and this model has {count}. "
            "Use --kind medusa."
        )
    return default_aux_layers(count)


class Target:
    """Owns the scorer, and the hook that requests aux hidden states."""

    def __init__(self, scorer: Scorer, hparams: HParams, layers: tuple[int, ...]) -> None:
        self.hparams = hparams
        self.layers = layers
        self.network = scorer.network
        self._scorer = scorer
        if layers:
            check_aux_hidden_states(self.network, hparams.architecture)
        self.device = self.final_norm().device

    def offsets(self, texts: Sequence[Text]) -> NDArray[Any]:
        return text_offsets(texts)

    def states(self, batch: Batch) -> States:
        """Hidden states of a batch, usable by autograd."""
        return self.packed_states(batch.texts).at(batch.state_indices)

    def packed_states(self, texts: Sequence[Text]) -> States:
        """Hidden states of all tokens of these texts, concatenated."""
        steps: list[dict[int, Tensor]] = []

        def request(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            del module, kwargs
            steps.append({layer: torch.empty(0) for layer in self.layers})
            return args[:2], {"aux_hidden_states": steps[-1]}

        hook = None
        if self.layers:
            hook = self.network.register_forward_pre_hook(request, with_kwargs=True)
        try:
            windows = [Window(text.tokens) for text in texts]
            chunks = [chunk.values for chunk in self._scorer.hidden(windows)]
        finally:
            if hook is not None:
                hook.remove()
        aux_hidden_states = self._concatenated(steps) if self.layers else None
        return States(torch.cat(chunks), aux_hidden_states)

    def _concatenated(self, steps: list[dict[int, Tensor]]) -> Tensor:
        missing = sorted({layer for each in steps for layer in each if not each[layer].numel()})
        if missing:
            raise UnsupportedError(
                f"{self.hparams.architecture} did not return the inputs of layers {missing}, which "
                "--kind eagle reads. Use --kind medusa."
            )
        rows = [torch.cat([each[layer] for layer in self.layers], dim=-1) for each in steps]
        return torch.cat(rows)

    @torch.no_grad()
    def logits(self, last: Tensor) -> Tensor:
        """The model's logits of hidden states [rows, hidden], in its own dtype."""
        return self.network.logits(last)

    @torch.no_grad()
    def embedding(self) -> Tensor:
        """The dense embedding table [vocabulary, hidden], from any storage format."""
        parts = []
        for at in range(0, self.hparams.vocab_size, _ROWS_PER_CHUNK):
            stop = min(at + _ROWS_PER_CHUNK, self.hparams.vocab_size)
            ids = torch.arange(at, stop, dtype=torch.int32, device=self.device)
            parts.append(self.network.embed(ids))
        return torch.cat(parts)

    @torch.no_grad()
    def head(self) -> Tensor:
        """The dense LM head [vocabulary, hidden], from any storage format: its logits of units."""
        dtype = self.final_norm().dtype
        units = torch.eye(self.hparams.hidden_size, dtype=dtype, device=self.device)
        return self.network.logits(units).T.contiguous()

    def final_norm(self) -> Tensor:
        """The weight of the norm before the LM head."""
        return self.network.get_parameter("model.norm.weight").detach()


def check_aux_hidden_states(network: Network, architecture: str) -> None:
    """Refuse a network that cannot return the inputs of its layers."""
    if "aux_hidden_states" not in inspect.signature(network.forward).parameters:
        raise UnsupportedError(
            f"{architecture} does not return aux hidden states, which --kind eagle reads. "
            "Use --kind medusa."
        )
