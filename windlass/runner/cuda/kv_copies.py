"""Copies KV blocks between a GPU's pages and pinned host memory, while steps run.

    read:   compute stream:  | ... step | gather |   step, which may overwrite the blocks
            read stream:                         | staging -> rows |
    write:  compute stream:  | step            |   next step, which does not use the blocks
            write stream:    | rows -> staging |(wait)| scatter |

Staging buffers lie in device memory. They are allocated once, because the allocator must not reuse
memory of captured graphs. When all staging buffers of reads are in use, the compute stream waits for
one to become free; the host never waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from windlass.core.types import BlockId
from windlass.errors import EngineError
from windlass.kernels import reference
from windlass.kernels.storages import Held, held
from windlass.runner.device import gib
from windlass.runner.host_rows import HostRows
from windlass.runner.kv_records import DONE, PendingCopy, RecordLayout

_CHUNK_BYTES = 64 * 2**20  # of records, gathered or scattered by one launch per tensor
_NUM_READ_CHUNKS = 8  # in flight, before a gather waits for the first one
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of this process

CopyKernel = Callable[[Tensor, Tensor, Tensor], None]


class Event(Protocol):
    """A recorded point in a stream, like a CUDA event."""

    def done(self) -> bool: ...

    def wait(self) -> None:
        """Block the host until the stream has passed the event."""
        ...


class Stream(Protocol):
    """A queue of device work that runs in order, like a CUDA stream."""

    def run(self, work: Callable[[], None]) -> None:
        """Call `work`, whose launches go to this stream."""
        ...

    def record_event(self) -> Event: ...

    def wait(self, event: Event) -> None:
        """Make later work of this stream wait for an event of another stream. The host does not wait."""
        ...


@dataclass(frozen=True, slots=True)
class Streams:
    """One stream per kind of work; `compute` runs the steps."""

    compute: Stream
    reads: Stream
    writes: Stream


@dataclass(frozen=True, slots=True)
class CopyKernels:
    """Gather blocks into records, and scatter records into blocks."""

    gather: CopyKernel = reference.gather_blocks
    scatter: CopyKernel = reference.scatter_blocks


@dataclass(slots=True)
class _Chunk:
    """A staging buffer of records. `free` is recorded when the host has its contents."""

    records: Tensor  # [records, words]
    free: Event | None = None


def staging_rows(record_bytes: int) -> int:
    """Max records per chunk."""
    return max(1, _CHUNK_BYTES // record_bytes)


def staging_bytes(record_bytes: int) -> int:
    """Max bytes of device memory for staging."""
    return (_NUM_READ_CHUNKS + 1) * staging_rows(record_bytes) * record_bytes


class StreamedBlockCopies:
    """Owns the staging buffers."""

    def __init__(
        self, layout: RecordLayout, rows: HostRows, streams: Streams, kernels: CopyKernels
    ) -> None:
        self.layout = layout
        self.record_bytes = layout.record_bytes
        self.rows = rows
        self._streams = streams
        self._moves = kernels
        self._size = min(staging_rows(self.record_bytes), layout.num_blocks)
        shape = (_NUM_READ_CHUNKS + 1, self._size, self.record_bytes // layout.word.itemsize)
        *reading, self._writing = torch.empty(shape, dtype=layout.word, device=layout.device)
        self._reading = [_Chunk(records) for records in reading]

    @torch.inference_mode()
    def read(self, blocks: Sequence[BlockId], rows: Sequence[int]) -> PendingCopy:
        compute, reads = self._streams.compute, self._streams.reads
        pending: PendingCopy = DONE
        for some_blocks, some_rows in self._parts(blocks, rows):
            chunk = self._reading[0]
            self._reading.append(self._reading.pop(0))
            if chunk.free is not None:
                compute.wait(chunk.free)
            compute.run(partial(self._move, self._moves.gather, some_blocks, chunk.records))
            reads.wait(compute.record_event())
            reads.run(partial(self._to_host, chunk.records, some_rows))
            pending = chunk.free = reads.record_event()
        return pending

    @torch.inference_mode()
    def write(self, rows: Sequence[int], blocks: Sequence[BlockId]) -> PendingCopy:
        writes, submitted = self._streams.writes, self._streams.compute.record_event()
        pending: PendingCopy = DONE
        for some_blocks, some_rows in self._parts(blocks, rows):
            writes.run(partial(self._to_device, some_rows, self._writing))
            writes.wait(submitted)
            writes.run(partial(self._move, self._moves.scatter, some_blocks, self._writing))
            pending = writes.record_event()
        return pending

    def storages(self) -> Iterator[Held]:
        yield from held("KV offload", self._writing)  # reads use the same memory
        yield from self.rows.storages()

    def wait(self) -> None:
        for stream in (self._streams.reads, self._streams.writes):
            stream.record_event().wait()

    def close(self) -> None:
        self.wait()
        self.rows.close()

    def _parts(
        self, blocks: Sequence[BlockId], rows: Sequence[int]
    ) -> Iterator[tuple[list[BlockId], list[int]]]:
        """Split a copy into chunks, sorted by row, so that adjacent rows need one transfer."""
        self.layout.check(blocks, rows, self.rows.num_ready)
        order = sorted(range(len(rows)), key=rows.__getitem__)
        for first in range(0, len(order), self._size):
            part = order[first : first + self._size]
            yield [blocks[at] for at in part], [rows[at] for at in part]

    def _move(self, move: CopyKernel, blocks: Sequence[BlockId], records: Tensor) -> None:
        pinned = self.layout.device.type == "cuda"
        ids = torch.tensor(blocks, pin_memory=pinned).to(self.layout.device, non_blocking=True)
        for section in self.layout.sections:
            move(section.pages, ids, section.of(records[: len(blocks)]))

    def _to_host(self, records: Tensor, rows: Sequence[int]) -> None:
        first = 0
        for run in self.rows.runs(rows):
            source = records[first : first + len(run)].view(torch.uint8)
            run.copy_(source, non_blocking=True)
            first += len(run)

    def _to_device(self, rows: Sequence[int], records: Tensor) -> None:
        first = 0
        for run in self.rows.runs(rows):
            records[first : first + len(run)].view(torch.uint8).copy_(run, non_blocking=True)
            first += len(run)


def cuda_block_copies(
    layout: RecordLayout, num_rows: int, *, plain_kernels: bool
) -> StreamedBlockCopies:
    """Copies on streams of their own, with pinned rows."""
    device = layout.device
    rows = HostRows(num_rows, layout.record_bytes, pinning=_CudaPinning(device))
    reads, writes = (_CudaStream(torch.cuda.Stream(device)) for _ in range(2))
    streams = Streams(compute=_CudaStream(None), reads=reads, writes=writes)
    kernels = CopyKernels()
    if not plain_kernels:
        from windlass.kernels.triton.block_copy import gather_blocks, scatter_blocks

        kernels = CopyKernels(gather_blocks, scatter_blocks)
    return StreamedBlockCopies(layout, rows, streams=streams, kernels=kernels)


class _CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def done(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        self.event.synchronize()


class _CudaStream:
    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        """None: the current stream."""
        self._own = stream

    @property
    def _stream(self) -> torch.cuda.Stream:
        return self._own or torch.cuda.current_stream()

    def run(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def record_event(self) -> _CudaEvent:
        return _CudaEvent(self._stream.record_event())

    def wait(self, event: Event) -> None:
        assert isinstance(event, _CudaEvent)
        self._stream.wait_event(event.event)


class _CudaPinning:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._runtime = torch.cuda.cudart()

    def pin(self, memory: Tensor) -> None:
        with torch.cuda.device(self._device):  # another thread may have another current device
            error = self._runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE)
        self._check(error, f"pin {gib(memory.nbytes)} of host memory for --kv-offload-gb")

    def unpin(self, memory: Tensor) -> None:
        torch.cuda.synchronize(self._device)
        self._check(self._runtime.cudaHostUnregister(memory.data_ptr()), "unpin host memory")

    def _check(self, error: Any, what: str) -> None:
        if int(error) != 0:
            why = self._runtime.cudaGetErrorString(error)
            raise EngineError(f"CUDA cannot {what}: {why} (error {int(error)}).")
