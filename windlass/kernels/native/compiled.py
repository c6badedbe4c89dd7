"""Loads the library of C++ kernels: from the package, from the cache, or compiled now for this CPU.

A wheel for this platform has a library for this CPU's instruction level (prebuilt.py). Otherwise the library
is compiled once and cached. The name of a cached file is a hash of sources, flags, CPU and compiler, so a
library built by another CPU, compiler or version is never loaded. A cached library that another user could
have written is a ConfigError. If there is no library, NativeUnavailable gives the reason.
"""

from __future__ import annotations

import ctypes
import os
import platform
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from filelock import FileLock

from windlass.folders import cache_dir, check_private, make_private
from windlass.kernels.native import prebuilt
from windlass.kernels.native.compiler import (
    FLAGS,
    Build,
    Compiler,
    NativeUnavailable,
    digest,
    find_compilers,
    machine_flags,
    source_texts,
)
from windlass.start_log import start_bar, start_log

SOURCES = Path(__file__).parent / "src"
_CPU_FIELDS = (  # of /proc/cpuinfo, on aarch64 and x86-64
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features"),
    *("vendor_id", "cpu family", "model", "model name", "stepping", "flags"),
)


@dataclass(frozen=True, slots=True)
class Native:
    """A loaded library."""

    functions: ctypes.CDLL
    path: Path
    simd: str  # its instruction set: "NEON dot product"
    reason: str  # its origin: "compiled by g++ 12.2.0 in 6.1 s"
    compile_s: float = 0.0  # 0: it was in the package or in the cache
    is_temporary: bool = False  # the cache cannot be written


def load(
    folder: Path | None = None,
    extra_flags: Sequence[str] = (),
    sources: Path = SOURCES,
    what: str = "CPU kernels",
) -> Native:
    """Load the package's library, or that of `folder` (default: the user's cache), compiled if missing.

    No library of the package has `extra_flags`. `what` names the library while it is compiled.
    """
    found, unused = (None, None) if extra_flags else _from_package(sources)
    if found is not None:
        return found
    if unused is None:
        return _load_compiled(folder, extra_flags, sources, what)
    start_log.warning(unused)
    try:
        found = _load_compiled(folder, extra_flags, sources, what)
    except NativeUnavailable as error:
        raise NativeUnavailable(f"{error}; {unused}") from error
    return replace(found, reason=f"{found.reason}; {unused}")


def ready_library(folder: Path | None = None, sources: Path = SOURCES) -> Native | None:
    """The library that `load` finds without compiling; None: it will compile one, or there is none."""
    found, _ = _from_package(sources)
    return found or _from_cache(folder, (), sources, find_compilers()[0])


def _from_package(sources: Path) -> tuple[Native | None, str | None]:
    """The package's library, or why it is not used; neither in a package without libraries."""
    carried = prebuilt.find(sources)
    if carried is None:
        return None, None
    problem = carried.problem
    if problem is None:
        try:
            return _open(carried.path, "from the package"), None
        except OSError as error:
            problem = f"it cannot be loaded: {error}"
    return None, f"{carried.path} of the package is not used: {problem}"


def _load_compiled(
    folder: Path | None, extra_flags: Sequence[str], sources: Path, what: str
) -> Native:
    compilers, problems = find_compilers()
    found = _from_cache(folder, extra_flags, sources, compilers)
    if found is not None:
        return found
    cache = (folder or cache_dir()) / "native"
    flags = (*FLAGS, *machine_flags(), *extra_flags)
    stem = _stem(flags, sources)
    for compiler in compilers:
        try:
            path = cache / f"{stem}-{digest(compiler.version)}.so"
            return _build(Build(compiler, flags, sources, what), path)
        except NativeUnavailable as error:
            problems.append(str(error))
    raise NativeUnavailable("no native kernels: " + "; ".join(problems))


def _from_cache(
    folder: Path | None, extra_flags: Sequence[str], sources: Path, compilers: Sequence[Compiler]
) -> Native | None:
    folder = (folder or cache_dir()) / "native"
    check_private(folder.parent, folder)
    stem = _stem((*FLAGS, *machine_flags(), *extra_flags), sources)
    for compiler in compilers:
        path = folder / f"{stem}-{digest(compiler.version)}.so"
        if (found := _open_cached(path, "from the cache")) is not None:
            return found
    if not compilers and os.path.isdir(folder):
        for path in sorted(folder.glob(f"{stem}-*.so")):
            origin = "from the cache; there is no compiler now"
            if (found := _open_cached(path, origin)) is not None:
                return found
    return None


def _stem(flags: Sequence[str], sources: Path) -> str:
    return digest(*source_texts(sources), *flags, cpu_identity())


def cpu_identity() -> str:
    """Identify this CPU among those that need different binaries."""
    found = {platform.machine(), platform.processor()}
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = (line.partition(":") for line in info.read_text().splitlines())
        found |= {f"{k.strip()}={v.strip()}" for k, _, v in lines if k.strip() in _CPU_FIELDS}
    return "\n".join(sorted(found))


def _build(build: Build, target: Path) -> Native:
    """Compile into the cache, or into a temporary folder if the cache is not writable."""
    try:
        make_private(target.parent)
        # A second process waits here and then finds the file.
        with FileLock(target.with_suffix(".lock")):
            if (found := _open_cached(target, "from the cache")) is not None:
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
    built = _open_cached(target, origin)
    if built is None:
        raise NativeUnavailable(f"{build.compiler.version} built {target}, which cannot be loaded")
    return replace(built, compile_s=duration_s, is_temporary=is_temporary)


def _compile(build: Build, folder: Path) -> float:
    """Compile to folder/windlass.so behind a progress bar; return the seconds."""
    text = f"compiling {build.what} for this machine, once"
    with start_bar(text, build.num_files()) as advance:
        return build.run(folder, advance)


def _open_cached(path: Path, origin: str) -> Native | None:
    """Load a library of the cache; None if it is missing or damaged, so that it is rebuilt."""
    if not os.path.isfile(path):  # nor in a folder that this user may not search
        return None
    check_private(path)
    try:
        return _open(path, origin)
    except OSError:
        return None


def _open(path: Path, origin: str) -> Native:
    """Load a library; raise OSError if it is damaged."""
    functions = ctypes.CDLL(str(path))
    try:
        simd = prebuilt.simd_name(functions)
    except AttributeError as error:
        raise OSError(str(error)) from error
    reason = f"{origin}: {path}" if origin.startswith("from") else origin
    return Native(functions=functions, path=path, simd=simd, reason=reason)
