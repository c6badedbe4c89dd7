"""Mixture-of-experts MLPs on a CPU: one native command from router logits to the weighted sum.

Both weights have the layout of native/linear.py, so experts support the same forms with the same
quantisation of activations. A row's result is bit-identical in any batch and with any prefill chunking.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor

from windlass.kernels.experts import ExpertMLP, ExpertWeights, Routing
from windlass.kernels.native.commands import Call, LinearFlag, Op
from windlass.kernels.native.linear import NativeGemm, NativeLinear
from windlass.kernels.native.pool import Pool, Workers

_LARGEST_TILE = 16  # outputs, with AVX-512
_MAX_EXPERTS = 1024  # kMaxExperts of src/routing.h
_GATES = {"silu": 0, "gelu_tanh": 1, "clamped": 2, "relu2": 3}  # Gate of src/activations.h


class _Experts(ctypes.Structure):
    """Mirrors WindlassExperts of src/experts.h."""

    _fields_ = (
        ("gate_up", ctypes.c_void_p),
        ("down", ctypes.c_void_p),
        ("gate_up_bias", ctypes.c_void_p),
        ("down_bias", ctypes.c_void_p),
        ("correction_bias", ctypes.c_void_p),
        ("expert_scales", ctypes.c_void_p),
        ("gate_up_input_scale", ctypes.c_void_p),
        ("down_input_scale", ctypes.c_void_p),
        ("expert_map", ctypes.c_void_p),
        ("load", ctypes.c_void_p),
        ("gate_up_quantised", ctypes.c_int32),
        ("down_quantised", ctypes.c_int32),
        ("num_experts", ctypes.c_int32),
        ("num_local", ctypes.c_int32),
        ("top_k", ctypes.c_int32),
        ("sigmoid", ctypes.c_int32),
        ("normalised", ctypes.c_int32),
        ("num_groups", ctypes.c_int32),
        ("top_groups", ctypes.c_int32),
        ("top2", ctypes.c_int32),
        ("activation", ctypes.c_int32),
        ("interleaved", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("alpha", ctypes.c_float),
        ("limit", ctypes.c_float),
    )


class NativeExperts:
    """The ExpertKernel of CPUs."""

    name = "native"
    batch_invariant = True

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._linear = NativeLinear(workers)

    def refuse(
        self, weights: ExpertWeights, device: torch.device, dtype: torch.dtype
    ) -> str | None:
        for form in (weights.gate_up, weights.down):
            why = None if isinstance(form, Tensor) else self._linear.refuse(form, device, dtype)
            if why is not None:
                return why
        for size in (weights.num_gate_up, weights.hidden_size):
            if size % _LARGEST_TILE:
                return f"{size} outputs of an expert, not a multiple of {_LARGEST_TILE}"
        return _refuse_routing(weights.routing) or self._workers.refuse()

    def prepare(self, weights: ExpertWeights, dtype: torch.dtype) -> ExpertMLP:
        del dtype  # computes in float32
        count = weights.num_local
        return NativeMLP(
            self._workers.pool,
            weights,
            gate_up=self._linear.prepare(weights.gate_up, num_stacked=count),
            down=self._linear.prepare(weights.down, num_stacked=count),
        )


class NativeMLP(ExpertMLP):
    """Experts in the library's packed layout."""

    def __init__(
        self, pool: Pool, weights: ExpertWeights, *, gate_up: NativeGemm, down: NativeGemm
    ) -> None:
        self._pool = pool
        self._gate_up, self._down = gate_up, down
        self._gate_up_bias = _float(weights.gate_up_bias)
        self._down_bias = _float(weights.down_bias)
        self._correction_bias = _float(weights.correction_bias)
        self._expert_scales = _float(weights.expert_scales)
        self._expert_map, self._load = weights.expert_map(), weights.load
        routing, activation = weights.routing, weights.activation
        self._experts = _Experts(
            gate_up=gate_up.address,
            down=down.address,
            gate_up_bias=_pointer(self._gate_up_bias),
            down_bias=_pointer(self._down_bias),
            correction_bias=_pointer(self._correction_bias),
            expert_scales=_pointer(self._expert_scales),
            gate_up_input_scale=_pointer(gate_up.input_scale),
            down_input_scale=_pointer(down.input_scale),
            expert_map=_pointer(self._expert_map),
            load=_pointer(self._load),
            gate_up_quantised=gate_up.activation != "none",
            down_quantised=down.activation != "none",
            num_experts=routing.num_experts,
            num_local=weights.num_local,
            top_k=routing.top_k,
            sigmoid=routing.score == "sigmoid",
            normalised=routing.normalised,
            num_groups=routing.num_groups,
            top_groups=routing.top_groups,
            top2=routing.group_score == "top2",
            activation=_GATES[activation.kind],
            interleaved=activation.interleaved,
            scale=routing.scale,
            alpha=activation.alpha,
            limit=activation.limit,
        )

    def tensors(self) -> Sequence[Tensor | None]:
        biases = (self._gate_up_bias, self._down_bias, self._correction_bias)
        weights = [*self._gate_up.tensors(), *self._down.tensors(), *biases]
        return [*weights, self._expert_scales, self._expert_map, self._load]

    @property
    def coarse_prompts(self) -> bool:
        return self._gate_up.coarse_prompts or self._down.coarse_prompts

    def using(self, workers: Workers) -> NativeMLP:
        twin = copy(self)
        twin._pool = workers.pool
        return twin

    def apply(self, x: Tensor, logits: Tensor, chosen: Tensor | None = None) -> Tensor:
        x32, logits32 = x.float().contiguous(), logits.float().contiguous()
        out = torch.empty_like(x32)
        call = Call(
            Op.EXPERTS,
            len(x),
            step_tensors=(x32, out, logits32) if chosen is None else (x32, out, logits32, chosen),
            model_tensors=(ctypes.addressof(self._experts),),
            sizes=(LinearFlag.STEP_ROWS if self._pool.has_step else 0,),
        )
        self._pool.run(call)
        return out.to(x.dtype)


def _refuse_routing(routing: Routing) -> str | None:
    count, groups = routing.num_experts, routing.num_groups
    if count > _MAX_EXPERTS:
        return f"{count} experts, more than {_MAX_EXPERTS}"
    if count % groups or (routing.group_score == "top2" and count < 2 * groups):
        return f"{count} experts in {groups} groups"
    if not 0 < routing.top_k <= count or not 0 < routing.top_groups <= groups:
        return f"top {routing.top_k} of {count} experts, {routing.top_groups} of {groups} groups"
    return None


def _float(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.float().contiguous()


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
