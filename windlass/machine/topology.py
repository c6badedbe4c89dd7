"""The CPUs of this process by physical core and NUMA node, and how processes divide them.

The default number of threads is the number of physical cores of one NUMA node: two threads of one core share
its execution units, and memory of another node is slower. Several processes of one machine get cores of their
own, those of one node first.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from windlass.machine.cgroup import ROOT, cpu_quota

_CPUS = "sys/devices/system/cpu"
_NODES = "sys/devices/system/node"


@dataclass(frozen=True, slots=True)
class Core:
    """A physical core: its NUMA node, and its logical CPUs that the process may use."""

    node: int
    cpus: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Topology:
    """The cores that this process may use, by node, and those of the machine."""

    cores: tuple[Core, ...]
    num_machine_cores: int
    num_machine_cpus: int
    num_machine_nodes: int
    quota: float | None = None  # CPU quota of the cgroup, in cores
    free_gib: Mapping[int, int] = field(default_factory=dict)  # free memory of nodes

    @property
    def cpus(self) -> tuple[int, ...]:
        return tuple(sorted(cpu for core in self.cores for cpu in core.cpus))

    @property
    def nodes(self) -> dict[int, tuple[Core, ...]]:
        """The allowed cores of each node."""
        numbers = sorted({core.node for core in self.cores})
        return {node: tuple(core for core in self.cores if core.node == node) for node in numbers}

    @property
    def num_usable_cpus(self) -> int:
        """Logical CPUs that can be busy at the same time: by affinity, below the CPU quota."""
        allowed = len(self.cpus)
        return allowed if self.quota is None else min(allowed, max(1, int(self.quota)))


@dataclass(frozen=True, slots=True)
class CpuSlot:
    """Which of the engine processes of a machine a process is: they divide the cores."""

    index: int = 0
    count: int = 1


@dataclass(frozen=True, slots=True)
class CpuShare:
    """The cores of one of several processes, and how many threads compute on them."""

    cores: tuple[Core, ...]
    num_threads: int
    reason: str
    is_bound: bool = False  # there are several NUMA nodes, so threads stay on theirs

    @property
    def cpus(self) -> tuple[int, ...]:
        return tuple(sorted(cpu for core in self.cores for cpu in core.cpus))

    @property
    def thread_cpus(self) -> tuple[tuple[int, ...], ...] | None:
        """The CPUs of each thread's node; None: threads run on any CPU.

        Threads are numbered by node, and a thread packs the same part of a weight as it multiplies with later.
        So the kernel, which places a page on the node that writes it first, places weights where they are read.
        A thread is not bound to one core: it would wait there for another process.
        """
        if not self.is_bound:
            return None
        of_node = {
            node: tuple(
                sorted(cpu for core in self.cores if core.node == node for cpu in core.cpus)
            )
            for node in {core.node for core in self.cores}
        }
        count = len(self.cores)
        return tuple(
            of_node[self.cores[i * count // self.num_threads].node] for i in range(self.num_threads)
        )


def bind_process(share: CpuShare) -> None:
    """Keep this thread, and those that it starts from now on, on the share's node."""
    if share.is_bound and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, share.cpus)


@functools.cache
def process_topology() -> Topology:
    """The topology when it was first asked for: binding the process narrows its affinity mask."""
    return read_topology()


def read_topology(root: Path = ROOT, affinity: frozenset[int] | None = None) -> Topology:
    """Read the machine. `affinity`: CPUs that the process may use; None: ask the system.

    Systems without /sys (macOS, Windows) report numbers of cores only: one node, and no CPU is bound.
    """
    has_affinity = affinity is not None or hasattr(os, "sched_getaffinity")
    if not has_affinity or not (root / _CPUS / "online").is_file():
        return _counted()
    online = parse_cpus((root / _CPUS / "online").read_text())
    if affinity is None:
        affinity = frozenset(os.sched_getaffinity(0))
    nodes = _nodes_of(root)
    siblings = {cpu: _siblings(root, cpu) for cpu in online}
    allowed = {
        frozenset(siblings[cpu]): tuple(sorted(siblings[cpu] & affinity))
        for cpu in online
        if cpu in affinity
    }
    cores = [Core(nodes.get(cpus[0], 0), cpus) for cpus in allowed.values()]
    return Topology(
        cores=tuple(sorted(cores, key=lambda core: (core.node, core.cpus))),
        num_machine_cores=len({frozenset(each) for each in siblings.values()}),
        num_machine_cpus=len(online),
        num_machine_nodes=max(1, len(set(nodes.values()))),
        quota=cpu_quota(root),
        free_gib={node: _free_gib(root, node) for node in set(nodes.values())},
    )


