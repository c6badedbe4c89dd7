"""Chooses a kernel for each operation when the engine is built, and keeps the reasons.

Candidates are in order of preference; each returns why it refuses. The reference implementation is
last and never refuses. A new kernel is one file and one line here. Triton is imported only for CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from windlass.core.mla import LatentHeads
from windlass.core.recurrent import Recurrence, RecurrentHeads
from windlass.kernels.batch import Heads
from windlass.kernels.gpu import gpu_of
from windlass.kernels.native.ops import NativeOps
from windlass.kernels.native.pool import Workers

_MAX_NATIVE_DIM = 512
_MAX_NATIVE_GROUP = 64
_MAX_NATIVE_LATENT = 640
_MAX_NATIVE_CONV = 8
_MAX_NATIVE_KEY = 256
_MIN_TRITON_STATE = 16
_MAX_TRITON_LATENT_HEADS = 128  # a tile of a chunk has at least one token
_MAX_TRITON_DIM = 512
_MAX_TRITON_GROUP = 16  # rows of the decode kernel's query tile


@dataclass(frozen=True, slots=True)
class Need:
    """A network's requirements for its kernels."""

    device: torch.device
    dtype: torch.dtype
    heads: Heads
    soft_cap: float | None = None
    sinks: bool = False
    latent: LatentHeads | None = None  # set: attention is MLA, and `heads` have the latents' size
    recurrent: RecurrentHeads | None = (
        None  # set: some layers are recurrent, of the kind `recurrence`
    )
    recurrence: Recurrence = "mamba"
    kv_dtype: torch.dtype | None = None  # of the KV cache; None: same as dtype
    plain: bool = False  # use only reference implementations
    workers: Workers = field(default_factory=Workers)  # of native kernels


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kernel. `refuse` returns why it cannot be used, or None."""

    name: str
    where: str  # "module:function", or the method of NativeOps
    refuse: Callable[[Need], str | None]

    def function(self, need: Need) -> Callable[..., Any]:
        """The kernel; a native one is bound to the pool of `need`."""
        module, _, name = self.where.rpartition(":")
        owner = import_module(module) if module else NativeOps(need.workers.pool)
        return getattr(owner, name)


@dataclass(frozen=True, slots=True)
class Selection:
    """The chosen kernel, and why the candidates before it were refused."""

    operation: str
    name: str
    function: Callable[..., Any]
    refusals: dict[str, str] = field(default_factory=dict)

    @property
    def reason(self) -> str:
        if not self.refusals:
            return "first choice"
        return "; ".join(f"{name}: {why}" for name, why in self.refusals.items())


def _never(need: Need) -> str | None:  # noqa: ARG001
    return None


def _triton(need: Need) -> str | None:
    if need.plain:
        return "plain kernels were requested"
    if need.device.type != "cuda":
        return f"Triton needs CUDA, this is {need.device.type}"
    if find_spec("triton") is None:
        return "triton is not installed"
    if need.dtype not in (torch.bfloat16, torch.float16):
        return f"written for 16-bit arithmetic, this is {str(need.dtype).removeprefix('torch.')}"
    return gpu_of(need.device).lacks_triton()


def _triton_pages(need: Need) -> str | None:
    if need.heads.dim > _MAX_TRITON_DIM:
        return f"head_dim is {need.heads.dim}, more than {_MAX_TRITON_DIM}"
    return _triton(need)


def _triton_attention(need: Need) -> str | None:
    if need.heads.group > _MAX_TRITON_GROUP:
        return f"{need.heads.group} query heads share a kv head, more than {_MAX_TRITON_GROUP}"
    return _triton_pages(need)


def _triton_latent(need: Need) -> str | None:
    if need.heads.num_q > _MAX_TRITON_LATENT_HEADS:
        return f"{need.heads.num_q} heads share a latent, more than {_MAX_TRITON_LATENT_HEADS}"
    return _triton(need)


def _native(need: Need) -> str | None:
    if need.plain:
        return "plain kernels were requested"
    if need.device.type != "cpu":
        return f"made for CPUs, this is {need.device.type}"
    if need.dtype != torch.float32:
        return f"written for float32 arithmetic, this is {str(need.dtype).removeprefix('torch.')}"
    return need.workers.refuse()


def _native_latent(need: Need) -> str | None:
    heads = need.latent
    assert heads is not None
    if heads.rank % 8 or heads.nope_dim % 8 or heads.rope_dim % 8 or heads.value_dim % 4:
        return f"the sizes of {heads} are not multiples of 8"
    if heads.dim > _MAX_NATIVE_LATENT:
        return f"latents have {heads.dim} numbers, more than {_MAX_NATIVE_LATENT}"
    if heads.num_q > _MAX_NATIVE_GROUP:
        return f"{heads.num_q} heads share a latent, more than {_MAX_NATIVE_GROUP}"
    return _no_fp8(need) or _native(need)


def _triton_recurrent(need: Need) -> str | None:
    heads = need.recurrent
    assert heads is not None
    if need.recurrence == "mamba" and heads.dim % _MIN_TRITON_STATE:
        return f"heads have {heads.dim} features, not a multiple of {_MIN_TRITON_STATE}"
    sizes = (heads.state_size,) if need.recurrence == "mamba" else (heads.dim, heads.state_size)
    for size in sizes:
        if size < _MIN_TRITON_STATE or size & (size - 1):
            return f"the sizes of {heads} are not powers of two from {_MIN_TRITON_STATE} on"
    return _triton(need)


def _native_recurrent(need: Need) -> str | None:
    heads = need.recurrent
    assert heads is not None
    if heads.dim % 8 or heads.state_size % 8:
        return f"the sizes of {heads} are not multiples of 8"
    return _native_conv(need)


def _native_conv(need: Need) -> str | None:
    heads = need.recurrent
    assert heads is not None
    if heads.channels % 8:
        return f"the convolution has {heads.channels} channels, not a multiple of 8"
    if heads.conv_size > _MAX_NATIVE_CONV:
        return f"the convolution covers {heads.conv_size} tokens, more than {_MAX_NATIVE_CONV}"
    return _native(need)


def _native_delta(need: Need) -> str | None:
    heads = need.recurrent
    assert heads is not None
    if heads.state_size > _MAX_NATIVE_KEY:
        return f"keys have {heads.state_size} numbers, more than {_MAX_NATIVE_KEY}"
    return _native_recurrent(need)


def _no_fp8(need: Need) -> str | None:
    if need.kv_dtype == torch.float8_e4m3fn:
        return "no fp8 KV cache on a CPU; use --kv-cache-dtype int8"
    return None


def _native_pages(need: Need) -> str | None:
    dim = need.heads.dim
    if dim % 8 or dim > _MAX_NATIVE_DIM:
        return f"head_dim is {dim}, not a multiple of 8 up to {_MAX_NATIVE_DIM}"
    return _no_fp8(need) or _native(need)


def _native_attention(need: Need) -> str | None:
    if need.heads.group > _MAX_NATIVE_GROUP:
        return f"{need.heads.group} query heads share a kv head, more than {_MAX_NATIVE_GROUP}"
    return _native_pages(need)


def _fused_torch(need: Need) -> str | None:
    if need.plain:
        return "plain kernels were requested"
    if need.soft_cap is not None:
        return "torch's fused attention has no soft cap"
    return "torch's fused attention has no sinks" if need.sinks else None


_TRITON = "windlass.kernels.triton"
_LATENT = "windlass.kernels.latent"
_RECURRENT = "windlass.kernels.recurrent"
_MAMBA = "windlass.kernels.mamba"
_DELTA = "windlass.kernels.delta"
_REFERENCE = "windlass.kernels.reference"

_CANDIDATES: dict[str, list[Candidate]] = {
    "embedding": [Candidate("native", "embedding", _native)],
    "gather": [Candidate("native", "gather", _native)],
    "rms_norm": [
        Candidate("triton", f"{_TRITON}.norm:rms_norm", _triton),
        Candidate("native", "rms_norm", _native),
    ],
    "add_rms_norm": [
        Candidate("triton", f"{_TRITON}.norm:add_rms_norm", _triton),
        Candidate("native", "add_rms_norm", _native),
    ],
    "qk_norm": [
        Candidate("triton", f"{_TRITON}.norm:qk_norm", _triton),
        Candidate("native", "qk_norm", _native),
    ],
    "silu_mul": [
        Candidate("triton", f"{_TRITON}.norm:silu_mul", _triton),
        Candidate("native", "silu_mul", _native),
    ],
    "layer_norm": [Candidate("native", "layer_norm", _native)],
    "add_layer_norm": [Candidate("native", "add_layer_norm", _native)],
    "gelu_mul": [Candidate("native", "gelu_mul", _native)],
    "activate": [Candidate("native", "activate", _native)],
    "sigmoid_gate": [Candidate("native", "sigmoid_gate", _native)],
    "scale_by_top_score": [Candidate("native", "scale_by_top_score", _native)],
    "rotate_queries": [Candidate("native", "rotate_queries", _native_pages)],
    "value_norm": [Candidate("native", "value_norm", _native)],
    "group_norm": [Candidate("native", "group_norm", _native)],
    "mul_columns": [Candidate("native", "mul_columns", _native)],
    "split_gates": [Candidate("native", "split_gates", _native)],
    "sparse_mixer": [Candidate("native", "sparse_mixer", _native)],
    "soft_cap": [Candidate("native", "soft_cap", _native)],
    "rope_write": [
        Candidate("triton", f"{_TRITON}.rope:rope_write", _triton_pages),
        Candidate("native", "rope_write", _native_pages),
    ],
    "attention": [
        Candidate("triton", f"{_TRITON}.attention:attention", _triton_attention),
        Candidate("native", "attention", _native_attention),
        Candidate("torch", "windlass.kernels.torch_attention:attention", _fused_torch),
    ],
    "causal_conv": [
        Candidate("triton", f"{_TRITON}.recurrent:causal_conv", _triton_recurrent),
        Candidate("native", "causal_conv", _native_recurrent),
        Candidate("plain", f"{_RECURRENT}:causal_conv", _never),
    ],
    "short_conv": [
        Candidate("triton", f"{_TRITON}.recurrent:short_conv", _triton),
        Candidate("native", "short_conv", _native_conv),
        Candidate("plain", f"{_RECURRENT}:short_conv", _never),
    ],
    "selective_scan": [
        Candidate("triton", f"{_TRITON}.mamba:selective_scan", _triton_recurrent),
        Candidate("native", "selective_scan", _native_recurrent),
        Candidate("plain", f"{_MAMBA}:selective_scan", _never),
    ],
    "delta_rule": [
        Candidate("triton", f"{_TRITON}.delta:delta_rule", _triton_recurrent),
        Candidate("native", "delta_rule", _native_delta),
        Candidate("plain", f"{_DELTA}:delta_rule", _never),
    ],
    "latent_queries": [
        Candidate("triton", f"{_TRITON}.latent:latent_queries", _triton_latent),
        Candidate("native", "latent_queries", _native_latent),
        Candidate("plain", f"{_LATENT}:latent_queries", _never),
    ],
    "latent_attention": [
        Candidate("triton", f"{_TRITON}.latent:latent_attention", _triton_latent),
        Candidate("native", "latent_attention", _native_latent),
        Candidate("torch", f"{_LATENT}:torch_latent_attention", _fused_torch),
        Candidate("plain", f"{_LATENT}:latent_attention", _never),
    ],
    "latent_outputs": [
        Candidate("triton", f"{_TRITON}.latent:latent_outputs", _triton_latent),
        Candidate("native", "latent_outputs", _native_latent),
        Candidate("plain", f"{_LATENT}:latent_outputs", _never),
    ],
}


def select(operation: str, need: Need) -> Selection:
    """Select the first candidate that accepts; the reference implementation always does."""
    refusals: dict[str, str] = {}
    reference = Candidate("plain", f"{_REFERENCE}:{operation}", _never)
    for candidate in [*_CANDIDATES[operation], reference]:
        why = candidate.refuse(need)
        if why is None:
            return Selection(
                operation=operation,
                name=candidate.name,
                function=candidate.function(need),
                refusals=refusals,
            )
        refusals[candidate.name] = why
    raise AssertionError(f"the reference implementation of {operation} refused")
