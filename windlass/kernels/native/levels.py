"""The instruction levels of the libraries in a wheel, and which of them a CPU can run.

A library that is compiled on the machine itself has no level: the compiler detects the CPU. layout.h
selects the backend from the flags in both cases.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Level:
    """Instructions that a library may use."""

    name: str  # the beginning of the library's file name; has one hyphen
    simd: str  # as windlass_simd() returns it
    flags: tuple[str, ...]  # of the compiler
    needs: frozenset[str]  # the CPU's features by Linux's names, flags or Features of /proc/cpuinfo


def _level(name: str, simd: str, flags: str, needs: str, base: Level | None = None) -> Level:
    """A level; one with a `base` adds to its flags and needs."""
    flags_before, needs_before = (base.flags, base.needs) if base else ((), frozenset())
    return Level(
        name, simd, (*flags_before, *flags.split()), needs_before | frozenset(needs.split())
    )


_X86 = _level("x86_64-portable", "portable", "-march=x86-64", "")
# x86-64-v3 and -v4 are the names of the psABI; compilers may use all of their instructions.
_AVX2 = _level(
    "x86_64-avx2", "AVX2", "-march=x86-64-v3", "avx2 fma f16c bmi1 bmi2 movbe abm popcnt"
)
_AVX2_VNNI = _level("x86_64-avx2_vnni", "AVX2 with VNNI", "-mavxvnni", "avx_vnni", _AVX2)
# Tuned like -march=native on such CPUs: the compiler's own loops use vectors of 256 bits.
_AVX512 = _level(
    "x86_64-avx512_bw",
    "AVX-512 BW",
    "-march=x86-64-v4 -mtune=skylake-avx512",
    " ".join(_AVX2.needs) + " avx512f avx512bw avx512cd avx512dq avx512vl",
)
_AVX512_VNNI = _level(
    "x86_64-avx512_vnni",
    "AVX-512 VNNI",
    "-mavx512vnni -mtune=cascadelake",
    "avx512_vnni",
    _AVX512,
)
_AVX512_BF16 = _level(
    "x86_64-avx512_bf16", "AVX-512 VNNI and BF16", "-mavx512bf16", "avx512_bf16", _AVX512_VNNI
)
_AMX = _level(
    "x86_64-amx",
    "AVX-512 VNNI, BF16 and AMX",
    "-mamx-tile -mamx-int8 -mamx-bf16",
    "amx_tile amx_int8 amx_bf16",
    _AVX512_BF16,
)
_ARM = _level("aarch64-portable", "portable", "-march=armv8-a", "")
_DOTPROD = _level(
    "aarch64-dotprod",
    "NEON dot product",
    "-march=armv8.2-a+dotprod+fp16",
    "asimddp asimdhp atomics asimdrdm crc32",
)
_I8MM = _level(
    "aarch64-i8mm",
    "NEON i8mm and bfloat16",
    "-march=armv8.2-a+dotprod+fp16+i8mm+bf16",
    " ".join(_DOTPROD.needs) + " i8mm bf16",
)
# Of each architecture, the best first.
_X86_LEVELS = (_AMX, _AVX512_BF16, _AVX512_VNNI, _AVX512, _AVX2_VNNI, _AVX2, _X86)
_ARM_LEVELS = (_I8MM, _DOTPROD, _ARM)
_LEVELS = {
    "x86_64": _X86_LEVELS,
    "AMD64": _X86_LEVELS,
    "aarch64": _ARM_LEVELS,
    "arm64": _ARM_LEVELS,
}
# Linux's names of what macOS lists as hw.optional.arm.FEAT_...
_MACOS_FEATURES = {
    "DotProd": "asimddp",
    "FP16": "asimdhp",
    "LSE": "atomics",
    "RDM": "asimdrdm",
    "CRC32": "crc32",
    "I8MM": "i8mm",
    "BF16": "bf16",
}


def levels(machine: str) -> tuple[Level, ...]:
    """The levels of an architecture, the best first; none for one that no wheel supports."""
    return _LEVELS.get(machine, ())


def runnable(machine: str, features: frozenset[str]) -> list[Level]:
    """The levels that a CPU with these features can run, the best first."""
    return [level for level in levels(machine) if level.needs <= features]


def next_level(machine: str, features: frozenset[str]) -> tuple[Level, tuple[str, ...]] | None:
    """The level above the best that a CPU can run, and the features that it lacks; None: there is no better."""
    known, found = levels(machine), runnable(machine, features)
    index = known.index(found[0]) if found else 0
    if index == 0:
        return None
    above = known[index - 1]
    return above, tuple(sorted(above.needs - features))


@cache
def cpu_features() -> frozenset[str]:
    """The features that all cores of this CPU have, and the operating system supports."""
    if sys.platform == "darwin":
        command = ["/usr/sbin/sysctl", "hw.optional"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return macos_features(done.stdout)
    info = Path("/proc/cpuinfo")
    return linux_features(info.read_text() if info.is_file() else "")


def linux_features(cpuinfo: str) -> frozenset[str]:
    """The features of /proc/cpuinfo that every core lists."""
    pairs = (line.partition(":") for line in cpuinfo.splitlines())
    cores = [
        frozenset(words.split()) for key, _, words in pairs if key.strip() in ("flags", "Features")
    ]
    return frozenset.intersection(*cores) if cores else frozenset()


def macos_features(sysctl: str) -> frozenset[str]:
    """The features that `sysctl hw.optional` lists, by Linux's names."""
    pairs = (line.partition(":") for line in sysctl.splitlines())
    present = {key.rpartition("FEAT_")[2] for key, _, value in pairs if value.strip() == "1"}
    return frozenset(name for feature, name in _MACOS_FEATURES.items() if feature in present)
