"""Sums the parts of a mixture of experts that the ranks computed, each with its own experts.

Every rank has all tokens, so none is sent to an expert: a rank computes its experts' part of each token,
and only results travel. All-reduce sums whole batches, also in captured graphs. All-to-all sends a row only
for a token and a rank with some of its experts: each rank sums the rows of its slice of the tokens, and an
all-gather joins the slices. The host must know the numbers of rows, so graphs cannot capture this; with
numbers padded to the most it would move as much as all-reduce.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from windlass.config import CombineRule
from windlass.core.card import Choice
from windlass.core.moe import ExpertPlacement, Routing
from windlass.kernels.token_split import TokenSplit
from windlass.parallel.mesh import Mesh

# All-to-all has one more collective, and the host waits for the numbers of rows: 20 to 100 us, in which
# a link of 100 to 400 GB/s moves these bytes.
_MIN_SAVED_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True)
class CombineCost:
    """Rows of a token's result that a rank sends and receives, on average over the tokens."""

    all_reduce: float  # as a ring: reduce-scatter and all-gather
    all_to_all: float  # the same, without the rows that no expert computed

    @classmethod
    def of(cls, routing: Routing, num_ranks: int) -> CombineCost:
        """With experts that are equally likely, on ranks with as many of them."""
        others = num_ranks - 1
        used = 1.0 - (1.0 - 1.0 / num_ranks) ** routing.top_k
        return cls(2 * others / num_ranks, (1 + used) * others / num_ranks)

    def min_tokens(self, row_bytes: int) -> float:
        """The number of tokens from which all-to-all is faster."""
        saved = (self.all_reduce - self.all_to_all) * row_bytes
        return math.inf if saved <= 0 else math.ceil(_MIN_SAVED_BYTES / saved)


@dataclass(frozen=True, slots=True)
class ExpertSpread:
    """How one layer's experts are spread over the ranks, and how their results are summed."""

    placement: ExpertPlacement
    device: torch.device
    rule: CombineRule = "auto"


class ExpertCombine(nn.Module):
    """Computes the experts of all ranks. `owners` has the rank of each expert."""

    owners: Tensor

    def __init__(
        self, mesh: Mesh, spread: ExpertSpread, routing: Routing, *, row_bytes: int
    ) -> None:
        super().__init__()
        self._group, self._routing = mesh.tp, routing
        cost = CombineCost.of(routing, mesh.ep.size)
        choices = {"auto": cost.min_tokens(row_bytes), "all-reduce": math.inf, "all-to-all": 0}
        # Without ep every rank has a part of each result.
        self.min_tokens = math.inf if mesh.ep.size == 1 else choices[spread.rule]
        self.choice = _choice(cost, spread, self.min_tokens)
        held = enumerate(spread.placement.ranks)
        ranks = {expert: rank for rank, experts in held for expert in experts}
        owners = torch.tensor([ranks[i] for i in range(len(ranks))], device=spread.device)
        self.register_buffer("owners", owners, persistent=False)

    def forward(
        self,
        experts: Callable[..., Tensor],
        x: Tensor,
        logits: Tensor,
        split: TokenSplit | None = None,
    ) -> Tensor:
        """The sum over all ranks; with `split`, of this rank's tokens alone.

        `experts` computes this rank's; see ExpertMLP.apply.
        """
        if len(x) < self.min_tokens or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            y = experts(x, logits)
            return self._group.all_reduce(y) if split is None else split.reduce_scatter(y)
        chosen = torch.empty((len(x), self._routing.top_k), dtype=torch.int32, device=x.device)
        y = experts(x, logits, chosen)
        owners = self.owners[chosen.long()]
        if split is not None:
            return self._exchange(y, owners, [0, *accumulate(split.counts)])
        size, (tokens, width) = self._group.size, y.shape
        borders = [rank * tokens // size for rank in range(size + 1)]
        total = self._exchange(y, owners, borders)
        widths = [(stop - start) * width for start, stop in pairwise(borders)]
        return self._group.all_gather(total.flatten(), widths).view(tokens, width)

    def _exchange(self, y: Tensor, owners: Tensor, borders: Sequence[int]) -> Tensor:
        """Sum the ranks' y [T, H], of which a rank has a row for tokens with some of its `owners` [T, k].

        Return the rows of this rank's slice of the tokens, between two of the `borders`.
        """
        group, (tokens, width) = self._group, y.shape
        has_row = torch.zeros((tokens, group.size), dtype=torch.bool, device=y.device)
        has_row.scatter_(1, owners, True)
        first, last = borders[group.rank], borders[group.rank + 1]
        own = has_row[first:last]
        # Row counts by slice of the tokens and by rank; the host waits here.
        sums = torch.stack([has_row[start:stop].sum(0) for start, stop in pairwise(borders)])
        counts = sums.tolist()
        received = group.all_to_all(
            y[has_row[:, group.rank]],
            sent=[row[group.rank] for row in counts],
            received=counts[group.rank],
        )
        total = torch.zeros((last - first, width), dtype=torch.float32, device=y.device)
        for rank, rows in enumerate(received.split(counts[group.rank])):  # the order of all_reduce
            total[own[:, rank]] += rows
        return total.to(y.dtype)


def _choice(cost: CombineCost, spread: ExpertSpread, min_tokens: float) -> Choice:
    """A line of the start-up table."""
    sizes = sorted({len(experts) for experts in spread.placement.ranks})
    what = f"{' or '.join(map(str, sizes))} experts on each of {len(spread.placement.ranks)} ranks"
    if spread.rule != "auto":
        return Choice("expert parallelism", f"{what}, {spread.rule}", "as set")
    if min_tokens == math.inf:
        return Choice("expert parallelism", f"{what}, all-reduce", "all-to-all would move as much")
    return Choice(
        "expert parallelism",
        f"{what}, all-reduce, from {min_tokens:,} tokens all-to-all",
        f"{cost.all_to_all:.2f} instead of {cost.all_reduce:.2f} rows per token",
    )
