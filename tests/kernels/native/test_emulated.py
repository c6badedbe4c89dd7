"""Kernels for other CPUs than this one: compiled for them, and run where an emulator is installed.

qemu has AVX2 and every NEON extension in use. It has neither AVX-512 nor AMX: test_special_values.py runs
AVX-512 on CPUs that have it, and this file only checks which instructions the compiler emitted.
"""

from __future__ import annotations

import platform
import shutil
from pathlib import Path

import pytest

from tests.kernels.native.backends import build_selftest, run_checked
from windlass.kernels.native.compiled import SOURCES

_X86 = "x86_64-linux-gnu-g++"
_ARM = "g++" if platform.machine() == "aarch64" else "aarch64-linux-gnu-g++"
_NEON_I8MM = "armv8.2-a+dotprod+fp16+i8mm+bf16"


def _needs(*programs: str) -> pytest.MarkDecorator:
    missing = [program for program in programs if shutil.which(program) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def _emulator(machine: str) -> tuple[str | Path, ...]:
    """Return the qemu command line, with the folder of a cross compiler's libraries."""
    native = machine == platform.machine()
    libraries = Path("/") if native else Path(f"/usr/{machine}-linux-gnu")
    return (f"qemu-{machine}", "-L", libraries, "-cpu", "max")


@_needs(_X86, "qemu-x86_64")
def test_avx2_operations_match_their_definitions(pytestconfig: pytest.Config) -> None:
    program = build_selftest(pytestconfig, [_X86], ["-O1", "-march=haswell"])
    assert run_checked(*_emulator("x86_64"), program) == "AVX2: all GEMMs agree\n"


@_needs(_ARM, "qemu-aarch64")
def test_i8mm_and_bfloat16_gemms_match_their_definitions(pytestconfig: pytest.Config) -> None:
    program = build_selftest(pytestconfig, [_ARM], ["-O1", f"-march={_NEON_I8MM}"])
    command = (*_emulator("aarch64"), program)
    assert run_checked(*command, "gemms") == "NEON i8mm and bfloat16: all GEMMs agree\n"
    assert run_checked(*command, "special") == "NEON i8mm and bfloat16: special values agree\n"


@_needs(_ARM, "qemu-aarch64")
@pytest.mark.skipif(platform.machine() == "aarch64", reason="the CPU itself runs NEON")
@pytest.mark.parametrize("march", ["armv8.2-a+dotprod", "armv8.2-a+dotprod+fp16"])
def test_neon_operations_match_their_definitions(pytestconfig: pytest.Config, march: str) -> None:
    program = build_selftest(pytestconfig, [_ARM], ["-O1", f"-march={march}"])
    assert run_checked(*_emulator("aarch64"), program) == "NEON dot product: all GEMMs agree\n"


@_needs(_X86)
@pytest.mark.parametrize(
    ("march", "source", "instructions"),
    [
        ("alderlake", "int_gemm", ["{vex} vpdpbusd"]),
        ("sapphirerapids", "int_gemm", ["vpdpbusd", "%zmm", "tdpbsud"]),
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
