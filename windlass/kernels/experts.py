"""Mixture-of-experts MLPs: their sizes and routing, the kernel interface, and the choice of a kernel.

Weights are stacked along the outputs: gate and up rows of the expert at index i are rows [2 i I, 2 (i + 1) I)
of `gate_up`, which has up rows alone, [i I, (i + 1) I), if there is no gate; its down rows are rows [i H, (i + 1) H) of `down`. So each packed form serves experts, too.
A new kernel is one file and one line in `_CANDIDATES`; reference_experts.py is the definition.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from windlass.core.moe import ExpertActivation, Routing
from windlass.kernels.linears import describe
from windlass.kernels.native.pool import Workers
from windlass.kernels.packed import Packed
from windlass.kernels.storages import Held, held

__all__ = [
    "ExpertActivation",
    "ExpertKernel",
    "ExpertKernels",
    "ExpertMLP",
    "ExpertWeights",
    "PreparedExperts",
    "Routing",
]

_CANDIDATES: dict[str, tuple[str, ...]] = {
    "cpu": ("windlass.kernels.native.experts:NativeExperts",),
    "cuda": ("windlass.kernels.triton.experts:TritonExperts",),
}
_REFERENCE = "windlass.kernels.reference_experts:ReferenceExperts"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """The experts of one layer that this rank holds, as the checkpoint's format packs them.

    With expert parallelism these are L of E experts; their sum is this rank's part of the result.
    """

    gate_up: Packed | Tensor  # [L * 2 I, H], or [L * I, H]
    down: Packed | Tensor  # [L * H, I]
    routing: Routing
    experts: tuple[int, ...] | None = None  # of this rank, in the order of the stack; None: all
    load: Tensor | None = None  # int64 [E]: counts the tokens of each expert
    activation: ExpertActivation = field(default_factory=ExpertActivation)
    correction_bias: Tensor | None = None  # float32 [E], added to scores for the choice only
    expert_scales: Tensor | None = None  # float32 [E], of the weights of each expert's results
    gate_up_bias: Tensor | None = None  # [L, 2 I], or [L, I]
    down_bias: Tensor | None = None  # [L, H]

    @property
    def num_local(self) -> int:
        """The number of experts in the stack."""
        return self.routing.num_experts if self.experts is None else len(self.experts)

    @property
    def hidden_size(self) -> int:
        return self.down.shape[0] // self.num_local

    @property
    def intermediate_size(self) -> int:
        return self.down.shape[1]

    @property
    def num_gate_up(self) -> int:
        """Rows of one expert in `gate_up`."""
        return (2 if self.activation.has_gate else 1) * self.intermediate_size

    def expert_map(self) -> Tensor | None:
        """Each expert's index in the stack, int32 [E], or -1 on another rank; None: all are here."""
        if self.experts is None:
            return None
        codes = self.down if isinstance(self.down, Tensor) else self.down.codes
        indices = [-1] * self.routing.num_experts
        for index, expert in enumerate(self.experts):
            indices[expert] = index
        return torch.tensor(indices, dtype=torch.int32, device=codes.device)


class ExpertMLP(ABC):
    """The experts of one layer, prepared for one kernel."""

    @abstractmethod
    def tensors(self) -> Sequence[Tensor | None]:
        """The tensors of the weights."""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors() if tensor is not None)

    def storages(self) -> Iterator[Held]:
        return held("weights", *self.tensors())

    @staticmethod
    def counted(load: Tensor | None) -> Tensor | None:
        """`load`, or None in captured graphs: their padding rows are no load."""
        captured = load is not None and load.is_cuda and torch.cuda.is_current_stream_capturing()
        return None if captured else load

    @property
    def coarse_prompts(self) -> bool:
        """Whether activations of prompt tokens are quantised more coarsely than others."""
        return False

    def using(self, workers: Workers) -> ExpertMLP:
        """The same weights for another engine, computed by its workers."""
        del workers
        return self

    @abstractmethod
    def apply(self, x: Tensor, logits: Tensor, chosen: Tensor | None = None) -> Tensor:
        """The weighted sum of the chosen experts' outputs [T, H], for x [T, H] and router logits [T, E].

        Experts on other ranks add nothing. `chosen`, int32 [T, k], gets the experts of each token.
        """


