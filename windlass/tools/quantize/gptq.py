"""GPTQ: quantises columns in order, and adds the error of each to the columns that follow.

The inverse Gram matrix of the inputs (the Hessian of the output error) gives the weights of that
update.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from windlass.errors import CheckpointError
from windlass.tools.quantize.weights import Grid, IntWeight, even_groups

# static: columns with large inputs first, groups of adjacent inputs; group: groups in that order.
ActOrder = Literal["none", "static", "group"]

_MAX_DAMPING = 1.0


def gptq(
    weight: Tensor,
    gram: Tensor,
    grid: Grid,
    act_order: ActOrder = "static",
    damping: float = 0.01,
    block: int = 128,
) -> IntWeight:
    """Quantise a weight [N, K] to minimise the output error for inputs with this Gram matrix [K, K]."""
    num_in = weight.shape[1]
    order = torch.arange(num_in, device=weight.device)
    if act_order != "none":
        order = gram.diagonal().argsort(descending=True, stable=True)
    groups = even_groups(num_in, grid.group, weight.device)
    by_column = groups if act_order == "group" else groups[order]
    update = _update_matrix(gram[order][:, order], damping)
    quantiser = _ColumnQuantiser(weight.T[order], grid, by_column)
    if act_order == "static":
        quantiser.fit_all(weight)
    quantiser.run(update, block)
    back = torch.empty_like(order)
    back[order] = torch.arange(num_in, device=order.device)
    return IntWeight(
        bits=grid.bits,
        codes=quantiser.codes[back].T.contiguous(),
        scales=quantiser.scales.T.contiguous(),
        zeros=quantiser.zeros.T.to(torch.uint8),
        groups=by_column[back],
    )


class _ColumnQuantiser:
    """Quantises a transposed weight [K, N], so that an input's weights are contiguous.

    Owns a copy of the weight, which it overwrites.
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
        """Fit every group's scale and zero point to the original weight [N, K]."""
        scales, zeros = self.grid.fit(weight.unflatten(1, (-1, self.grid.group)))
        self.scales, self.zeros = scales.T.contiguous(), zeros.T.contiguous()
        self._fitted = True

    def run(self, update: Tensor, block: int) -> None:
        num_in = self.weight.shape[0]
        for first in range(0, num_in, block):
            last = min(first + block, num_in)
            errors = self._block(first, last, update[first:last, first:last])
            self.weight[last:].addmm_(update[first:last, last:].T, errors, alpha=-1)

    def _block(self, first: int, last: int, update: Tensor) -> Tensor:
        """Quantise inputs [first, last); return their errors, scaled for the inputs that follow."""
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
            errors[at] = (own[at] - (code - zero) * scale) / update[at, at]
            own[at:].addr_(update[at, at:], errors[at], alpha=-1)
        return errors

    def _fit(self, group: int, k: int) -> None:
        """Fit a group's scale and zero point to the updated weights."""
        found = self.grid.fit(self.weight[k : k + self.grid.group].T)
        self.scales[group], self.zeros[group] = found


def _update_matrix(gram: Tensor, damping: float) -> Tensor:
    """Return the upper Cholesky factor of the inverse Gram matrix."""
    mean = gram.diagonal().mean()
    if mean <= 0:
        raise CheckpointError("all calibration inputs are zero.")
    gram = gram / mean
    share = damping
    while share <= _MAX_DAMPING:
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
        f"{_MAX_DAMPING:g} of its mean added. Use more and other calibration texts."
    )
