"""Trains Medusa heads: each reads only the target's last hidden state, no other head's draft token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from windlass.tools.train_draft.batches import Batch
from windlass.tools.train_draft.head import (
    DECAY,
    StepMetrics,
    autocast,
    saved_tensors,
    soft_loss,
    to_module_dtype,
)
from windlass.tools.train_draft.medusa_module import MedusaModule
from windlass.tools.train_draft.target import States, Target

# Maximum number of logits in memory.
_MAX_LOGITS = {"cuda": 2**28, "cpu": 2**24}


class MedusaHead:
    """Owns the module, and a dense copy of the target's LM head if the heads share it."""

    def __init__(
        self,
        target: Target,
        num_heads: int,
        share: bool,
        draft_ids: Tensor | None,
        num_blocks: int = 1,
    ) -> None:
        """`draft_ids`: the draft vocabulary, on the CPU; None: the full vocabulary."""
        self.num_draft_tokens = num_heads
        self._target = target
        self._share = share
        matrix = to_module_dtype(target.head())
        self._rows = max(1, _MAX_LOGITS[target.device.type] // len(matrix))
        module = MedusaModule(
            num_heads, matrix, share=share, draft_ids=draft_ids, num_blocks=num_blocks
        )
        self.module = module.to(target.device)
        self._draft_ids = None if draft_ids is None else draft_ids.to(target.device)

    def backward(self, batch: Batch, states: States) -> StepMetrics:
        """Process chunks of labels and sum their gradients: logits of a full vocabulary are large."""
        last = to_module_dtype(states.last).flatten(0, 1)
        total = torch.zeros((), device=last.device)
        accuracy = torch.zeros(self.num_draft_tokens, device=last.device)
        for at in range(0, len(batch.labels), self._rows):
            here = slice(at, at + self._rows)
            labels, best = self._labels(states.last.flatten(0, 1)[batch.labels[here]])
            for j in range(self.num_draft_tokens):
                weights = batch.weights(j)[here]
                with autocast(last.device):
                    logits = self.module.logits(j, last[batch.roots(j)[here]])
                    loss = DECAY**j * soft_loss(logits, labels, weights)
                loss.backward()
                total += loss.detach()
                drafted = self.module.tokens(logits.detach())
                accuracy[j] += (drafted == best).float() @ weights
        return StepMetrics(total, accuracy)

    @torch.no_grad()
    def draft(self, batch: Batch, states: States) -> list[Tensor]:
        last = to_module_dtype(states.last).flatten(0, 1)
        found = []
        for j in range(self.num_draft_tokens):
            with autocast(last.device):
                chunks = [
                    self.module.tokens(self.module.logits(j, last[roots]))
                    for roots in batch.roots(j).split(self._rows)
                ]
            found.append(torch.cat(chunks))
        return found

    @torch.no_grad()
    def _labels(self, last: Tensor) -> tuple[Tensor, Tensor]:
        """The target's probabilities over the draft vocabulary [rows, ...], and its argmax."""
        logits = self._target.logits(last).float()
        best, labels = logits.argmax(-1), logits.softmax(-1)
        return labels if self._draft_ids is None else labels[:, self._draft_ids], best

    def tensors(self) -> dict[str, Tensor]:
        return saved_tensors(self.module)

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
