"""Mixture-of-experts MLPs on CUDA: routing, two grouped GEMMs and a sum over the experts of a token.

The number of tokens alone decides launches and tiles, so that graphs can be captured. With few
(token, expert) pairs each pair is a tile, and only the chosen experts are read. With more, pairs are
sorted by expert, and a tile has more rows the more pairs an expert has on average: about twice as many,
so that most experts are read once. A tile that is not full costs as much as a smaller one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from windlass.kernels.experts import ExpertMLP, ExpertWeights
from windlass.kernels.gpu import Gpu, gpu_of
from windlass.kernels.native.pool import Workers
from windlass.kernels.packed import Float8, Packed, Table4
from windlass.kernels.triton import experts_weights, pdl
from windlass.kernels.triton.experts_inputs import BLOCK, ExpertInputs, empty_codes, quantise_inputs
from windlass.kernels.triton.experts_kernels import combine_kernel, expert_gemm_kernel
from windlass.kernels.triton.experts_routing import Tiles, route, single_pairs, sort_pairs
from windlass.kernels.triton.experts_weights import Stack
from windlass.kernels.triton.fit import fit

_MAX_EXPERTS, _MAX_TOP_K = 512, 16
_MIN_ROWS = 16  # of a tile: tensor cores multiply no fewer
_COMBINED = 512  # outputs per program of the sum over experts
_PREFETCH_BYTES = 8 * 2**20  # bytes of weights that the second GEMM prefetches
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(frozen=True, slots=True)
class Tiling:
    """A grouped GEMM's tile: weight rows, inputs per iteration, and launch options."""

    outputs: int
    block_k: int = 64  # of 16-bit weights, and half of that of fp8 ones; else 128
    warps: int = 4
    stages: int = 4


@dataclass(frozen=True, slots=True)
class Plan:
    """How the GEMMs run if experts have at most `max_pairs` pairs on average."""

    max_pairs: float
    rows: int  # pairs per tile; 1: pairs are not sorted
    gate_up: Tiling
    down: Tiling


_MOST = float("inf")
_CODES = (
    Plan(0.25, 1, Tiling(64, stages=6), Tiling(64, stages=6)),
    Plan(8, 16, Tiling(128, stages=5), Tiling(128, stages=5)),
    Plan(24, 32, Tiling(128, stages=4), Tiling(128, stages=4)),
    Plan(_MOST, 64, Tiling(128, 64, warps=8, stages=3), Tiling(128, 64, warps=8, stages=3)),
)
# By form, in ascending order of `max_pairs`, measured with benchmarks/scripts/moe_kernels.py on an H200.
# Outputs of at least 64 keep the sums of all tilings equal: below, Triton uses other instructions.
PLANS: dict[str, tuple[Plan, ...]] = {
    "wide": (
        Plan(0.25, 1, Tiling(64, 128), Tiling(64, 128)),
        Plan(8, 16, Tiling(64, 128), Tiling(64, 128)),
        Plan(24, 32, Tiling(64, 128), Tiling(64, 128, stages=3)),
        Plan(_MOST, 128, Tiling(256, 64, warps=8), Tiling(256, 64, warps=8)),
    ),
    "fp8": (
        Plan(0.25, 1, Tiling(64, 128), Tiling(64, 128)),
        Plan(8, 16, Tiling(64, 128, stages=3), Tiling(128, 64)),
        Plan(24, 32, Tiling(64, 128, stages=3), Tiling(128, 64)),
        Plan(96, 64, Tiling(128, 64, stages=3), Tiling(128, 64, stages=3)),
        Plan(512, 128, Tiling(256, 64, warps=8), Tiling(256, 64, warps=8)),
        Plan(_MOST, 256, Tiling(128, 64, warps=8), Tiling(128, 64, warps=8)),
    ),
    # A second sum per output, of the block, takes as many registers as the first.
    "fp8 in blocks": (
        Plan(0.25, 1, Tiling(64, 64), Tiling(64, 64)),
        Plan(8, 16, Tiling(64, 64), Tiling(128, 64)),
        Plan(24, 32, Tiling(64, 64), Tiling(128, 64)),
        Plan(_MOST, 64, Tiling(128, 64, warps=8), Tiling(128, 64, warps=8)),
    ),
    "eight": _CODES,
    "four": _CODES,
    "e2m1": _CODES,
}


