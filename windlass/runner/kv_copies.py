"""Copies KV blocks between the device's pages and host memory: on a CPU here, on a GPU in cuda/kv_copies.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from windlass.config import CacheConfig
from windlass.core.types import BlockId
from windlass.kernels.batch import KVCache
from windlass.kernels.storages import Held
from windlass.runner.cuda.kv_copies import cuda_block_copies, staging_bytes
from windlass.runner.host_rows import HostRows
from windlass.runner.kv_records import DONE, BlockCopies, PendingCopy, RecordLayout

_BUFFER_BYTES = 256 * 2**20  # of host memory, if tiers are enabled without --kv-offload-gb
# Bytes to measure with: a few milliseconds each way.
_MEASURED_BYTES = {"cpu": 8 * 2**20, "cuda": 64 * 2**20}
_NUM_MEASURED = 3


class HostBlockCopies:
    """Copies blocks of a CPU's KV caches, at once.

    NumPy copies in the calling thread. torch would wake its thread pool for each block, which competes
    with the kernels' threads: measured at 4 times as long, and 100 times on busy cores.
    """

    def __init__(self, layout: RecordLayout, rows: HostRows) -> None:
        self.layout = layout
        self.record_bytes = layout.record_bytes
        self.rows = rows
        self._pages = [section.pages.numpy() for section in layout.sections]

    def read(self, blocks: Sequence[BlockId], rows: Sequence[int]) -> PendingCopy:
        for page, part in self._pairs(blocks, rows):
            np.copyto(part, page)
        return DONE

    def write(self, rows: Sequence[int], blocks: Sequence[BlockId]) -> PendingCopy:
        for page, part in self._pairs(blocks, rows):
            np.copyto(page, part)
        return DONE

    def wait(self) -> None:
        pass

    def storages(self) -> Iterator[Held]:
        return self.rows.storages()

    def close(self) -> None:
        self.rows.close()

    def _pairs(
        self, blocks: Sequence[BlockId], rows: Sequence[int]
    ) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """The pages of each block, and their part of its record."""
        self.layout.check(blocks, rows, self.rows.num_ready)
        for block, row in zip(blocks, rows, strict=True):
            record = self.rows.tensor(row).view(self.layout.word)
            for section, pages in zip(self.layout.sections, self._pages, strict=True):
                yield pages[:, block], section.of(record).numpy()


def make_block_copies(
    caches: Sequence[KVCache], num_bytes: int, *, plain_kernels: bool = False
) -> BlockCopies:
    """Make the block copies of these caches. The rows fill up to `num_bytes` of host memory."""
    layout = RecordLayout(caches)
    num_rows = max(1, num_bytes // layout.record_bytes)
    if layout.device.type == "cuda":
        return cuda_block_copies(layout, num_rows, plain_kernels=plain_kernels)
    # The system provides pages of a CPU's cache when they are first written.
    beside = sum(cache.num_bytes for cache in caches)
    return HostBlockCopies(layout, HostRows(num_rows, layout.record_bytes, beside=beside))


def offload_bytes(config: CacheConfig, num_ranks: int) -> int:
    """Bytes of host memory for one rank's KV records."""
    if not config.has_tiers:
        return 0
    if config.kv_offload_gb is None:
        return _BUFFER_BYTES
    return int(config.kv_offload_gb * 2**30) // num_ranks


def reserved_bytes(
    config: CacheConfig, record_bytes: int, device: torch.device, num_ranks: int = 1
) -> int:
    """Bytes of the device's memory that copies of KV blocks take beside the KV cache."""
    if config.has_tiers and device.type == "cuda":
        return staging_bytes(record_bytes)
    return offload_bytes(config, num_ranks)


def measure_write_rate(copies: BlockCopies) -> float:
    """Bytes per second from host memory to the device, before any step. The content of the blocks stays."""
    layout = copies.layout
    num_bytes = _MEASURED_BYTES[layout.device.type]
    count = min(copies.rows.num_ready, layout.num_blocks, max(1, num_bytes // layout.record_bytes))
    rows, blocks = range(count), [BlockId(block) for block in range(count)]
    copies.read(blocks, rows).wait()
    copies.write(rows, blocks).wait()  # compiles kernels, and touches the memory
    times = []
    for _ in range(_NUM_MEASURED):
        start = perf_counter()
        copies.write(rows, blocks).wait()
        times.append(perf_counter() - start)
    # The shortest time, since other programs may slow a run down.
    return count * layout.record_bytes / max(min(times), 1e-9)
