"""Detects a checkpoint's quantisation format from its quantization_config.

Unknown formats and contradictory fields raise with their names; there are no fallbacks. A new format
is one file and one line in `_READERS`.
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
from windlass.quant.mxfp4 import Mxfp4
from windlass.quant.packed_method import FileMethod
from windlass.quant.settings import Settings, matches_any

MethodOf = Callable[[str], FileMethod | None]  # from a module's name; None: unquantised


@dataclass(frozen=True, slots=True)
class Format:
    """The quantisation format of a checkpoint."""

    name: str  # "awq"
    method: MethodOf


def detect(config: Mapping[str, Any], source: str, linears: Linears) -> Format | None:
    """Read a quantization_config; None if it is empty."""
    if not config:
        return None
    settings = Settings(config, f"{source}: quantization_config")
    name = settings.text("quant_method", _implied(config))
    if name not in _READERS:
        raise UnsupportedError(
            f"{settings.where}: the weights are quantised with {name!r}, which is not supported. "
            f"Supported: {', '.join(_READERS)}. Use another quantised version of the model, or the "
            "original with --quantization."
        )
    return Format(name, _READERS[name](settings, linears))


def _implied(config: Mapping[str, Any]) -> str:
    """The method of a config without quant_method: older bitsandbytes versions omit it."""
    if config.get("load_in_4bit") or config.get("load_in_8bit"):
        return "bitsandbytes"
    return "unnamed"


def _awq(settings: Settings, linears: Linears) -> MethodOf:
    method = Awq.read(settings, linears)
    return partial(_unless_skipped, (*settings.texts("modules_to_not_convert"), "lm_head"), method)


def _gptq(settings: Settings, linears: Linears) -> MethodOf:
    method = Gptq.read(settings, linears)
    head = () if settings.flag("lm_head", False) else ("lm_head",)
    return partial(_unless_skipped, (*settings.texts("modules_to_not_convert"), *head), method)


def _fp8(settings: Settings, linears: Linears) -> MethodOf:
    method = Fp8.read(settings, linears)
    skipped = settings.texts("modules_to_not_convert", "ignored_layers")
    return partial(_unless_skipped, (*skipped, "lm_head"), method)


def _bitsandbytes(settings: Settings, linears: Linears) -> MethodOf:
    method = bitsandbytes.read(settings, linears)
    return partial(_unless_skipped, (*settings.texts("llm_int8_skip_modules"), "lm_head"), method)


def _unless_skipped(skipped: tuple[str, ...], method: FileMethod, module: str) -> FileMethod | None:
    return None if matches_any(module, skipped) else method


def _mxfp4(settings: Settings, linears: Linears) -> MethodOf:
    """Only experts are quantised, whatever modules_to_not_convert lists."""
    del settings
    method = Mxfp4(linears)
    return lambda module: method if ".experts." in module else None


_READERS: dict[str, Callable[[Settings, Linears], MethodOf]] = {
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": compressed_tensors.read,
    "fp8": _fp8,
    "bitsandbytes": _bitsandbytes,
    "mxfp4": _mxfp4,
}
