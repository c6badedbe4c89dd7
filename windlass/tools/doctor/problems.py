"""Known problems of machines. Each check reads the findings alone, so that tests can fake any machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from windlass.machine.topology import share_cpus
from windlass.tools.doctor.findings import DISTRIBUTION, Findings

GIB = 2**30
MIN_SHM = GIB  # NCCL; containers have 64 MiB by default
MIN_DISK = 2 * GIB
MIN_MEMORY = GIB  # the engine and HTTP processes of the default model hold 0.45 GiB
MIN_OPEN_FILES = 1024
MIN_CAPABILITY = (8, 0)  # of Triton
_ADAPTIVE_DRIVERS = ("intel_pstate", "amd-pstate", "amd-pstate-epp")  # their powersave scales


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem. `stops`: Windlass cannot run; otherwise it is slower or may fail later."""

    name: str
    level: Literal["stops", "slower", "risk"]
    what: str
    fix: str


Check = Callable[[Findings], Iterator[Problem]]


def find_problems(found: Findings) -> list[Problem]:
    """All known problems, those that stop Windlass first."""
    problems = [problem for check in CHECKS for problem in check(found)]
    return sorted(problems, key=lambda problem: problem.level != "stops")


def _torch(found: Findings) -> Iterator[Problem]:
    error = found.torch.error
    if error is None:
        return
    damaged = "" if "No module named 'torch'" in error else " --force-reinstall"
    fix = f"pip install{damaged} 'torch>=2.11'"
    if found.system.libc.startswith("musl"):
        yield Problem(
            "musl",
            "stops",
            f"torch cannot be imported ({error}), and this system has musl, for which torch has no builds",
            "use a system or image with glibc, such as Debian",
        )
    elif "GLIBC" in error:
        yield Problem(
            "glibc",
            "stops",
            f"torch needs a newer glibc than {found.system.libc}: {error}",
            "use a newer system or image, or a torch built for this one",
        )
    else:
        yield Problem("torch", "stops", f"torch cannot be imported: {error}", fix)


def _requirements(found: Findings) -> Iterator[Problem]:
    if found.packages.unmet:
        missing = " ".join(f"'{each}'" for each in found.packages.unmet)
        yield Problem(
            "requirements",
            "stops",
            f"required packages are missing or too old: {', '.join(found.packages.unmet)}",
            f"pip install {missing}",
        )


def _weak_folders(found: Findings) -> Iterator[Problem]:
    for folder in found.folders:
        if folder.weakness is not None:
            variable = "TRITON_CACHE_DIR" if folder.name == "Triton" else "WINDLASS_CACHE"
            yield Problem(
                "cache permissions",
                "stops",
                f"{folder.weakness}; compiled code runs from {folder.path}",
                f"chmod -R go-w {folder.path}, if it is unchanged, or set {variable} to another folder",
            )


def _folders(found: Findings) -> Iterator[Problem]:
    for folder in found.folders:
        if not folder.is_writable:
            yield Problem(
                "cache not writable",
                "slower",
                f"{folder.path} cannot be written: nothing is kept for the next start",
                "set WINDLASS_CACHE, TRITON_CACHE_DIR and HF_HOME to folders that you can write",
            )
        elif folder.free_bytes is not None and folder.free_bytes < MIN_DISK:
            yield Problem(
                "disk full",
                "risk",
                f"{folder.free_bytes / GIB:.1f} GiB are free on the disk of {folder.path}",
                "free some space, or set WINDLASS_CACHE and HF_HOME to another disk",
            )


