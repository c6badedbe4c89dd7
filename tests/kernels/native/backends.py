"""Builds and caches the native library for each SIMD backend that this CPU can run.

`layout.h` selects the best backend that the compiler flags allow. Here the flags select the backend, so
that one CPU tests several of them. test_emulated.py covers the backends that this CPU cannot run. All
builds lie in pytest's cache folder, under a name made of sources and flags: test files share them, and
later runs compile nothing.
"""

from __future__ import annotations

import hashlib
import platform
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

from tests.kernels.background import Program, Run
from windlass.kernels.native import compiled
from windlass.kernels.native.pool import Pool


@dataclass(frozen=True, slots=True)
class Backend:
    name: str  # as windlass_simd() returns it
    flags: tuple[str, ...]
    # Flags (x86-64) or Features (aarch64) of /proc/cpuinfo. Its order differs between processes.
    needs: frozenset[str] = field(default=frozenset(), repr=False)

    @property
    def build_flags(self) -> tuple[str, ...]:
        """-O0 unless `flags` say otherwise: compiling takes longer than running the tests."""
        return ("-O0", *self.flags)


_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi2"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd"}
_DOT = frozenset({"asimddp"})
PORTABLE = Backend("portable", ("-DWINDLASS_SCALAR",))
HASWELL = Backend("AVX2", ("-march=haswell",), _AVX2)
_BACKENDS = {
    "x86_64": (
        HASWELL,
        # The compiler vectorises plain loops with AVX-512.
        Backend("AVX-512 BW", ("-march=skylake-avx512", "-O1", "-ftree-vectorize"), _AVX512),
        Backend("AVX-512 VNNI", ("-march=cascadelake",), _AVX512 | {"avx512_vnni"}),
        Backend(
            "AVX-512 VNNI and BF16",
            ("-march=cooperlake",),
            _AVX512 | {"avx512_vnni", "avx512_bf16"},
        ),
        Backend(
            "AVX-512 VNNI, BF16 and AMX",
            ("-march=sapphirerapids",),
            _AVX512 | {"avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16"},
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
# Without optimisation, a compiler reads headers most of the time: they are compiled once per build.
_HEADERS = """
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <numeric>
#include <thread>
#include <vector>
#if !defined(WINDLASS_SCALAR) && defined(__x86_64__)
#include <immintrin.h>
#elif !defined(WINDLASS_SCALAR) && defined(__aarch64__)
#include <arm_neon.h>
#endif
"""
_BUILD = """
import subprocess, sys
from pathlib import Path
from windlass.kernels.native import compiled
from windlass.kernels.native.compiler import FLAGS, find_compilers, machine_flags

folder, header, *flags = sys.argv[1:]
compilers, _ = find_compilers()
extra = [*flags, "-include", header]
if compilers and compiled._from_cache(Path(folder), extra, compiled.SOURCES, compilers) is None:
    call = [*compilers[0].command, *FLAGS, *machine_flags(), *flags, "-x", "c++-header"]
    subprocess.run([*call, header, "-o", header + ".gch"], check=True)
    compiled.load(Path(folder), extra)
    Path(header + ".gch").unlink()  # it is large
"""
_SELFTEST = [
    Path(__file__).with_name(name)
    for name in ("selftest.cpp", "selftest_ops.h", "selftest_special.h", "definition.h")
]


def runnable() -> list[Backend]:
    """List the backends that this CPU can run, the portable one first."""
    candidates = _BACKENDS.get(platform.machine(), ())
    features = _cpu_features()
    return [PORTABLE, *(backend for backend in candidates if backend.needs <= features)]


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


def backend_folder(config: pytest.Config) -> Path:
    assert config.cache is not None
    return config.cache.mkdir("windlass_backends")


def build(backend: Backend, folder: Path, run: Run) -> None:
    """Compile the backend's library if it is not cached."""
    run([sys.executable, "-c", _BUILD, folder, _header(backend, folder), *backend.build_flags])


def _header(backend: Backend, folder: Path) -> Path:
    """The file that all sources of a backend's library include first."""
    flags = "\0".join(backend.build_flags).encode()
    path = folder / hashlib.blake2b(flags, digest_size=8).hexdigest() / "headers.h"
    path.parent.mkdir(exist_ok=True)
    if not path.is_file():
        path.write_text(_HEADERS)
    return path


@cache
def backend_pool(backend: Backend, folder: Path) -> Pool:
    """Return a pool of two threads over the backend's library, compiled if it is not cached."""
    header = _header(backend, folder)
    native = compiled.load(folder, (*backend.build_flags, "-include", str(header)))
    assert native.simd == backend.name
    return Pool(native, 2)


def run_checked(*command: str | Path) -> str:
    """Run a command that must succeed and return its standard output."""
    return output_of(subprocess.run([*map(str, command)], capture_output=True, text=True))


def output_of(done: Program) -> str:
    """Return the standard output of a program that must have succeeded."""
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@dataclass(frozen=True, slots=True)
class SelfTest:
    """A build of selftest.cpp, and how to run it."""

    compiler: tuple[str, ...]
    flags: tuple[str, ...]
    emulator: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()  # one run for each; without any all checks run

    def run(self, config: pytest.Config, run: Run) -> str:
        """Compile the program if it is not cached, run it, and return its output."""
        assert config.cache is not None
        program = self._build(config.cache.mkdir("windlass_selftest"), run)
        calls = [(argument,) for argument in self.arguments] or [()]
        return "".join(output_of(run([*self.emulator, program, *call])) for call in calls)

    def _build(self, folder: Path, run: Run) -> Path:
        words = (*self.compiler, *self.flags, _HEADERS)
        digest = hashlib.blake2b("\0".join(words).encode(), digest_size=8)
        for path in [*_SELFTEST, *sorted(compiled.SOURCES.iterdir())]:
            digest.update(path.read_bytes())
        program = folder / digest.hexdigest()
        if program.is_file():
            return program
        call = [*self.compiler, *self.flags, "-std=c++17", "-ffp-contract=off", "-pthread"]
        call.append(f"-I{compiled.SOURCES}")
        sources = [_SELFTEST[0], *sorted(compiled.SOURCES.glob("*.cpp"))]
        objects = [program.with_name(f"{program.name}.{source.stem}.o") for source in sources]
        header = program.with_suffix(".h")
        header.write_text(_HEADERS)
        precompiled = program.with_suffix(".h.gch")
        output_of(run([*call, "-x", "c++-header", header, "-o", precompiled]))
        for source, output in zip(sources, objects, strict=True):
            output_of(run([*call, "-include", header, "-c", source, "-o", output]))
        output_of(run([*call, *objects, "-o", program]))
        for path in (*objects, header, precompiled):
            path.unlink()
        return program
