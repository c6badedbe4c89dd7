"""What to make: method, bits, groups and file format, checked against each other and the model.

What is left open is chosen here, with the reason; nothing is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from windlass.errors import ConfigError
from windlass.models.hparams import HParams
from windlass.tools.quantize.gptq import ActOrder
from windlass.tools.quantize.weights import Grid

Method = Literal["rtn", "gptq", "awq", "smoothquant", "fp8", "nf4"]
Format = Literal["compressed-tensors", "gptq", "awq", "bitsandbytes"]
Scales = Literal["channel", "block"]

CALIBRATED = ("gptq", "awq", "smoothquant")
BLOCK = 128  # of fp8: outputs and inputs that share a scale
PER_CHANNEL = -1

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
    """What was asked for; None: to be chosen."""

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
    """All of it decided. `notes` say what was chosen, and why."""

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
    dtype: torch.dtype  # of everything that is not quantised, and of the scales
    notes: tuple[str, ...] = ()

    def grid(self, num_in: int) -> Grid:
        group = num_in if self.group_size == PER_CHANNEL else self.group_size
        return Grid(self.bits, group, self.symmetric, self.dtype)


def decide(wishes: QuantizeOptions, hparams: HParams) -> Recipe:
    """Fill in what was left open; refuse what does not go together or does not fit the model."""
    method = wishes.method
    bits = _BITS[method][0] if wishes.bits is None else wishes.bits
    if bits not in _BITS[method]:
        known = ", ".join(map(str, sorted(_BITS[method])))
        raise ConfigError(f"--bits {bits} does not go with --method {method}; possible: {known}.")
    notes: list[str] = []
    format = _format(wishes, bits, notes)
    group_size = _group_size(wishes, hparams, notes)
    symmetric = _symmetric(wishes, format)
    recipe = Recipe(
        method,
        bits,
        group_size,
        format,
        symmetric,
        _act_order(wishes, format),
        wishes.scales,
        wishes.damping,
        wishes.alpha,
        wishes.clip,
        _dtype(hparams, format, notes),
        tuple(notes),
    )
    _check_packing(recipe, hparams)
    return recipe


def _format(wishes: QuantizeOptions, bits: int, notes: list[str]) -> Format:
    method, wish = wishes.method, wishes.format
    if wishes.scales == "block" and method != "fp8":
        raise ConfigError(f"--scales block is for --method fp8, not {method}.")
    if method == "nf4":
        if wish not in (None, "bitsandbytes"):
            raise ConfigError("--method nf4 is only written as --format bitsandbytes.")
        return "bitsandbytes"
    if wish == "bitsandbytes":
        raise ConfigError(f"--format bitsandbytes is for --method nf4, not {method}.")
    if method in ("smoothquant", "fp8"):
        if wish not in (None, "compressed-tensors"):
            raise ConfigError(f"--method {method} is only written as --format compressed-tensors.")
        return "compressed-tensors"
    if wish is None and bits == 3:
        notes.append("format gptq: the only one whose layout of 3 bits is the same everywhere")
        return "gptq"
    format = wish or "compressed-tensors"
    if bits not in _FORMAT_BITS[format]:
        able = [name for name, known in _FORMAT_BITS.items() if bits in known]
        raise ConfigError(
            f"--format {format} has no {bits} bits; use --format {' or '.join(able)}."
        )
    return format


def _symmetric(wishes: QuantizeOptions, format: Format) -> bool:
    """AWQ's files always carry zero points, so they may as well be used."""
    if wishes.method in ("smoothquant", "fp8", "nf4"):
        if wishes.symmetric is False:
            raise ConfigError(f"--asymmetric does not go with --method {wishes.method}.")
        return True
    return format != "awq" if wishes.symmetric is None else wishes.symmetric


def _act_order(wishes: QuantizeOptions, format: Format) -> ActOrder:
    if wishes.act_order is not None and wishes.method != "gptq":
        raise ConfigError(f"--act-order is for --method gptq, not {wishes.method}.")
    if wishes.act_order == "group" and format != "gptq":
        raise ConfigError(
            f"--act-order group needs --format gptq: {format} cannot say which group an input "
            "belongs to. Use --act-order static, which any format can hold."
        )
    if wishes.act_order == "group" and wishes.group_size == PER_CHANNEL:
        raise ConfigError("--act-order group needs groups; use static with --group-size -1.")
    return wishes.act_order or "static"


def linear_shapes(hparams: HParams) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of a block's linear layers, under their names in checkpoints."""
    hidden, inner = hparams.hidden_size, hparams.intermediate_size
    heads, kv = hparams.num_heads * hparams.head_dim, hparams.num_kv_heads * hparams.head_dim
    return {
        "self_attn.q_proj": (heads, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }


def _group_size(wishes: QuantizeOptions, hparams: HParams, notes: list[str]) -> int:
    method, wish = wishes.method, wishes.group_size
    if method in ("smoothquant", "fp8"):
        if wish is not None:
            raise ConfigError(
                f"--group-size does not go with --method {method}: it has one scale per output."
            )
        return PER_CHANNEL
    inputs = {name: num_in for name, (_, num_in) in linear_shapes(hparams).items()}
    if wish == PER_CHANNEL and method != "nf4":
        return PER_CHANNEL
    possible = [size for size in _GROUP_SIZES if all(n % size == 0 for n in inputs.values())]
    if wish is not None:
        return _checked_group(wish, inputs, possible, per_channel=method != "nf4")
    preferred = 64 if method == "nf4" else _GROUP_SIZES[0]
    fitting = [size for size in possible if size <= preferred]
    if not fitting:
        name, num_in = next((n, k) for n, k in inputs.items() if k % _GROUP_SIZES[-1])
        instead = "" if method == "nf4" else ", or --group-size -1 for one scale per output"
        raise ConfigError(
            f"no usual group size divides the {num_in} inputs of {name}. Use --method fp8{instead}."
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
    """Of the file. Kernels for AWQ's and GPTQ's layouts want float16 scales."""
    if format in ("awq", "gptq"):
        return torch.float16
    if hparams.dtype in ("bfloat16", "float16"):
        return torch.bfloat16 if hparams.dtype == "bfloat16" else torch.float16
    notes.append("float16 for what is not quantised: the source is no 16-bit checkpoint")
    return torch.float16


def _check_packing(recipe: Recipe, hparams: HParams) -> None:
    """Codes are packed into words of 32 bits, along outputs or inputs."""
    if recipe.scales == "block":
        wrong = next(((n, k) for n, (_, k) in linear_shapes(hparams).items() if k % BLOCK), None)
        if wrong is not None:
            raise ConfigError(
                f"--scales block: blocks of {BLOCK} do not divide the {wrong[1]} inputs of "
                f"model.layers.*.{wrong[0]}. Use --scales channel."
            )
    if recipe.method in ("smoothquant", "fp8"):
        return
    unit = 32 if recipe.bits == 3 else 8
    for name, (num_out, num_in) in linear_shapes(hparams).items():
        if num_out % unit or num_in % unit:
            raise ConfigError(
                f"model.layers.*.{name} has {num_out} outputs and {num_in} inputs; {recipe.bits}-bit "
                f"codes are packed in units of {unit}, which does not divide both. Use --method fp8."
            )
