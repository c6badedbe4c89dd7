"""An adapter as it lies in its .safetensors file: arrays in it, not read until they are used.

Asking torch for each of hundreds of tensors takes longer than rounding them.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from windlass.errors import CheckpointError

Array = np.ndarray[Any, np.dtype[Any]]

# bfloat16 is no type of numpy's: an array of such numbers has their bits.
TYPES = {"bf16": np.uint16, "f16": np.float16, "f32": np.float32, "f64": np.float64}


class Stored(NamedTuple):
    """A change before anything is done to it: scaling * up @ down. Of bfloat16 there are the bits."""

    down: Array  # [rank, in]
    up: Array  # [out, rank]
    scaling: float = 1.0


@dataclass(frozen=True, slots=True)
class StoredAdapter:
    """Changes by the names of modules, as `Adapter` has them: neither scaled nor looked at."""

    name: str
    modules: Mapping[str, Stored]
    file: str


def not_finite(file: str, module: str) -> CheckpointError:
    return CheckpointError(f"{file}: {module} has numbers that are not finite (NaN or infinity).")


class MappedFile:
    """A file whose header was found to be sound; the arrays keep it open."""

    def __init__(self, file: Path) -> None:
        self._file = file
        try:
            with file.open("rb") as stream:
                length = int.from_bytes(stream.read(8), "little")
                self._entries: Mapping[str, Any] = json.loads(stream.read(length))
                whole = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file}: cannot be read: {error}.") from error
        self._bytes: Array = np.frombuffer(whole, np.uint8)[8 + length :]

    def array(self, name: str, shape: tuple[int, ...]) -> Array:
        """Of a tensor whose type is one of `TYPES`."""
        entry = self._entries.get(name, {"dtype": "nothing", "data_offsets": (0, 0)})
        dtype, (start, end) = TYPES.get(entry["dtype"].lower()), entry["data_offsets"]
        if dtype is None or end - start != math.prod(shape) * np.dtype(dtype).itemsize:
            raise CheckpointError(f"{self._file}: tensor {name} has changed since it was checked.")
        return self._bytes[start:end].view(dtype).reshape(shape)
