"""The cores of a process on machines with SMT, NUMA nodes, affinity masks and CPU quotas."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.machine.machines import make_cgroup, make_machine, topology_of
from windlass.machine import topology as topology_module
from windlass.machine.topology import (
    CpuSlot,
    bind_process,
    parse_cpus,
    read_topology,
    share_cpus,
    threads_as_set,
)


def test_lists_of_cpus() -> None:
    assert parse_cpus("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert parse_cpus("\n") == set()


def test_smt_siblings_are_one_core(tmp_path: Path) -> None:
    found = topology_of(make_machine(tmp_path, cores=4, threads=2))
    assert (found.num_machine_cores, found.num_machine_cpus, found.num_machine_nodes) == (4, 8, 1)
    assert [core.cpus for core in found.cores] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    share = share_cpus(found)
    assert (share.num_threads, share.reason) == (4, "4 physical cores")
    assert share.cpus == tuple(range(8))


def test_one_process_takes_one_node(tmp_path: Path) -> None:
    share = share_cpus(topology_of(make_machine(tmp_path, nodes=2, cores=4, threads=2)))
    assert (share.num_threads, share.cpus) == (4, (0, 1, 2, 3, 8, 9, 10, 11))
    assert share.reason == "4 physical cores of NUMA node 0 (2 nodes)"


def test_one_process_takes_the_node_with_most_cores(tmp_path: Path) -> None:
    found = topology_of(make_machine(tmp_path, nodes=2, cores=4), 2, 4, 5, 6)
    assert share_cpus(found).cpus == (4, 5, 6)


def test_a_second_server_takes_the_node_with_more_free_memory(tmp_path: Path) -> None:
    root = make_machine(tmp_path, nodes=2, cores=4)
    for node, free in enumerate((20, 90)):
        text = f"Node {node} MemTotal: 99 kB\nNode {node} MemFree: {free * 2**20} kB\n"
        (root / f"sys/devices/system/node/node{node}/meminfo").write_text(text)
    found = topology_of(root)
    assert found.free_gib == {0: 20, 1: 90}
    assert share_cpus(found).cpus == (4, 5, 6, 7)
    # Processes of one server start one after the other, so they do not go by free memory.
    assert share_cpus(found, CpuSlot(0, 2)).cpus == (0, 1, 2, 3)


def test_an_affinity_mask_of_three_cores(tmp_path: Path) -> None:
    found = topology_of(make_machine(tmp_path, cores=8, threads=2), 1, 2, 5, 10)
    assert [core.cpus for core in found.cores] == [(1,), (2, 10), (5,)]
    assert share_cpus(found).num_threads == 3
    assert found.num_machine_cores == 8
    assert found.num_usable_cpus == 4


@pytest.mark.parametrize(("quota", "threads"), [(1.5, 1), (0.5, 1), (2.0, 2), (3.9, 3), (64, 8)])
def test_threads_stay_below_a_quota(tmp_path: Path, quota: float, threads: int) -> None:
    root = make_cgroup(make_machine(tmp_path, cores=8), {"cpu.max": f"{int(quota * 1e5)} 100000"})
    found = topology_of(root)
    assert found.quota == quota
    share = share_cpus(found)
    assert share.num_threads == threads
    assert ("quota" in share.reason) == (quota < 8)
    assert found.num_usable_cpus == threads


def test_processes_divide_cores_and_quota(tmp_path: Path) -> None:
    found = topology_of(make_machine(tmp_path / "smt", cores=8, threads=2))
    shares = [share_cpus(found, CpuSlot(index, 3)) for index in range(3)]
    assert [share.num_threads for share in shares] == [2, 3, 3]
    assert sorted(cpu for share in shares for cpu in share.cpus) == list(range(16))
    assert shares[0].reason == "2 physical cores; 3 processes share 8 physical cores"
    root = make_cgroup(make_machine(tmp_path / "quota", cores=8), {"cpu.max": "400000 100000"})
    assert share_cpus(topology_of(root), CpuSlot(1, 2)).num_threads == 2


def test_processes_keep_to_a_node(tmp_path: Path) -> None:
    found = topology_of(make_machine(tmp_path, nodes=2, cores=4))
    pairs = [share_cpus(found, CpuSlot(index, 2)).cpus for index in range(2)]
    assert pairs == [(0, 1, 2, 3), (4, 5, 6, 7)]
    four = [share_cpus(found, CpuSlot(index, 4)).cpus for index in range(4)]
    assert four == [(0, 1), (2, 3), (4, 5), (6, 7)]
    three = [share_cpus(found, CpuSlot(index, 3)) for index in range(3)]
    assert [{core.node for core in share.cores} for share in three] == [{0}, {1}, {1}]
    assert sum(len(share.cores) for share in three) == 8


def test_fewer_processes_than_nodes_get_a_node_each(tmp_path: Path) -> None:
    found = topology_of(make_machine(tmp_path, nodes=4, cores=2))
    assert [share_cpus(found, CpuSlot(index, 2)).cpus for index in range(2)] == [(0, 1), (2, 3)]


def test_more_processes_than_cores_share_them(tmp_path: Path) -> None:
    found = topology_of(make_machine(tmp_path, cores=2))
    shares = [share_cpus(found, CpuSlot(index, 5)) for index in range(5)]
    assert [share.num_threads for share in shares] == [1] * 5
    assert {share.cpus for share in shares} == {(0,), (1,)}


def test_more_threads_than_a_node_has_take_other_nodes(tmp_path: Path) -> None:
    found = topology_of(make_machine(tmp_path, nodes=2, cores=4))
    share = threads_as_set(found, share_cpus(found), 6)
    assert (share.num_threads, share.cpus, share.reason) == (6, (0, 1, 2, 3, 4, 5), "as set")
    assert threads_as_set(found, share_cpus(found), 2).cpus == (0, 1, 2, 3)


def test_threads_stay_on_their_node(tmp_path: Path) -> None:
    """Threads are numbered by node, so that each reads the part of a weight that its node packed."""
    one = topology_of(make_machine(tmp_path / "one", cores=4))
    assert share_cpus(one).thread_cpus is None
    two = topology_of(make_machine(tmp_path / "two", nodes=2, cores=2, threads=2))
    first, second = (0, 1, 4, 5), (2, 3, 6, 7)
    assert share_cpus(two).thread_cpus == (first, first)
    assert share_cpus(two, CpuSlot(1, 2)).thread_cpus == (second, second)
    both = threads_as_set(two, share_cpus(two), 4)
    assert both.thread_cpus == (first, first, second, second)
    more = threads_as_set(two, share_cpus(two), 6).thread_cpus
    assert [cpus[0] for cpus in more] == [0, 0, 0, 2, 2, 2]


def test_a_process_is_bound_where_there_are_several_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = []
    monkeypatch.setattr(
        os, "sched_setaffinity", lambda process, cpus: bound.append((process, cpus))
    )
    bind_process(share_cpus(topology_of(make_machine(tmp_path / "one"))))
    assert bound == []
    bind_process(share_cpus(topology_of(make_machine(tmp_path / "two", nodes=2)), CpuSlot(1, 2)))
    assert bound == [(0, (4, 5, 6, 7))]


def test_a_system_without_sys_reports_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on macOS and Windows, which have no affinity in Python either."""
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(topology_module.os, "cpu_count", lambda: 8)
    monkeypatch.setattr("psutil.cpu_count", lambda logical: 8 if logical else 4)
    found = read_topology(tmp_path)
    assert (found.num_machine_cores, found.num_machine_cpus) == (4, 8)
    assert share_cpus(found).num_threads == 4
