"""The kernels of x86-64 on any machine: cross-compiled, and AVX2 also run, by an emulator.

No emulator has AVX-512 or VNNI here, so what uses those is only compiled.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from windlass.kernels.native.compiled import SOURCES

_COMPILER = "x86_64-linux-gnu-g++"
_EMULATOR = "qemu-x86_64"
_LIBRARIES = Path("/usr/x86_64-linux-gnu")  # where distributions put those of a cross compiler
_FLAGS = ("-std=c++17", "-O1", "-ffp-contract=off", "-pthread", f"-I{SOURCES}")
_OWN = [
    Path(__file__).with_name(name) for name in ("selftest.cpp", "selftest_ops.h", "definition.h")
]

pytestmark = pytest.mark.skipif(
    shutil.which(_COMPILER) is None, reason=f"{_COMPILER} is not installed"
)


def _call(*command: str | Path) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _program(kept: Path, march: str) -> Path:
    """The self-test for a CPU; compiled once for the same sources."""
    text = b"".join(path.read_bytes() for path in [*_OWN, *sorted(SOURCES.iterdir())])
    program = kept / f"{march}-{hashlib.blake2b(text, digest_size=8).hexdigest()}"
    if program.is_file():
        return program
    call = (_COMPILER, *_FLAGS, f"-march={march}")
    sources = [_OWN[0], *sorted(SOURCES.glob("*.cpp"))]
    objects = [program.with_suffix(f".{source.stem}.o") for source in sources]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        pairs = zip(sources, objects, strict=True)
        list(pool.map(lambda pair: _call(*call, "-c", pair[0], "-o", pair[1]), pairs))
    _call(*call, *objects, "-o", program)
    for made in objects:
        made.unlink()
    return program


@pytest.mark.skipif(shutil.which(_EMULATOR) is None, reason=f"{_EMULATOR} is not installed")
def test_avx2_computes_what_every_operation_means(pytestconfig: pytest.Config) -> None:
    assert pytestconfig.cache is not None
    program = _program(pytestconfig.cache.mkdir("windlass_x86"), "haswell")
    said = _call(_EMULATOR, "-L", _LIBRARIES, "-cpu", "max", program)
    assert said == "AVX2: all products agree\n"


@pytest.mark.parametrize(
    ("march", "instruction"), [("alderlake", "{vex} vpdpbusd"), ("icelake-server", "vpdpbusd")]
)
def test_products_of_whole_numbers_use_vnni_where_a_cpu_has_it(
    march: str, instruction: str, tmp_path: Path
) -> None:
    written = tmp_path / "int_gemm.s"
    _call(
        _COMPILER, *_FLAGS, "-O0", f"-march={march}", "-S", SOURCES / "int_gemm.cpp", "-o", written
    )
    text = written.read_text()
    assert instruction in text
    assert "vpmaddubsw" not in text
