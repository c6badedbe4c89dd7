"""Sequence parallelism: the tokens of a step, divided over the ranks of a tensor-parallel group.

Every rank keeps the residual stream of its own tokens, and normalises those alone. A row-parallel GEMM gives
summands for all tokens: a reduce-scatter in place of the all-reduce gives each rank the sums of its tokens.
Column-parallel GEMMs read all tokens, which an all-gather joins after the norm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from windlass.kernels.gemm import Norm
from windlass.kernels.gemm_io import InputQuant, Inputs, QuantisedInputs


class Ranks(Protocol):
    """The ranks that share the layers; a process group is one."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor: ...

    def reduce_scatter(self, x: Tensor, counts: Sequence[int]) -> Tensor: ...

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor: ...


def min_split_tokens(num_ranks: int) -> int:
    """The number of tokens from which every rank has one."""
    return num_ranks**2


class TokenSplit:
    """The tokens of one step; this rank's are [start, start + count). Slices are equal, but for the last."""

    def __init__(
        self,
        ranks: Ranks,
        num_tokens: int,
        rows_are: Callable[[range], AbstractContextManager[None]] | None = None,
    ) -> None:
        """`rows_are`: a context in which the rows of GEMMs are some of the tokens."""
        assert num_tokens >= min_split_tokens(ranks.size), "a rank would have no token"
        self._ranks = ranks
        self._rows_are = rows_are
        most = -(-num_tokens // ranks.size)
        self.num_tokens = num_tokens
        self.counts = [min(most, num_tokens - most * rank) for rank in range(ranks.size)]
        self.start, self.count = most * ranks.rank, self.counts[ranks.rank]

    def own(self, x: Tensor) -> Tensor:
        """This rank's rows of all tokens."""
        return x[self.start : self.start + self.count]

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """This rank's rows of the sum of all ranks' x, which have all tokens."""
        return self._ranks.reduce_scatter(x, self.counts)

    def gather(self, x: Inputs) -> Inputs:
        """The rows of all tokens, from those of the ranks; x may have them already."""
        if x.shape[0] == self.num_tokens:
            return x
        if isinstance(x, Tensor):
            return self.gather_rows(x)
        assert isinstance(x, QuantisedInputs)  # `is_unquantised` refuses planes
        codes = self.gather_rows(x.codes.view(torch.uint8)).view(x.codes.dtype)
        return QuantisedInputs(codes, self.gather_rows(x.scales), x.dtype)

    def gather_rows(self, x: Tensor) -> Tensor:
        """As `gather`, of a tensor of this rank's tokens."""
        width = x.shape[1]
        found = self._ranks.all_gather(x.flatten(), [count * width for count in self.counts])
        return found.view(self.num_tokens, width)

    def project(self, linear: Callable[[Inputs], Tensor], x: Inputs) -> Tensor:
        """The outputs for all tokens of a layer that no rank has a part of: each computes its tokens."""
        if self._rows_are is None:
            return self.gather_rows(linear(x))
        with self._rows_are(range(self.start, self.start + self.count)):
            y = linear(x)
        return self.gather_rows(y)

    def pick(self, x: Tensor, tokens: Tensor) -> Tensor:
        """The rows of some tokens, from the ranks that have them."""
        at = tokens.long() - self.start
        is_own = ((at >= 0) & (at < self.count)).unsqueeze(1)
        rows = x[at.clamp(0, self.count - 1)]
        return self._ranks.all_reduce(torch.where(is_own, rows, torch.zeros_like(rows)))

    def is_unquantised(self, norm: Norm) -> bool:
        """Whether a norm must not quantise: not all readers want codes by row, which can be gathered."""
        wanted = {norm.input_quant(rows) for rows in {self.num_tokens, *self.counts}}
        return wanted != {InputQuant("rows")}
