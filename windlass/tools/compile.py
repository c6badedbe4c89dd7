"""Fills the caches of compiled kernels for a model and its options, without serving it.

A CPU's kernels are the same for all models. On CUDA an engine is built, because kernel signatures
depend on weight shapes and on measurements. Afterwards, Triton's cache has all kernels that the
engine has launched.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from windlass.build import build_engine, open_model
from windlass.config import EngineConfig
from windlass.errors import ConfigError
from windlass.folders import triton_cache_dir
from windlass.kernels.native.compiled import Native, load
from windlass.runner.device import choose_device

DEFAULT = "default"  # of --model
_NOT_NATIVE = ("bfloat16", "float16")  # dtypes whose CPU kernels are torch's


@dataclass(frozen=True, slots=True)
class Filled:
    """One cache of compiled kernels."""

    what: str  # "CPU kernels"
    how: str  # "compiled (AVX-512 VNNI)"
    seconds: float
    where: Path
    device: str  # of the engine, and why: "cpu (torch sees no CUDA device)"


def fill_caches(config: EngineConfig) -> list[Filled]:
    """Compile everything that an engine with this config would compile at its start."""
    chosen = choose_device(config.model)
    on_cpu = chosen.type == "cpu"
    device = f"{chosen.type} ({chosen.reason})"
    if config.model.plain_kernels or (on_cpu and config.model.dtype in _NOT_NATIVE):
        flag = "--plain-kernels" if config.model.plain_kernels else f"--dtype {config.model.dtype}"
        raise ConfigError(f"{flag}: nothing is compiled then. Omit it.")
    filled = []
    if config.lora.enable_lora:
        from windlass.lora.packing import SOURCES

        filled.append(_native("adapter loader", load(sources=SOURCES), device))
    if on_cpu:
        if config.model.model != DEFAULT:
            open_model(config)  # refuse a model that does not exist
        filled.append(_native("CPU kernels", load(), device))
    else:
        filled.append(_triton(config, device))
    return filled


def _native(what: str, native: Native, device: str) -> Filled:
    if native.is_temporary:
        raise ConfigError(
            f"{what}: {native.reason}. Make the folder writable, or set WINDLASS_CACHE."
        )
    how = "compiled" if native.compile_s else "found"
    return Filled(
        what, f"{how} ({native.simd})", seconds=native.compile_s, where=native.path, device=device
    )


def _triton(config: EngineConfig, device: str) -> Filled:
    from windlass.kernels.triton.precompile import counted

    with counted() as counts:
        start = time.perf_counter()
        build_engine(config, open_model(config).source).close()
        seconds = time.perf_counter() - start
    how = f"{counts['compiled']} compiled, {counts['found']} found"
    return Filled("Triton kernels", how, seconds=seconds, where=triton_cache_dir(), device=device)