def plans_of(stack: Stack) -> tuple[Plan, ...]:
    """The plans for a form of weights."""
    return PLANS["fp8 in blocks" if stack.kind == "fp8" and stack.blocks else stack.kind]


class TritonExperts:
    """Supports 16-bit experts and all packed forms, except permuted inputs.

    fp8 forms that quantise activations do so per token, and per 128 inputs if weights have scales per
    block. Other forms keep 16-bit activations.
    """

    name = "triton experts"
    batch_invariant = True

    def __init__(self, workers: Workers | None = None, plans: Sequence[Plan] | None = None) -> None:
        """`plans`: instead of those of the form."""
        del workers  # of native kernels
        self._plans = plans

    def refuse(
        self, weights: ExpertWeights, device: torch.device, dtype: torch.dtype
    ) -> str | None:
        if device.type != "cuda" and not _INTERPRETED:
            return f"Triton needs CUDA, this is {device.type}"
        if dtype == torch.float32 and not _INTERPRETED:
            return "needs a 16-bit dtype, this is float32"
        routing = weights.routing
        if routing.num_experts > _MAX_EXPERTS or routing.top_k > _MAX_TOP_K:
            return (
                f"at most {_MAX_TOP_K} of {_MAX_EXPERTS} experts are supported, these are "
                f"{routing.top_k} of {routing.num_experts}"
            )
        for form in (weights.gate_up, weights.down):
            why = experts_weights.refuse(form, weights.num_local)
            if why is not None:
                return why
            why = _lacks(form, gpu_of(device))
            if why is not None:
                return why
        return None

    def prepare(self, weights: ExpertWeights, dtype: torch.dtype) -> TritonMLP:
        return TritonMLP(weights, dtype, self._plans)


def _lacks(form: Packed | Tensor, gpu: Gpu) -> str | None:
    """Why a GPU cannot multiply with a form, or None."""
    if isinstance(form, Float8):
        return gpu.lacks_fp8()
    if isinstance(form, Table4):
        return gpu.lacks_ptx()
    return gpu.lacks_triton()


