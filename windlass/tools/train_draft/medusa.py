"""Medusa heads in torch, and their training; the state dict is the public layout.

Head i reads only the target's last hidden state at position p and predicts token p + 2 + i. Each head
has residual blocks and a matrix over the draft vocabulary, or shares the target's LM head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from windlass.tools.train_draft.batches import Batch
from windlass.tools.train_draft.head import DECAY, StepMetrics, autocast, soft_loss, to_module_dtype
from windlass.tools.train_draft.target import States, Target

# Maximum number of logits in memory.
_MAX_LOGITS = {"cuda": 2**28, "cpu": 2**24}


class Block(nn.Module):
    """x + silu(linear(x)); initially the identity."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class Output(nn.Module):
    """A head's own matrix, initialised with the target's rows."""

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(matrix.detach().float().clone())


class MedusaModule(nn.ModuleList):
    """Has `{i}.{block}.linear.weight` and `.bias`, and `{i}.{blocks}.weight` unless the LM head is
    shared. With a draft vocabulary also `d2t`: target id minus draft id.
    """

    d2t: Tensor | None

    def __init__(
        self,
        num_heads: int,
        matrix: Tensor,
        share: bool,
        draft_ids: Tensor | None = None,
        num_blocks: int = 1,
    ) -> None:
        """`matrix`: the target's LM head [vocabulary, hidden].

        `draft_ids`: the draft vocabulary, ascending; None: the full one, as with a shared LM head.
        """
        hidden = matrix.shape[1]
        rows = matrix if draft_ids is None else matrix[draft_ids]
        parts: list[nn.Module] = []
        for _ in range(num_heads):
            own = [] if share else [Output(rows)]
            parts.append(nn.ModuleList([*(Block(hidden) for _ in range(num_blocks)), *own]))
        super().__init__(parts)
        self.num_blocks = num_blocks
        offsets = None if draft_ids is None else draft_ids - torch.arange(len(draft_ids))
        self.register_buffer("d2t", offsets)
        # In a tuple, so that torch does not register the target's matrix with this module.
        self._shared = (matrix,) if share else None

    def hidden(self, head: int, last: Tensor) -> Tensor:
        """The input of a head's matrix, from the target's last hidden states."""
        for block in range(self.num_blocks):
            last = self.get_submodule(f"{head}.{block}")(last)
        return last

    def matrix(self, head: int) -> Tensor:
        if self._shared is not None:
            return self._shared[0]
        return self.get_parameter(f"{head}.{self.num_blocks}.weight")

    def logits(self, head: int, last: Tensor) -> Tensor:
        """Logits of head `head` over its vocabulary [rows, vocabulary]."""
        return F.linear(self.hidden(head, last), self.matrix(head))

    def tokens(self, logits: Tensor) -> Tensor:
        """The likeliest tokens, as target ids [rows]."""
        best = logits.argmax(-1)
        return best if self.d2t is None else best + self.d2t[best]


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
