"""GPTQ: columns are rounded one after another, and what each one loses is given to those to come.

How much a later column can make good is in the inverse of the inputs' Gram matrix.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from windlass.errors import CheckpointError
from windlass.tools.quantize.weights import Grid, IntWeight, even_groups

# static: columns of large inputs first, groups of neighbours; group: groups follow that order too.
ActOrder = Literal["none", "static", "group"]

_MOST_DAMPING = 1.0


def gptq(
    weight: Tensor,
    gram: Tensor,
    grid: Grid,
    act_order: ActOrder = "static",
    damping: float = 0.01,
    block: int = 128,
) -> IntWeight:
    """Quantise [N, K] so that the outputs for inputs with this Gram matrix [K, K] change little."""
    num_in = weight.shape[1]
    order = torch.arange(num_in, device=weight.device)
    if act_order != "none":
        order = gram.diagonal().argsort(descending=True, stable=True)
    groups = even_groups(num_in, grid.group, weight.device)
    by_column = groups if act_order == "group" else groups[order]
    pass_on = _propagation(gram[order][:, order], damping)
    rounding = _Rounding(weight.T[order], grid, by_column)
    if act_order == "static":
        rounding.fit_all(weight)
    rounding.run(pass_on, block)
    back = torch.empty_like(order)
    back[order] = torch.arange(num_in, device=order.device)
    return IntWeight(
        grid.bits,
        rounding.codes[back].T.contiguous(),
        rounding.scales.T.contiguous(),
        rounding.zeros.T.to(torch.uint8),
        by_column[back],
    )


class _Rounding:
    """One weight on its way, transposed so that what is worked on lies together: [K, N].

    Owns a copy of it, which is used up.
    """

    def __init__(self, weight: Tensor, grid: Grid, groups: Tensor) -> None:
        num_in, num_out = weight.shape
        self.weight = weight
        self.grid = grid
        self.groups = groups.tolist()
        self.codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
        self.scales = weight.new_empty(num_in // grid.group, num_out)
        self.zeros = torch.empty_like(self.scales)
        self._fitted = False

    def fit_all(self, weight: Tensor) -> None:
        """Every group's grid, from the weights as they were: [N, K]."""
        scales, zeros = self.grid.fit(weight.unflatten(1, (-1, self.grid.group)))
        self.scales, self.zeros = scales.T.contiguous(), zeros.T.contiguous()
        self._fitted = True

    def run(self, pass_on: Tensor, block: int) -> None:
        num_in = self.weight.shape[0]
        for first in range(0, num_in, block):
            last = min(first + block, num_in)
            errors = self._block(first, last, pass_on[first:last, first:last])
            self.weight[last:].addmm_(pass_on[first:last, last:].T, errors, alpha=-1)

    def _block(self, first: int, last: int, pass_on: Tensor) -> Tensor:
        """Round inputs [first, last); returns what each lost, scaled for those to come."""
        own = self.weight[first:last]
        errors = torch.empty_like(own)
        for at in range(last - first):
            k = first + at
            group = self.groups[k]
            if not self._fitted and k % self.grid.group == 0:
                self._fit(group, k)
            scale, zero = self.scales[group], self.zeros[group]
            code = self.grid.encode(own[at], scale, zero)
            self.codes[k] = code.to(torch.uint8)
            errors[at] = (own[at] - (code - zero) * scale) / pass_on[at, at]
            own[at:].addr_(pass_on[at, at:], errors[at], alpha=-1)
        return errors

    def _fit(self, group: int, k: int) -> None:
        """A group's grid, from the weights as they have become."""
        found = self.grid.fit(self.weight[k : k + self.grid.group].T)
        self.scales[group], self.zeros[group] = found


def _propagation(gram: Tensor, damping: float) -> Tensor:
    """Upper Cholesky factor of the inverse Gram matrix."""
    mean = gram.diagonal().mean()
    if mean <= 0:
        raise CheckpointError("the inputs are all zero, so there is nothing to calibrate on.")
    gram = gram / mean
    share = damping
    while share <= _MOST_DAMPING:
        damped = gram.clone()
        damped.diagonal().add_(share)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            inverse = torch.cholesky_inverse(lower)
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not failed and bool(torch.isfinite(upper).all()):
                return upper
        share *= 10
    raise CheckpointError(
        f"the inputs' Gram matrix of {gram.shape[0]} features cannot be inverted, even with "
        f"{_MOST_DAMPING:g} of its mean added. Calibrate on more and other texts."
    )
