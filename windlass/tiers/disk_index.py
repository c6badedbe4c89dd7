"""The index of a disk store in memory: every record under its directory, in order of last use."""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path

from windlass.tiers.disk_files import StoredRecord, list_records

# A folder that changed so recently may change again without a new modification time.
_UNSETTLED_NS = 2_000_000_000


class DiskIndex:
    """Owns the sizes and ages of records by path. Its owner holds a lock; `in` needs none."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._records: OrderedDict[str, tuple[int, int]] = OrderedDict()  # (bytes, last use)
        self._listed: dict[Path, int] = {}  # modification times of unchanged folders

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, path: object) -> bool:
        return path in self._records

    def find_new(self, folders: Iterable[Path]) -> list[StoredRecord]:
        """List records that are not in the index, the oldest first; reads only changed folders."""
        found: list[StoredRecord] = []
        for folder in folders:
            try:
                changed_ns = os.stat(folder).st_mtime_ns
                if self._listed.get(folder) == changed_ns:
                    continue
                found += list_records(folder, known=self._records)
            except FileNotFoundError:
                continue
            if time.time_ns() - changed_ns > _UNSETTLED_NS:
                self._listed[folder] = changed_ns
        return sorted(found)

    def add_all(self, found: Iterable[StoredRecord]) -> None:
        """Add the records of `find_new`."""
        for used_ns, path, num_bytes in found:
            if path not in self._records:
                self._records[path] = (num_bytes, used_ns)
                self.num_bytes += num_bytes

    def add(self, path: str, num_bytes: int, used_ns: int) -> None:
        """Add a record as the last used one."""
        self.drop(path)
        self._records[path] = (num_bytes, used_ns)
        self.num_bytes += num_bytes

    def drop(self, path: str) -> None:
        self.num_bytes -= self._records.pop(path, (0, 0))[0]

    def touch(self, path: str) -> None:
        """Note a use. A record that another engine wrote may be unknown until the next listing."""
        if path in self._records:
            self.add(path, self._records[path][0], time.time_ns())

    def evict(self, max_bytes: int) -> int:
        """Remove the files that were not used for the longest time; returns their number.

        A file that another engine has used since, or removed, is not counted.
        """
        num_evicted = 0
        while self.num_bytes > max_bytes and self._records:
            path, (num_bytes, used_ns) = next(iter(self._records.items()))
            try:
                last_ns = os.stat(path, follow_symlinks=False).st_mtime_ns
                if last_ns > used_ns:
                    self.add(path, num_bytes, last_ns)
                    continue
                os.unlink(path)
                num_evicted += 1
            except (FileNotFoundError, IsADirectoryError):
                pass  # another engine evicted it, or it is no record any more
            self.drop(path)
        return num_evicted