def _gpu(found: Findings) -> Iterator[Problem]:
    torch, driver = found.torch, found.driver
    if driver.error is not None and not torch.gpus:
        yield Problem(
            "GPU driver",
            "slower",
            f"{driver.error}, and torch sees no GPU",
            "install the NVIDIA driver, or restart the machine after an update of it",
        )
        return
    has_gpu = bool(driver.gpus) or driver.cuda is not None
    if torch.version is None or not has_gpu:
        return
    if torch.cuda is None:
        yield Problem(
            "CPU build of torch",
            "slower",
            f"there is a GPU, and torch {torch.version} was built for CPUs",
            "install a CUDA build of torch (https://pytorch.org/get-started/locally)",
        )
    elif driver.cuda is not None and driver.cuda[0] < int(torch.cuda.split(".")[0]):
        yield Problem(
            "GPU driver",
            "slower",
            f"the driver supports CUDA {driver.cuda[0]}.{driver.cuda[1]}, and torch needs {torch.cuda}",
            "install a newer driver, or a torch build for the driver's CUDA version",
        )
    elif driver.cuda is None and not torch.gpus:
        yield Problem(
            "CUDA driver library",
            "slower",
            "nvidia-smi lists a GPU, and libcuda.so.1 cannot be loaded",
            "install the driver's CUDA library (Debian: libcuda1), or, in a container, set "
            "NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        )
    elif not torch.gpus:
        why = torch.cuda_error or "torch sees no CUDA device"
        yield Problem(
            "GPU unavailable",
            "slower",
            f"there is a GPU that torch cannot use: {why}",
            "check nvidia-smi, CUDA_VISIBLE_DEVICES and, in a container, --gpus all",
        )


def _triton(found: Findings) -> Iterator[Problem]:
    if not found.torch.gpus:
        return
    if found.packages.triton is None:
        yield Problem(
            "Triton",
            "slower",
            "Triton is missing, so torch's operators compute on the GPU",
            f"pip install '{DISTRIBUTION}[cuda]'",
        )
    old = [gpu for gpu in found.torch.gpus if gpu.capability and gpu.capability < MIN_CAPABILITY]
    for gpu in old:
        major, minor = gpu.capability or (0, 0)
        yield Problem(
            "compute capability",
            "risk",
            f"{gpu.name} has compute capability {major}.{minor}; Triton supports 8.0 and above",
            "use --reference-kernels if a kernel fails to compile, or --device cpu",
        )


def _shared_memory(found: Findings) -> Iterator[Problem]:
    size = found.memory.shm
    if len(found.torch.gpus) > 1 and size is not None and size < MIN_SHM:
        yield Problem(
            "/dev/shm",
            "risk",
            f"/dev/shm has {size / 2**20:.0f} MiB; NCCL needs more for several GPUs",
            "docker run --shm-size 8g, or an emptyDir with medium Memory at /dev/shm",
        )


def _compiler(found: Findings) -> Iterator[Problem]:
    native = found.native
    if native.compiler is None and native.simd is None and not found.torch.gpus:
        yield Problem(
            "compiler",
            "slower",
            f"no C++ compiler ({native.compiler_problem}) and no library of CPU kernels, so torch's "
            "operators compute",
            "apt install g++ (dnf install gcc-c++), set CXX, or install the wheel for this platform",
        )


def _instructions(found: Findings) -> Iterator[Problem]:
    system, names = found.system, found.cpu.instructions
    if system.os != "linux" or found.torch.gpus:
        return
    if system.machine == "x86_64" and not {"avx2", "fma", "f16c"} <= set(names):
        yield Problem(
            "instructions",
            "slower",
            "this CPU has no AVX2, FMA and F16C, so portable C++ computes",
            "use a CPU from 2013 or later; in a virtual machine, pass the host's CPU model through",
        )
    if system.machine in ("aarch64", "arm64") and "asimddp" not in names:
        yield Problem(
            "instructions",
            "slower",
            "this CPU has no dot product instructions, so portable C++ computes",
            "use a CPU with asimddp (Neoverse N1, Apple M1 or later)",
        )


def _quota(found: Findings) -> Iterator[Problem]:
    topology = found.cpu.topology
    quota = topology.quota
    if quota is None or quota >= len(topology.cores):
        return
    threads = share_cpus(topology).num_threads
    what = f"the cgroup grants {quota:g} of {len(topology.cpus)} CPUs"
    if quota < 1:
        what += ": the kernel pauses even one thread"
    else:
        what += f", so {threads} of {len(topology.cores)} cores compute"
    yield Problem(
        "CPU quota",
        "slower",
        what,
        "raise the limit (docker run --cpus, resources.limits.cpu), in whole cores",
    )


def _governor(found: Findings) -> Iterator[Problem]:
    cpu = found.cpu
    if found.torch.gpus or cpu.governor != "powersave" or cpu.scaling_driver in _ADAPTIVE_DRIVERS:
        return
    yield Problem(
        "CPU frequency",
        "slower",
        f"the governor powersave of {cpu.scaling_driver} keeps the lowest frequency",
        "cpupower frequency-set -g schedutil (or performance)",
    )


def _memory(found: Findings) -> Iterator[Problem]:
    memory = found.memory
    if memory.free < MIN_MEMORY:
        limit = "" if memory.limit is None else f" below the cgroup's {memory.limit / GIB:.1f} GiB"
        yield Problem(
            "memory",
            "risk",
            f"{memory.free / GIB:.1f} GiB of memory are free{limit}; the default model needs about 1",
            "free memory, or raise the limit (docker run --memory, resources.limits.memory)",
        )


def _open_files(found: Findings) -> Iterator[Problem]:
    hard = found.memory.open_files_hard
    if hard is not None and hard < MIN_OPEN_FILES:
        yield Problem(
            "open files",
            "risk",
            f"a process may open {hard} files, so the server accepts few connections",
            "ulimit -Hn 65536 (LimitNOFILE in systemd, --ulimit nofile=65536 in Docker)",
        )


def _system(found: Findings) -> Iterator[Problem]:
    if found.system.os != "linux":
        yield Problem(
            "operating system",
            "risk",
            f"Windlass is tried on Linux; on {found.system.os} only its imports are tested",
            "use Linux, a container or WSL 2 where something fails",
        )


CHECKS: tuple[Check, ...] = (
    _torch,
    _requirements,
    _weak_folders,
    _system,
    _gpu,
    _triton,
    _shared_memory,
    _compiler,
    _instructions,
    _quota,
    _governor,
    _memory,
    _folders,
    _open_files,
)
