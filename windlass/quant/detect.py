"""Names the format that a checkpoint is quantised in, from its quantization_config.

A format that is unknown, or fields that contradict each other, are refused by name; nothing is
guessed. A new format is one file and one line in `_READERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from windlass.errors import UnsupportedError
from windlass.kernels.linears import Linears
from windlass.quant import bitsandbytes, compressed_tensors
from windlass.quant.awq import Awq
from windlass.quant.fp8 import Fp8
from windlass.quant.gptq import Gptq
from windlass.quant.packed_method import FileMethod
from windlass.quant.settings import Settings, is_named

MethodOf = Callable[[str], FileMethod | None]  # by a module's name; None: it is not quantised


@dataclass(frozen=True, slots=True)
class Format:
    """What a checkpoint is quantised in."""

    name: str  # "awq"
    method: MethodOf


def detect(config: Mapping[str, Any], source: str, linears: Linears) -> Format | None:
    """Read a quantization_config; None when there is none."""
    if not config:
        return None
    settings = Settings(config, f"{source}: quantization_config")
    name = settings.text("quant_method", _implied(config))
    if name not in _READERS:
        raise UnsupportedError(
            f"{settings.where}: the weights are quantised with {name!r}, which cannot be read here. "
            f"Known: {', '.join(_READERS)}. Use another quantisation of the model, or the original "
            "with --quantization."
        )
    return Format(name, _READERS[name](settings, linears))


def _implied(config: Mapping[str, Any]) -> str:
    """bitsandbytes did not always write its name."""
    if config.get("load_in_4bit") or config.get("load_in_8bit"):
        return "bitsandbytes"
    return "unnamed"


def _awq(settings: Settings, linears: Linears) -> MethodOf:
    method = Awq.read(settings, linears)
    return partial(_unless, (*settings.texts("modules_to_not_convert"), "lm_head"), method)


def _gptq(settings: Settings, linears: Linears) -> MethodOf:
    method = Gptq.read(settings, linears)
    head = () if settings.flag("lm_head", False) else ("lm_head",)
    return partial(_unless, (*settings.texts("modules_to_not_convert"), *head), method)


def _fp8(settings: Settings, linears: Linears) -> MethodOf:
    method = Fp8.read(settings, linears)
    skipped = settings.texts("modules_to_not_convert", "ignored_layers")
    return partial(_unless, (*skipped, "lm_head"), method)


def _bitsandbytes(settings: Settings, linears: Linears) -> MethodOf:
    method = bitsandbytes.read(settings, linears)
    return partial(_unless, (*settings.texts("llm_int8_skip_modules"), "lm_head"), method)


def _unless(names: tuple[str, ...], method: FileMethod, module: str) -> FileMethod | None:
    return None if is_named(module, names) else method


_READERS: dict[str, Callable[[Settings, Linears], MethodOf]] = {
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": compressed_tensors.read,
    "fp8": _fp8,
    "bitsandbytes": _bitsandbytes,
}
