"""Medusa heads as plain torch; the state dict is the public layout.

Head i reads the last hidden state at a position p and guesses token p + 2 + i. Each is a residual
block and a matrix over the vocabulary, or the target's own matrix where that is shared.
"""

from __future__ import annotations

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
    """A head's own matrix, which starts as the target's."""

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(matrix.detach().float().clone())


class MedusaModule(nn.ModuleList):
    """`{i}.0.linear.weight`, `{i}.0.linear.bias`, and `{i}.1.weight` unless the head is shared."""

    def __init__(self, num_heads: int, matrix: Tensor, share: bool) -> None:
        """`matrix`: the target's head [vocabulary, hidden]."""
        hidden = matrix.shape[1]
        parts: list[nn.Module] = []
        for _ in range(num_heads):
            own = [] if share else [Output(matrix)]
            parts.append(nn.ModuleList([Block(hidden), *own]))
        super().__init__(parts)
        # In a tuple: it is the target's and no part of this module.
        self._shared = (matrix,) if share else None

    def hidden(self, head: int, last: Tensor) -> Tensor:
        """What the matrix of a head reads, from the target's last hidden states."""
        block: Tensor = self.get_submodule(f"{head}.0")(last)
        return block

    def matrix(self, head: int) -> Tensor:
        if self._shared is not None:
            return self._shared[0]
        return self.get_parameter(f"{head}.1.weight")

    def logits(self, head: int, last: Tensor) -> Tensor:
        """Scores over the vocabulary of head `head` [rows, vocabulary]."""
        return F.linear(self.hidden(head, last), self.matrix(head))
