"""Libraries in wheels: the level of a CPU, and when the package's library is used instead of a compiled one."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from windlass.kernels.native import prebuilt
from windlass.kernels.native.compiled import SOURCES, load
from windlass.kernels.native.compiler import NativeUnavailable, find_compilers
from windlass.kernels.native.levels import levels, linux_features, macos_features, runnable

_COMPILERS, _ = find_compilers()
needs_compiler = pytest.mark.skipif(not _COMPILERS, reason="no C++ compiler")
needs_levels = pytest.mark.skipif(
    not levels(platform.machine()), reason="no wheel has libraries for this architecture"
)
ROOT = Path(__file__).parents[3]
# A library without a backend, like that of lora/src.
_TINY = 'extern "C" const char* windlass_simd() { return "compiler default"; }\n'

_HASWELL = "fpu fma movbe popcnt avx f16c abm bmi1 avx2 bmi2"
_SKYLAKE_X = f"{_HASWELL} avx512f avx512dq avx512cd avx512bw avx512vl"
_N1 = "fp asimd aes crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp ssbs"


@pytest.mark.parametrize(
    ("machine", "features", "expected"),
    [
        ("x86_64", "fpu sse4_2 avx", "x86_64-portable"),
        ("x86_64", _HASWELL, "x86_64-avx2"),
        ("x86_64", _HASWELL.replace("bmi2", ""), "x86_64-portable"),
        ("x86_64", f"{_HASWELL} avx_vnni", "x86_64-avx2_vnni"),
        ("x86_64", _SKYLAKE_X, "x86_64-avx512_bw"),
        ("AMD64", f"{_SKYLAKE_X} avx512_vnni", "x86_64-avx512_vnni"),
        ("x86_64", f"{_SKYLAKE_X} avx512_vnni avx512_bf16", "x86_64-avx512_bf16"),
        ("x86_64", f"{_SKYLAKE_X} avx512_vnni avx512_bf16 amx_tile", "x86_64-avx512_bf16"),
        (
            "x86_64",
            f"{_SKYLAKE_X} avx_vnni avx512_vnni avx512_bf16 amx_bf16 amx_tile amx_int8",
            "x86_64-amx",
        ),
        ("aarch64", "fp asimd crc32", "aarch64-portable"),
        ("aarch64", _N1, "aarch64-dotprod"),
        ("arm64", f"{_N1} i8mm bf16", "aarch64-i8mm"),
    ],
)
def test_the_best_level_of_a_cpu(machine: str, features: str, expected: str) -> None:
    assert runnable(machine, frozenset(features.split()))[0].name == expected


def test_an_architecture_without_levels() -> None:
    assert runnable("riscv64", frozenset()) == []


def test_features_are_those_of_every_core() -> None:
    two = "processor\t: 0\nflags\t\t: avx2 amx_tile\n\nprocessor\t: 1\nflags\t\t: avx2 fma\n"
    assert linux_features(two) == {"avx2"}
    assert linux_features("CPU part\t: 0xd0c\nFeatures\t: fp asimddp\n") == {"fp", "asimddp"}
    assert linux_features("") == frozenset()


def test_features_of_macos() -> None:
    m1 = "".join(
        f"hw.optional.arm.FEAT_{name}: {value}\n"
        for name, value in {
            **dict.fromkeys(("DotProd", "FP16", "LSE", "LSE2", "RDM", "CRC32"), 1),
            **dict.fromkeys(("BF16", "I8MM"), 0),
        }.items()
    )
    assert runnable("arm64", macos_features(m1))[0].name == "aarch64-dotprod"
    m2 = m1.replace(": 0", ": 1")
    assert runnable("arm64", macos_features(m2))[0].name == "aarch64-i8mm"
    assert runnable("arm64", macos_features("hw.optional.neon: 1\n"))[0].name == "aarch64-portable"


@needs_compiler
@needs_levels
@pytest.mark.parametrize("level", levels(platform.machine()), ids=lambda level: level.name)
def test_the_flags_of_a_level_select_its_backend(level: prebuilt.Level) -> None:
    call = [*_COMPILERS[0].command, *level.flags, "-std=c++17", "-x", "c++", "-E"]
    done = subprocess.run([*call, str(SOURCES / "simd.h")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.findall(r'kSimdName = "(.*)"', done.stdout) == [level.simd]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package of tiny sources, with a library for each level."""
    sources = tmp_path / "package" / "src"
    sources.mkdir(parents=True)
    (sources / "tiny.cpp").write_text(_TINY)
    prebuilt.build_all(sources, sources.parent / "prebuilt", platform.machine())
    return sources.parent


def _libraries(package: Path) -> list[Path]:
    return sorted((package / "prebuilt").iterdir())