class TritonMLP(ExpertMLP):
    """Owns the prepared weights of one layer."""

    def __init__(
        self, weights: ExpertWeights, dtype: torch.dtype, plans: Sequence[Plan] | None
    ) -> None:
        self._gate_up = experts_weights.prepare(weights.gate_up, dtype)
        self._down = experts_weights.prepare(weights.down, dtype)
        self._biases = tuple(
            None if bias is None else bias.to(dtype).contiguous()
            for bias in (weights.gate_up_bias, weights.down_bias)
        )
        bias = weights.correction_bias
        self._correction_bias = None if bias is None else bias.float().contiguous()
        scales = weights.expert_scales
        self._expert_scales = None if scales is None else scales.float().contiguous()
        self._routing, self._activation = weights.routing, weights.activation
        self._num_local, self._load = weights.num_local, weights.load
        self._expert_map = weights.expert_map()
        device = self._down.codes.device
        self._counts = torch.zeros(self._num_local, dtype=torch.int32, device=device)
        self._plans = plans or plans_of(self._gate_up)

    def with_plans(self, plans: Sequence[Plan]) -> TritonMLP:
        """Return the same weights, multiplied with other plans."""
        twin = copy(self)
        twin._plans, twin._counts = plans, torch.zeros_like(self._counts)
        return twin

    def using(self, workers: Workers) -> TritonMLP:
        del workers
        return self.with_plans(self._plans)

    def tensors(self) -> Sequence[Tensor | None]:
        stacks = *self._gate_up.tensors(), *self._down.tensors()
        return (
            *stacks,
            *self._biases,
            self._correction_bias,
            self._expert_scales,
            self._expert_map,
            self._load,
            self._counts,
        )

    def apply(self, x: Tensor, logits: Tensor, chosen: Tensor | None = None) -> Tensor:
        routing = self._routing
        num_pairs = x.shape[0] * routing.top_k
        plan = next(p for p in self._plans if num_pairs <= p.max_pairs * routing.num_experts)
        quantised = empty_codes(x, self._gate_up.blocks) if self._gate_up.kind == "fp8" else None
        routed = route(
            logits,
            self._correction_bias,
            routing,
            expert_scales=self._expert_scales,
            counts=self._counts if plan.rows > 1 else None,
            expert_map=self._expert_map,
            load=self.counted(self._load),
            x=x if quantised is not None else None,
            quantised=quantised,
        )
        if chosen is not None:
            chosen.copy_(routed.experts)
        tiles = sort_pairs(routed, plan.rows) if plan.rows > 1 else single_pairs(routed)
        gates = self._gemm(quantised or ExpertInputs(x), x.dtype, tiles, plan.gate_up, gated=True)
        inner = ExpertInputs(gates)
        if self._down.kind == "fp8" and plan.rows > 1:  # a tile of one row quantises it
            inner = quantise_inputs(gates, self._down.blocks)
        rows = self._gemm(inner, x.dtype, tiles, plan.down, gated=False)
        out = torch.empty_like(x)
        combine_kernel[(x.shape[0], triton.cdiv(x.shape[1], _COMBINED))](
            rows,
            routed.weights,
            None if self._expert_map is None else routed.local,
            out,
            SIZE=x.shape[1],
            TOP_K=routing.top_k,
            WIDTH=_COMBINED,
            num_warps=4,
            **pdl.options(),
        )
        return out

    def _gemm(
        self, x: ExpertInputs, dtype: torch.dtype, tiles: Tiles, tiling: Tiling, *, gated: bool
    ) -> Tensor:
        """The GEMM of all pairs, [pairs, I] if gated, else [pairs, H]."""
        top_k, activation = self._routing.top_k, self._activation
        stack, bias = (self._gate_up if gated else self._down), self._biases[0 if gated else 1]
        num_out = stack.num_rows // self._num_local
        num_rows = x.values.shape[0]
        num_pairs = num_rows * top_k if gated else num_rows
        columns = num_out // 2 if gated and activation.has_gate else num_out
        out = torch.empty((num_pairs, columns), dtype=dtype, device=x.values.device)
        rows = max(_MIN_ROWS, tiles.rows)
        prefetched = max(64, _PREFETCH_BYTES // (tiles.count * num_out) // 64 * 64)
        fit(expert_gemm_kernel)[(triton.cdiv(num_out, tiling.outputs), tiles.count)](
            x.values,
            x.scales,
            stack.codes,
            stack.scales,
            stack.offsets,
            stack.sub_scales,
            stack.table,
            bias,
            out,
            tiles.experts,
            tiles.num_rows,
            tiles.pairs,
            self._counts if gated and tiles.rows > 1 else None,
            activation.alpha,
            activation.limit,
            num_rows,
            stack.num_rows,
            min(stack.codes.shape[1] * stack.codes.itemsize, prefetched),
            self._num_local,
            N=num_out,
            K=stack.num_in,
            TOP_K=top_k if gated else 1,
            FORM=stack.kind,
            GROUP=stack.group,
            SUPER=stack.super_group,
            GATED=gated,
            ORDER="interleaved" if activation.interleaved else "halves",
            KIND=activation.kind,
            ROWS=rows,
            OUTPUTS=tiling.outputs,
            BLOCK_K=block_k(stack.kind, tiling),
            STAGES=tiling.stages,
            DIVIDED=tiles.pairs is None and self._expert_map is not None,
            num_warps=num_warps(stack.kind, rows, tiling),
            num_stages=tiling.stages,
            **pdl.options(),
        )
        return out


def block_k(kind: str, tiling: Tiling) -> int:
    """Inputs per iteration."""
    if kind == "fp8":
        return 2 * tiling.block_k  # as many bytes
    return tiling.block_k if kind == "wide" else BLOCK


def num_warps(kind: str, rows: int, tiling: Tiling) -> int:
    """Warps of a program: 8 for large tiles of codes, which need registers besides the sums."""
    large = kind != "wide" and rows * tiling.outputs > 128 * 64
    return max(8, tiling.warps) if large else tiling.warps
