"""Writes an adapter's LoRA weights into a packed buffer, converted or quantised to int8 codes.

Several reader threads pack while steps run. Hundreds of small calls per adapter would make these
threads wait for the GIL most of the time, so one native call packs a whole adapter
(src/pack.cpp). Without a compiler, or for dtypes that the native code does not support, torch does
the same matrix by matrix.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from windlass.kernels.native.compiled import load
from windlass.kernels.native.compiler import NativeUnavailable
from windlass.lora.base import Adapter, LoraWeights
from windlass.lora.codes import quantise
from windlass.lora.stored import Array, StoredAdapter, StoredWeights

SOURCES = Path(__file__).parent / "src"
# numpy has no bfloat16: uint16 holds its bits.
_BF16, _FLOAT = np.dtype(np.uint16), np.dtype(np.float32)
_TARGETS = {np.dtype(np.int8): "codes", _BF16: "bf16", _FLOAT: "floats"}
_SOURCES = (_BF16, _FLOAT)
_TASK = np.dtype(  # struct Task in src/pack.cpp
    [(name, np.int64) for name in ("down", "up", "down_to", "up_to", "scales")]
    + [(name, np.int64) for name in ("rank", "in", "out")]
    + [(name, np.int64) for name in ("down_is_bf16", "up_is_bf16", "transposed")]
    + [("scaling", np.float64)]
)


class Target(NamedTuple):
    """Destination arrays of one module's weights. bfloat16 arrays hold its bits as uint16."""

    down: Array  # [rank, in]
    up: Array  # [out, rank], or [rank, out] transposed
    scales: Array | None  # [rank] float32; set for int8 codes


def as_stored(adapter: Adapter) -> StoredAdapter:
    """Wrap an unpacked adapter as if it were read from a file."""
    modules = {
        name: StoredWeights(to_array(weights.down.contiguous()), to_array(weights.up.contiguous()))
        for name, weights in adapter.modules.items()
    }
    return StoredAdapter(adapter.name, modules, f"adapter {adapter.name!r}")


def to_array(tensor: Tensor) -> Array:
    """A tensor as a numpy array without a copy; bfloat16 as its bits."""
    if tensor.dtype != torch.bfloat16:
        return tensor.numpy()
    bits: Array = tensor.view(torch.int16).numpy().view(np.uint16)
    return bits


def target_of(weights: LoraWeights) -> Target:
    """The destination for views into a packed buffer."""
    scales = None if weights.scales is None else to_array(weights.scales)
    return Target(to_array(weights.down), to_array(weights.up), scales)


def write(sources: Sequence[StoredWeights], targets: Sequence[Target]) -> int | None:
    """Scale weights and write them to their targets, as the codes of `quantise` for int8 targets.

    Stops at the first module with a value that is not finite and returns its index.
    """
    functions = compiled_code()
    kind = _TARGETS.get(targets[0].down.dtype) if targets else None
    supported = all(matrix.dtype in _SOURCES for source in sources for matrix in source[:2])
    if functions is None or kind is None or not supported:
        return write_reference(sources, targets)
    table = np.array(list(map(_task, sources, targets)), _TASK)
    function = getattr(functions, f"windlass_pack_{kind}")
    function.restype = ctypes.c_int64
    bad: int = function(ctypes.c_void_p(_address(table)), ctypes.c_int64(len(table)))
    return None if bad < 0 else bad


@functools.cache
def compiled_code() -> ctypes.CDLL | None:
    """The native library, compiled now if it is not cached; None if it cannot be compiled."""
    try:
        return load(sources=SOURCES, what="the adapter loader").functions
    except (NativeUnavailable, OSError):  # OSError: an installation without the source
        return None


def _task(source: StoredWeights, target: Target) -> tuple[Any, ...]:
    down, up = source.down, source.up
    scales = 0 if target.scales is None else _address(target.scales)
    pointers = (_address(down), _address(up), _address(target.down), _address(target.up), scales)
    transposed = not target.up.flags.c_contiguous
    flags = (down.dtype == _BF16, up.dtype == _BF16, transposed)
    return (*pointers, *down.shape, len(up), *flags, source.scaling)


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def write_reference(sources: Sequence[StoredWeights], targets: Sequence[Target]) -> int | None:
    """The reference implementation of `write`, in torch."""
    for i, (source, target) in enumerate(zip(sources, targets, strict=True)):
        dtype = _to_tensor(target.down).dtype if target.scales is None else torch.float32
        up = _to_tensor(source.up) * source.scaling
        weights = LoraWeights(_to_tensor(source.down).to(dtype), up.to(dtype))
        if not (weights.down.isfinite().all() and weights.up.isfinite().all()):
            return i
        written = weights if target.scales is None else quantise(weights)
        for array, tensor in zip(target, written, strict=True):
            if array is not None and tensor is not None:
                np.copyto(array, to_array(tensor))
    return None


def _to_tensor(array: Array) -> Tensor:
    if array.dtype != _BF16:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
