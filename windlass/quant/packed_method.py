"""What all quantised formats share: parts become forms, forms that go together become one product."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from windlass.errors import CheckpointError
from windlass.kernels.gemm import Norm
from windlass.kernels.linears import Linears
from windlass.kernels.packed import Packed
from windlass.kernels.rounded import Inputs, Outputs
from windlass.quant.base import Axis, Layer, ParamSpec, Part
from windlass.quant.join import join
from windlass.quant.rounding import Scheme

Shape = tuple[int, int]  # outputs, inputs


class PackedMethod(ABC):
    """Reads one part at a time; subclasses say what is stored and what form it becomes."""

    def __init__(self, name: str, linears: Linears) -> None:
        self._name = name
        self._linears = linears

    @property
    def name(self) -> str:
        return self._name

    @abstractmethod
    def params(self, part: str, num_out: int, num_in: int) -> dict[str, ParamSpec]:
        """As LinearMethod says; a size that the format cannot have is refused here."""

    @abstractmethod
    def form(self, part: Part, shape: Shape) -> Packed | Tensor:
        """One part's stored tensors in the form that they have in memory."""

    def gives_rows(self, num_out: int, num_in: int) -> bool:
        """Whether rows of the weight, once it is packed, can be read by themselves."""
        del num_out, num_in
        return False

    def finish(self, layer: Layer) -> None:
        """Each part's stored tensors are let go as soon as they are in their form."""
        forms: list[Packed | Tensor] = []
        for part, num_out in layer.parts.items():
            forms.append(self.form(layer.stored.pop(part), (num_out, layer.num_in)))
        layer.gemm = [self._linears.hold(form) for form in join(forms)]

    def apply(self, layer: Layer, x: Inputs) -> Tensor:
        outputs = [gemm.prepared.apply(x) for gemm in layer.gemm]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

    def then(self, layer: Layer, x: Inputs, residual: Tensor, norm: Norm) -> tuple[Inputs, Tensor]:
        if len(layer.gemm) == 1:
            return layer.gemm[0].prepared.then(x, residual, norm)
        return norm.add(self.apply(layer, x), residual)

    def gated(self, layer: Layer, x: Inputs, silu_mul: Callable[[Outputs], Inputs]) -> Inputs:
        if len(layer.gemm) == 1:
            return layer.gemm[0].prepared.gated(x, silu_mul)
        return silu_mul(self.apply(layer, x))


class FileMethod(PackedMethod):
    """A format that checkpoints come in."""

    @property
    @abstractmethod
    def scheme(self) -> Scheme:
        """The form in the abstract: what random weights are brought into."""


class Dense(PackedMethod):
    """A part that is not quantised, in a layer whose other parts are."""

    def params(self, part: str, num_out: int, num_in: int) -> dict[str, ParamSpec]:
        del part
        dtype = self._linears.dtype
        return {"weight": ParamSpec((num_out, num_in), dtype, out=Axis(0), into=Axis(1))}

    def form(self, part: Part, shape: Shape) -> Packed | Tensor:
        del shape
        return part["weight"]


class Mixed(PackedMethod):
    """A merged layer whose parts are stored in different ways."""

    def __init__(self, methods: Mapping[str, PackedMethod], linears: Linears) -> None:
        names = dict.fromkeys(method.name for method in methods.values())
        super().__init__(" + ".join(names), linears)
        self._methods = dict(methods)

    def params(self, part: str, num_out: int, num_in: int) -> dict[str, ParamSpec]:
        return self._methods[_last(part)].params(part, num_out, num_in)

    def form(self, part: Part, shape: Shape) -> Packed | Tensor:
        return self._methods[_last(part.name)].form(part, shape)


def _last(name: str) -> str:
    return name.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class Groups:
    """How many inputs share a scale; None: all of a row."""

    size: int | None

    def of(self, part: str, num_in: int) -> int:
        """The size in a weight of so many inputs; one that does not divide them is refused."""
        size = self.size or num_in
        if num_in % size:
            raise CheckpointError(
                f"{part}: a group size of {size} does not divide the {num_in} inputs. "
                "The weights and the quantization_config do not belong together."
            )
        return size
