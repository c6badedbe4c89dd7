"""Chooses a kernel for each operation once, when the engine is built, and keeps the reasons.

Candidates stand in order of preference; each says why it refuses. The plain version is last and
never refuses. A new kernel is one file and one line here. Triton is imported only for CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from windlass.kernels.batch import Heads


@dataclass(frozen=True, slots=True)
class Need:
    """What a network asks of its kernels."""

    device: torch.device
    dtype: torch.dtype
    heads: Heads
    rotated: int  # features of a head that turn with the position
    soft_cap: float | None = None
    plain: bool = False  # only the plain versions, to compare with


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kernel, where it lives, and its reason to refuse: None when it accepts."""

    name: str
    where: str  # "module:function"
    refuse: Callable[[Need], str | None]


@dataclass(frozen=True, slots=True)
class Selection:
    """The kernel that was chosen, and why those before it were not."""

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
        return "the plain versions were asked for"
    if need.device.type != "cuda":
        return f"Triton needs CUDA, this is {need.device.type}"
    if find_spec("triton") is None:
        return "triton is not installed"
    if need.dtype not in (torch.bfloat16, torch.float16):
        return f"written for 16-bit arithmetic, this is {str(need.dtype).removeprefix('torch.')}"
    return None


def _triton_rope(need: Need) -> str | None:
    if need.rotated != need.heads.dim:
        return f"only {need.rotated} of {need.heads.dim} features turn"
    return _triton(need)


def _fused_torch(need: Need) -> str | None:
    if need.plain:
        return "the plain versions were asked for"
    return "no soft cap in torch's fused product" if need.soft_cap is not None else None


_TRITON = "windlass.kernels.triton"
_PLAIN = "windlass.kernels.reference"

_CANDIDATES: dict[str, list[Candidate]] = {
    "rms_norm": [Candidate("triton", f"{_TRITON}.norm:rms_norm", _triton)],
    "add_rms_norm": [Candidate("triton", f"{_TRITON}.norm:add_rms_norm", _triton)],
    "silu_mul": [Candidate("triton", f"{_TRITON}.norm:silu_mul", _triton)],
    "rope_write": [Candidate("triton", f"{_TRITON}.rope:rope_write", _triton_rope)],
    "attention": [
        Candidate("triton", f"{_TRITON}.attention:attention", _triton),
        Candidate("torch", "windlass.kernels.torch_attention:attention", _fused_torch),
    ],
}


def select(operation: str, need: Need) -> Selection:
    """The first candidate that accepts; the plain version is always there."""
    refusals: dict[str, str] = {}
    plain = Candidate("plain", f"{_PLAIN}:{operation}", _never)
    for candidate in [*_CANDIDATES[operation], plain]:
        why = candidate.refuse(need)
        if why is None:
            module, name = candidate.where.split(":")
            function = getattr(import_module(module), name)
            return Selection(operation, candidate.name, function, refusals)
        refusals[candidate.name] = why
    raise AssertionError(f"the plain version of {operation} refused")
