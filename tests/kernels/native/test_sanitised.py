"""The kernels under AddressSanitizer and UBSan, in a program of their own."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from windlass.kernels.native.compiled import SOURCES, find_compilers, machine_flags

_FLAGS = ("-std=c++17", "-O0", "-ffp-contract=off", "-pthread", f"-I{SOURCES}")
_SANITISERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
_COMPILERS, _ = find_compilers()


@pytest.mark.skipif(not _COMPILERS, reason="no C++ compiler")
def test_sanitisers_find_nothing(tmp_path: Path) -> None:
    call = [*_COMPILERS[0].command, *_FLAGS, *_SANITISERS, *machine_flags()]
    sources = [Path(__file__).with_name("selftest.cpp"), *sorted(SOURCES.glob("*.cpp"))]
    made = [str(tmp_path / f"{source.stem}.o") for source in sources]

    def compile_one(pair: tuple[Path, str]) -> None:
        subprocess.run([*call, "-c", str(pair[0]), "-o", pair[1]], check=True)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compile_one, zip(sources, made, strict=True)))
    program = tmp_path / "selftest"
    subprocess.run([*call, *made, "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all products agree" in done.stdout
