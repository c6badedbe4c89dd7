"""The SIMD backends that this CPU can run, each as a library of its own.

`layout.h` picks the best backend that the compiler's flags allow. Here the flags pick, so that one CPU
tests several backends. test_emulated.py covers those that it cannot run.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from windlass.kernels.native import compiled
from windlass.kernels.native.pool import Pool, workers


@dataclass(frozen=True, slots=True)
class Backend:
    name: str  # as the library says it
    flags: tuple[str, ...]
    needs: frozenset[str] = frozenset()  # flags (x86-64) or Features (aarch64) of /proc/cpuinfo


_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi2"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd"}
_DOT = frozenset({"asimddp"})
_BACKENDS = {
    "x86_64": (
        Backend("AVX2", ("-march=haswell",), _AVX2),
        # AVX-512 without VNNI: AVX2 intrinsics, but the compiler vectorises plain loops with AVX-512.
        Backend("AVX2", ("-march=skylake-avx512",), _AVX512),
        Backend("AVX-512 VNNI", ("-march=cascadelake",), _AVX512 | {"avx512_vnni"}),
        Backend(
            "AVX-512 VNNI and BF16",
            ("-march=cooperlake",),
            _AVX512 | {"avx512_vnni", "avx512_bf16"},
        ),
    ),
    "aarch64": (
        Backend("NEON dot product", ("-march=armv8.2-a+dotprod+nofp16",), _DOT),
        Backend("NEON dot product", ("-march=armv8.2-a+dotprod+fp16",), _DOT | {"asimdhp"}),
        Backend(
            "NEON i8mm and bfloat16",
            ("-march=armv8.2-a+dotprod+fp16+i8mm+bf16",),
            _DOT | {"asimdhp", "i8mm", "bf16"},
        ),
    ),
}


def runnable() -> list[Backend]:
    """Those of this CPU, the portable one first."""
    found = _BACKENDS.get(platform.machine(), ())
    own = _cpu_features()
    return [Backend("portable", ("-DWINDLASS_SCALAR",)), *(b for b in found if b.needs <= own)]


def _cpu_features() -> frozenset[str]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    pairs = (line.partition(":") for line in lines)
    return frozenset(
        word
        for key, _, words in pairs
        if key.strip() in ("flags", "Features")
        for word in words.split()
    )


@contextmanager
def in_use(backend: Backend, config: pytest.Config) -> Iterator[Pool]:
    """While it lasts, native kernels of this process compute with the backend."""
    assert config.cache is not None
    folder = config.cache.mkdir("windlass_backends")
    # -O0: compiling takes longer than all that is computed here.
    native = compiled.load(folder, (*backend.flags, "-O0"))
    assert native.simd == backend.name
    pool = Pool(native, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers(torch.get_num_threads()), "_pool", pool)
        yield pool
