"""Writes the changes of an adapter into their places: as they are, or rounded to codes.

Several threads do so at once, beside the steps. Hundreds of small calls for each adapter would let
them wait for the interpreter most of the time, so one native call does all of it (src/pack.cpp).
Types that it does not know, and machines without a compiler, get the same from torch, piece by piece.
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

from windlass.kernels.native.compiled import NativeUnavailable, load
from windlass.lora.base import Adapter, Low
from windlass.lora.codes import encode
from windlass.lora.stored import Array, Stored, StoredAdapter

_CODE = Path(__file__).parent / "src"
# What the native call writes and reads; 16 bits without a sign are those of bfloat16.
_BF16, _FLOAT = np.dtype(np.uint16), np.dtype(np.float32)
_TARGETS = {np.dtype(np.int8): "codes", _BF16: "bf16", _FLOAT: "floats"}
_SOURCES = (_BF16, _FLOAT)
_CHANGE = np.dtype(  # as src/pack.cpp has it
    [(name, np.int64) for name in ("down", "up", "down_to", "up_to", "scales")]
    + [(name, np.int64) for name in ("rank", "in", "out")]
    + [(name, np.int64) for name in ("down_is_bf16", "up_is_bf16", "turned")]
    + [("scaling", np.float64)]
)


class Place(NamedTuple):
    """Where a change goes; of bfloat16 there are the bits."""

    down: Array  # [rank, in]
    up: Array  # [out, rank], or [rank, out] turned
    scales: Array | None  # [rank] float32, where codes are wanted


def stored(adapter: Adapter) -> StoredAdapter:
    """An adapter that was not packed, as if it came from a file."""
    modules = {
        name: Stored(array_of(low.down.contiguous()), array_of(low.up.contiguous()))
        for name, low in adapter.modules.items()
    }
    return StoredAdapter(adapter.name, modules, f"adapter {adapter.name!r}")


def array_of(tensor: Tensor) -> Array:
    """The numbers of a tensor, or the bits of bfloat16."""
    if tensor.dtype != torch.bfloat16:
        return tensor.numpy()
    bits: Array = tensor.view(torch.int16).numpy().view(np.uint16)
    return bits


def place_of(low: Low) -> Place:
    """Where views of a packed piece lie."""
    scales = None if low.scales is None else array_of(low.scales)
    return Place(array_of(low.down), array_of(low.up), scales)


def write(changes: Sequence[Stored], places: Sequence[Place]) -> int | None:
    """Put changes, scaled, where they belong: as the codes that `encode` tells, where wanted.

    The first that has numbers which are not finite ends it, and its index comes back.
    """
    functions = compiled_code()
    target = _TARGETS.get(places[0].down.dtype) if places else None
    known = all(half.dtype in _SOURCES for change in changes for half in change[:2])
    if functions is None or target is None or not known:
        return write_plain(changes, places)
    table = np.array(list(map(_row, changes, places)), _CHANGE)
    function = getattr(functions, f"windlass_pack_{target}")
    function.restype = ctypes.c_int64
    wrong: int = function(ctypes.c_void_p(_address(table)), ctypes.c_int64(len(table)))
    return None if wrong < 0 else wrong


@functools.cache
def compiled_code() -> ctypes.CDLL | None:
    """The native code, compiled now if this machine does not have it; None if it cannot be."""
    try:
        return load(sources=_CODE).functions
    except (NativeUnavailable, OSError):  # or an installation without the source
        return None


def _row(change: Stored, place: Place) -> tuple[Any, ...]:
    down, up = change.down, change.up
    scales = 0 if place.scales is None else _address(place.scales)
    where = (_address(down), _address(up), _address(place.down), _address(place.up), scales)
    turned = not place.up.flags.c_contiguous
    kinds = (down.dtype == _BF16, up.dtype == _BF16, turned)
    return (*where, *down.shape, len(up), *kinds, change.scaling)


def _address(array: Array) -> int:
    found: int = array.__array_interface__["data"][0]
    return found


def write_plain(changes: Sequence[Stored], places: Sequence[Place]) -> int | None:
    """What `write` does, by torch."""
    for i, (change, place) in enumerate(zip(changes, places, strict=True)):
        kind = _tensor_of(place.down).dtype if place.scales is None else torch.float32
        up = _tensor_of(change.up) * change.scaling
        low = Low(_tensor_of(change.down).to(kind), up.to(kind))
        if not (low.down.isfinite().all() and low.up.isfinite().all()):
            return i
        held = low if place.scales is None else encode(low)
        for target, part in zip(place, held, strict=True):
            if target is not None and part is not None:
                np.copyto(target, array_of(part))
    return None


def _tensor_of(array: Array) -> Tensor:
    if array.dtype != _BF16:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
