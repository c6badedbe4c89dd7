"""Host memory for the records of KV blocks, in rows of equal size.

A record is the bytes of one block on this rank. Stores (windlass/tiers) decide which record lies in
which row; kv_copies.py copies between rows and the device's pages, without another copy on the host.

A GPU copies asynchronously only from and to pinned memory. Pinning gigabytes takes seconds, so a
thread does it piece by piece: the first rows can be used at once, the others when they are ready.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections.abc import Iterator, Sequence
from math import prod
from threading import RLock, Thread
from typing import Protocol

import torch
from torch import Tensor

from windlass.errors import ConfigError, EngineError
from windlass.kernels.storages import Held, held
from windlass.machine.posix import map_private
from windlass.runner.device import free_bytes, gib

# Pinning one piece may delay kernel launches by some milliseconds.
_PIECE_BYTES = 128 * 2**20

_log = logging.getLogger("windlass.engine")


class Pinning(Protocol):
    """How a device pins host memory."""

    def pin(self, memory: Tensor) -> None:
        """Pin the memory of a tensor. Raises EngineError if the device or the system refuses."""
        ...

    def unpin(self, memory: Tensor) -> None:
        """Undo `pin`, after the copies that use the memory."""
        ...


class HostRows:
    """Owns the memory. Without pinning, the system provides pages when they are first written."""

    def __init__(
        self, num_rows: int, row_bytes: int, *, beside: int = 0, pinning: Pinning | None = None
    ) -> None:
        """`beside`: bytes of host memory that other parts have reserved, but not used yet."""
        self.num_rows = num_rows
        self.row_bytes = row_bytes
        free = free_bytes(torch.device("cpu")) - beside
        if num_rows * row_bytes > free:
            raise ConfigError(
                f"{num_rows} KV records of {gib(row_bytes)} need {gib(num_rows * row_bytes)} of host "
                f"memory, and {gib(max(0, free))} are free. Lower --kv-offload-gb."
            )
        self._rows_per_piece = max(1, _PIECE_BYTES // row_bytes)
        self._pieces: list[Tensor] = []  # [rows, row_bytes]
        self._pinned: _PinnedPieces | None = None
        if pinning is None:
            self._pieces += [_allocate(count, row_bytes) for count in self._counts()]
            return
        self._pinned = _PinnedPieces(self._pieces, pinning)
        self._pinned.start([(count, row_bytes) for count in self._counts()])
        # Memory must not be freed before it is unpinned, also without `close`.
        weakref.finalize(self, self._pinned.close).atexit = False

    def _counts(self) -> Iterator[int]:
        """The number of rows of each piece."""
        for first in range(0, self.num_rows, self._rows_per_piece):
            yield min(self._rows_per_piece, self.num_rows - first)

    @property
    def num_ready(self) -> int:
        """The first rows that can be used; the others become usable later."""
        return min(self.num_rows, len(self._pieces) * self._rows_per_piece)

    def row(self, index: int) -> memoryview:
        """The bytes of a row, to read and write."""
        return self.tensor(index).numpy().data

    def tensor(self, index: int) -> Tensor:
        """The bytes of a row as a tensor [row_bytes] of the same memory."""
        piece, at = divmod(index, self._rows_per_piece)
        return self._pieces[piece][at]

    def runs(self, rows: Sequence[int]) -> Iterator[Tensor]:
        """The rows in order as tensors [rows, row_bytes], each of rows that lie side by side."""
        first = 0
        for end in range(1, len(rows) + 1):
            if (
                end < len(rows)
                and rows[end] == rows[end - 1] + 1
                and rows[end] % self._rows_per_piece
            ):
                continue
            piece, at = divmod(rows[first], self._rows_per_piece)
            yield self._pieces[piece][at : at + end - first]
            first = end

    def storages(self) -> Iterator[Held]:
        return held("KV offload", *self._pieces)

    def wait_ready(self) -> None:
        """Block until no more rows become ready."""
        if self._pinned is not None:
            self._pinned.wait()

    def close(self) -> None:
        """Unpin and free pinned memory, after the last copy."""
        if self._pinned is not None:
            self._pinned.close()


class _PinnedPieces:
    """Adds pinned pieces to a list, in a thread.

    Knows nothing of the rows: these can be garbage-collected while the thread works.
    """

    def __init__(self, pieces: list[Tensor], pinning: Pinning) -> None:
        self._pieces = pieces
        self._pinning = pinning
        self._lock = RLock()  # the garbage collector may call `close` in the thread
        self._closed = False
        self._thread: Thread | None = None

    def start(self, shapes: list[tuple[int, int]]) -> None:
        """Add a piece of each shape: the first one now."""
        self._add(shapes[0])
        self._thread = Thread(
            target=self._add_all, args=(shapes[1:],), name="kv-offload", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            while self._pieces:
                self._pinning.unpin(self._pieces[-1])
                self._pieces.pop()

    def _add_all(self, shapes: list[tuple[int, int]]) -> None:
        try:
            for shape in shapes:
                with self._lock:
                    if self._closed:
                        break
                    self._add(shape)
        except EngineError as error:
            ready = gib(sum(piece.nbytes for piece in self._pieces))
            _log.warning("--kv-offload-gb: only %s of host memory are used: %s", ready, error)
        if self._closed:
            self.close()

    def _add(self, shape: tuple[int, int]) -> None:
        free = free_bytes(torch.device("cpu"))
        if prod(shape) > free:
            raise EngineError(
                f"{gib(free)} of memory are free, and {gib(prod(shape))} more needed."
            )
        piece = _allocate(*shape)
        # Pages that exist are pinned faster, and unlike pinning this never delays kernel launches.
        ctypes.memset(piece.data_ptr(), 0, piece.nbytes)
        self._pinning.pin(piece)
        self._pieces.append(piece)


def _allocate(num_rows: int, row_bytes: int) -> Tensor:
    # By default, forked processes would share it.
    memory = map_private(num_rows * row_bytes)
    return torch.frombuffer(memory, dtype=torch.uint8).view(num_rows, row_bytes)
