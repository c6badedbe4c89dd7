"""Medusa heads as plain torch; the state dict is the public layout.

Head i reads the last hidden state at a position p and guesses token p + 2 + i. Each is some residual
blocks and a matrix over the vocabulary or part of it, or the target's own where that is shared.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """x + silu(linear(x)); at the start it changes nothing."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class Output(nn.Module):
    """A head's own matrix, which starts as the target's, or some rows of it."""

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(matrix.detach().float().clone())


class MedusaModule(nn.ModuleList):
    """`{i}.{block}.linear.weight` and `.bias`, and `{i}.{blocks}.weight` unless the head is shared.

    With a draft vocabulary also `d2t`: how far a draft id is from the target's.
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
        """`matrix`: the target's head [vocabulary, hidden].

        `draft_ids`: the tokens that can be guessed, ascending; None: all. A shared head has all.
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
        # In a tuple: it is the target's and no part of this module.
        self._shared = (matrix,) if share else None

    def hidden(self, head: int, last: Tensor) -> Tensor:
        """What the matrix of a head reads, from the target's last hidden states."""
        for block in range(self.num_blocks):
            last = self.get_submodule(f"{head}.{block}")(last)
        return last

    def matrix(self, head: int) -> Tensor:
        if self._shared is not None:
            return self._shared[0]
        return self.get_parameter(f"{head}.{self.num_blocks}.weight")

    def logits(self, head: int, last: Tensor) -> Tensor:
        """Scores of the tokens that head `head` can guess [rows, vocabulary]."""
        return F.linear(self.hidden(head, last), self.matrix(head))

    def tokens(self, logits: Tensor) -> Tensor:
        """The likeliest tokens, as the target numbers them [rows]."""
        best = logits.argmax(-1)
        return best if self.d2t is None else best + self.d2t[best]
