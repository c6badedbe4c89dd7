"""The gated delta rule. recurrent.py has the states and the convolution before it.

A head's state [dim, state_size] maps keys to values. A token replaces a part `beta` of the value that the
decayed state has for its key by its own value:

    S_t = exp(g_t) S_{t-1} + u_t k_t,  u_t = beta_t (v_t - exp(g_t) S_{t-1} k_t),  y_t = S_t q_t
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from windlass.core.recurrent import RecurrentHeads
from windlass.kernels.batch import LayerState, StepBatch
from windlass.kernels.recurrent import decays, follow, per_head

UNIT_EPS = 1e-6  # added to the square of a key's length


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """Weights of the gated delta rule, in float32."""

    decay: Tensor  # A of each head, negative: a state shrinks by exp(A dt)
    dt_bias: Tensor
    norm: Tensor  # [dim], of the outputs of every head
    eps: float


def delta_rule(
    projected: Tensor,
    mixed: Tensor,
    weights: DeltaWeights,
    heads: RecurrentHeads,
    state: LayerState,
    batch: StepBatch,
) -> Tensor:
    """The heads' normalised outputs times silu(gate): [tokens, heads * dim]. Writes the recurrent states.

    Of `projected`, the first columns are the gate and the last are beta, before its sigmoid, and dt;
    `mixed` are the outputs of `causal_conv`: values, keys, queries.
    """
    beta, dt = projected[:, -2 * heads.num_heads :].float().chunk(2, dim=-1)
    beta, log_decay = beta.sigmoid(), functional.softplus(dt + weights.dt_bias) * weights.decay
    parts = [heads.inner, heads.group_features, heads.group_features]
    v, *shared = mixed.float().split(parts, dim=-1)
    v = v.unflatten(1, (heads.num_heads, heads.dim))
    k, q = (_unit(per_head(each, heads)) for each in shared)
    q = q * heads.state_size**-0.5

    def advance(tokens: slice, current: Tensor) -> tuple[Tensor, Tensor]:
        return _advance(
            q[tokens], k[tokens], v[tokens], beta[tokens], log_decay[tokens], state=current
        )

    y = follow(torch.empty_like(v), advance, heads, state, batch)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + weights.eps) * weights.norm
    return (y.flatten(1) * functional.silu(projected[:, : heads.inner].float())).to(projected.dtype)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + UNIT_EPS)


def _advance(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, *, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs [tokens, heads, dim] of some tokens and the state after them, given the one before.

    The u_t depend on those before: they solve a triangular system. With it all tokens are computed at
    once, as attention whose weights decay with the distance.
    """
    q, k, v = (each.transpose(0, 1) for each in (q, k, v))  # heads first
    beta = beta.T[..., None]
    total = log_decay.cumsum(0).T[..., None]
    decay = decays(log_decay).permute(2, 0, 1)
    before = state.mT
    system = beta * (k @ k.mT) * decay
    known = beta * (v - total.exp() * (k @ before))
    u = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    y = total.exp() * (q @ before) + (q @ k.mT * decay) @ u
    rest = (total[:, -1:] - total).exp()
    after = state * total[:, -1:].exp() + (u * rest).mT @ k
    return y.transpose(0, 1), after