class ExpertKernel(Protocol):
    """A kernel for mixture-of-experts MLPs."""

    @property
    def name(self) -> str: ...

    @property
    def batch_invariant(self) -> bool:
        """Whether a row's result is bitwise independent of the other rows."""
        ...

    def refuse(
        self, weights: ExpertWeights, device: torch.device, dtype: torch.dtype
    ) -> str | None:
        """Why the kernel does not support these weights, or None. Tensors may be on the meta device."""
        ...

    def prepare(self, weights: ExpertWeights, dtype: torch.dtype) -> ExpertMLP:
        """Repack the weights. They are not needed afterwards."""
        ...


@dataclass(frozen=True, slots=True)
class PreparedExperts:
    """Experts prepared for their kernel, with the reason for the choice."""

    mlp: ExpertMLP
    form: str  # "int4, groups of 128"
    kernel: str
    reason: str
    batch_invariant: bool = True
    load: Tensor | None = None  # int64 [E]: tokens per expert since the start


class ExpertKernels:
    """Prepares the experts of one engine for its device and dtype."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        plain: bool = False,
        workers: Workers | None = None,
        count_load: bool = False,
    ) -> None:
        """`workers`: the engine's; without them native kernels have a pool of their own.

        `count_load`: count the tokens of each expert.
        """
        self._device = device
        self._dtype = dtype
        self._workers = workers or Workers()
        self._plain = plain
        self._count_load = count_load

    def prepare(self, weights: ExpertWeights) -> PreparedExperts:
        """Choose the first kernel that supports the weights, else the reference, and prepare them."""
        refusals: dict[str, str] = {}
        if self._plain:
            refusals["all others"] = "plain kernels were requested"
        codes = weights.down if isinstance(weights.down, Tensor) else weights.down.codes
        if self._count_load:
            count = weights.routing.num_experts
            load = torch.zeros(count, dtype=torch.int64, device=codes.device)
            weights = replace(weights, load=load)
        for where in [*self._candidates, _REFERENCE]:
            kernel = _kernel(where, self._workers)
            why = kernel.refuse(weights, self._device, self._dtype)
            if why is None:
                reason = "; ".join(f"{name}: {text}" for name, text in refusals.items())
                prepared_by = _kernel(_REFERENCE, self._workers) if codes.is_meta else kernel
                return PreparedExperts(
                    mlp=prepared_by.prepare(weights, self._dtype),
                    form=_describe(weights),
                    kernel=kernel.name,
                    reason=reason or "first choice",
                    batch_invariant=kernel.batch_invariant,
                    load=weights.load,
                )
            refusals[kernel.name] = why
        raise AssertionError("the reference implementation of experts refused")

    def share(self, prepared: PreparedExperts) -> PreparedExperts:
        """The experts of another engine with the same weights, computed by this engine's workers."""
        return replace(prepared, mlp=prepared.mlp.using(self._workers))

    @property
    def _candidates(self) -> tuple[str, ...]:
        if self._plain or (self._device.type == "cuda" and find_spec("triton") is None):
            return ()
        return _CANDIDATES.get(self._device.type, ())


def _describe(weights: ExpertWeights) -> str:
    """The forms of gate_up and down, once if they are the same."""
    forms = [
        str(form.dtype).removeprefix("torch.") if isinstance(form, Tensor) else describe(form)
        for form in (weights.gate_up, weights.down)
    ]
    return " and ".join(dict.fromkeys(forms))


def _kernel(where: str, workers: Workers) -> ExpertKernel:
    module, name = where.split(":")
    return getattr(import_module(module), name)(workers)