def share_cpus(topology: Topology, slot: CpuSlot = CpuSlot()) -> CpuShare:  # noqa: B008 - frozen
    """The cores of one of the engine processes of this machine.

    A process gets cores of one node. One process gets the node with the most cores, and of several such
    nodes the one with the most free memory, so that a second server takes another node than the first.
    """
    index, count = slot.index, slot.count
    cores = _node_cores(topology, index, count)
    nodes = topology.nodes
    num_threads, limits = len(cores), [_physical(len(cores))]
    if len(nodes) > 1:
        limits[0] += f" of NUMA node {cores[0].node} ({len(nodes)} nodes)"
    if topology.quota is not None and topology.quota / count < num_threads:
        num_threads = max(1, int(topology.quota / count))
        limits.append(f"the CPU quota is {topology.quota:g} cores")
    if count > 1:
        limits.append(f"{count} processes share {_physical(len(topology.cores))}")
    return CpuShare(cores, num_threads, "; ".join(limits), is_bound=len(nodes) > 1)


def threads_as_set(topology: Topology, share: CpuShare, num_threads: int) -> CpuShare:
    """The share with a number of threads that the user has set; more threads than cores take other nodes."""
    cores = share.cores
    if num_threads > len(cores):
        others = [core for core in topology.cores if core not in cores]
        cores = (*cores, *others[: num_threads - len(cores)])
        cores = tuple(sorted(cores, key=lambda core: (core.node, core.cpus)))
    return CpuShare(cores, num_threads, "as set", share.is_bound)


def parse_cpus(text: str) -> frozenset[int]:
    """0-3,8 -> 0, 1, 2, 3, 8"""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def _physical(count: int) -> str:
    return f"{count} physical core{'' if count == 1 else 's'}"


def _node_cores(topology: Topology, index: int, count: int) -> tuple[Core, ...]:
    nodes = topology.nodes
    if count == 1:
        best = max(
            nodes, key=lambda node: (len(nodes[node]), topology.free_gib.get(node, 0), -node)
        )
        return nodes[best]
    if count < len(nodes):  # a node for each process, the largest ones
        largest = sorted(nodes, key=lambda node: (-len(nodes[node]), node))[:count]
        return nodes[sorted(largest)[index]]
    total = len(topology.cores)
    owners = [topology.cores[(2 * each + 1) * total // (2 * count)].node for each in range(count)]
    peers = [each for each in range(count) if owners[each] == owners[index]]
    cores, position = nodes[owners[index]], peers.index(index)
    first, last = (len(cores) * (position + end) // len(peers) for end in (0, 1))
    return cores[first : max(last, first + 1)]


def _siblings(root: Path, cpu: int) -> frozenset[int]:
    """The logical CPUs of a CPU's core."""
    for name in ("core_cpus_list", "thread_siblings_list"):
        path = root / _CPUS / f"cpu{cpu}" / "topology" / name
        if path.is_file():
            return parse_cpus(path.read_text()) | {cpu}
    return frozenset({cpu})


def _nodes_of(root: Path) -> dict[int, int]:
    """The node of each CPU."""
    found = {}
    for folder in sorted((root / _NODES).glob("node[0-9]*")):
        for cpu in parse_cpus((folder / "cpulist").read_text()):
            found[cpu] = int(folder.name.removeprefix("node"))
    return found


def _free_gib(root: Path, node: int) -> int:
    """Free memory of a node in whole GiB; 0 if the system does not say."""
    path = root / _NODES / f"node{node}" / "meminfo"
    if not path.is_file():
        return 0
    found = [line.split() for line in path.read_text().splitlines() if "MemFree:" in line]
    return int(found[0][-2]) // 2**20 if found else 0


def _counted() -> Topology:
    import psutil

    num_cpus = os.cpu_count() or 1
    num_cores = min(num_cpus, psutil.cpu_count(logical=False) or num_cpus)
    cores = [Core(0, tuple(range(i, num_cpus, num_cores))) for i in range(num_cores)]
    return Topology(tuple(cores), num_cores, num_cpus, num_machine_nodes=1)
