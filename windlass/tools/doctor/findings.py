"""Facts about the machine: plain values, without secrets, user names and host names.

Users paste them into bug reports. Therefore paths below the home folder start with ~, the user's
name in other paths becomes $USER, and file owners are "this user", "root" or "another user".
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from windlass.errors import ConfigError
from windlass.folders import cache_dir, find_weakness, triton_cache_dir
from windlass.kernels.native.compiled import ready_library
from windlass.kernels.native.compiler import find_compilers
from windlass.kernels.native.levels import cpu_features, levels, next_level, runnable
from windlass.machine.cgroup import ROOT, memory_limit
from windlass.machine.topology import Topology, read_topology
from windlass.tools.common.record import cpu_name
from windlass.version import __version__

if TYPE_CHECKING:
    from packaging.requirements import Requirement

DISTRIBUTION = "windlass-llm"
TORCH_TIMEOUT_S = 30
_SMI_TIMEOUT_S = 5
_MAX_WALK_S = 0.3
_SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WINDLASS_API_KEY")
# Instructions that the native kernels have loops for, as /proc/cpuinfo names them.
_INSTRUCTIONS = (
    *("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512dq", "avx512vl"),
    *("avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16"),
    *("asimd", "asimddp", "asimdhp", "i8mm", "bf16", "sve"),
)


@dataclass(frozen=True, slots=True)
class System:
    os: str  # linux, darwin, win32
    release: str
    machine: str  # x86_64, aarch64
    libc: str  # glibc 2.36, musl; empty where unknown
    python: str
    windlass: str
    is_container: bool


@dataclass(frozen=True, slots=True)
class Cpu:
    model: str
    instructions: tuple[str, ...]
    topology: Topology
    governor: str | None  # frequency governor of CPU 0
    scaling_driver: str | None
    huge_pages: str | None  # transparent huge pages: always, madvise, never


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of memory; None: no such limit, or unknown."""

    total: int
    free: int
    limit: int | None  # of the cgroup
    swap_total: int
    swap_free: int
    shm: int | None  # size of /dev/shm
    open_files_soft: int | None
    open_files_hard: int | None  # None: unlimited


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    capability: tuple[int, int] | None  # None: the driver does not report it
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Torch:
    """What torch reports; `error`: why it cannot be imported."""

    version: str | None = None
    cuda: str | None = None  # CUDA version of the build; None: built for CPUs
    error: str | None = None
    cuda_error: str | None = None
    gpus: tuple[Gpu, ...] = ()  # that torch can use


@dataclass(frozen=True, slots=True)
class Driver:
    """What the GPU driver reports, without torch."""

    version: str | None = None
    cuda: tuple[int, int] | None = None  # newest CUDA version that it supports
    gpus: tuple[Gpu, ...] = ()
    error: str | None = None  # the error of nvidia-smi


@dataclass(frozen=True, slots=True)
class NativeKernels:
    """The C++ library of CPU kernels, or the compiler that will build it."""

    compiler: str | None  # version
    compiler_problem: str | None
    simd: str | None  # instruction set of the library; None: there is none yet
    origin: str | None
    problem: str | None = None  # the reason if an existing library is not used
    level: str | None = None  # best instruction set with own loops that this CPU can run
    next_level: str | None = None  # the next better instruction set
    lacks: tuple[str, ...] = ()  # CPU features that it needs and this CPU lacks


@dataclass(frozen=True, slots=True)
class Extra:
    """An optional group of packages of the distribution."""

    name: str
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Packages:
    """Python packages that Windlass needs."""

    triton: str | None
    unmet: tuple[str, ...]  # requirements that no installed version meets
    extras: tuple[Extra, ...]


@dataclass(frozen=True, slots=True)
class Folder:
    """A cache folder. Compiled code runs from it if `has_code`."""

    name: str
    path: str  # as shown
    has_code: bool
    exists: bool
    owner: str | None = None
    num_bytes: int = 0
    is_partial: bool = False  # counting stopped early
    is_writable: bool = True
    free_bytes: int | None = None  # on its disk
    weakness: str | None = (
        None  # the way in which another user could change or replace a file in it
    )


@dataclass(frozen=True, slots=True)
class Findings:
    """All facts about the machine."""

    system: System
    cpu: Cpu
    memory: Memory
    torch: Torch
    driver: Driver
    native: NativeKernels
    packages: Packages
    folders: tuple[Folder, ...]


def examine() -> Findings:
    """Look at this machine. torch is loaded in a child process, beside the other probes."""
    with _start_torch_probe() as child:
        memory = _memory()
        packages = _packages()
        findings = {
            "system": _system(),
            "cpu": _cpu(),
            "memory": memory,
            "native": _native(),
            "packages": packages,
            "folders": tuple(_folders()),
        }
        torch, driver_cuda = _read_torch_probe(child)
    return Findings(torch=torch, driver=_driver(driver_cuda), **findings)  # type: ignore[arg-type]


