"""Kernels for CPUs that this one is not: compiled for them, and run where an emulator is there.

qemu has AVX2 and every NEON extension in use. It has neither AVX-512 nor AMX: test_special_values.py runs
AVX-512 on CPUs that have it, and here only the instructions are looked for.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from windlass.kernels.native.compiled import SOURCES

_X86 = "x86_64-linux-gnu-g++"
_ARM = "g++" if platform.machine() == "aarch64" else "aarch64-linux-gnu-g++"
_FLAGS = ("-std=c++17", "-O1", "-ffp-contract=off", "-pthread", f"-I{SOURCES}")
_OWN = [
    Path(__file__).with_name(name)
    for name in ("selftest.cpp", "selftest_ops.h", "selftest_special.h", "definition.h")
]


def _needs(*programs: str) -> pytest.MarkDecorator:
    missing = [program for program in programs if shutil.which(program) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def _libraries(machine: str) -> Path:
    """Where distributions put those of a cross compiler; the machine's own are everywhere."""
    return Path("/") if machine == platform.machine() else Path(f"/usr/{machine}-linux-gnu")


def _call(*command: str | Path) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _program(config: pytest.Config, compiler: str, march: str) -> Path:
    """The self-test for a CPU; compiled once for the same sources."""
    assert config.cache is not None
    text = b"".join(path.read_bytes() for path in [*_OWN, *sorted(SOURCES.iterdir())])
    digest = hashlib.blake2b(text, digest_size=8).hexdigest()
    program = config.cache.mkdir("windlass_emulated") / f"{march}-{digest}"
    if program.is_file():
        return program
    call = (compiler, *_FLAGS, f"-march={march}")
    sources = [_OWN[0], *sorted(SOURCES.glob("*.cpp"))]
    objects = [program.with_name(f"{program.name}.{source.stem}.o") for source in sources]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        pairs = zip(sources, objects, strict=True)
        list(pool.map(lambda pair: _call(*call, "-c", pair[0], "-o", pair[1]), pairs))
    _call(*call, *objects, "-o", program)
    for made in objects:
        made.unlink()
    return program


@_needs(_X86, "qemu-x86_64")
def test_avx2_computes_what_every_operation_means(pytestconfig: pytest.Config) -> None:
    program = _program(pytestconfig, _X86, "haswell")
    said = _call("qemu-x86_64", "-L", _libraries("x86_64"), "-cpu", "max", program)
    assert said == "AVX2: all products agree\n"


@_needs(_ARM, "qemu-aarch64")
def test_i8mm_and_bfloat16_compute_what_products_mean(pytestconfig: pytest.Config) -> None:
    program = _program(pytestconfig, _ARM, "armv8.2-a+dotprod+fp16+i8mm+bf16")
    emulator = ("qemu-aarch64", "-L", _libraries("aarch64"), "-cpu", "max")
    assert _call(*emulator, program, "products") == "NEON i8mm and bfloat16: all products agree\n"
    assert _call(*emulator, program, "special") == "NEON i8mm and bfloat16: special values agree\n"


@_needs(_ARM, "qemu-aarch64")
@pytest.mark.skipif(platform.machine() == "aarch64", reason="the CPU itself runs NEON")
@pytest.mark.parametrize("march", ["armv8.2-a+dotprod", "armv8.2-a+dotprod+fp16"])
def test_neon_computes_what_every_operation_means(pytestconfig: pytest.Config, march: str) -> None:
    program = _program(pytestconfig, _ARM, march)
    said = _call("qemu-aarch64", "-L", _libraries("aarch64"), "-cpu", "max", program)
    assert said == "NEON dot product: all products agree\n"


@_needs(_X86)
@pytest.mark.parametrize(
    ("march", "source", "instructions"),
    [
        ("alderlake", "int_gemm", ["{vex} vpdpbusd"]),
        ("sapphirerapids", "int_gemm", ["vpdpbusd", "%zmm", "tdpbsud"]),
        ("sapphirerapids", "bf16_gemm", ["vdpbf16ps", "%zmm", "tdpbf16ps"]),
    ],
)
def test_products_use_what_a_cpu_has(
    march: str, source: str, instructions: list[str], tmp_path: Path
) -> None:
    path = SOURCES / f"{source}.cpp"
    written = tmp_path / "assembly.s"
    _call(_X86, *_FLAGS, "-O0", f"-march={march}", "-S", path, "-o", written)
    text = written.read_text()
    assert [one for one in instructions if one not in text] == []
    assert "vpmaddubsw" not in text
