"""A recorded step: native commands over memory at fixed addresses, replayed for any batch.

Each step passes its number of tokens and rows. Buffers with disjoint lifetimes share memory.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from windlass.errors import ConfigError
from windlass.kernels.native.commands import TOKENS, Command, Op, Step
from windlass.kernels.native.pool import Pool
from windlass.kernels.native.record import Buffer, Recorded, Recording, fuse
from windlass.kernels.storages import Held, held

_ALIGNMENT = 64  # bytes: buffers begin at a cache line


@dataclass(frozen=True, slots=True)
class ProgramLimits:
    """The largest possible step."""

    tokens: int
    rows: int


class ProgramInputs:
    """Owns the inputs of a step, in memory that the commands read."""

    def __init__(self, limits: ProgramLimits, tables: Tensor) -> None:
        """`tables` is read in place: [groups, slots, blocks] of int32."""
        self.tokens = np.zeros((3, limits.tokens), dtype=np.int32)  # ids, positions, slots
        self.adapters = np.zeros(limits.tokens, dtype=np.int32)  # the adapter slot of each token
        self._rows = np.zeros((limits.rows, 4), dtype=np.int32)
        self._sampled = np.zeros(limits.rows, dtype=np.int32)
        self._prompts = np.zeros((limits.rows, 2), dtype=np.int32)
        self._tables = tables
        ids, positions, slots = (row.ctypes.data for row in self.tokens)
        self.step = Step(
            table_stride=tables.shape[2],
            tables=tables.data_ptr(),
            ids=ids,
            positions=positions,
            slots=slots,
            adapters=self.adapters.ctypes.data,
            rows=self._rows.ctypes.data,
            sampled=self._sampled.ctypes.data,
            prompts=self._prompts.ctypes.data,
        )

    def write(
        self,
        *,
        num_tokens: int,
        rows: Sequence[tuple[int, int, int]],
        slots: Sequence[int],
        prompts: Sequence[tuple[int, int]],
        sampled: Sequence[int],
    ) -> None:
        """Write all but `tokens` and `adapters`.

        A row has its first token, number of tokens and first position; `prompts` are disjoint
        ranges of prompt tokens; the tokens in `sampled` go to the LM head.
        """
        self._rows[: len(rows), :3] = rows
        self._rows[: len(rows), 3] = slots
        self._sampled[: len(sampled)] = sampled
        if prompts:
            self._prompts[: len(prompts)] = prompts
        step = self.step
        step.num_tokens, step.num_rows = num_tokens, len(rows)
        step.num_sampled, step.num_prompts = len(sampled), len(prompts)


class Program:
    """Owns the commands and their memory.

    `results` are views of what the forward returned, after the last step; `inputs` is a view of what
    the next step reads beside its tokens, if anything.
    """

    def __init__(
        self,
        pool: Pool,
        recording: Recording,
        *,
        inputs: Tensor | None,
        results: Sequence[Tensor],
        limits: ProgramLimits,
        max_bytes: int,
    ) -> None:
        self._pool = pool
        self._recording = recording  # owns tensors that commands point into
        calls = fuse(recording.calls)
        given = None if inputs is None else recording.buffer_of(inputs)
        kept = [recording.buffer_of(result) for result in results]
        offsets, total = _plan_memory(calls, limits, given, kept)
        if total > max_bytes:
            raise ConfigError(
                f"a step of {limits.tokens} tokens and {limits.rows} sampled rows needs "
                f"{total / 2**20:,.1f} MiB, and {max_bytes / 2**20:,.1f} MiB of memory are free "
                "beside the KV cache. Lower --max-num-batched-tokens, --max-num-seqs or the size "
                "of the cache."
            )
        self._memory = torch.zeros(total + _ALIGNMENT, dtype=torch.uint8)
        base = -self._memory.data_ptr() % _ALIGNMENT
        first = self._memory.data_ptr() + base
        commands = [
            recorded.call.command(
                recorded.rows,
                [
                    None if buffer is None else first + offsets[buffer]
                    for buffer in recorded.buffers
                ],
            )
            for recorded in calls
        ]
        self._commands = (Command * len(commands))(*commands)
        # argmax comes last: steps that sample otherwise leave it out.
        self._num_without_argmax = sum(recorded.op != Op.ARGMAX for recorded in calls)

        def view(buffer: Buffer) -> Tensor:
            start, rows = base + offsets[buffer], _num_rows(buffer, limits)
            raw = self._memory[start : start + rows * buffer.row_bytes]
            return raw.view(buffer.dtype).view(rows, -1)

        self.inputs = None if given is None else view(given)
        self.results = [view(buffer) for buffer in kept]

    @property
    def num_commands(self) -> int:
        return len(self._commands)

    @property
    def num_bytes(self) -> int:
        return self._memory.nbytes

    def storages(self) -> Iterator[Held]:
        yield from held("recorded steps", self._memory)
        yield from self._recording.storages()

    def run(self, inputs: ProgramInputs, draw: bool) -> None:
        """Compute a step; with `draw` also the argmax of each row."""
        count = len(self._commands) if draw else self._num_without_argmax
        if self._pool.timer is None:
            self._pool.replay(ctypes.byref(self._commands), count, inputs.step)
            return
        for command in self._commands[:count]:
            start = time.perf_counter()
            self._pool.replay(ctypes.byref(command), 1, inputs.step)
            self._pool.timer.add(command, start, time.perf_counter() - start)


def record(
    pool: Pool,
    forward: Callable[[], Sequence[Tensor]],
    limits: ProgramLimits,
    max_bytes: int,
    inputs: Tensor | None = None,
) -> Program:
    """Run `forward`, which returns the step's results, once without computing.

    `inputs`: a tensor with a row per token that `forward` reads. A program that needs more than
    `max_bytes` of memory is a ConfigError.
    """
    recording = Recording()
    if inputs is not None:
        recording.read_by_step(inputs)
    with pool.recorded_by(recording), recording:
        results = forward()
    return Program(
        pool, recording, inputs=inputs, results=results, limits=limits, max_bytes=max_bytes
    )


def _plan_memory(
    calls: Sequence[Recorded], limits: ProgramLimits, given: Buffer | None, kept: Sequence[Buffer]
) -> tuple[dict[Buffer, int], int]:
    """Return the offset of each buffer, first fit by lifetime, and the total bytes.

    `given` is written before the first command, `kept` are read after the last.
    """
    lifetimes: dict[Buffer, list[int]] = {}  # first and last call
    for at, recorded in enumerate(calls):
        for buffer in recorded.buffers:
            if buffer is not None:
                lifetimes.setdefault(buffer, [at, at])[1] = at
    if given is not None:
        lifetimes[given][0] = -1
    for buffer in kept:
        lifetimes[buffer][1] = len(calls)
    placed: list[tuple[int, int, Buffer]] = []  # first byte, end
    offsets: dict[Buffer, int] = {}
    for buffer, (begin, end) in sorted(
        lifetimes.items(), key=lambda item: -_num_bytes(item[0], limits)
    ):
        offset = 0
        for first, last, other in sorted(placed, key=lambda item: item[0]):
            other_begin, other_end = lifetimes[other]
            if other_begin > end or other_end < begin:
                continue
            if offset + _num_bytes(buffer, limits) <= first:
                break
            offset = max(offset, last)
        offsets[buffer] = offset
        placed.append((offset, offset + _num_bytes(buffer, limits), buffer))
    return offsets, max(last for _, last, _ in placed)


def _num_rows(buffer: Buffer, limits: ProgramLimits) -> int:
    return limits.tokens if buffer.rows == TOKENS else limits.rows


def _num_bytes(buffer: Buffer, limits: ProgramLimits) -> int:
    return -(-_num_rows(buffer, limits) * buffer.row_bytes // _ALIGNMENT) * _ALIGNMENT
