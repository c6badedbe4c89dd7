"""Limits of cgroups v1 and v2, at any level above the process."""

from __future__ import annotations

from pathlib import Path

from tests.machine.machines import make_cgroup
from windlass.machine.cgroup import MemoryLimit, cpu_quota, memory_limit


def test_no_limits(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None
    root = make_cgroup(
        tmp_path, {"cpu.max": "max 100000", "memory.max": "max", "memory.current": "5"}
    )
    assert cpu_quota(root) is None
    assert memory_limit(root) is None


def test_the_tightest_level_counts(tmp_path: Path) -> None:
    files = {
        "a/cpu.max": "400000 100000",
        "a/b/cpu.max": "max 100000",
        "a/memory.max": "1000",
        "a/memory.current": "900",
        "a/memory.stat": "anon 600\ninactive_file 300",
        "a/b/memory.max": "800",
        "a/b/memory.current": "100",
    }
    root = make_cgroup(tmp_path, files, "0::/a/b")
    assert cpu_quota(root) == 4
    assert memory_limit(root) == MemoryLimit(1000, 400)


def test_version_1(tmp_path: Path) -> None:
    files = {
        "cpu,cpuacct/box/cpu.cfs_quota_us": "150000",
        "cpu,cpuacct/box/cpu.cfs_period_us": "100000",
        "memory/box/memory.limit_in_bytes": "2048",
        "memory/box/memory.usage_in_bytes": "1024",
        "memory/memory.limit_in_bytes": "9223372036854771712",
        "memory/memory.usage_in_bytes": "4096",
    }
    root = make_cgroup(tmp_path, files, "4:memory:/box\n3:cpu,cpuacct:/box\n0::/")
    assert cpu_quota(root) == 1.5
    assert memory_limit(root) == MemoryLimit(2048, 1024)


def test_a_container_whose_groups_are_named_as_on_the_host(tmp_path: Path) -> None:
    root = make_cgroup(tmp_path, {"cpu.max": "50000 100000"}, "0::/kubepods/pod1/box")
    assert cpu_quota(root) == 0.5
