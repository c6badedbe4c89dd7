"""`windlass doctor`: every known problem with faked findings, and the command on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.conftest import Invoke
from windlass.cli.doctor import as_object
from windlass.errors import ConfigError
from windlass.folders import cache_dir
from windlass.machine.topology import Core, Topology
from windlass.tools.doctor import findings as findings_module
from windlass.tools.doctor.choices import choose
from windlass.tools.doctor.findings import (
    Cpu,
    Driver,
    Extra,
    Findings,
    Folder,
    Gpu,
    Memory,
    NativeKernels,
    Packages,
    System,
    Torch,
    parse_torch,
    shown,
)
from windlass.tools.doctor.problems import CHECKS, GIB, Problem, find_problems

H200 = Gpu("NVIDIA H200", (9, 0), 141 * GIB)
CORES = tuple(Core(0, (i, i + 4)) for i in range(4))
HEALTHY = Findings(
    system=System("linux", "6.1.0", "x86_64", "glibc 2.36", "3.12.1", "0.1.0", is_container=True),
    cpu=Cpu(
        model="A CPU",
        instructions=("avx2", "fma", "f16c"),
        topology=Topology(CORES, 4, 8, 1),
        governor="powersave",
        scaling_driver="intel_pstate",
        huge_pages="madvise",
    ),
    memory=Memory(32 * GIB, 30 * GIB, None, 0, 0, 64 * 2**20, 1024, 65536),
    torch=Torch("2.13.0"),
    driver=Driver(),
    native=NativeKernels("g++ 12.2.0", None, "AVX2", "from the cache"),
    packages=Packages("3.6.0", (), (Extra("tune", ("optuna>=4",)), Extra("otel", ()))),
    folders=(
        Folder("Windlass", "~/.cache/windlass", True, True, "this user", 9, free_bytes=9 * GIB),
    ),
)
ON_GPU = replace(
    HEALTHY,
    torch=Torch("2.13.0", cuda="13.0", gpus=(H200,)),
    driver=Driver("580.1", (13, 0), (H200,)),
)


def with_quota(quota: float) -> Findings:
    topology = replace(HEALTHY.cpu.topology, quota=quota)
    return replace(HEALTHY, cpu=replace(HEALTHY.cpu, topology=topology))


def with_folder(**changes: object) -> Findings:
    return replace(HEALTHY, folders=(replace(HEALTHY.folders[0], **changes),))


def with_memory(found: Findings = HEALTHY, **changes: object) -> Findings:
    return replace(found, memory=replace(found.memory, **changes))


def with_system(**changes: object) -> Findings:
    return replace(HEALTHY, system=replace(HEALTHY.system, **changes))


NO_TORCH = replace(HEALTHY, torch=Torch(error="ModuleNotFoundError: No module named 'torch'"))
DAMAGED_TORCH = replace(HEALTHY, torch=Torch(error="ImportError: _C.so: file too short"))
OLD_GLIBC = replace(
    HEALTHY, torch=Torch(error="ImportError: /lib/libm.so.6: version `GLIBC_2.28' not found")
)
NO_COMPILER = NativeKernels(None, "no c++; no g++; no clang++", None, None)
OLD_GPU = replace(H200, name="Tesla V100", capability=(7, 0))
PROBLEMS: list[tuple[Findings, str, str, str]] = [
    (NO_TORCH, "torch", "stops", "pip install 'torch>=2.11'"),
    (DAMAGED_TORCH, "torch", "stops", "pip install --force-reinstall 'torch>=2.11'"),
    (OLD_GLIBC, "glibc", "stops", "newer system"),
    (replace(NO_TORCH, system=with_system(libc="musl").system), "musl", "stops", "glibc"),
    (
        replace(HEALTHY, packages=Packages("3.6.0", ("pyzmq>=26",), ())),
        "requirements",
        "stops",
        "pip install 'pyzmq>=26'",
    ),
    (with_folder(weakness="~/.cache has mode 0777"), "cache permissions", "stops", "chmod -R go-w"),
    (with_folder(is_writable=False), "cache not writable", "slower", "WINDLASS_CACHE"),
    (with_folder(free_bytes=GIB), "disk full", "risk", "free some space"),
    (
        replace(HEALTHY, driver=Driver("580.1", (13, 0), (H200,))),
        "CPU build of torch",
        "slower",
        "CUDA build",
    ),
    (
        replace(
            ON_GPU, torch=Torch("2.13.0", cuda="13.0"), driver=Driver("535.1", (12, 2), (H200,))
        ),
        "GPU driver",
        "slower",
        "newer driver",
    ),
    (
        replace(ON_GPU, torch=Torch("2.13.0", cuda="13.0", cuda_error="initialization error")),
        "GPU unavailable",
        "slower",
        "CUDA_VISIBLE_DEVICES",
    ),
    (
        replace(ON_GPU, torch=Torch("2.13.0", cuda="13.0"), driver=Driver("580.1", None, (H200,))),
        "CUDA driver library",
        "slower",
        "NVIDIA_DRIVER_CAPABILITIES",
    ),
    (
        replace(HEALTHY, driver=Driver(error="nvidia-smi ended with 9: no driver")),
        "GPU driver",
        "slower",
        "restart the machine",
    ),
    (
        replace(ON_GPU, packages=replace(HEALTHY.packages, triton=None)),
        "Triton",
        "slower",
        "pip install 'windlass-llm[cuda]'",
    ),
    (
        replace(ON_GPU, torch=replace(ON_GPU.torch, gpus=(OLD_GPU,))),
        "compute capability",
        "risk",
        "--device cpu",
    ),
    (
        replace(ON_GPU, torch=replace(ON_GPU.torch, gpus=(H200, H200))),
        "/dev/shm",
        "risk",
        "--shm-size",
    ),
    (replace(HEALTHY, native=NO_COMPILER), "compiler", "slower", "apt install g++"),
    (
        replace(HEALTHY, cpu=replace(HEALTHY.cpu, instructions=("avx2",))),
        "instructions",
        "slower",
        "host's CPU model",
    ),
    (
        replace(with_system(machine="aarch64"), cpu=replace(HEALTHY.cpu, instructions=("asimd",))),
        "instructions",
        "slower",
        "asimddp",
    ),
    (with_quota(1.5), "CPU quota", "slower", "whole cores"),
    (with_quota(0.5), "CPU quota", "slower", "whole cores"),
    (
        replace(HEALTHY, cpu=replace(HEALTHY.cpu, scaling_driver="acpi-cpufreq")),
        "CPU frequency",
        "slower",
        "cpupower",
    ),
    (with_memory(free=GIB // 2, limit=GIB), "memory", "risk", "--memory"),
    (with_memory(open_files_hard=256), "open files", "risk", "ulimit -Hn"),
    (with_system(os="darwin"), "operating system", "risk", "use Linux"),
]


@pytest.mark.parametrize("found", [HEALTHY, ON_GPU])
def test_a_healthy_machine_has_no_problem(found: Findings) -> None:
    assert find_problems(found) == []


@pytest.mark.parametrize(
    ("found", "name", "level", "fix"), PROBLEMS, ids=lambda each: str(each)[:20]
)
def test_a_known_problem_is_found(found: Findings, name: str, level: str, fix: str) -> None:
    (problem,) = find_problems(found)
    assert (problem.name, problem.level) == (name, level)
    assert fix in problem.fix
    assert as_object(found, choose(found), [problem])["runs"] is (level != "stops")


def test_every_check_has_a_case() -> None:
    cases = [found for found, *_ in PROBLEMS]
    assert [check for check in CHECKS if not any(list(check(found)) for found in cases)] == []


def test_problems_that_stop_come_first() -> None:
    found = replace(with_quota(0.5), torch=NO_TORCH.torch)
    assert [problem.level for problem in find_problems(found)] == ["stops", "slower"]


def test_a_small_shm_matters_with_several_gpus_only() -> None:
    two = replace(ON_GPU, torch=replace(ON_GPU.torch, gpus=(H200, H200)))
    assert find_problems(with_memory(two, shm=8 * GIB)) == []


def chosen(found: Findings) -> dict[str, str]:
    return {choice.what: choice.value for choice in choose(found)}


def test_choices() -> None:
    assert chosen(HEALTHY) == {
        "device": "cpu",
        "kernels": "native, AVX2",
        "executors": "recorded program, then eager",
        "threads": "4",
        "memory share": "0.25",
    }
    on_gpu = chosen(ON_GPU)
    assert (on_gpu["device"], on_gpu["kernels"]) == ("cuda", "Triton")
    assert on_gpu["executors"].startswith("CUDA graphs")
    without = chosen(replace(HEALTHY, native=NO_COMPILER))
    assert (without["kernels"], without["executors"]) == ("torch", "eager")
    later = replace(HEALTHY.native, simd=None, origin=None)
    assert chosen(replace(HEALTHY, native=later))["kernels"] == "native"
    assert chosen(with_quota(1.5))["threads"] == "1"


def test_the_kernels_say_which_instructions_the_next_level_lacks() -> None:
    level = {"level": "AVX-512 BW", "next_level": "AVX-512 VNNI", "lacks": ("avx512_vnni",)}
    why = "AVX-512 VNNI needs avx512_vnni, which this CPU lacks"
    built = replace(HEALTHY.native, simd="AVX-512 BW", **level)
    (kernels,) = [each for each in choose(replace(HEALTHY, native=built)) if each.what == "kernels"]
    assert (kernels.value, kernels.reason) == ("native, AVX-512 BW", f"from the cache; {why}")
    later = replace(built, simd=None, origin=None)
    (kernels,) = [each for each in choose(replace(HEALTHY, native=later)) if each.what == "kernels"]
    assert kernels.value == "native, AVX-512 BW"
    assert kernels.reason == f"compiled at first use, by g++ 12.2.0; {why}"


def test_a_driver_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = findings_module._driver(None)
    assert found == Driver(error="nvidia-smi ended with 9: NVIDIA-SMI has failed")


def test_missing_extras_have_their_command() -> None:
    printed = as_object(HEALTHY, [], [])
    assert printed["missing_extras"] == {"tune": "pip install 'windlass-llm[tune]'"}


def test_the_user_has_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/alice")
    monkeypatch.setattr(findings_module.getpass, "getuser", lambda: "alice")
    assert shown(Path("/home/alice/.cache/windlass")) == "~/.cache/windlass"
    assert shown(Path("/home/alice")) == "~"
    assert shown("error in /scratch/alice/a.so: bad") == "error in /scratch/$USER/a.so: bad"
    assert shown("/home/alice2/x") == "/home/alice2/x"
    monkeypatch.setenv("HOME", "/cache")  # as in the images, whose user has the name of the program
    assert shown("/cache/.triton/cache") == "~/.triton/cache"
    monkeypatch.setattr(findings_module.getpass, "getuser", lambda: "windlass")
    assert shown("/cache/windlass") == "~/windlass"
    assert shown("/opt/windlass/bin") == "/opt/windlass/bin"


def test_errors_of_torch_have_no_name_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/alice")
    failed = {"error": "ImportError: /home/alice/v/libtorch.so: undefined symbol"}
    torch, _ = parse_torch(failed)
    assert torch.error == "ImportError: ~/v/libtorch.so: undefined symbol"


def test_what_torch_reports() -> None:
    gpu = {"name": "NVIDIA H200", "capability": [9, 0], "memory_bytes": H200.memory_bytes}
    found = {"driver_cuda": [13, 0], "version": "2.13.0", "cuda": "13.0", "gpus": [gpu]}
    assert parse_torch(found) == (ON_GPU.torch, (13, 0))


@pytest.fixture
def folder_of_root(tmp_path: Path) -> Iterator[Path]:
    """A folder that this process cannot search while the test runs."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    folder = tmp_path / "private"
    (folder / "cache").mkdir(parents=True)
    folder.chmod(0o700)
    os.setresuid(65534, 65534, 0)
    try:
        yield folder / "cache"
    finally:
        os.setresuid(0, 0, 0)


