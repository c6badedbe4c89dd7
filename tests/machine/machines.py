"""Folders that look like the root of a machine: CPUs in /sys, cgroups in /proc and /sys."""

from __future__ import annotations

from pathlib import Path

from windlass.machine.topology import Topology, read_topology


def make_machine(root: Path, *, nodes: int = 1, cores: int = 4, threads: int = 1) -> Path:
    """Write /sys of a machine: `cores` per node, `threads` per core. Siblings are numbered last, as by Linux."""
    total = nodes * cores
    devices = root / "sys/devices/system"
    for cpu in range(total * threads):
        core = cpu % total
        siblings = ",".join(str(core + total * thread) for thread in range(threads))
        _write(devices / f"cpu/cpu{cpu}/topology/core_cpus_list", siblings)
    _write(devices / "cpu/online", f"0-{total * threads - 1}")
    for node in range(nodes):
        own = [
            f"{total * t + node * cores}-{total * t + (node + 1) * cores - 1}"
            for t in range(threads)
        ]
        _write(devices / f"node/node{node}/cpulist", ",".join(own))
    return root


def make_cgroup(root: Path, files: dict[str, str], group: str = "0::/") -> Path:
    """Write files below /sys/fs/cgroup, and the process' groups."""
    _write(root / "proc/self/cgroup", group)
    for name, text in files.items():
        _write(root / "sys/fs/cgroup" / name, text)
    return root


def topology_of(root: Path, *cpus: int) -> Topology:
    """The topology with an affinity mask; all CPUs without one."""
    return read_topology(root, frozenset(cpus or range(1024)))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")
