"""Mirrors src/commands.h: the commands of the native library and their arguments.

A `Call` holds the tensors that a command reads and writes; the library gets their addresses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag

import torch
from torch import Tensor

_STEP_TENSORS, _MODEL_TENSORS, _SIZES, _SCALARS = 5, 7, 12, 2

TOKENS, SAMPLED = -1, -2  # row counts that come from the step


class Op(IntEnum):
    EMBED = 0
    NORM = 1
    ADD_NORM = 2
    LINEAR = 3
    QUANTISE = 4
    SILU_MUL = 5
    ROPE = 6
    ATTENTION = 7
    GATHER = 8
    ARGMAX = 9
    LORA = 10
    SAMPLE = 11
    EXPERTS = 12
    LATENT = 13
    PER_HEAD = 14
    LAYER_NORM = 15
    ADD_LAYER_NORM = 16
    GELU_MUL = 17
    MAP = 18
    ADD = 19
    SIGMOID_GATE = 20
    SPARSE_MIXER = 21
    CAUSAL_CONV = 22
    SELECTIVE_SCAN = 23
    ALL_REDUCE = 24
    ALL_GATHER = 25
    DELTA_RULE = 26
    SPLIT_GATES = 27
    MUL_COLUMNS = 28
    SHORT_CONV = 29


class MapFunction(IntEnum):
    GELU = 0
    GELU_TANH = 1
    RELU2 = 2
    SILU = 3
    SCALE = 4
    SOFT_CAP = 5


class LinearFlag(IntFlag):
    ADD_TO_Y = 1
    NORM_FIRST = 2
    GATED = 4
    QUANTISED_INPUTS = 8
    STEP_ROWS = 16


class RopeFlag(IntFlag):
    INTERLEAVED = 1
    LAYER_NORM = 2
    NORM_PER_HEAD = 4


class Type(IntEnum):
    """Storage types."""

    F32 = 0
    F16 = 1
    BF16 = 2
    INT8 = 3
    PACKED = 4


TYPE_OF = {
    torch.float32: Type.F32,
    torch.float16: Type.F16,
    torch.bfloat16: Type.BF16,
    torch.int8: Type.INT8,
}

# Indices of the step tensors that a command writes.
WRITTEN = {
    Op.EMBED: (0,),
    Op.NORM: (1,),
    Op.ADD_NORM: (1, 2),
    Op.LINEAR: (1, 2, 3),
    Op.QUANTISE: (1, 2),
    Op.SILU_MUL: (1,),
    Op.ROPE: (1,),
    Op.ATTENTION: (1,),
    Op.GATHER: (1,),
    Op.ARGMAX: (1,),
    Op.LORA: (1,),
    Op.LATENT: (2,),
    Op.PER_HEAD: (1,),
    Op.EXPERTS: (1, 3),
    Op.LAYER_NORM: (1,),
    Op.ADD_LAYER_NORM: (1, 2),
    Op.GELU_MUL: (1,),
    Op.MAP: (1,),
    Op.ADD: (2,),
    Op.SIGMOID_GATE: (2,),
    Op.SPARSE_MIXER: (1,),
    Op.CAUSAL_CONV: (1,),
    Op.SHORT_CONV: (1,),
    Op.SELECTIVE_SCAN: (2,),
    Op.ALL_REDUCE: (1,),
    Op.ALL_GATHER: (1,),
    Op.DELTA_RULE: (2,),
    Op.SPLIT_GATES: (1, 2),
    Op.MUL_COLUMNS: (2,),
}


class Command(ctypes.Structure):
    """WindlassCommand."""

    _fields_ = (
        ("op", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("sizes", ctypes.c_int32 * _SIZES),
        ("scalars", ctypes.c_float * _SCALARS),
        ("step_tensors", ctypes.c_void_p * _STEP_TENSORS),
        ("model_tensors", ctypes.c_void_p * _MODEL_TENSORS),
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
    """One command. `step_tensors` change with every step; `model_tensors` (or addresses) do not."""

    op: Op
    rows: int
    step_tensors: Sequence[Tensor | None]
    model_tensors: Sequence[Tensor | int | None] = ()
    sizes: Sequence[int] = ()
    scalars: Sequence[float] = ()

    def command(self, rows: int | None = None, addresses: Sequence[int | None] = ()) -> Command:
        """Build the C struct; `addresses`, if given, replace those of the step tensors."""
        command = Command(op=self.op, rows=self.rows if rows is None else rows)
        command.sizes[: len(self.sizes)] = self.sizes
        command.scalars[: len(self.scalars)] = self.scalars
        addresses = addresses or [address(tensor) for tensor in self.step_tensors]
        command.step_tensors[: len(addresses)] = addresses
        command.model_tensors[: len(self.model_tensors)] = [
            address(item) for item in self.model_tensors
        ]
        return command


def address(item: Tensor | int | None) -> int | None:
    """Return the address of a contiguous tensor."""
    if isinstance(item, Tensor):
        assert item.is_contiguous()
        return item.data_ptr()
    return item