def test_caches_that_belong_to_another_user(
    folder_of_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in `docker run --user` with the home folder of root."""
    monkeypatch.setenv("WINDLASS_CACHE", str(folder_of_root))
    folder = findings_module._folders()[0]
    assert (folder.exists, folder.is_writable) == (False, False)
    assert findings_module._native().simd is None
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert findings_module._native().simd is None


def test_a_user_without_a_home_folder_needs_a_cache_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("HOME", "WINDLASS_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    with pytest.raises(ConfigError, match="WINDLASS_CACHE"):
        cache_dir()


def run_doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "windlass.cli", "doctor", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )


def test_the_command_runs_without_torch(tmp_path: Path) -> None:
    """A torch that cannot be imported stops Windlass, and everything else is reported."""
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    secrets = {"HF_TOKEN": "hf_secret", "WINDLASS_API_KEY": "key_secret"}
    done = run_doctor("--json", PYTHONPATH=path, WINDLASS_CACHE=str(tmp_path / "cache"), **secrets)
    assert done.returncode == 1, done.stderr
    printed = json.loads(done.stdout)
    assert printed["runs"] is False
    assert printed["machine"]["torch"]["error"] == "ImportError: no torch here"
    assert printed["machine"]["cpu"]["topology"]["num_machine_cores"] >= 1
    names = [folder["name"] for folder in printed["machine"]["folders"]]
    assert names[:2] == ["Windlass", "Triton"]
    assert "secret" not in done.stdout


_PROBE = """
import json, sys
from windlass.tools.doctor import torch_probe
torch_probe._driver_cuda = lambda: None
found = torch_probe.probe()
print(json.dumps([found, "torch" in sys.modules]))
"""


def probe_torch(*folders: Path) -> tuple[dict[str, Any], bool]:
    """What is found without a GPU driver, and whether torch was imported."""
    path = os.pathsep.join([*map(str, folders), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", _PROBE], capture_output=True, text=True, env=environment
    )
    found, was_imported = json.loads(done.stdout)
    return found, was_imported


@pytest.mark.skipif(sys.platform != "linux", reason="torch is imported on other systems")
def test_torch_is_not_imported_without_a_gpu_driver() -> None:
    found, was_imported = probe_torch()
    expected = {"version": torch.__version__, "cuda": torch.version.cuda, "gpus": []}
    assert found == {"driver_cuda": None, **expected}
    assert not was_imported


def test_a_torch_that_cannot_be_loaded_is_imported_for_its_error(tmp_path: Path) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / f"_C{EXTENSION_SUFFIXES[0]}").write_text("damaged")
    (package / "version.py").write_text("__version__, cuda = '2.13.0', None\n")
    (package / "__init__.py").write_text("raise ImportError('GLIBC_2.99 not found')\n")
    found, _ = probe_torch(tmp_path)
    assert found == {"driver_cuda": None, "error": "ImportError: GLIBC_2.99 not found"}


def test_packages_that_torch_needs_are_required(monkeypatch: pytest.MonkeyPatch) -> None:
    version = findings_module._version
    monkeypatch.setattr(
        findings_module, "_version", lambda name: None if name == "sympy" else version(name)
    )
    assert any(each.startswith("sympy") for each in findings_module._packages().unmet)


def test_the_tables_of_this_machine(windlass: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem("CPU quota", "slower", "the cgroup grants 1.5 of 8 CPUs", "raise the limit")
    monkeypatch.setattr("windlass.tools.doctor.findings.examine", lambda: ON_GPU)
    monkeypatch.setattr("windlass.tools.doctor.problems.find_problems", lambda _: [problem])
    printed = windlass("doctor")
    assert printed.code == 0
    for text in ("NVIDIA H200", "compute capability 9.0", "CUDA graphs", "CPU quota", "tune"):
        assert text in printed.out


def test_cores_are_counted_by_numa_node(windlass: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    cores = tuple(Core(i // 4, (i,)) for i in range(6))
    two_nodes = replace(HEALTHY.cpu, topology=Topology(cores, 8, 8, 2))
    found = replace(HEALTHY, cpu=two_nodes)
    monkeypatch.setattr("windlass.tools.doctor.findings.examine", lambda: found)
    printed = " ".join(windlass("doctor").out.replace("│", " ").split())
    assert "6 cores allowed (4 on node 0, 2 on node 1)" in printed
