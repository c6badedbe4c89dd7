"""The model that a head learns from: its hidden states, its logits, its embedding.

Runs whole texts through the engine's own network and kernels, with pages for one step only. What
comes out is copied, so that a head may be trained on it.
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
from windlass.tools.train_draft.batches import Batch, end_to_end
from windlass.tools.train_draft.writing import Text

_ROWS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class States:
    """What the target makes of tokens: of whole texts end to end, [tokens, ...], or of a batch.

    A batch has [texts, positions, ...], of no meaning past a text's end.
    """

    last: Tensor  # [..., hidden]: what the model's own head reads
    aux_hidden_states: Tensor | None  # [..., taps * hidden]

    def at(self, places: Tensor) -> States:
        """Copies of these tokens' states, in the shape of `places`."""
        return States(
            self.last[places],
            None if self.aux_hidden_states is None else self.aux_hidden_states[places],
        )


def aux_layers(hparams: HParams) -> tuple[int, ...]:
    """Three layers, low, middle and high, whose inputs an EAGLE head reads."""
    count = hparams.num_layers
    if count < 3:
        raise UnsupportedError(
            f"--kind eagle reads what enters three layers, and this model has {count}. "
            "Use --kind medusa."
        )
    return default_aux_layers(count)


class Target:
    """Owns the scorer, the dense embedding, and the hook that asks for taps."""

    def __init__(self, scorer: Scorer, hparams: HParams, layers: tuple[int, ...]) -> None:
        self.hparams = hparams
        self.layers = layers
        self.network = scorer.network
        self._scorer = scorer
        if layers:
            check_taps(self.network, hparams.architecture)
        self.device = self.final_norm().device

    def firsts(self, texts: Sequence[Text]) -> NDArray[Any]:
        return end_to_end(texts)

    def states(self, batch: Batch) -> States:
        """Hidden states of a batch, free for autograd."""
        return self.end_to_end(batch.texts).at(batch.places)

    def end_to_end(self, texts: Sequence[Text]) -> States:
        """Hidden states of all tokens of these texts, one text after the other."""
        seen: list[dict[int, Tensor]] = []

        def ask(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            del module, kwargs
            seen.append({layer: torch.empty(0) for layer in self.layers})
            return args[:2], {"taps": seen[-1]}

        hook = None
        if self.layers:
            hook = self.network.register_forward_pre_hook(ask, with_kwargs=True)
        try:
            windows = [Window(text.tokens) for text in texts]
            pieces = [piece.values for piece in self._scorer.hidden(windows)]
        finally:
            if hook is not None:
                hook.remove()
        return States(torch.cat(pieces), self._taps(seen) if self.layers else None)

    def _taps(self, seen: list[dict[int, Tensor]]) -> Tensor:
        missing = sorted({layer for each in seen for layer in each if not each[layer].numel()})
        if missing:
            raise UnsupportedError(
                f"{self.hparams.architecture} gave nothing of what enters layers {missing}, which "
                "--kind eagle reads. Use --kind medusa."
            )
        rows = [torch.cat([each[layer] for layer in self.layers], dim=-1) for each in seen]
        return torch.cat(rows)

    @torch.no_grad()
    def logits(self, last: Tensor) -> Tensor:
        """The model's own scores of hidden states [rows, hidden], in its arithmetic."""
        return self.network.logits(last)

    @torch.no_grad()
    def embedding(self) -> Tensor:
        """The whole table [vocabulary, hidden], however it is stored."""
        parts = []
        for at in range(0, self.hparams.vocab_size, _ROWS_AT_ONCE):
            stop = min(at + _ROWS_AT_ONCE, self.hparams.vocab_size)
            ids = torch.arange(at, stop, dtype=torch.int32, device=self.device)
            parts.append(self.network.embed(ids))
        return torch.cat(parts)

    @torch.no_grad()
    def head(self) -> Tensor:
        """The head's matrix [vocabulary, hidden], however it is stored: what it makes of units."""
        dtype = self.final_norm().dtype
        units = torch.eye(self.hparams.hidden_size, dtype=dtype, device=self.device)
        return self.network.logits(units).T.contiguous()

    def final_norm(self) -> Tensor:
        """The weight of the norm before the head."""
        return self.network.get_parameter("model.norm.weight").detach()


def check_taps(network: Network, architecture: str) -> None:
    """Refuse a network that does not say what enters its layers."""
    if "taps" not in inspect.signature(network.forward).parameters:
        raise UnsupportedError(
            f"{architecture} does not give what enters its layers, which --kind eagle reads. "
            "Use --kind medusa."
        )
