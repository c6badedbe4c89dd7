"""Kernels for other CPUs than this one: compiled for them, and run where an emulator is installed.

qemu has AVX2 and every NEON extension in use. It has neither AVX-512 nor AMX: test_special_values.py and
test_sanitised.py run them on CPUs that have them, and this file only checks which instructions the compiler
emitted.
"""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kernels.native.backends import HASWELL, SelfTest, run_checked, runnable
from windlass.kernels.native.compiled import SOURCES

_X86 = "x86_64-linux-gnu-g++"
_ARM = "g++" if platform.machine() == "aarch64" else "aarch64-linux-gnu-g++"


def _needs(*programs: str) -> pytest.MarkDecorator:
    missing = [program for program in programs if shutil.which(program) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def _emulated(compiler: str, machine: str, march: str, *arguments: str) -> SelfTest:
    """With the folder of a cross compiler's libraries for the emulator."""
    libraries = "/" if machine == platform.machine() else f"/usr/{machine}-linux-gnu"
    emulator = (f"qemu-{machine}", "-L", libraries, "-cpu", "max")
    return SelfTest((compiler,), ("-O1", f"-march={march}"), emulator, arguments)


_RUNS_AVX2 = HASWELL in runnable()
_HASWELL = (
    SelfTest((_X86,), ("-O1", "-march=haswell"))
    if _RUNS_AVX2
    else _emulated(_X86, "x86_64", "haswell")
)
_I8MM = _emulated(_ARM, "aarch64", "armv8.2-a+dotprod+fp16+i8mm+bf16", "gemms", "special")
_NEON = _emulated(_ARM, "aarch64", "armv8.2-a+dotprod")
_NEON_FP16 = _emulated(_ARM, "aarch64", "armv8.2-a+dotprod+fp16")


@_needs(_X86, *([] if _RUNS_AVX2 else ["qemu-x86_64"]))
@pytest.mark.parametrize("selftest", [_HASWELL], ids=["haswell"])
def test_avx2_operations_match_their_definitions(
    selftest: SelfTest, run_selftest: Callable[[SelfTest], str]
) -> None:
    assert run_selftest(selftest) == "AVX2: all GEMMs agree\n"


@_needs(_ARM, "qemu-aarch64")
@pytest.mark.parametrize("selftest", [_I8MM], ids=["i8mm"])
def test_i8mm_and_bfloat16_gemms_match_their_definitions(
    selftest: SelfTest, run_selftest: Callable[[SelfTest], str]
) -> None:
    backend = "NEON i8mm and bfloat16"
    assert run_selftest(selftest) == (
        f"{backend}: all GEMMs agree\n{backend}: special values agree\n"
    )


@_needs(_ARM, "qemu-aarch64")
@pytest.mark.skipif(platform.machine() == "aarch64", reason="the CPU itself runs NEON")
@pytest.mark.parametrize("selftest", [_NEON, _NEON_FP16], ids=["float32", "float16"])
def test_neon_operations_match_their_definitions(
    selftest: SelfTest, run_selftest: Callable[[SelfTest], str]
) -> None:
    assert run_selftest(selftest) == "NEON dot product: all GEMMs agree\n"


@pytest.mark.slow
@_needs(_X86)
@pytest.mark.parametrize(
    ("march", "source", "instructions"),
    [
        ("alderlake", "int_gemm", ["{vex} vpdpbusd"]),
        ("cascadelake", "int_gemm", ["vpdpbusd", "%zmm"]),
        ("sapphirerapids", "int_gemm", ["vpdpbusd", "%zmm"]),
        ("sapphirerapids", "bf16_gemm", ["vdpbf16ps", "%zmm", "tdpbf16ps"]),
    ],
)
def test_gemms_use_the_instructions_of_the_cpu(
    march: str, source: str, instructions: list[str], tmp_path: Path
) -> None:
    assembly = tmp_path / "assembly.s"
    flags = ("-std=c++17", "-O0", "-ffp-contract=off", f"-march={march}")
    run_checked(_X86, *flags, "-S", SOURCES / f"{source}.cpp", "-o", assembly)
    text = assembly.read_text()
    assert [name for name in instructions if name not in text] == []
    assert "vpmaddubsw" not in text
