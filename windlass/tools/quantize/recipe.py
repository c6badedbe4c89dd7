"""Quantisation options (method, bits, group size, file format), checked and completed for a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from windlass.errors import ConfigError, UnsupportedError
from windlass.lora.modules import linear_shapes
from windlass.models.hparams import HParams
from windlass.tools.quantize.gptq import ActOrder
from windlass.tools.quantize.weights import Grid

Method = Literal["rtn", "gptq", "awq", "smoothquant", "fp8", "nf4"]
Format = Literal["compressed-tensors", "gptq", "awq", "bitsandbytes"]
Scales = Literal["channel", "block"]

CALIBRATED = ("gptq", "awq", "smoothquant")
BLOCK = 128  # fp8: outputs and inputs per scale with --scales block
PER_CHANNEL = -1

_NESTED = "ForConditionalGeneration"  # whose config has the text model in a part of its own
_GROUP_SIZES = (128, 64, 32)
_BITS: Mapping[str, tuple[int, ...]] = {
    "rtn": (4, 8, 3),
    "gptq": (4, 8, 3),
    "awq": (4, 8, 3),
    "smoothquant": (8,),
    "fp8": (8,),
    "nf4": (4,),
}
_FORMAT_BITS: Mapping[str, tuple[int, ...]] = {
    "compressed-tensors": (4, 8),
    "gptq": (3, 4, 8),
    "awq": (4,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeOptions:
    """Options of the user; None: `decide` chooses."""

    method: Method
    bits: int | None = None
    group_size: int | None = None
    format: Format | None = None
    symmetric: bool | None = None
    act_order: ActOrder | None = None
    scales: Scales = "channel"
    damping: float = 0.01
    alpha: float = 0.5
    clip: bool = True

    def __post_init__(self) -> None:
        for name, kind in (("method", Method), ("format", Format), ("act_order", ActOrder)):
            _one_of(name, getattr(self, name), get_args(kind))
        _one_of("scales", self.scales, get_args(Scales))
        if not 0.0 < self.damping <= 1.0:
            raise ConfigError(f"--damping must be above 0 and at most 1, got {self.damping}.")
        if not 0.0 <= self.alpha <= 1.0:
            raise ConfigError(f"--alpha must be between 0 and 1, got {self.alpha}.")


def _one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if value is not None and value not in known:
        flag = name.replace("_", "-")
        raise ConfigError(f"--{flag} must be one of {', '.join(known)}; got {value!r}.")


@dataclass(frozen=True, slots=True)
class Recipe:
    """Complete options. `notes` explain automatic choices."""

    method: Method
    bits: int
    group_size: int  # PER_CHANNEL: one scale per output
    format: Format
    symmetric: bool
    act_order: ActOrder
    scales: Scales
    damping: float
    alpha: float
    clip: bool
    dtype: torch.dtype  # of unquantised tensors and scales
    notes: tuple[str, ...] = ()

    def grid(self, num_in: int) -> Grid:
        group = num_in if self.group_size == PER_CHANNEL else self.group_size
        return Grid(bits=self.bits, group=group, symmetric=self.symmetric, stored=self.dtype)


def decide(options: QuantizeOptions, hparams: HParams) -> Recipe:
    """Complete the options; raise ConfigError for options that conflict or do not fit the model."""
    method = options.method
    _check_model(method, hparams)
    bits = _BITS[method][0] if options.bits is None else options.bits
    if bits not in _BITS[method]:
        known = ", ".join(map(str, sorted(_BITS[method])))
        raise ConfigError(f"--bits {bits} does not go with --method {method}; possible: {known}.")
    notes: list[str] = []
    format = _format(options, bits, notes)
    group_size = _group_size(options, hparams, notes)
    symmetric = _symmetric(options, format)
    dtype = _dtype(hparams, format, notes)
    recipe = Recipe(
        method=method,
        bits=bits,
        group_size=group_size,
        format=format,
        symmetric=symmetric,
        act_order=_act_order(options, format),
        scales=options.scales,
        damping=options.damping,
        alpha=options.alpha,
        clip=options.clip,
        dtype=dtype,
        notes=tuple(notes),
    )
    _check_packing(recipe, hparams)
    return recipe


def _check_model(method: Method, hparams: HParams) -> None:
    """Refuse networks whose layers cannot be calibrated, or written under names that are read again."""
    why = None
    if hparams.mla is not None:
        why = "its latent attention (MLA) reads a projection that is never multiplied by itself"
    elif hparams.recurrent is not None:
        why = "it has recurrent layers, which are not calibrated"
    elif hparams.mixes_heads or hparams.per_layer_inputs is not None:
        why = "its layers have heads of different sizes, or inputs of their own, which are not calibrated"
    elif hparams.architecture.endswith(_NESTED):
        why = "its files have a vision part. Quantise the text model"
    if why is not None:
        raise UnsupportedError(
            f"windlass quantize does not support {hparams.architecture}: {why}. --quantization "
            "quantises the weights of any model at load time."
        )
    if method == "smoothquant" and (hparams.moe or hparams.norm.placement in ("post", "parallel")):
        raise ConfigError(
            f"--method smoothquant folds scales into the norms before linear layers, and "
            f"{hparams.architecture} has layers without a norm of their own. Use --method fp8 or rtn."
        )


def _format(options: QuantizeOptions, bits: int, notes: list[str]) -> Format:
    method, requested = options.method, options.format
    if options.scales == "block" and method != "fp8":
        raise ConfigError(f"--scales block is for --method fp8, not {method}.")
    if method == "nf4":
        if requested not in (None, "bitsandbytes"):
            raise ConfigError("--method nf4 is only written as --format bitsandbytes.")
        return "bitsandbytes"
    if requested == "bitsandbytes":
        raise ConfigError(f"--format bitsandbytes is for --method nf4, not {method}.")
    if method in ("smoothquant", "fp8"):
        if requested not in (None, "compressed-tensors"):
            raise ConfigError(f"--method {method} is only written as --format compressed-tensors.")
        return "compressed-tensors"
    if requested is None and bits == 3:
        notes.append("format gptq: the only format with the same 3-bit layout in all readers")
        return "gptq"
    format = requested or "compressed-tensors"
    if bits not in _FORMAT_BITS[format]:
        able = [name for name, known in _FORMAT_BITS.items() if bits in known]
        raise ConfigError(
            f"--format {format} has no {bits} bits; use --format {' or '.join(able)}."
        )
    return format


def _symmetric(options: QuantizeOptions, format: Format) -> bool:
    """AWQ files always have zero points, so their default is asymmetric."""
    if options.method in ("smoothquant", "fp8", "nf4"):
        if options.symmetric is False:
            raise ConfigError(f"--asymmetric does not go with --method {options.method}.")
        return True
    return format != "awq" if options.symmetric is None else options.symmetric


def _act_order(options: QuantizeOptions, format: Format) -> ActOrder:
    if options.act_order is not None and options.method != "gptq":
        raise ConfigError(f"--act-order is for --method gptq, not {options.method}.")
    if options.act_order == "group" and format != "gptq":
        raise ConfigError(
            f"--act-order group needs --format gptq: {format} has no g_idx. "
            "Use --act-order static, which every format supports."
        )
    if options.act_order == "group" and options.group_size == PER_CHANNEL:
        raise ConfigError("--act-order group needs groups; use static with --group-size -1.")
    return options.act_order or "static"


def _block_shapes(hparams: HParams) -> dict[str, tuple[int, int]]:
    """Return outputs and inputs of the blocks' linear layers by their names in checkpoints."""
    hidden, moe = hparams.hidden_size, hparams.moe
    named = linear_shapes(hparams).items()
    shapes = {name.split(".", 3)[3]: shape for name, shape in named if name != "lm_head"}
    experts = {"experts.*": moe.intermediate_size} if moe else {}
    if moe and moe.shared_intermediate_size:
        experts["shared_expert"] = moe.shared_intermediate_size
    for prefix, inner in experts.items():
        for part in ("gate_proj", "up_proj"):
            shapes[f"mlp.{prefix}.{part}"] = (inner, hidden)
        shapes[f"mlp.{prefix}.down_proj"] = (hidden, inner)
    return shapes


