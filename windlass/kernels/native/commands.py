"""Commands of the native library and their arguments, as src/commands.h has them.

A `Call` names the tensors that a command reads and writes; the library sees only their places.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag

import torch
from torch import Tensor

_MOVING, _FIXED, _SIZES, _NUMBERS = 5, 7, 6, 2

TOKENS, SAMPLED = -1, -2  # numbers of rows that a step knows


class Op(IntEnum):
    EMBED = 0
    NORM = 1
    ADD_NORM = 2
    LINEAR = 3
    ROUND = 4
    SILU_MUL = 5
    ROPE = 6
    ATTEND = 7
    GATHER = 8
    ARGMAX = 9
    LORA = 10
    SAMPLE = 11


class LinearFlag(IntFlag):
    ADD_TO_Y = 1
    NORM_FIRST = 2
    GATED = 4
    GIVEN_SCALES = 8
    OF_NETWORK = 16


class Type(IntEnum):
    """How numbers are stored."""

    FLOAT = 0
    HALF = 1
    BF16 = 2
    INT8 = 3
    PACKED = 4


STORED_AS = {
    torch.float32: Type.FLOAT,
    torch.float16: Type.HALF,
    torch.bfloat16: Type.BF16,
    torch.int8: Type.INT8,
}

# Which of its moving tensors a command writes.
WRITTEN = {
    Op.EMBED: (0,),
    Op.NORM: (1,),
    Op.ADD_NORM: (1, 2),
    Op.LINEAR: (1, 2, 3),
    Op.ROUND: (1, 2),
    Op.SILU_MUL: (1,),
    Op.ROPE: (1,),
    Op.ATTEND: (1,),
    Op.GATHER: (1,),
    Op.ARGMAX: (1,),
    Op.LORA: (1,),
}


class Command(ctypes.Structure):
    """WindlassCommand."""

    _fields_ = (
        ("op", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("sizes", ctypes.c_int32 * _SIZES),
        ("numbers", ctypes.c_float * _NUMBERS),
        ("moving", ctypes.c_void_p * _MOVING),
        ("fixed", ctypes.c_void_p * _FIXED),
    )


class Step(ctypes.Structure):
    """WindlassStep."""

    _fields_ = (
        ("num_tokens", ctypes.c_int32),
        ("num_rows", ctypes.c_int32),
        ("num_sampled", ctypes.c_int32),
        ("table_stride", ctypes.c_int32),
        ("ids", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("sampled", ctypes.c_void_p),
        ("adapters", ctypes.c_void_p),
        ("prompts", ctypes.c_void_p),
        ("num_prompts", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True)
class Call:
    """One command. `moving` tensors belong to a step, `fixed` ones (or places) to the network."""

    op: Op
    rows: int
    moving: Sequence[Tensor | None]
    fixed: Sequence[Tensor | int | None] = ()
    sizes: Sequence[int] = ()
    numbers: Sequence[float] = ()

    def command(self, rows: int | None = None, places: Sequence[int | None] = ()) -> Command:
        """As the library takes it; `places` are those of the moving tensors if not their own."""
        made = Command(op=self.op, rows=self.rows if rows is None else rows)
        made.sizes[: len(self.sizes)] = self.sizes
        made.numbers[: len(self.numbers)] = self.numbers
        moving = places or [place(tensor) for tensor in self.moving]
        made.moving[: len(moving)] = moving
        made.fixed[: len(self.fixed)] = [place(item) for item in self.fixed]
        return made


def place(item: Tensor | int | None) -> int | None:
    """Where a tensor lies; the library reads it as one run of numbers."""
    if isinstance(item, Tensor):
        assert item.is_contiguous()
        return item.data_ptr()
    return item
