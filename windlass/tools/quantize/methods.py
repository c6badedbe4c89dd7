"""A method applied to one decoder layer: scales folded, weights rounded, errors noted.

The layer is left with the weights that a reader of the file will have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from windlass.tools.quantize.awq import search_clip, search_scale
from windlass.tools.quantize.folding import folds_of, smoothing_scale
from windlass.tools.quantize.gptq import gptq
from windlass.tools.quantize.layer import Layer, rounded_to
from windlass.tools.quantize.recipe import BLOCK, Recipe
from windlass.tools.quantize.statistics import Inputs
from windlass.tools.quantize.weights import (
    IntWeight,
    QuantisedWeight,
    round_activations_float8,
    round_activations_int8,
    round_to_nearest,
    to_float8,
    to_nf4,
)

# Rounding these off moves attention scores far more than it helps.
_NEVER_CLIPPED = ("q_proj", "k_proj")


@dataclass(frozen=True, slots=True)
class Quantised:
    """One layer's weights by name inside the block, and for each what is known of its quality."""

    weights: dict[str, QuantisedWeight] = field(default_factory=dict)  # "self_attn.q_proj"
    quality: dict[str, dict[str, float]] = field(default_factory=dict)


@torch.inference_mode()
def quantise(layer: Layer, inputs: Mapping[str, Inputs] | None, recipe: Recipe) -> Quantised:
    """Quantise every linear layer; `inputs` by their paths, None: not calibrated."""
    made = Quantised()
    seen = dict(inputs or {})
    strengths = _fold(layer, seen, recipe)
    for path, linear in layer.linears.items():
        weight = linear.get_parameter("weight")
        parent = path.rpartition(".")[0]
        whole = _together(weight, seen.get(path), recipe)
        first = 0
        for part, num_out in linear.parts.items():
            own = weight[first : first + num_out]
            if whole is not None:
                rounded: QuantisedWeight = whole.rows(first, num_out)
            else:
                rounded = _alone(part, own, seen.get(path), recipe)
            name = f"{parent}.{part}"
            dense = rounded.dequantise()
            made.weights[name] = rounded
            made.quality[name] = _quality(own, dense, seen.get(path)) | strengths.get(path, {})
            own.copy_(dense)
            first += num_out
    return made


def input_rounding(recipe: Recipe) -> Callable[[Tensor], Tensor] | None:
    """What kernels for this recipe do to a product's inputs."""
    if recipe.method == "smoothquant":
        return round_activations_int8
    if recipe.method == "fp8":
        return partial(round_activations_float8, group=BLOCK if recipe.scales == "block" else None)
    return None


def _fold(layer: Layer, inputs: dict[str, Inputs], recipe: Recipe) -> dict[str, dict[str, float]]:
    """Fold the method's scales, if it has any; `inputs` follow them."""
    strengths: dict[str, dict[str, float]] = {}
    if recipe.method not in ("awq", "smoothquant"):
        return strengths
    for fold in folds_of(layer.block):
        weight, seen = fold.linear.get_parameter("weight"), inputs[fold.name]
        if recipe.method == "awq":
            found = search_scale(weight, seen, recipe.grid(fold.linear.num_in), fold.sources)
            scale = found.scale
            strengths[fold.name] = {"strength": found.strength}
        elif fold.is_norm:
            scale = smoothing_scale(weight, seen.max_abs, recipe.alpha)
        else:
            continue
        fold.apply(scale)
        inputs[fold.name] = seen.divided(scale[fold.sources])
    for path, module in layer.block.named_modules():
        if path.endswith("layernorm"):
            norm = module.get_parameter("weight")
            norm.copy_(rounded_to(norm, recipe.dtype, f"{layer.prefix}{path}.weight"))
    return strengths


def _together(weight: Tensor, inputs: Inputs | None, recipe: Recipe) -> IntWeight | None:
    """GPTQ's matrices depend on the inputs alone: parts that share them are done at once."""
    if recipe.method != "gptq":
        return None
    assert inputs is not None
    grid = recipe.grid(weight.shape[1])
    return gptq(weight, inputs.gram, grid, recipe.act_order, recipe.damping)


def _alone(part: str, weight: Tensor, inputs: Inputs | None, recipe: Recipe) -> QuantisedWeight:
    num_in = weight.shape[1]
    if recipe.method == "fp8":
        return to_float8(weight, recipe.dtype, BLOCK if recipe.scales == "block" else None)
    if recipe.method == "nf4":
        return to_nf4(weight, recipe.group_size)
    grid = recipe.grid(num_in)
    if recipe.method == "awq" and recipe.clip and part not in _NEVER_CLIPPED:
        assert inputs is not None
        return round_to_nearest(weight, grid, search_clip(weight, inputs, grid))
    return round_to_nearest(weight, grid)


def _quality(weight: Tensor, dense: Tensor, inputs: Inputs | None) -> dict[str, float]:
    change = float((weight - dense).square().sum() / weight.square().sum().clamp(min=1e-30))
    found = {"weight_error": change}
    if inputs is not None:
        found["output_error"] = inputs.output_error(weight, dense)
    return found