def _group_size(options: QuantizeOptions, hparams: HParams, notes: list[str]) -> int:
    method, requested = options.method, options.group_size
    if method in ("smoothquant", "fp8"):
        if requested is not None:
            raise ConfigError(
                f"--group-size does not go with --method {method}: it has one scale per output."
            )
        return PER_CHANNEL
    inputs = {name: num_in for name, (_, num_in) in _block_shapes(hparams).items()}
    if requested == PER_CHANNEL and method != "nf4":
        return PER_CHANNEL
    possible = [size for size in _GROUP_SIZES if all(n % size == 0 for n in inputs.values())]
    if requested is not None:
        return _checked_group(requested, inputs, possible, per_channel=method != "nf4")
    preferred = 64 if method == "nf4" else _GROUP_SIZES[0]
    fitting = [size for size in possible if size <= preferred]
    if not fitting:
        name, num_in = next((n, k) for n, k in inputs.items() if k % _GROUP_SIZES[-1])
        alternative = "" if method == "nf4" else ", or --group-size -1 for one scale per output"
        raise ConfigError(
            f"no supported group size divides the {num_in} inputs of {name}. Use --method fp8{alternative}."
        )
    if fitting[0] != preferred:
        name, num_in = next((n, k) for n, k in inputs.items() if k % preferred)
        notes.append(
            f"group size {fitting[0]}: {preferred} does not divide the {num_in} inputs of {name}"
        )
    return fitting[0]


