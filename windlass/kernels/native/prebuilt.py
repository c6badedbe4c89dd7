"""The libraries of a platform wheel: one per instruction level, compiled when the wheel was built.

They lie beside the sources, as prebuilt/<level>-<digest>.so. The digest covers sources and flags, so a
library of other sources is never loaded. A checkout and the wheel for any platform have none.
Imports nothing but the standard library, like compiler.py.
"""

from __future__ import annotations

import ctypes
import platform
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from windlass.folders import package_weakness
from windlass.kernels.native.compiler import (
    FLAGS,
    Build,
    NativeUnavailable,
    digest,
    find_compilers,
    source_texts,
)
from windlass.kernels.native.levels import Level, cpu_features, levels, runnable

FOLDER = "prebuilt"
_OTHER_NAMES = (  # that a library may report instead of its level's
    "compiler default",  # lora/src
    "AVX-512 VNNI and BF16 (the system does not allow AMX)",
)


@dataclass(frozen=True, slots=True)
class Prebuilt:
    """The library in the package for this CPU."""

    path: Path
    problem: str | None  # why it is not used


def find(sources: Path) -> Prebuilt | None:
    """Find the library for this CPU's best level; None if the package has no libraries at all."""
    folder = _folder(sources)
    present = sorted(path.name for path in folder.glob("*.so"))
    if not present:
        return None
    found = runnable(platform.machine(), cpu_features())
    if not found:
        return Prebuilt(folder, f"none is for {platform.machine()}: {', '.join(present)}")
    level = found[0]
    path = folder / _file_name(level, sources)
    return Prebuilt(path, _problem(path, level, present))


def _problem(path: Path, level: Level, present: Sequence[str]) -> str | None:
    if path.name not in present:
        if any(name.startswith(f"{level.name}-") for name in present):
            return "it was compiled from other sources than those beside it"
        return f"it is missing; the package has {', '.join(present)}"
    return package_weakness(path)


def build_all(sources: Path, target: Path, machine: str) -> list[Path]:
    """Compile the libraries of all levels of an architecture into the new folder `target`.

    Those that this CPU can run are loaded once: one that reports another backend is an error.
    """
    wanted = levels(machine)
    if not wanted:
        raise NativeUnavailable(f"no instruction levels are defined for {machine!r}")
    compilers, problems = find_compilers()
    if not compilers:
        raise NativeUnavailable("no C++ compiler: " + "; ".join(problems))
    target.mkdir(parents=True)
    return [_build(Build(compilers[0], _flags(level), sources), level, target) for level in wanted]


def _build(build: Build, level: Level, target: Path) -> Path:
    with tempfile.TemporaryDirectory() as folder:
        seconds = build.run(Path(folder))
        path = target / _file_name(level, build.sources)
        shutil.copyfile(Path(folder) / "windlass.so", path)
    path.chmod(0o755)
    if level in runnable(platform.machine(), cpu_features()):
        simd = simd_name(ctypes.CDLL(str(path)))
        if simd not in (level.simd, *_OTHER_NAMES):
            raise NativeUnavailable(f"{path.name} reports {simd!r} instead of {level.simd!r}")
    print(f"compiled {path.name} in {seconds:.0f} s by {build.compiler.version}", flush=True)
    return path


def simd_name(functions: ctypes.CDLL) -> str:
    """The instruction set that a library reports."""
    functions.windlass_simd.restype = ctypes.c_char_p
    name: str = functions.windlass_simd().decode()
    return name


def _folder(sources: Path) -> Path:
    return sources.parent / FOLDER


def _file_name(level: Level, sources: Path) -> str:
    return f"{level.name}-{digest(*source_texts(sources), *_flags(level))}.so"


def _flags(level: Level) -> tuple[str, ...]:
    return (*FLAGS, *level.flags)