@needs_compiler
@needs_levels
def test_the_packages_library_needs_no_compiler_and_no_cache(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(_libraries(package)) == len(levels(platform.machine()))
    monkeypatch.setenv("CXX", "no-such-compiler")
    found = load(tmp_path / "cache", sources=package / "src")
    best = runnable(platform.machine(), prebuilt.cpu_features())[0]
    assert found.path.name.startswith(f"{best.name}-")
    assert found.reason == f"from the package: {found.path}"
    assert found.compile_s == 0
    assert not (tmp_path / "cache").exists()


def _compiled_instead(package: Path, cache: Path, why: str) -> None:
    """Check that the library is compiled, and that the reason says why the package's is not used."""
    found = load(cache, sources=package / "src")
    assert found.path.is_relative_to(cache)
    assert re.fullmatch(rf"compiled by .*; .*\.so of the package is not used: {why}", found.reason)
    again = load(cache, sources=package / "src")
    assert re.fullmatch(rf"from the cache: .* is not used: {why}", again.reason)


@needs_compiler
@needs_levels
def test_a_library_of_other_sources_is_not_used(package: Path, tmp_path: Path) -> None:
    (package / "src" / "tiny.cpp").write_text(_TINY + "// changed\n")
    _compiled_instead(package, tmp_path / "cache", "it was compiled from other sources .*")


@needs_compiler
@needs_levels
def test_a_missing_level_is_compiled(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = load(sources=package / "src").path
    best.unlink()
    if len(levels(platform.machine())) > 1:
        _compiled_instead(package, tmp_path / "cache", "it is missing; the package has .*")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(NativeUnavailable, match=r"no no-such-compiler .*; .* it is missing"):
        load(tmp_path / "other", sources=package / "src")


@needs_compiler
@needs_levels
def test_a_damaged_library_is_not_used(package: Path, tmp_path: Path) -> None:
    installed = shutil.copytree(package, tmp_path / "installed")  # not loaded by this process yet
    for path in _libraries(installed):
        path.write_bytes(b"not a library")
    _compiled_instead(installed, tmp_path / "cache", "it cannot be loaded: .*")


@needs_compiler
@needs_levels
def test_a_library_that_others_can_write_is_not_used(package: Path, tmp_path: Path) -> None:
    for path in _libraries(package):
        path.chmod(0o757)
    _compiled_instead(package, tmp_path / "cache", ".* has mode 0757, so that other users can .*")


@needs_compiler
@needs_levels
def test_a_library_in_a_folder_that_others_can_write_is_not_used(
    package: Path, tmp_path: Path
) -> None:
    (package / "prebuilt").chmod(0o777)
    _compiled_instead(package, tmp_path / "cache", ".*/prebuilt has mode 0777.*")


@needs_compiler
@needs_levels
def test_another_architectures_libraries_are_not_used(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prebuilt, "runnable", lambda *_: [])
    found = load(tmp_path / "cache", sources=package / "src")
    assert found.reason.startswith("compiled by")
    assert f"none is for {platform.machine()}" in found.reason


@needs_compiler
@needs_levels
def test_flags_of_a_caller_are_compiled(package: Path, tmp_path: Path) -> None:
    found = load(tmp_path / "cache", ["-O0"], package / "src")
    assert found.reason.startswith("compiled by")
    assert "package" not in found.reason


@needs_compiler
def test_an_architecture_without_levels_has_no_platform_wheel(tmp_path: Path) -> None:
    with pytest.raises(NativeUnavailable, match="no instruction levels are defined for 'riscv64'"):
        prebuilt.build_all(tmp_path, tmp_path / "prebuilt", "riscv64")


@needs_compiler
@needs_levels
def test_a_library_of_another_backend_is_an_error(tmp_path: Path) -> None:
    sources = tmp_path / "src"
    sources.mkdir()
    (sources / "tiny.cpp").write_text(_TINY.replace("compiler default", "another backend"))
    with pytest.raises(NativeUnavailable, match="reports 'another backend' instead of"):
        prebuilt.build_all(sources, tmp_path / "prebuilt", platform.machine())


_BUILD = (
    "import sys, setuptools.build_meta as build; print(getattr(build, sys.argv[1])(sys.argv[2]))"
)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that wheels are built from, with tiny kernels."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(
        ROOT / "windlass", folder / "windlass", ignore=shutil.ignore_patterns("__pycache__", "src")
    )
    for sources in ("kernels/native/src", "lora/src"):
        (folder / "windlass" / sources).mkdir()
        (folder / "windlass" / sources / "tiny.cpp").write_text(_TINY)
    return folder


def _build(checkout: Path, kind: str, compiles: bool = False) -> Path:
    """Build a wheel or an sdist, as pip does without isolation; return the file."""
    environment = os.environ | {"WINDLASS_BUILD_KERNELS": str(int(compiles)), "PYTHONPATH": ""}
    command = [sys.executable, "-W", "ignore", "-c", _BUILD, kind, "dist"]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return checkout / "dist" / done.stdout.splitlines()[-1]


@needs_compiler
@needs_levels
def test_wheels_and_their_libraries(checkout: Path, tmp_path: Path) -> None:
    platform_wheel = _build(checkout, "build_wheel", compiles=True)
    assert re.search(rf"-py3-none-\w+_{platform.machine()}\.whl$", platform_wheel.name)
    with zipfile.ZipFile(platform_wheel) as wheel:
        names = wheel.namelist()
        wheel.extractall(tmp_path)
    found = {name for name in names if name.endswith(".so")}
    for package in ("windlass/kernels/native", "windlass/lora"):
        for level in levels(platform.machine()):
            (one,) = (
                name for name in found if name.startswith(f"{package}/prebuilt/{level.name}-")
            )
            found.remove(one)
        loaded = load(tmp_path / "cache", sources=tmp_path / package / "src")
        assert loaded.path.is_relative_to(tmp_path / package / "prebuilt")
    assert not found

    # In the same folder: the libraries of the earlier build must not be packed.
    pure = _build(checkout, "build_wheel")
    assert pure.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(pure) as wheel:
        assert set(wheel.namelist()) == {name for name in names if not name.endswith(".so")}


def test_the_sdist_has_what_builds_a_wheel(checkout: Path) -> None:
    with tarfile.open(_build(checkout, "build_sdist")) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    sources = {"windlass/kernels/native/src/tiny.cpp", "windlass/lora/src/tiny.cpp"}
    assert names >= {"setup.py", "pyproject.toml", "README.md", "LICENSE", *sources}
    assert not [name for name in names if name.endswith(".so")]
