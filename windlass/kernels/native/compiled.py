"""Compiles the C++ kernels once for this machine's CPU, keeps the result, and loads it.

The file's name is made of everything that it depends on, so a cache that another CPU, compiler or
version filled is never loaded. A library that another user could have written is a ConfigError.
What cannot be had is a NativeUnavailable with the reason.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from windlass.errors import UnsupportedError
from windlass.folders import cache_dir, check_private, make_private

SOURCES = Path(__file__).parent / "src"
_COMPILERS = ("c++", "g++", "clang++")
# A contracted a * b + c would round x otherwise than the definition says.
_FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-pthread"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)
_COMPILE_S = 300
_CPU_FIELDS = (  # of /proc/cpuinfo, on aarch64 and x86-64
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features"),
    *("vendor_id", "cpu family", "model", "model name", "stepping", "flags"),
)


class NativeUnavailable(UnsupportedError):
    """There is no native library, and the message says why. The plain kernels work without it."""


@dataclass(frozen=True, slots=True)
class Native:
    """The loaded library."""

    functions: ctypes.CDLL
    path: Path
    simd: str  # the instructions it was compiled for: "NEON dot product"
    reason: str  # how it came to be: "compiled by g++ 12.2.0 in 6.1 s"


@dataclass(frozen=True, slots=True)
class Compiler:
    """How to call it, and which it is."""

    command: tuple[str, ...]
    version: str  # the first line of --version


@dataclass(frozen=True, slots=True)
class _Recipe:
    compiler: Compiler
    flags: tuple[str, ...]
    sources: Path


def load(
    folder: Path | None = None, extra_flags: Sequence[str] = (), sources: Path = SOURCES
) -> Native:
    """The library from `folder` (the user's cache if None), compiled now if it is not there."""
    folder = (folder or cache_dir()) / "native"
    check_private(folder.parent, folder)
    flags = (*_FLAGS, *machine_flags(), *extra_flags)
    stem = _digest(*_texts(sources), *flags, cpu_identity())
    compilers, problems = find_compilers()
    for compiler in compilers:
        kept = folder / f"{stem}-{_digest(compiler.version)}.so"
        if (found := _open(kept, "from the cache")) is not None:
            return found
    if not compilers:
        for kept in sorted(folder.glob(f"{stem}-*.so")):
            if (found := _open(kept, "from the cache; there is no compiler now")) is not None:
                return found
    for compiler in compilers:
        try:
            kept = folder / f"{stem}-{_digest(compiler.version)}.so"
            return _build(_Recipe(compiler, flags, sources), kept)
        except NativeUnavailable as error:
            problems.append(str(error))
    raise NativeUnavailable("no native kernels: " + "; ".join(problems))


def cpu_identity() -> str:
    """What tells this CPU from others that would need another binary."""
    found = {platform.machine(), platform.processor()}
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = (line.partition(":") for line in info.read_text().splitlines())
        found |= {f"{k.strip()}={v.strip()}" for k, _, v in lines if k.strip() in _CPU_FIELDS}
    return "\n".join(sorted(found))


def machine_flags() -> tuple[str, ...]:
    """What makes a compiler use all that this CPU has."""
    if platform.machine() in ("aarch64", "arm64"):
        return ("-mcpu=native",)
    if platform.machine() in ("x86_64", "AMD64"):
        return ("-march=native",)
    return ()


def _texts(sources: Path) -> Iterator[str]:
    for path in sorted(sources.iterdir()):
        yield path.name
        yield path.read_text(encoding="utf-8")


def _digest(*parts: str) -> str:
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()


def find_compilers() -> tuple[list[Compiler], list[str]]:
    """Those that answer, in order of preference, and what is wrong with the others."""
    found: list[Compiler] = []
    problems: list[str] = []
    chosen = os.environ.get("CXX")
    for text in [chosen] if chosen else _COMPILERS:
        command = tuple(shlex.split(text))
        if not command or shutil.which(command[0]) is None:
            problems.append(f"no {text}" + (" (set by CXX)" if chosen else ""))
            continue
        try:
            said = _call([*command, "--version"])
        except NativeUnavailable as error:
            problems.append(str(error))
            continue
        version = said.strip().splitlines()[0] if said.strip() else text
        if version not in [other.version for other in found]:  # c++ often is g++
            found.append(Compiler(command, version))
    return found, problems


def _call(command: Sequence[str]) -> str:
    """Run a compiler; returns what it said."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"{command[0]} did not run: {error}") from error
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines()
        errors = [line for line in lines if "error" in line] or lines or ["it said nothing"]
        raise NativeUnavailable(f"{command[0]} failed ({done.returncode}): {errors[0][:300]}")
    return done.stdout


def _build(recipe: _Recipe, target: Path) -> Native:
    """Compile into the cache, or beside it where the cache cannot be written."""
    try:
        make_private(target.parent)
        # Whoever comes second waits, and finds the file.
        with FileLock(target.with_suffix(".lock")):
            if (found := _open(target, "from the cache")) is not None:
                return found
            with tempfile.TemporaryDirectory(dir=target.parent) as workshop:
                taken_s = _compile(recipe, Path(workshop))
                made = Path(workshop) / "windlass.so"
                made.chmod(0o700)  # a linker leaves what the umask allows
                os.replace(made, target)
        how = f"compiled by {recipe.compiler.version} in {taken_s:.1f} s"
    except OSError as error:
        why = f"{target.parent} cannot be written ({error.strerror or error})"
        target = Path(tempfile.mkdtemp(prefix="windlass-native-")) / "windlass.so"
        taken_s = _compile(recipe, target.parent)
        target.chmod(0o700)
        how = (
            f"compiled by {recipe.compiler.version} in {taken_s:.1f} s for this process only: {why}"
        )
    built = _open(target, how)
    if built is None:
        raise NativeUnavailable(f"{recipe.compiler.version} made {target}, which cannot be loaded")
    return built


def _compile(recipe: _Recipe, workshop: Path) -> float:
    """workshop/windlass.so out of all sources, side by side; returns the seconds."""
    start = time.perf_counter()
    call = [*recipe.compiler.command, *recipe.flags]
    sources = sorted(recipe.sources.glob("*.cpp"))
    objects = [str(workshop / f"{source.stem}.o") for source in sources]
    commands = [
        [*call, "-c", str(source), "-o", made]
        for source, made in zip(sources, objects, strict=True)
    ]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(_call, commands))
    _call([*call, "-shared", *objects, "-o", str(workshop / "windlass.so")])
    return time.perf_counter() - start


def _open(path: Path, how: str) -> Native | None:
    """Load a library; None when it is not there or was damaged, so that it is made again."""
    if not path.is_file():
        return None
    check_private(path)
    try:
        functions = ctypes.CDLL(str(path))
        functions.windlass_simd.restype = ctypes.c_char_p
        simd = functions.windlass_simd().decode()
    except (OSError, AttributeError):
        return None
    return Native(functions, path, simd, f"{how}: {path}" if how.startswith("from") else how)
