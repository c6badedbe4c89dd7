"""Quantises one decoder layer: folds scales, quantises weights, records errors.

Afterwards the layer has the dequantised weights, as a reader of the file will see them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from windlass.tools.quantize.gptq import gptq
from windlass.tools.quantize.layer import InputStats, Layer
from windlass.tools.quantize.recipe import BLOCK, Recipe
from windlass.tools.quantize.scaling import folds_of, search_clip, search_scale, smoothing_scale
from windlass.tools.quantize.weights import (
    IntWeight,
    QuantisedWeight,
    quantise_activations_float8,
    quantise_activations_int8,
    round_to_nearest,
    to_float8,
    to_nf4,
)

# Clipping these changes attention scores more than it helps.
_NEVER_CLIPPED = ("q_proj", "k_proj")


@dataclass(frozen=True, slots=True)
class Quantised:
    """Quantised weights of a layer by name in the block, and their errors."""

    weights: dict[str, QuantisedWeight] = field(default_factory=dict)  # "self_attn.q_proj"
    quality: dict[str, dict[str, float]] = field(default_factory=dict)


@torch.inference_mode()
def quantise(layer: Layer, inputs: Mapping[str, InputStats] | None, recipe: Recipe) -> Quantised:
    """Quantise every linear layer. `inputs`: statistics by path; None without calibration."""
    made = Quantised()
    stats = dict(inputs or {})
    strengths = _fold(layer, stats, recipe)
    for path, linear in layer.linears.items():
        weight = linear.get_parameter("weight")
        parent = path.rpartition(".")[0]
        whole = _gptq(weight, stats.get(path), recipe)
        first = 0
        for part, num_out in linear.parts.items():
            own = weight[first : first + num_out]
            if whole is not None:
                quantised: QuantisedWeight = whole.rows(first, num_out)
            else:
                quantised = _quantise_part(part, own, inputs=stats.get(path), recipe=recipe)
            name = f"{parent}.{part}"
            dense = quantised.dequantise()
            made.weights[name] = quantised
            made.quality[name] = _quality(own, dense, stats.get(path)) | strengths.get(path, {})
            own.copy_(dense)
            first += num_out
    return made


def activation_quantiser(recipe: Recipe) -> Callable[[Tensor], Tensor] | None:
    """Return what kernels for this recipe do to a GEMM's activations; None: nothing."""
    if recipe.method == "smoothquant":
        return quantise_activations_int8
    if recipe.method == "fp8":
        return partial(
            quantise_activations_float8, group=BLOCK if recipe.scales == "block" else None
        )
    return None


def _fold(
    layer: Layer, inputs: dict[str, InputStats], recipe: Recipe
) -> dict[str, dict[str, float]]:
    """Fold the scales of AWQ or SmoothQuant, and update `inputs`; return AWQ's strengths."""
    strengths: dict[str, dict[str, float]] = {}
    if recipe.method not in ("awq", "smoothquant"):
        return strengths
    for fold in folds_of(layer.block):
        if fold.name not in inputs:  # an expert that no token chose
            continue
        weight, stats = fold.linear.get_parameter("weight"), inputs[fold.name]
        if recipe.method == "awq":
            grid = recipe.grid(fold.linear.num_in)
            scale, strength = search_scale(weight, stats, grid, fold.sources)
            strengths[fold.name] = {"strength": strength}
        elif fold.is_norm:
            scale = smoothing_scale(weight, stats.max_abs, recipe.alpha)
        else:
            continue
        fold.apply(scale)
        inputs[fold.name] = stats.divided(scale[fold.sources])
    for path, module in layer.block.named_modules():
        if path.endswith("layernorm"):
            for name, value in module.named_parameters(recurse=False):
                value.copy_(layer.as_read(f"{layer.prefix}{path}.{name}", value, recipe.dtype))
    return strengths


def _gptq(weight: Tensor, inputs: InputStats | None, recipe: Recipe) -> IntWeight | None:
    """Quantise all parts of a merged layer at once with GPTQ: they share inputs.

    None: another method, or an expert without inputs, whose weights are rounded to nearest.
    """
    if recipe.method != "gptq" or inputs is None:
        return None
    grid = recipe.grid(weight.shape[1])
    return gptq(weight, inputs.gram, grid=grid, act_order=recipe.act_order, damping=recipe.damping)


def _quantise_part(
    part: str, weight: Tensor, inputs: InputStats | None, recipe: Recipe
) -> QuantisedWeight:
    num_in = weight.shape[1]
    if recipe.method == "fp8":
        return to_float8(weight, recipe.dtype, BLOCK if recipe.scales == "block" else None)
    if recipe.method == "nf4":
        return to_nf4(weight, recipe.group_size)
    grid = recipe.grid(num_in)
    if recipe.method == "awq" and recipe.clip and part not in _NEVER_CLIPPED and inputs is not None:
        return round_to_nearest(weight, grid, search_clip(weight, inputs, grid))
    return round_to_nearest(weight, grid)


def _quality(weight: Tensor, dense: Tensor, inputs: InputStats | None) -> dict[str, float]:
    change = float((weight - dense).square().sum() / weight.square().sum().clamp(min=1e-30))
    found = {"weight_error": change}
    if inputs is not None:
        found["output_error"] = inputs.output_error(weight, dense)
    return found
