"""fp8 checkpoints: e4m3 weights with one scale per tensor, or per block as in DeepSeek models."""

from __future__ import annotations

import torch
from torch import Tensor

from windlass.errors import UnsupportedError
from windlass.kernels.linears import Linears
from windlass.kernels.packed import Activation, Float8, Packed
from windlass.quant.base import Axis, ParamSpec, Part
from windlass.quant.packed_method import FileMethod, Shape
from windlass.quant.rounding import Scheme
from windlass.quant.settings import Settings

_BLOCK = (128, 128)


class Fp8(FileMethod):
    """weight [N, K] with weight_scale (and input_scale), or with weight_scale_inv per block."""

    def __init__(self, activation: Activation, block: tuple[int, int] | None, linears: Linears):
        super().__init__("fp8 blocks" if block else "fp8", linears)
        self._activation = activation
        self._block = block

    @classmethod
    def read(cls, settings: Settings, linears: Linears) -> Fp8:
        settings.one_of("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
        scheme = settings.one_of("activation_scheme", ("dynamic", "static"), "dynamic")
        stored = settings.raw("weight_block_size")
        if stored is None:
            return cls("tensor" if scheme == "static" else "token", None, linears)
        if stored != list(_BLOCK) and stored != _BLOCK:
            raise UnsupportedError(
                f"{settings.where}: weight_block_size is {stored!r}; only {list(_BLOCK)} is supported."
            )
        if scheme == "static":
            raise UnsupportedError(
                f"{settings.where}: activation_scheme 'static' contradicts weight_block_size: "
                "with blocks, activations have one dynamic scale per token and 128 inputs."
            )
        return cls("block", _BLOCK, linears)

    @property
    def block(self) -> tuple[int, int] | None:
        return self._block

    @property
    def scheme(self) -> Scheme:
        # Random weights have no activation scale; dynamic scales per token cost the same.
        activation: Activation = "block" if self._block else "token"
        return Scheme(self.name, "fp8", per_row=True, activation=activation, block=self._block)

    def params(self, part: str, num_out: int, num_in: int) -> dict[str, ParamSpec]:
        del part
        shape = (num_out, num_in)
        weight = ParamSpec(shape=shape, dtype=torch.float8_e4m3fn, out=Axis(0), into=Axis(1))
        if self._block is not None:
            return {"weight": weight, "weight_scale_inv": block_scales(shape, self._block)}
        params = {"weight": weight, "weight_scale": ParamSpec((1,), torch.float32)}
        static = self._activation == "tensor"
        params["input_scale"] = ParamSpec((1,), torch.float32, optional=not static)
        return params

    def form(self, part: Part, shape: Shape) -> Packed | Tensor:
        del shape
        if self._block is not None:
            scales = part.scales("weight_scale_inv")
            return Float8(part["weight"], scales, self._activation, block=self._block)
        input_scale = part.scales("input_scale") if self._activation == "tensor" else None
        scales = part.scales("weight_scale").view(1, 1)
        return Float8(
            codes=part["weight"],
            scales=scales,
            activation=self._activation,
            input_scale=input_scale,
        )


def block_scales(shape: Shape, block: tuple[int, int]) -> ParamSpec:
    """One scale per block. The last block of an axis may be partial."""
    counts = tuple(-(-size // step) for size, step in zip(shape, block, strict=True))
    return ParamSpec(
        shape=counts, dtype=torch.float32, out=Axis(0, block[0]), into=Axis(1, block[1])
    )