def _checked_group(
    size: int, inputs: Mapping[str, int], possible: list[int], per_channel: bool
) -> int:
    if size < 8 or size & (size - 1):
        other = ", or -1" if per_channel else " with --method nf4"
        raise ConfigError(f"--group-size must be a power of two from 8 on{other}; got {size}.")
    wrong = next((name for name, num_in in inputs.items() if num_in % size), None)
    if wrong is not None:
        works = [str(each) for each in possible]
        if per_channel:
            works.append(f"{PER_CHANNEL} (one scale per output)")
        raise ConfigError(
            f"--group-size {size} does not divide the {inputs[wrong]} inputs of "
            f"model.layers.*.{wrong}. Sizes that fit all layers: {', '.join(works) or 'none'}."
        )
    return size


def _dtype(hparams: HParams, format: Format, notes: list[str]) -> torch.dtype:
    """Return the dtype of the file. AWQ and GPTQ kernels need float16 scales."""
    if format in ("awq", "gptq"):
        return torch.float16
    if hparams.dtype in ("bfloat16", "float16"):
        return torch.bfloat16 if hparams.dtype == "bfloat16" else torch.float16
    notes.append("float16 for unquantised tensors: the source is not a 16-bit checkpoint")
    return torch.float16


def _check_packing(recipe: Recipe, hparams: HParams) -> None:
    """Check that codes fill 32-bit words along outputs and inputs."""
    if recipe.scales == "block":
        wrong = next(((n, k) for n, (_, k) in _block_shapes(hparams).items() if k % BLOCK), None)
        if wrong is not None:
            raise ConfigError(
                f"--scales block: blocks of {BLOCK} do not divide the {wrong[1]} inputs of "
                f"model.layers.*.{wrong[0]}. Use --scales channel."
            )
    if recipe.method in ("smoothquant", "fp8"):
        return
    unit = 32 if recipe.bits == 3 else 8
    for name, (num_out, num_in) in _block_shapes(hparams).items():
        if num_out % unit or num_in % unit:
            raise ConfigError(
                f"model.layers.*.{name} has {num_out} outputs and {num_in} inputs; {recipe.bits}-bit "
                f"codes are packed in units of {unit}, which does not divide both. Use --method fp8."
            )
