"""Mamba-2: the selective scan. recurrent.py has the states and the convolution before it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from windlass.core.recurrent import RecurrentHeads
from windlass.kernels.batch import LayerState, StepBatch
from windlass.kernels.recurrent import decays, follow, per_head


@dataclass(frozen=True, slots=True)
class ScanWeights:
    """Weights of the selective scan, one number per head, in float32."""

    decay: Tensor  # A, negative: a state shrinks by exp(A dt)
    skip: Tensor  # D: of a token's own input
    dt_bias: Tensor


def selective_scan(
    projected: Tensor,
    mixed: Tensor,
    weights: ScanWeights,
    heads: RecurrentHeads,
    state: LayerState,
    batch: StepBatch,
) -> Tensor:
    """The heads' outputs times silu(gate): [tokens, heads * dim]. Writes the recurrent states.

    Of `projected`, the first columns are the gate and the last are dt; `mixed` are the outputs of
    `causal_conv`: inputs of the heads, B, C.
    """
    gate = projected[:, : heads.inner].float()
    dt = functional.softplus(projected[:, -heads.num_heads :].float() + weights.dt_bias)
    parts = [heads.inner, heads.group_features, heads.group_features]
    x, *shared = mixed.float().split(parts, dim=-1)
    x = x.unflatten(1, (heads.num_heads, heads.dim))
    b, c = (per_head(each, heads) for each in shared)

    def advance(tokens: slice, current: Tensor) -> tuple[Tensor, Tensor]:
        inputs, log_decay = x[tokens] * dt[tokens, :, None], dt[tokens] * weights.decay
        return _scan(inputs, b[tokens], c[tokens], log_decay, current)

    y = follow(torch.empty_like(x), advance, heads, state, batch)
    y = y + weights.skip[:, None] * x
    return (y.flatten(1) * functional.silu(gate)).to(projected.dtype)


def _scan(
    x: Tensor, b: Tensor, c: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs [tokens, heads, dim] of some tokens and the state after them, given the one before.

    state_t = exp(log_decay_t) state_{t-1} + x_t b_t; y_t = state_t c_t. All tokens are computed at
    once, as attention whose weights decay with the distance.
    """
    total = log_decay.cumsum(0)  # [tokens, heads]
    scores = torch.einsum("thn,shn->tsh", c, b) * decays(log_decay)
    y = torch.einsum("tsh,shd->thd", scores, x)
    y = y + torch.einsum("thn,hdn->thd", c, state) * total.exp()[..., None]
    rest = (total[-1] - total).exp()
    added = torch.einsum("shd,shn->hdn", x * rest[..., None], b)
    return y, state * total[-1].exp()[:, None, None] + added
