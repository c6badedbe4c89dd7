"""A recorded step: native commands over memory of fixed address, replayed for any batch.

How many tokens and rows there are is told with every step. Buffers that are never needed at the same
time share their memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from windlass.kernels.native.commands import TOKENS, Command, Op, Step
from windlass.kernels.native.pool import Pool
from windlass.kernels.native.record import Buffer, Recorded, Recording, fuse

_LINE = 64  # bytes: buffers begin at a line of the cache


@dataclass(frozen=True, slots=True)
class Most:
    """The largest step that there can be."""

    tokens: int
    rows: int


class StepInputs:
    """What differs from step to step, where the commands read it."""

    def __init__(self, most: Most, tables: Tensor) -> None:
        """`tables` is read in place: [slots, blocks] of int32."""
        self.ids, self.positions, self.slots, self.adapters = (
            np.zeros(most.tokens, np.int32) for _ in "abcd"
        )
        self.rows = np.zeros((most.rows, 4), np.int32)  # first token, tokens, position, slot
        self.sampled = np.zeros(most.rows, np.int32)
        self._tables = tables
        self.step = Step(
            table_stride=tables.shape[1],
            ids=self.ids.ctypes.data,
            positions=self.positions.ctypes.data,
            slots=self.slots.ctypes.data,
            tables=tables.data_ptr(),
            rows=self.rows.ctypes.data,
            sampled=self.sampled.ctypes.data,
            adapters=self.adapters.ctypes.data,
        )

    def count(self, tokens: int, rows: int, sampled: int) -> None:
        step = self.step
        step.num_tokens, step.num_rows, step.num_sampled = tokens, rows, sampled


class Program:
    """Owns the commands and their memory. `logits` and `tokens` are those of the last step."""

    def __init__(
        self, pool: Pool, recording: Recording, logits: Tensor, tokens: Tensor, most: Most
    ) -> None:
        self._pool = pool
        self._recording = recording  # keeps tensors that commands point into
        calls = fuse(recording.calls)
        places, total = _arrange(calls, most)
        self._memory = torch.zeros(total + _LINE, dtype=torch.uint8)
        base = -self._memory.data_ptr() % _LINE
        own = [
            one.call.command(
                one.rows,
                [
                    None if buffer is None else self._memory.data_ptr() + base + places[buffer]
                    for buffer in one.buffers
                ],
            )
            for one in calls
        ]
        self._commands = (Command * len(own))(*own)
        # Tokens come last: they are left out where rows are drawn otherwise.
        self._without_tokens = sum(one.op != Op.ARGMAX for one in calls)

        def view(tensor: Tensor) -> Tensor:
            buffer = recording.buffer_of(tensor)
            first = base + places[buffer]
            raw = self._memory[first : first + most.rows * buffer.row_bytes]
            return raw.view(buffer.dtype).view(most.rows, -1)

        self.logits = view(logits)
        self.tokens = view(tokens).numpy()[:, 0]

    @property
    def num_commands(self) -> int:
        return len(self._commands)

    @property
    def num_bytes(self) -> int:
        return self._memory.nbytes

    def run(self, inputs: StepInputs, draw: bool) -> None:
        """Compute a step; with `draw` also each row's likeliest token."""
        count = len(self._commands) if draw else self._without_tokens
        self._pool.replay(ctypes.byref(self._commands), count, inputs.step)


def record(pool: Pool, forward: Callable[[], tuple[Tensor, Tensor]], most: Most) -> Program:
    """Run `forward`, which gives logits and tokens, once without computing anything."""
    recording = Recording()
    with pool.recorded_by(recording), recording:
        logits, tokens = forward()
    return Program(pool, recording, logits, tokens, most)


def _arrange(calls: Sequence[Recorded], most: Most) -> tuple[dict[Buffer, int], int]:
    """Where each buffer lies, and how many bytes all take: the first gap that is free in its time."""
    times: dict[Buffer, list[int]] = {}
    for at, one in enumerate(calls):
        for buffer in one.buffers:
            if buffer is not None:
                times.setdefault(buffer, [at, at])[1] = at
    # Results are read after the last command.
    for buffer in calls[-1].buffers:
        if buffer is not None:
            times[buffer][1] = len(calls)
    placed: list[tuple[int, int, Buffer]] = []  # from, to
    places: dict[Buffer, int] = {}
    for buffer, (begin, end) in sorted(times.items(), key=lambda item: -_size(item[0], most)):
        at = 0
        for first, last, other in sorted(placed, key=lambda item: item[0]):
            other_begin, other_end = times[other]
            if other_begin > end or other_end < begin:
                continue
            if at + _size(buffer, most) <= first:
                break
            at = max(at, last)
        places[buffer] = at
        placed.append((at, at + _size(buffer, most), buffer))
    return places, max(last for _, last, _ in placed)


def _size(buffer: Buffer, most: Most) -> int:
    rows = most.tokens if buffer.rows == TOKENS else most.rows
    return -(-rows * buffer.row_bytes // _LINE) * _LINE