def shown(text: str | Path) -> str:
    """A path, or a text with paths, without the user's name."""
    text = str(text)
    with contextlib.suppress(RuntimeError):
        text = re.sub(rf"(?<![\w.-]){re.escape(str(Path.home()))}(?![\w.-])", "~", text)
    try:
        user = getpass.getuser()
    except (OSError, KeyError, ImportError):  # a container may run as a user without a name
        return text
    if user in ("root", "windlass"):  # names of no person; images have the second
        return text
    return re.sub(rf"(?<=/){re.escape(user)}(?![\w.-])", "$USER", text)


def parse_torch(found: dict[str, Any]) -> tuple[Torch, tuple[int, int] | None]:
    """What `torch_probe` printed, and the driver's CUDA version."""
    gpus = tuple(
        Gpu(gpu["name"], (gpu["capability"][0], gpu["capability"][1]), gpu["memory_bytes"])
        for gpu in found.get("gpus", [])
    )
    cuda = found.get("driver_cuda")
    torch = Torch(
        version=found.get("version"),
        cuda=found.get("cuda"),
        error=_shown_or_none(found.get("error")),
        cuda_error=_shown_or_none(found.get("cuda_error")),
        gpus=gpus,
    )
    return torch, None if cuda is None else (cuda[0], cuda[1])


def _shown_or_none(text: str | None) -> str | None:
    return None if text is None else shown(text)


