"""Trains Medusa heads: each from the target's last hidden state alone, none sees another's guess."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from windlass.tools.train_draft.batches import Batch
from windlass.tools.train_draft.head import DECAY, Figures, arithmetic, as_inputs, soft_loss, stored
from windlass.tools.train_draft.medusa_module import MedusaModule
from windlass.tools.train_draft.target import States, Target

# Rows whose logits over the whole vocabulary are in memory at once.
_NUMBERS = {"cuda": 2**28, "cpu": 2**24}


class MedusaHead:
    """Owns the module; where the target's head is shared, a dense copy of it to train through."""

    def __init__(
        self,
        target: Target,
        num_heads: int,
        share: bool,
        draft_ids: Tensor | None,
        num_blocks: int = 1,
    ) -> None:
        """`draft_ids`: what can be guessed, on the CPU; None: the whole vocabulary."""
        self.num_draft_tokens = num_heads
        self._target = target
        self._share = share
        matrix = as_inputs(target.head())
        self._rows = max(1, _NUMBERS[target.device.type] // len(matrix))
        module = MedusaModule(num_heads, matrix, share, draft_ids, num_blocks)
        self.module = module.to(target.device)
        self._draft_ids = None if draft_ids is None else draft_ids.to(target.device)

    def learn(self, batch: Batch, states: States) -> Figures:
        """Piece by piece, gradients added up: logits over a whole vocabulary are large."""
        last = as_inputs(states.last).flatten(0, 1)
        total = torch.zeros((), device=last.device)
        right = torch.zeros(self.num_draft_tokens, device=last.device)
        for at in range(0, len(batch.labels), self._rows):
            here = slice(at, at + self._rows)
            labels, best = self._labels(states.last.flatten(0, 1)[batch.labels[here]])
            for j in range(self.num_draft_tokens):
                weights = batch.weights(j)[here]
                with arithmetic(last.device):
                    logits = self.module.logits(j, last[batch.roots(j)[here]])
                    loss = DECAY**j * soft_loss(logits, labels, weights)
                loss.backward()
                total += loss.detach()
                right[j] += (self.module.tokens(logits.detach()) == best).float() @ weights
        return Figures(total, right)

    @torch.no_grad()
    def guess(self, batch: Batch, states: States) -> list[Tensor]:
        last = as_inputs(states.last).flatten(0, 1)
        found = []
        for j in range(self.num_draft_tokens):
            with arithmetic(last.device):
                pieces = [
                    self.module.tokens(self.module.logits(j, last[roots]))
                    for roots in batch.roots(j).split(self._rows)
                ]
            found.append(torch.cat(pieces))
        return found

    @torch.no_grad()
    def _labels(self, last: Tensor) -> tuple[Tensor, Tensor]:
        """The target's probabilities of what can be guessed [rows, ...], and its choice of all."""
        logits = self._target.logits(last).float()
        best, labels = logits.argmax(-1), logits.softmax(-1)
        return labels if self._draft_ids is None else labels[:, self._draft_ids], best

    def tensors(self) -> dict[str, Tensor]:
        return stored(self.module)

    def config(self) -> dict[str, Any]:
        hparams = self._target.hparams
        reduced = {} if self._draft_ids is None else {"draft_vocab_size": len(self._draft_ids)}
        return {
            "model_type": "medusa",
            "medusa_num_heads": self.num_draft_tokens,
            "medusa_num_layers": self.module.num_blocks,
            "hidden_size": hparams.hidden_size,
            "vocab_size": hparams.vocab_size,
            **reduced,
            "share_lm_head": self._share,
            "torch_dtype": "bfloat16",
        }
