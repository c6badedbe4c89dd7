"""Compiling and caching the library: a fault ends in a working library or one clear reason."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.test_folders import make_foreign
from windlass.errors import ConfigError
from windlass.kernels.native import compiled, compiler
from windlass.kernels.native.compiled import load
from windlass.kernels.native.compiler import NativeUnavailable, find_compilers
from windlass.kernels.native.linear import NativeLinear
from windlass.kernels.native.pool import Workers
from windlass.kernels.packed import Int8Group

_COMPILERS, _ = find_compilers()
needs_compiler = pytest.mark.skipif(not _COMPILERS, reason="no C++ compiler")

_TINY = 'extern "C" const char* windlass_simd() { return "tiny"; }\n'
_PROGRAM = (
    "import sys; from pathlib import Path; from windlass.kernels.native.compiled import load; "
    "print(load(Path(sys.argv[1]), sources=Path(sys.argv[2])).reason)"
)
_LOAD = (sys.executable, "-c", _PROGRAM)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Tiny sources that compile quickly."""
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "tiny.cpp").write_text(_TINY)
    return folder


def cached(folder: Path) -> list[Path]:
    return sorted((folder / "native").glob("*.so"))


@needs_compiler
def test_compiled_once_and_cached(tmp_path: Path, sources: Path) -> None:
    first = load(tmp_path, sources=sources)
    assert first.reason.startswith("compiled by")
    assert first.simd == "tiny"
    again = load(tmp_path, sources=sources)
    assert again.reason == f"from the cache: {first.path}"
    assert cached(tmp_path) == [first.path]


@needs_compiler
def test_changed_sources_and_another_cpu_are_recompiled(
    tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(tmp_path, sources=sources)
    (sources / "tiny.cpp").write_text(_TINY + "// changed\n")
    load(tmp_path, sources=sources)
    assert len(cached(tmp_path)) == 2
    monkeypatch.setattr(compiled, "cpu_identity", lambda: "another CPU")
    assert load(tmp_path, sources=sources).reason.startswith("compiled by")
    assert len(cached(tmp_path)) == 3


@needs_compiler
def test_a_damaged_file_is_rebuilt(tmp_path: Path, sources: Path) -> None:
    # Another process fills the cache: this one would keep a library that it has loaded.
    subprocess.run([*_LOAD, str(tmp_path), str(sources)], check=True, capture_output=True)
    (path,) = cached(tmp_path)
    path.write_bytes(b"not a library")
    rebuilt = load(tmp_path, sources=sources)
    assert rebuilt.reason.startswith("compiled by")
    assert rebuilt.path == path


@needs_compiler
def test_a_cache_that_cannot_be_written(tmp_path: Path, sources: Path) -> None:
    blocked = tmp_path / "a file"
    blocked.write_text("where the folder should be")
    found = load(blocked, sources=sources)
    assert found.simd == "tiny"
    assert "for this process only" in found.reason
    assert f"{blocked / 'native'} cannot be written" in found.reason


@needs_compiler
def test_one_compiler_with_two_names_is_called_once(
    tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (sources / "tiny.cpp").write_text("#error broken\n")
    for name in ("c++", "g++"):
        program = tmp_path / name
        real = find_compilers()[0][0].command[0]
        program.write_text(
            f'#!/bin/sh\n[ "$1" = --version ] && echo "{name} (Linux) 12.2.0" || exec {real} "$@"\n'
        )
        program.chmod(0o755)
    monkeypatch.setattr(compiler.shutil, "which", lambda name: tmp_path / name)
    monkeypatch.setattr(compiler, "_COMPILERS", (str(tmp_path / "c++"), str(tmp_path / "g++")))
    with pytest.raises(NativeUnavailable) as raised:
        load(tmp_path, sources=sources)
    assert str(raised.value).count("broken") == 1


@needs_compiler
def test_a_library_that_others_can_write_is_not_loaded(
    tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    umask = os.umask(0)
    try:
        path = load(tmp_path / "cache", sources=sources).path
    finally:
        os.umask(umask)
    for part in (path, path.parent, path.parent.parent):
        assert stat.S_IMODE(part.stat().st_mode) == 0o700
        part.chmod(0o770)
        with pytest.raises(ConfigError, match="mode 0770"):
            load(tmp_path / "cache", sources=sources)
        part.chmod(0o700)
    make_foreign(path, monkeypatch)
    with pytest.raises(ConfigError, match="belongs to user"):
        load(tmp_path / "cache", sources=sources)


@needs_compiler
def test_two_processes_at_once(tmp_path: Path, sources: Path) -> None:
    command = [*_LOAD, str(tmp_path), str(sources)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sorted(line.split()[0] for line in outputs) == ["compiled", "from"]
    assert len(cached(tmp_path)) == 1
    assert not [path for path in (tmp_path / "native").iterdir() if path.is_dir()]


def test_a_missing_compiler(tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(NativeUnavailable, match=r"no no-such-compiler \(set by CXX\)"):
        load(tmp_path, sources=sources)


@needs_compiler
def test_a_filled_cache_needs_no_compiler(
    tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(tmp_path, sources=sources)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert load(tmp_path, sources=sources).reason.startswith("from the cache; there is no compiler")


@pytest.mark.parametrize("answers", [True, False])
def test_a_broken_compiler(
    tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    broken = tmp_path / "broken++"
    greeting = '[ "$1" = --version ] && echo broken 1.0 && exit 0\n' if answers else ""
    broken.write_text(f"#!/bin/sh\n{greeting}echo 'error: the disk has eaten it' >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(NativeUnavailable, match=r"failed \(3\): error: the disk has eaten it"):
        load(tmp_path, sources=sources)
    assert cached(tmp_path) == []


@needs_compiler
def test_a_slow_compiler_is_waited_for(
    tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: dict[str, object] = {}
    run = subprocess.run

    def record(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        limits["--version" if "--version" in command else "compile"] = options.get("timeout")
        return run(command, **options)

    monkeypatch.setattr(subprocess, "run", record)
    load(tmp_path, sources=sources)
    assert limits["compile"] is None
    assert limits["--version"] is not None


_TOO_MANY_THREADS = """
import resource
from windlass.kernels.native.compiled import load
from windlass.kernels.native.pool import Pool
native = load()
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, used + 2**28))  # stacks for some threads
try:
    Pool(native, 4000)
except Exception as error:
    print(type(error).__name__, error)
"""


def test_a_refused_thread_is_an_error_and_not_an_abort() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _TOO_MANY_THREADS], capture_output=True, text=True, timeout=300
    )
    message = "NativeUnavailable the system refused 4000 threads\n"
    assert (done.returncode, done.stdout) == (0, message), done.stderr


def test_without_a_library_every_form_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("WINDLASS_CACHE", str(tmp_path))
    form = Int8Group(torch.zeros(8, 32, dtype=torch.int8), torch.ones(8, 1))
    why = NativeLinear(Workers(1)).refuse(form, torch.device("cpu"), torch.float32)
    assert why is not None
    assert "no no-such-compiler" in why
