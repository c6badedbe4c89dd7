"""Runs a C++ compiler on the kernels' sources.

Imports nothing but the standard library: setup.py compiles with this module when a wheel is built.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from windlass.errors import UnsupportedError

_COMPILERS = ("c++", "g++", "clang++")
# Contracting a * b + c would change the rounding of quantised activations.
FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-pthread"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)
_VERSION_TIMEOUT_S = (
    60  # compiling has no limit: the largest source takes a minute of CPU time on a fast machine
)


class NativeUnavailable(UnsupportedError):
    """There is no native library; the message gives the reason. The reference kernels work without."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """A compiler's command line and version."""

    command: tuple[str, ...]
    version: str  # the first line of --version


@dataclass(frozen=True, slots=True)
class Build:
    """What is compiled, and how."""

    compiler: Compiler
    flags: tuple[str, ...]
    sources: Path
    what: str = "CPU kernels"  # in the line beside the progress bar

    def num_files(self) -> int:
        return len(self._files())

    def run(self, folder: Path, advance: Callable[[], None] = lambda: None) -> float:
        """Compile all sources in parallel to folder/windlass.so; return the seconds.

        `advance` is called after each source.
        """
        start = time.perf_counter()
        call = [*self.compiler.command, *self.flags]
        sources = self._files()
        objects = [str(folder / f"{source.stem}.o") for source in sources]
        commands = [
            [*call, "-c", str(source), "-o", output]
            for source, output in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            for _ in pool.map(_call, commands):
                advance()
        _call([*call, "-shared", *objects, "-o", str(folder / "windlass.so")])
        return time.perf_counter() - start

    def _files(self) -> list[Path]:
        return sorted(self.sources.glob("*.cpp"))


def machine_flags() -> tuple[str, ...]:
    """Return the flags that enable all instructions of this CPU."""
    if platform.machine() in ("aarch64", "arm64"):
        return ("-mcpu=native",)
    if platform.machine() in ("x86_64", "AMD64"):
        return ("-march=native",)
    return ()


def source_texts(sources: Path) -> Iterator[str]:
    """The names and contents of all sources, for a digest."""
    for path in sorted(sources.iterdir()):
        yield path.name
        yield path.read_text(encoding="utf-8")


def digest(*parts: str) -> str:
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
            output = _call([*command, "--version"], timeout_s=_VERSION_TIMEOUT_S)
        except NativeUnavailable as error:
            problems.append(str(error))
            continue
        version = output.strip().splitlines()[0] if output.strip() else text
        if _release(version) not in [_release(other.version) for other in found]:
            found.append(Compiler(command, version))
    return found, problems


def _release(version: str) -> str:
    """A version without the name that the compiler was called by: c++ is often g++."""
    return version.partition(" ")[2] or version


def _call(command: Sequence[str], timeout_s: float | None = None) -> str:
    """Run a compiler and return its output."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"{command[0]} did not run: {error}") from error
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines()
        errors = [line for line in lines if "error" in line] or lines or ["no output"]
        raise NativeUnavailable(f"{command[0]} failed ({done.returncode}): {errors[0][:300]}")
    return done.stdout
