"""The base of all packed formats: each part becomes a packed form; mergeable forms share a GEMM."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from windlass.errors import CheckpointError
from windlass.kernels.gemm import Norm
from windlass.kernels.gemm_io import Inputs, Outputs
from windlass.kernels.linears import Linears
from windlass.kernels.packed import Packed
from windlass.quant.base import Axis, Layer, ParamSpec, Part
from windlass.quant.join import join
from windlass.quant.rounding import Scheme

Shape = tuple[int, int]  # outputs, inputs


class PackedMethod(ABC):
    """Converts one part at a time. Subclasses define the stored tensors and the packed form."""

    cuts_inputs = True

    def __init__(self, name: str, linears: Linears) -> None:
        self._name = name
        self._linears = linears

    @property
    def name(self) -> str:
        return self._name

    @abstractmethod
    def params(self, part: str, num_out: int, num_in: int) -> dict[str, ParamSpec]:
        """See LinearMethod. Raises for a shape that the format cannot store."""

    @abstractmethod
    def form(self, part: Part, shape: Shape) -> Packed | Tensor:
        """Convert a rank's stored tensors of a part, of `shape` outputs and inputs, to the packed form."""

    def gives_rows(self, num_out: int, num_in: int) -> bool:
        """Whether single rows of the packed weight can be read, as for embeddings."""
        del num_out, num_in
        return False

    def forms(self, layer: Layer) -> list[Packed | Tensor]:
        """Pack the parts one by one and free their stored tensors, to limit peak memory."""
        forms: list[Packed | Tensor] = []
        for part, num_out in layer.parts.items():
            forms.append(self.form(layer.stored.pop(part), (num_out, layer.num_in)))
        return join(forms)

    def finish(self, layer: Layer) -> None:
        prepare = partial(self._linears.prepare, multiplied=layer.multiplied)
        layer.gemms = [prepare(form) for form in self.forms(layer)]

    def takes_unnormalised(self, layer: Layer, num_rows: int) -> bool:
        """False: measured for fp8 weights, a norm in the next GEMM makes steps slower."""
        del layer, num_rows
        return False

    def apply(self, layer: Layer, x: Inputs) -> Tensor:
        outputs = [gemm.prepared.apply(x) for gemm in layer.gemms]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

    def then(self, layer: Layer, x: Inputs, residual: Tensor, norm: Norm) -> tuple[Inputs, Tensor]:
        if len(layer.gemms) == 1:
            return layer.gemms[0].prepared.then(x, residual, norm)
        return norm.add(self.apply(layer, x), residual)

    def gated(self, layer: Layer, x: Inputs, silu_mul: Callable[[Outputs], Inputs]) -> Inputs:
        if len(layer.gemms) == 1:
            return layer.gemms[0].prepared.gated(x, silu_mul)
        return silu_mul(self.apply(layer, x))


class FileMethod(PackedMethod):
    """A quantisation format of checkpoints."""

    @property
    @abstractmethod
    def scheme(self) -> Scheme:
        """The scheme that quantises random weights to the same form."""


class Dense(PackedMethod):
    """An unquantised part of a layer whose other parts are quantised."""

    def params(self, part: str, num_out: int, num_in: int) -> dict[str, ParamSpec]:
        del part
        dtype = self._linears.dtype
        return {"weight": ParamSpec((num_out, num_in), dtype, out=Axis(0), into=Axis(1))}

    def form(self, part: Part, shape: Shape) -> Packed | Tensor:
        del shape
        return part["weight"]


class Mixed(PackedMethod):
    """A merged layer whose parts have different formats."""

    def __init__(self, methods: Mapping[str, PackedMethod], linears: Linears) -> None:
        names = dict.fromkeys(method.name for method in methods.values())
        super().__init__(" + ".join(names), linears)
        self._methods = dict(methods)
        for name, method in methods.items():
            for end in _ends(name):
                self._methods.setdefault(end, method)
        self.cuts_inputs = all(method.cuts_inputs for method in methods.values())

    def params(self, part: str, num_out: int, num_in: int) -> dict[str, ParamSpec]:
        return self._of(part).params(part, num_out, num_in)

    def form(self, part: Part, shape: Shape) -> Packed | Tensor:
        return self._of(part.name).form(part, shape)

    def _of(self, module: str) -> PackedMethod:
        """The method of a part, whose name may have a prefix more or less than that of the layer."""
        return next(self._methods[end] for end in _ends(module) if end in self._methods)


def _ends(name: str) -> Iterator[str]:
    """experts.3.up_proj -> itself, 3.up_proj, up_proj"""
    while name:
        yield name
        name = name.partition(".")[2]


@dataclass(frozen=True, slots=True)
class Groups:
    """The group size: inputs that share a scale; None: the whole row."""

    size: int | None

    def of(self, part: str, num_in: int) -> int:
        """The group size for `num_in` inputs. Raises if it does not divide them."""
        size = self.size or num_in
        if num_in % size:
            raise CheckpointError(
                f"{part}: a group size of {size} does not divide the {num_in} inputs. "
                "The weights and the quantization_config do not match."
            )
        return size

    def axis(self, dim: int, part: str, num_in: int) -> Axis | None:
        """The input axis of a tensor with one entry per group; None: scales of whole rows are not cut."""
        return None if self.size is None else Axis(dim, self.of(part, num_in))
