"""Reference implementation of routing and of experts: the definition, the fallback and the tests' oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace

import torch
from torch import Tensor

from windlass.kernels.experts import ExpertActivation, ExpertMLP, ExpertWeights, Routing
from windlass.kernels.gemm import batch_invariant_linear
from windlass.kernels.native.pool import Workers
from windlass.kernels.packed import Float8, Packed


def route(
    logits: Tensor, bias: Tensor | None, routing: Routing, expert_scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The weights, float32 [T, k], and indices [T, k] of each token's experts.

    Among equal scores the lower index is chosen. `expert_scales` [E] multiply the weights of their experts.
    """
    wide = logits.float()
    scores = wide.softmax(-1) if routing.score == "softmax" else wide.sigmoid()
    ranks = scores if bias is None else scores + bias
    if routing.top_groups < routing.num_groups:
        ranks = _limit_to_groups(ranks, routing)
    chosen = ranks.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_k]
    weights = scores.gather(-1, chosen)
    if routing.normalised:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    weights = weights * routing.scale
    return weights if expert_scales is None else weights * expert_scales[chosen], chosen


def _limit_to_groups(ranks: Tensor, routing: Routing) -> Tensor:
    """Replace the ranks of experts outside of the best groups by -infinity."""
    grouped = ranks.unflatten(-1, (routing.num_groups, -1))
    if routing.group_score == "max":
        best = grouped.amax(-1)
    else:
        best = grouped.topk(2, dim=-1).values.sum(-1)
    order = best.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_groups]
    allowed = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, order, True)
    return grouped.masked_fill(~allowed[..., None], float("-inf")).flatten(-2)


def activate(gate_up: Tensor, activation: ExpertActivation) -> Tensor:
    """The expert's activation of [rows, 2 I], or of [rows, I] without a gate: [rows, I]."""
    if activation.kind == "relu2":
        return torch.relu(gate_up).square()
    if activation.interleaved:
        gate, up = gate_up[..., 0::2], gate_up[..., 1::2]
    else:
        gate, up = gate_up.chunk(2, dim=-1)
    if activation.kind == "silu":
        return torch.nn.functional.silu(gate) * up
    if activation.kind == "gelu_tanh":
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    gate = gate.clamp(max=activation.limit)
    up = up.clamp(-activation.limit, activation.limit)
    return gate * torch.sigmoid(activation.alpha * gate) * (up + 1)


def expert_rows(form: Packed | Tensor, first: int, count: int) -> Packed | Tensor:
    """Rows [first, first + count) of a weight or of a packed form."""
    rows = slice(first, first + count)
    if isinstance(form, Tensor):
        return form[rows]
    if isinstance(form, Float8) and form.block is not None:
        if first % form.block[0] or count % form.block[0]:
            raise ValueError(f"rows {first}..{first + count} split a block of {form.block[0]} rows")
        blocks = slice(first // form.block[0], (first + count) // form.block[0])
        return replace(form, codes=form.codes[rows], scales=form.scales[blocks])
    assert is_dataclass(form)
    cut = {
        each.name: getattr(form, each.name)[rows]
        for each in fields(form)
        if each.name in ("codes", "scales", "offsets", "sub_scales")
        and getattr(form, each.name) is not None
        and getattr(form, each.name).shape[0] == form.shape[0]
    }
    return replace(form, **cut)


class ReferenceMLP(ExpertMLP):
    """Keeps the packed forms, and dequantises each chosen expert on each call."""

    def __init__(self, weights: ExpertWeights, dtype: torch.dtype) -> None:
        self._weights = weights
        self._dtype = dtype

    def tensors(self) -> Sequence[Tensor | None]:
        found: list[Tensor | None] = [self._weights.gate_up_bias, self._weights.down_bias]
        for form in (self._weights.gate_up, self._weights.down):
            if isinstance(form, Tensor):
                found.append(form)
            else:
                found += [
                    value
                    for each in fields(form)
                    if isinstance(value := getattr(form, each.name), Tensor)
                ]
        weights = self._weights
        return [*found, weights.correction_bias, weights.expert_scales, weights.load]

    def apply(self, x: Tensor, logits: Tensor, chosen: Tensor | None = None) -> Tensor:
        weights = self._weights
        scales, ids = route(logits, weights.correction_bias, weights.routing, weights.expert_scales)
        if chosen is not None:
            chosen.copy_(ids)
        load = self.counted(weights.load)
        if load is not None:
            load.scatter_add_(0, ids.flatten(), torch.ones_like(ids.flatten()))
        out = torch.zeros(x.shape[0], weights.hidden_size, dtype=torch.float32, device=x.device)
        local = weights.experts or range(weights.routing.num_experts)
        if x.is_cuda:  # captured graphs cannot depend on the choice: all tokens use all experts
            for index, expert in enumerate(local):
                share = (scales * (ids == expert)).sum(-1, keepdim=True)
                out += self._expert(x, index).float() * share
            return out.to(x.dtype)
        used = set(ids.unique().tolist())
        for index, expert in enumerate(local):
            if expert in used:
                tokens, places = (ids == expert).nonzero(as_tuple=True)
                y = self._expert(x[tokens], index)
                out.index_add_(0, tokens, y.float() * scales[tokens, places, None])
        return out.to(x.dtype)

    def _expert(self, x: Tensor, index: int) -> Tensor:
        weights = self._weights
        hidden, inner = weights.hidden_size, weights.num_gate_up
        gate_up = self._linear(x, weights.gate_up, index * inner, inner)
        if weights.gate_up_bias is not None:
            gate_up = gate_up + weights.gate_up_bias[index]
        activated = activate(gate_up, weights.activation)
        y = self._linear(activated, weights.down, index * hidden, hidden)
        return y if weights.down_bias is None else y + weights.down_bias[index]

    def _linear(self, x: Tensor, form: Packed | Tensor, first: int, count: int) -> Tensor:
        rows = expert_rows(form, first, count)
        weight = rows if isinstance(rows, Tensor) else rows.dequantise()
        return batch_invariant_linear(x, weight.to(x.dtype))


class ReferenceExperts:
    """Supports every form, dtype and device."""

    name = "plain"
    batch_invariant = True

    def __init__(self, workers: Workers) -> None:
        del workers

    def refuse(
        self, weights: ExpertWeights, device: torch.device, dtype: torch.dtype
    ) -> str | None:
        del weights, device, dtype
        return None

    def prepare(self, weights: ExpertWeights, dtype: torch.dtype) -> ExpertMLP:
        return ReferenceMLP(weights, dtype)
