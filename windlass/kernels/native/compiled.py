"""Compiles the C++ kernels for this machine's CPU, caches the library, and loads it.

The file name is a hash of sources, flags, CPU and compiler, so a library built by another CPU, compiler or
version is never loaded. A library that another user could have written is a ConfigError. If there is no
library, NativeUnavailable gives the reason.
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
from dataclasses import dataclass, replace
from pathlib import Path

from filelock import FileLock

from windlass.errors import UnsupportedError
from windlass.folders import cache_dir, check_private, make_private
from windlass.start_log import start_bar

SOURCES = Path(__file__).parent / "src"
_COMPILERS = ("c++", "g++", "clang++")
# Contracting a * b + c would change the rounding of quantised activations.
_FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-pthread"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)
_COMPILE_TIMEOUT_S = 300
_CPU_FIELDS = (  # of /proc/cpuinfo, on aarch64 and x86-64
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features"),
    *("vendor_id", "cpu family", "model", "model name", "stepping", "flags"),
)


class NativeUnavailable(UnsupportedError):
    """There is no native library; the message gives the reason. The reference kernels work without."""


@dataclass(frozen=True, slots=True)
class Native:
    """A loaded library."""

    functions: ctypes.CDLL
    path: Path
    simd: str  # its instruction set: "NEON dot product"
    reason: str  # its origin: "compiled by g++ 12.2.0 in 6.1 s"
    compile_s: float = 0.0  # 0: it was in the cache
    is_temporary: bool = False  # the cache cannot be written


@dataclass(frozen=True, slots=True)
class Compiler:
    """A compiler's command line and version."""

    command: tuple[str, ...]
    version: str  # the first line of --version


@dataclass(frozen=True, slots=True)
class _Build:
    compiler: Compiler
    flags: tuple[str, ...]
    sources: Path


def load(
    folder: Path | None = None, extra_flags: Sequence[str] = (), sources: Path = SOURCES
) -> Native:
    """Load the library from `folder` (default: the user's cache), compiled if it is not there."""
    cache = (folder or cache_dir()) / "native"
    compilers, problems = find_compilers()
    found = cached_library(folder, extra_flags, sources, compilers)
    if found is not None:
        return found
    flags = (*_FLAGS, *machine_flags(), *extra_flags)
    stem = _stem(flags, sources)
    for compiler in compilers:
        try:
            path = cache / f"{stem}-{_digest(compiler.version)}.so"
            return _build(_Build(compiler, flags, sources), path)
        except NativeUnavailable as error:
            problems.append(str(error))
    raise NativeUnavailable("no native kernels: " + "; ".join(problems))


def cached_library(
    folder: Path | None = None,
    extra_flags: Sequence[str] = (),
    sources: Path = SOURCES,
    compilers: Sequence[Compiler] | None = None,
) -> Native | None:
    """The library that `load` finds without compiling; None: it will compile one, or there is none."""
    folder = (folder or cache_dir()) / "native"
    check_private(folder.parent, folder)
    stem = _stem((*_FLAGS, *machine_flags(), *extra_flags), sources)
    if compilers is None:
        compilers, _ = find_compilers()
    for compiler in compilers:
        path = folder / f"{stem}-{_digest(compiler.version)}.so"
        if (found := _open(path, "from the cache")) is not None:
            return found
    if not compilers:
        for path in sorted(folder.glob(f"{stem}-*.so")):
            if (found := _open(path, "from the cache; there is no compiler now")) is not None:
                return found
    return None


def _stem(flags: Sequence[str], sources: Path) -> str:
    return _digest(*_texts(sources), *flags, cpu_identity())


def cpu_identity() -> str:
    """Identify this CPU among those that need different binaries."""
    found = {platform.machine(), platform.processor()}
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = (line.partition(":") for line in info.read_text().splitlines())
        found |= {f"{k.strip()}={v.strip()}" for k, _, v in lines if k.strip() in _CPU_FIELDS}
    return "\n".join(sorted(found))


