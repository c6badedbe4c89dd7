"""Medusa heads in torch; the state dict is the public layout.

Head i reads the last hidden state at position p and predicts token p + 2 + i. Each head has residual
blocks and a matrix over the draft vocabulary, or shares the target's LM head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


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
