"""A recorded step: native commands over memory of fixed address, replayed for any batch.

How many tokens and rows there are is told with every step. Buffers that are never needed at the same
time share their memory.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from windlass.errors import ConfigError
from windlass.kernels.native.commands import TOKENS, Command, Op, Step
from windlass.kernels.native.pool import Pool
from windlass.kernels.native.record import Buffer, Recorded, Recording, fuse

_LINE = 64  # bytes: buffers begin at a line of the cache


@dataclass(frozen=True, slots=True)
class ProgramLimits:
    """The largest step that there can be."""

    tokens: int
    rows: int


class StepInputs:
    """What differs from step to step, where the commands read it.

    It is written from lists: what numpy and torch take for a few numbers is a step's delay.
    """

    def __init__(self, most: ProgramLimits, tables: Tensor) -> None:
        """`tables` is read in place: [slots, blocks] of int32."""
        sizes = dict.fromkeys(("ids", "positions", "slots", "adapters"), most.tokens)
        sizes |= {"rows": 4 * most.rows, "sampled": most.rows, "prompts": 2 * most.rows}
        self._places = {name: (ctypes.c_int32 * size)() for name, size in sizes.items()}
        self._views = {
            name: memoryview(place).cast("B").cast("i") for name, place in self._places.items()
        }
        self._tables = tables
        addresses = {name: ctypes.addressof(place) for name, place in self._places.items()}
        self.step = Step(table_stride=tables.shape[1], tables=tables.data_ptr(), **addresses)

    def write(
        self, ids: list[int], positions: list[int], slots: list[int], rows: list[int]
    ) -> None:
        """The tokens, and four numbers of each row: first token, tokens, position, slot."""
        for name, values in (("ids", ids), ("positions", positions), ("slots", slots)):
            self._put(name, values)
        self._put("rows", rows)
        self.step.num_tokens, self.step.num_rows = len(ids), len(rows) // 4

    def write_prompts(self, spans: Sequence[tuple[int, int]]) -> None:
        """Runs of tokens that are of prompts, apart from each other."""
        self._put("prompts", [number for span in spans for number in span])
        self.step.num_prompts = len(spans)

    def write_adapters(self, adapters: list[int]) -> None:
        """The slot of each token's adapter."""
        self._put("adapters", adapters)

    def write_sampled(self, sampled: list[int]) -> None:
        """The tokens whose rows go on to the head."""
        self._put("sampled", sampled)
        self.step.num_sampled = len(sampled)

    def _put(self, name: str, values: list[int]) -> None:
        self._views[name][: len(values)] = array("i", values)


class Program:
    """Owns the commands and their memory. `logits` and `tokens` are those of the last step."""

    def __init__(
        self,
        pool: Pool,
        recording: Recording,
        logits: Tensor,
        tokens: Tensor,
        most: ProgramLimits,
        max_bytes: int,
    ) -> None:
        self._pool = pool
        self._recording = recording  # keeps tensors that commands point into
        calls = fuse(recording.calls)
        places, total = _arrange(calls, most)
        if total > max_bytes:
            raise ConfigError(
                f"a step of {most.tokens} tokens and {most.rows} sampled rows needs "
                f"{total / 2**20:,.1f} MiB, and {max_bytes / 2**20:,.1f} MiB of memory are free "
                "beside the KV cache. Lower --max-num-batched-tokens, --max-num-seqs or the size "
                "of the cache."
            )
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


def record(
    pool: Pool, forward: Callable[[], tuple[Tensor, Tensor]], most: ProgramLimits, max_bytes: int
) -> Program:
    """Run `forward`, which gives logits and tokens, once without computing anything.

    A program that needs more than `max_bytes` of memory is a ConfigError.
    """
    recording = Recording()
    with pool.recorded_by(recording), recording:
        logits, tokens = forward()
    return Program(pool, recording, logits, tokens, most, max_bytes)


def _arrange(calls: Sequence[Recorded], most: ProgramLimits) -> tuple[dict[Buffer, int], int]:
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


def _size(buffer: Buffer, most: ProgramLimits) -> int:
    rows = most.tokens if buffer.rows == TOKENS else most.rows
    return -(-rows * buffer.row_bytes // _LINE) * _LINE
