"""Limits of the control groups (v1 and v2) that this process runs in: CPU quota and memory.

A limit of any group above the process applies to it, so every level is read. Inside a container without a
namespace of its own, /proc names groups of the host that are not mounted; then the mount's top level counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
_UNLIMITED = 2**60  # v1 writes a huge number for "no limit"


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The tightest memory limit, and the bytes that can still be allocated below it."""

    num_bytes: int
    free_bytes: int


def cpu_quota(root: Path = ROOT) -> float | None:
    """CPU time per wall time, as a number of cores; None without a limit."""
    quotas = []
    for folder in _folders("cpu", root):
        if (folder / "cpu.max").is_file():
            limit, period = (folder / "cpu.max").read_text().split()[:2]
        elif (folder / "cpu.cfs_quota_us").is_file():
            limit = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        else:
            continue
        if limit not in ("max", "-1"):
            quotas.append(int(limit) / int(period))
    return min(quotas, default=None)


def memory_limit(root: Path = ROOT) -> MemoryLimit | None:
    """The tightest memory limit; None without one.

    The page cache counts as use, but the kernel drops its inactive part before it refuses memory.
    """
    limits = []
    for folder in _folders("memory", root):
        for maximum, used in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            if not (folder / maximum).is_file() or not (folder / used).is_file():
                continue
            limit = (folder / maximum).read_text().strip()
            if limit != "max" and int(limit) < _UNLIMITED:
                held = int((folder / used).read_text()) - _inactive_file_bytes(folder)
                limits.append(MemoryLimit(int(limit), max(0, int(limit) - max(0, held))))
    return min(limits, key=lambda limit: limit.free_bytes, default=None)


def _inactive_file_bytes(folder: Path) -> int:
    stats = folder / "memory.stat"
    if not stats.is_file():
        return 0
    found = dict(line.split()[:2] for line in stats.read_text().splitlines())
    return int(found.get("total_inactive_file", found.get("inactive_file", 0)))


def _folders(controller: str, root: Path) -> Iterator[Path]:
    """The folders of this process' groups that have a controller, with all groups above them."""
    mount, groups = root / "sys/fs/cgroup", root / "proc/self/cgroup"
    if not groups.is_file():
        return
    for line in groups.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            tops = [mount, mount / "unified"]
        elif controller in controllers.split(","):
            tops = [mount / controllers, mount / controller]
        else:
            continue
        for top in tops:
            own = top / path.lstrip("/")
            yield from (
                folder
                for folder in (own, *own.parents)
                if folder.is_relative_to(top) and folder.is_dir()
            )