def machine_flags() -> tuple[str, ...]:
    """Return the flags that enable all instructions of this CPU."""
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
    """Return the working compilers in order of preference, and the problems of the others."""
    found: list[Compiler] = []
    problems: list[str] = []
    chosen = os.environ.get("CXX")
    for text in [chosen] if chosen else _COMPILERS:
        command = tuple(shlex.split(text))
        if not command or shutil.which(command[0]) is None:
            problems.append(f"no {text}" + (" (set by CXX)" if chosen else ""))
            continue
        try:
            output = _call([*command, "--version"])
        except NativeUnavailable as error:
            problems.append(str(error))
            continue
        version = output.strip().splitlines()[0] if output.strip() else text
        if version not in [other.version for other in found]:  # c++ is often g++
            found.append(Compiler(command, version))
    return found, problems


def _call(command: Sequence[str]) -> str:
    """Run a compiler and return its output."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"{command[0]} did not run: {error}") from error
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines()
        errors = [line for line in lines if "error" in line] or lines or ["no output"]
        raise NativeUnavailable(f"{command[0]} failed ({done.returncode}): {errors[0][:300]}")
    return done.stdout


def _build(build: _Build, target: Path) -> Native:
    """Compile into the cache, or into a temporary folder if the cache is not writable."""
    try:
        make_private(target.parent)
        # A second process waits here and then finds the file.
        with FileLock(target.with_suffix(".lock")):
            if (found := _open(target, "from the cache")) is not None:
                return found
            with tempfile.TemporaryDirectory(dir=target.parent) as build_folder:
                duration_s = _compile(build, Path(build_folder))
                library = Path(build_folder) / "windlass.so"
                library.chmod(0o700)  # the linker applies the umask only
                os.replace(library, target)
        origin, is_temporary = f"compiled by {build.compiler.version} in {duration_s:.1f} s", False
    except OSError as error:
        is_temporary = True
        why = f"{target.parent} cannot be written ({error.strerror or error})"
        target = Path(tempfile.mkdtemp(prefix="windlass-native-")) / "windlass.so"
        duration_s = _compile(build, target.parent)
        target.chmod(0o700)
        origin = f"compiled by {build.compiler.version} in {duration_s:.1f} s for this process only: {why}"
    built = _open(target, origin)
    if built is None:
        raise NativeUnavailable(f"{build.compiler.version} built {target}, which cannot be loaded")
    return replace(built, compile_s=duration_s, is_temporary=is_temporary)


def _compile(build: _Build, folder: Path) -> float:
    """Compile all sources in parallel to folder/windlass.so; return the seconds."""
    start = time.perf_counter()
    call = [*build.compiler.command, *build.flags]
    sources = sorted(build.sources.glob("*.cpp"))
    objects = [str(folder / f"{source.stem}.o") for source in sources]
    commands = [
        [*call, "-c", str(source), "-o", output]
        for source, output in zip(sources, objects, strict=True)
    ]
    with (
        start_bar("compiling CPU kernels for this machine, once", len(commands)) as advance,
        ThreadPoolExecutor(os.cpu_count() or 1) as pool,
    ):
        for _ in pool.map(_call, commands):
            advance()
    _call([*call, "-shared", *objects, "-o", str(folder / "windlass.so")])
    return time.perf_counter() - start


def _open(path: Path, origin: str) -> Native | None:
    """Load a library; return None if it is missing or damaged, so that it is rebuilt."""
    if not path.is_file():
        return None
    check_private(path)
    try:
        functions = ctypes.CDLL(str(path))
        functions.windlass_simd.restype = ctypes.c_char_p
        simd = functions.windlass_simd().decode()
    except (OSError, AttributeError):
        return None
    return Native(
        functions=functions,
        path=path,
        simd=simd,
        reason=f"{origin}: {path}" if origin.startswith("from") else origin,
    )
