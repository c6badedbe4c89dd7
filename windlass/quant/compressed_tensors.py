"""compressed-tensors checkpoints: packed or unpacked integers, fp8, and quantised activations.

A config has groups of modules, each with its own scheme, and a list of ignored modules.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from windlass.errors import CheckpointError, UnsupportedError
from windlass.kernels.linears import Linears
from windlass.kernels.packed import Activation, Float8, Int8Group, Packed
from windlass.quant.base import Axis, ParamSpec, Part
from windlass.quant.bits import affine, num_words, perm_of, unpack
from windlass.quant.fp8 import block_scales
from windlass.quant.packed_method import FileMethod, Groups, Shape
from windlass.quant.rounding import Kind, Scheme
from windlass.quant.settings import Settings

_PACKED, _FLOAT, _NAIVE = "pack-quantized", "float-quantized", "naive-quantized"
_FORMATS = (_PACKED, "int-quantized", _FLOAT, _NAIVE)
_BLOCK = (128, 128)


@dataclass(frozen=True, slots=True)
class WeightArgs:
    """The `weights` section of a config group."""

    bits: int
    is_float: bool
    symmetric: bool
    groups: Groups
    per_tensor: bool
    block: tuple[int, int] | None
    act_order: bool  # inputs were sorted by activation before grouping


def read(settings: Settings, linears: Linears) -> Callable[[str], FileMethod | None]:
    """A function from module name to method; None for an unquantised module."""
    settings.refuse("kv_cache_scheme", "transform_config", "moe_sparsity_config")
    sparsity = settings.section("sparsity_config")
    if sparsity is not None and sparsity.names():
        sparsity.one_of("format", ("dense",))
    groups = settings.section("config_groups")
    if groups is None or not groups.names():
        raise CheckpointError(
            f"{settings.where}: has no config_groups, which define the modules' formats."
        )
    default = settings.raw("format")
    rules: list[tuple[str, FileMethod]] = []
    for name in groups.names():
        group = groups.section(name)
        if group is None:
            raise groups.wrong(name, None, "an object")
        method = _method(group, default, linears)
        rules += [(target, method) for target in group.texts("targets")]
    return _Rules(rules, settings.texts("ignore")).method


class _Rules:
    """Targets in order of precedence: module name, pattern, class."""

    def __init__(self, rules: list[tuple[str, FileMethod]], ignored: tuple[str, ...]) -> None:
        self._rules = rules
        self._ignored = ignored

    def method(self, module: str) -> FileMethod | None:
        if any(_matches(name, module) for name in self._ignored):
            return None
        by_name = [method for target, method in self._rules if target == module]
        by_pattern = [method for target, method in self._rules if _matches(target, module)]
        by_class = [method for target, method in self._rules if target == "Linear"]
        return next(iter([*by_name, *by_pattern, *by_class]), None)


def _matches(name: str, module: str) -> bool:
    if name.startswith("re:"):
        return re.match(name.removeprefix("re:"), module) is not None
    return name == module


def _method(group: Settings, default: Any, linears: Linears) -> FileMethod:
    group.refuse("output_activations")
    stored = group.section("weights")
    if stored is None:
        raise UnsupportedError(
            f"{group.where}: has no weights section; only activations are quantised."
        )
    kind = group.raw("format") or default
    if kind not in _FORMATS:
        raise UnsupportedError(
            f"{group.where}: the format {kind!r} is not supported. Supported: {', '.join(_FORMATS)}."
        )
    weights = _weight_args(stored)
    if weights.is_float != (kind == _FLOAT) and kind != _NAIVE:
        raise CheckpointError(
            f"{group.where}: the format {kind!r} contradicts weights.type {stored.raw('type')!r}."
        )
    activation = _activation(group.section("input_activations"), weights)
    return CompressedTensors(
        packed=kind == _PACKED, weights=weights, activation=activation, linears=linears
    )


def _weight_args(stored: Settings) -> WeightArgs:
    is_float = stored.one_of("type", ("int", "float"), "int") == "float"
    bits = stored.one_of("num_bits", (8,) if is_float else (4, 8))
    allowed = ("tensor", "channel", "block") if is_float else ("tensor", "channel", "group")
    has_group = stored.raw("group_size") not in (None, -1)
    strategy = stored.one_of("strategy", allowed, "group" if has_group else "tensor")
    symmetric = stored.flag("symmetric", True)
    if is_float and not symmetric:
        raise UnsupportedError(
            f"{stored.where}: symmetric is false, but fp8 weights are always symmetric."
        )
    if stored.raw("dynamic"):
        raise CheckpointError(
            f"{stored.where}: dynamic is set, but weights cannot be quantised dynamically."
        )
    block = None
    if strategy == "block":
        if stored.raw("block_structure") not in (list(_BLOCK), _BLOCK, "128x128"):
            raise UnsupportedError(
                f"{stored.where}: block_structure is {stored.raw('block_structure')!r}; only "
                f"{list(_BLOCK)} is supported."
            )
        block = _BLOCK
    order = stored.raw("actorder")
    if order not in (None, False, True, "group", "dynamic", "weight", "static"):
        raise UnsupportedError(f"{stored.where}: actorder is {order!r}, which is not supported.")
    size = stored.group_size() if strategy == "group" else None
    return WeightArgs(
        bits=bits,
        is_float=is_float,
        symmetric=symmetric,
        groups=Groups(size),
        per_tensor=strategy == "tensor",
        block=block,
        act_order=order in (True, "group", "dynamic"),
    )


def _activation(stored: Settings | None, weights: WeightArgs) -> Activation:
    if stored is None:
        return "none"
    expected = "float" if weights.is_float else "int"
    stored.one_of("type", (expected,), "int")
    stored.one_of("num_bits", (8,))
    stored.one_of("symmetric", (True,), True)
    if not weights.is_float and (weights.bits != 8 or weights.groups.size is not None):
        raise UnsupportedError(
            f"{stored.where}: activations are quantised and weights have {weights.bits} bits "
            "in groups; quantised activations need int8 weights with a scale per row or tensor."
        )
    dynamic = stored.one_of("dynamic", (True, False), False)
    if not dynamic:
        stored.one_of("strategy", ("tensor",), "tensor")
        return "tensor"
    strategy = stored.one_of("strategy", ("token", "tensor", "group"), "tensor")
    if strategy != "group":
        return "token"  # also for a dynamic scale per tensor: a scale per token is at least as fine
    if weights.block is None or stored.group_size() != _BLOCK[1]:
        raise UnsupportedError(
            f"{stored.where}: activations in groups are supported for blocks of {_BLOCK} only."
        )
    return "block"


class CompressedTensors(FileMethod):
    """weight_packed with weight_shape, or weight; weight_scale; zero points if asymmetric."""

    def __init__(
        self, packed: bool, weights: WeightArgs, activation: Activation, linears: Linears
    ) -> None:
        kind = "fp8" if weights.is_float else f"int{weights.bits}"
        super().__init__(f"compressed-tensors {kind}", linears)
        self._packed = packed
        self._weights = weights
        self._activation = activation
        self.cuts_inputs = not weights.act_order

    @property
    def weights(self) -> WeightArgs:
        return self._weights

    @property
    def activation(self) -> Activation:
        return self._activation

    @property
    def scheme(self) -> Scheme:
        weights = self._weights
        # Random weights have no activation scale; dynamic scales per token cost the same.
        activation: Activation = "token" if self._activation == "tensor" else self._activation
        if weights.is_float:
            return Scheme(
                self.name, "fp8", per_row=True, activation=activation, block=weights.block
            )
        groups = (weights.groups.size,) if weights.groups.size else ()
        kind: Kind = "int4" if weights.bits == 4 else "int8"
        return Scheme(self.name, kind, groups, per_row=not groups, activation=activation)

    def params(self, part: str, num_out: int, num_in: int) -> dict[str, ParamSpec]:
        weights, shape = self._weights, (num_out, num_in)
        params = self._codes(num_out, num_in)
        if weights.per_tensor:
            params["weight_scale"] = ParamSpec((1,), torch.float32)
        elif weights.block is not None:
            params["weight_scale"] = block_scales(shape, weights.block)
        else:
            group = weights.groups.of(part, num_in)
            scales = (num_out, num_in // group)
            params["weight_scale"] = ParamSpec(
                shape=scales,
                dtype=torch.float32,
                out=Axis(0),
                into=weights.groups.axis(1, part, num_in),
            )
        if not weights.is_float:
            params["weight_zero_point"] = self._zero_points(params["weight_scale"], num_out)
        if weights.act_order:
            params["weight_g_idx"] = ParamSpec(
                shape=(num_in,), dtype=torch.int64, out=None, into=Axis(0)
            )
        if self._activation == "tensor":
            params["input_scale"] = ParamSpec((1,), torch.float32)
            params["input_zero_point"] = ParamSpec((1,), torch.int8, optional=True)
        return params

    def _codes(self, num_out: int, num_in: int) -> dict[str, ParamSpec]:
        weights = self._weights
        if not self._packed:
            dtype = torch.float8_e4m3fn if weights.is_float else torch.int8
            return {
                "weight": ParamSpec(shape=(num_out, num_in), dtype=dtype, out=Axis(0), into=Axis(1))
            }
        words = (num_out, num_words(num_in, weights.bits))
        into = Axis(1, 32 // weights.bits)
        return {
            "weight_packed": ParamSpec(shape=words, dtype=torch.int32, out=Axis(0), into=into),
            "weight_shape": ParamSpec((2,), torch.int64),
        }

    def _zero_points(self, scale: ParamSpec, num_out: int) -> ParamSpec:
        optional = self._weights.symmetric
        if not self._packed or self._weights.per_tensor:
            return ParamSpec(
                shape=scale.shape,
                dtype=torch.int8,
                out=scale.out,
                into=scale.into,
                optional=optional,
            )
        unit = 32 // self._weights.bits
        shape = (num_words(num_out, self._weights.bits), scale.shape[1])
        return ParamSpec(
            shape=shape, dtype=torch.int32, out=Axis(0, unit), into=scale.into, optional=optional
        )

    def form(self, part: Part, shape: Shape) -> Packed | Tensor:
        input_scale = part.scales("input_scale") if self._activation == "tensor" else None
        _check_zero(part, "input_zero_point")
        scales = part.scales("weight_scale")
        if self._weights.is_float:
            if self._weights.per_tensor:
                scales = scales.view(1, 1)
            return Float8(
                part["weight"],
                scales,
                activation=self._activation,
                input_scale=input_scale,
                block=self._weights.block,
            )
        if self._weights.per_tensor:
            scales = scales.view(1, 1).expand(shape[0], 1)
        if self._activation != "none":
            return self._int8_activations(part, scales, input_scale)
        return self._weight_only(part, scales, shape)

    def _int8_activations(self, part: Part, scales: Tensor, input_scale: Tensor | None) -> Packed:
        """int8 weights for int8 GEMMs. Scales stay float32, since there are few."""
        offsets = None
        if not self._weights.symmetric:
            offsets = -part["weight_zero_point"].float() * scales
        return Int8Group(
            part["weight"],
            scales,
            offsets,
            activation=self._activation,
            input_scale=input_scale,
        )

    def _weight_only(self, part: Part, scales: Tensor, shape: Shape) -> Packed:
        (num_out, num_in), bits = shape, self._weights.bits
        centre = 2 ** (bits - 1)
        zeros: Tensor | int = centre
        if not self._weights.symmetric:
            zeros = self._stored_zeros(part, num_out).float() + centre
        elif not self._packed:
            _check_zero(part, "weight_zero_point")
        if self._packed:
            _check_shape(part)
            codes = unpack(part["weight_packed"], bits, num_in)
        else:
            codes = (part["weight"].to(torch.int16) + centre).to(torch.uint8)
        perm = None
        if self._weights.act_order:
            perm = perm_of(part, "weight_g_idx", self._weights.groups, method=self.name)
            codes = codes if perm is None else codes[:, perm.long()]
        return affine(codes, scales, zeros, bits, perm)

    def _stored_zeros(self, part: Part, num_out: int) -> Tensor:
        """Signed zero points [N, groups]."""
        stored = part["weight_zero_point"]
        if stored.dtype == torch.int8:
            return stored.view(-1, stored.shape[-1])
        centre = 2 ** (self._weights.bits - 1)
        unsigned = unpack(stored.T.contiguous(), self._weights.bits, num_out).T
        return unsigned.to(torch.int16) - centre


def _check_zero(part: Part, name: str) -> None:
    """Check that zero points, which some writers store for symmetric values, are zero."""
    points = part.tensors.get(name)
    if points is not None and not points.is_meta and bool((points != 0).any()):
        raise CheckpointError(
            f"tensor {part.name}.{name}: is not zero, but the config sets symmetric."
        )


def _check_shape(part: Part) -> None:
    stored = part["weight_shape"]
    if not stored.is_meta and tuple(stored.tolist()) != part.whole_shape:
        raise CheckpointError(
            f"tensor {part.name}.weight_shape: is {stored.tolist()}, the network needs "
            f"{list(part.whole_shape)}."
        )