def _start_torch_probe() -> subprocess.Popen[str]:
    program = Path(__file__).with_name("torch_probe.py")
    environment = {name: value for name, value in os.environ.items() if name not in _SECRETS}
    return subprocess.Popen(
        [sys.executable, "-P", str(program)],  # -P: the program's folder is no import path
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def _read_torch_probe(child: subprocess.Popen[str]) -> tuple[Torch, tuple[int, int] | None]:
    try:
        output, errors = child.communicate(timeout=TORCH_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        return Torch(error=f"its import took longer than {TORCH_TIMEOUT_S} s"), None
    if child.returncode != 0 or not output.strip():
        last = (errors.strip().splitlines() or ["no output"])[-1]
        return Torch(
            error=f"the process that imports it ended with {child.returncode}: {last}"
        ), None
    return parse_torch(json.loads(output.strip().splitlines()[-1]))


def _system() -> System:
    name, version = platform.libc_ver()
    if not name and sys.platform == "linux" and list(Path("/lib").glob("ld-musl-*")):
        name = "musl"
    return System(
        os=sys.platform,
        release=platform.release(),
        machine=platform.machine(),
        libc=f"{name} {version}".strip(),
        python=platform.python_version(),
        windlass=__version__,
        is_container=_is_container(),
    )


def _is_container(root: Path = ROOT) -> bool:
    marks = ("/.dockerenv", "/run/.containerenv", "/var/run/secrets/kubernetes.io")
    return any((root / mark.lstrip("/")).exists() for mark in marks)


def _cpu(root: Path = ROOT) -> Cpu:
    fields = _cpuinfo(root)
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    frequency = root / "sys/devices/system/cpu/cpu0/cpufreq"
    pages = _read(root / "sys/kernel/mm/transparent_hugepage/enabled")
    return Cpu(
        model=cpu_name(),
        instructions=tuple(name for name in _INSTRUCTIONS if name in flags),
        topology=read_topology(root),
        governor=_read(frequency / "scaling_governor"),
        scaling_driver=_read(frequency / "scaling_driver"),
        huge_pages=None if pages is None else pages.partition("[")[2].partition("]")[0],
    )


def _cpuinfo(root: Path) -> dict[str, str]:
    """The fields of the first CPU."""
    text = _read(root / "proc/cpuinfo") or ""
    lines = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in lines}


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _memory() -> Memory:
    import psutil

    memory, swap, limit = psutil.virtual_memory(), psutil.swap_memory(), memory_limit()
    soft, hard = _open_files()
    shm = Path("/dev/shm")
    return Memory(
        total=memory.total,
        free=memory.available if limit is None else min(memory.available, limit.free_bytes),
        limit=None if limit is None else limit.num_bytes,
        swap_total=swap.total,
        swap_free=swap.free,
        shm=shutil.disk_usage(shm).total if shm.is_dir() else None,
        open_files_soft=soft,
        open_files_hard=hard,
    )


def _open_files() -> tuple[int | None, int | None]:
    try:
        import resource
    except ImportError:  # Windows
        return None, None
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (None if each == resource.RLIM_INFINITY else each for each in limits)
    return soft, hard


def _driver(cuda: tuple[int, int] | None) -> Driver:
    program = shutil.which("nvidia-smi")
    if program is None:
        return Driver(cuda=cuda)
    fields = "driver_version,name,compute_cap,memory.total"
    command = [program, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Driver(cuda=cuda, error=shown(f"nvidia-smi did not answer: {error}"))
    rows = [line.split(", ") for line in done.stdout.splitlines() if line.count(", ") == 3]
    if done.returncode != 0:
        last = ((done.stderr or done.stdout).strip().splitlines() or ["no output"])[-1]
        return Driver(cuda=cuda, error=f"nvidia-smi ended with {done.returncode}: {last}")
    if not rows:
        return Driver(cuda=cuda)
    gpus = [Gpu(name, _capability(text), _mebibytes(size)) for _, name, text, size in rows]
    return Driver(version=rows[0][0], cuda=cuda, gpus=tuple(gpus))


def _capability(text: str) -> tuple[int, int] | None:
    major, _, minor = text.partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def _mebibytes(text: str) -> int:
    return int(text) * 2**20 if text.isdigit() else 0


def _native() -> NativeKernels:
    compilers, problems = find_compilers()
    found = _with_level(
        NativeKernels(
            compiler=compilers[0].version if compilers else None,
            compiler_problem=None if compilers else shown("; ".join(problems)),
            simd=None,
            origin=None,
        )
    )
    try:
        library = ready_library()
    except ConfigError as error:  # another user could have written it: a folder has the reason
        return replace(found, problem=shown(str(error).partition(". ")[0]))
    if library is None:
        return found
    origin = library.reason.partition(":")[0]  # without the path
    return replace(found, simd=library.simd, origin=origin)


def _with_level(found: NativeKernels) -> NativeKernels:
    machine, features = platform.machine(), cpu_features()
    if not features or not levels(machine):  # the system does not list them
        return found
    best, above = runnable(machine, features)[0], next_level(machine, features)
    if above is None:
        return replace(found, level=best.simd)
    return replace(found, level=best.simd, next_level=above[0].simd, lacks=above[1])


def _packages() -> Packages:
    requirements, names = _requirements(DISTRIBUTION)
    # torch_probe may load torch without an import, which would fail without its packages.
    unmet = [
        *_unmet(requirements),
        *(each for each in _unmet(_requirements("torch")[0]) if _is_missing(each)),
    ]
    extras = [
        Extra(name, _shown_requirements(_unmet(requirements, name)))
        for name in names
        if name != "dev"
    ]
    return Packages(_version("triton"), _shown_requirements(unmet), tuple(extras))


def _requirements(distribution: str) -> tuple[list[Requirement], list[str]]:
    """The requirements of an installed distribution, and the names of its extras."""
    from packaging.requirements import Requirement

    try:
        lines = metadata.requires(distribution) or []
        names = metadata.metadata(distribution).get_all("Provides-Extra") or []
    except metadata.PackageNotFoundError:  # a checkout that is not installed
        return [], []
    return [Requirement(line) for line in lines], names


def _unmet(requirements: Sequence[Requirement], extra: str = "") -> list[Requirement]:
    """The requirements, of the distribution or of an extra, that no installed version meets."""
    from packaging.markers import default_environment

    environment = {**cast(dict[str, str], default_environment()), "extra": extra}
    chosen = [
        each
        for each in requirements
        if (each.marker is None or each.marker.evaluate(environment))
        and (extra != "") == ("extra" in str(each.marker or ""))
    ]
    return [
        each
        for each in chosen
        if not each.specifier.contains(_version(each.name) or "0", prereleases=True)
        or _is_missing(each)
    ]


def _is_missing(requirement: Requirement) -> bool:
    return _version(requirement.name) is None


def _shown_requirements(requirements: Sequence[Requirement]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(f"{each.name}{each.specifier}" for each in requirements))


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _folders() -> list[Folder]:
    folders = [
        _folder("Windlass", cache_dir(), has_code=True),
        _folder("Triton", triton_cache_dir(), has_code=True),
    ]
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError:
        return folders
    return [*folders, _folder("hub", Path(HF_HUB_CACHE), has_code=False)]


def _folder(name: str, path: Path, has_code: bool) -> Folder:
    above = next(each for each in (path, *path.absolute().parents) if os.path.exists(each))
    free = shutil.disk_usage(above).free
    found = find_weakness(path) if has_code else None
    weakness = None if found is None else shown(f"{found[0]} {found[1]}")
    exists = os.path.isdir(path)  # and lies in no folder that this user may not search
    num_bytes, is_partial = _size(path) if exists else (0, False)
    return Folder(
        name=name,
        path=shown(path),
        has_code=has_code,
        exists=exists,
        owner=_owner(path) if exists else None,
        num_bytes=num_bytes,
        is_partial=is_partial,
        is_writable=os.access(path if exists else above, os.W_OK),
        free_bytes=free,
        weakness=weakness,
    )


def _owner(path: Path) -> str | None:
    if not hasattr(os, "geteuid"):
        return None
    owner = path.stat().st_uid
    if owner == os.geteuid():
        return "this user"
    return "root" if owner == 0 else "another user"


def _size(folder: Path) -> tuple[int, bool]:
    """Bytes of the files, and whether counting stopped early because there are many."""
    total, until = 0, time.monotonic() + _MAX_WALK_S
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # the file was deleted meanwhile
                total += os.lstat(os.path.join(path, name)).st_size
        if time.monotonic() > until:
            return total, True
    return total, False
