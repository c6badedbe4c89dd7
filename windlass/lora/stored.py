"""An adapter as it is stored in its .safetensors file: arrays over one piece of memory.

Asking torch for each of hundreds of tensors takes longer than rounding them. The file is read, not
mapped: where somebody cuts it off, or its disk fails, a map of it would end the whole process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from windlass.errors import CheckpointError
from windlass.models.checkpoint import StoredTensor

Array = np.ndarray[Any, np.dtype[Any]]

# bfloat16 is no type of numpy's: an array of such numbers has their bits.
TYPES = {"bf16": np.uint16, "f16": np.float16, "f32": np.float32, "f64": np.float64}

Version = tuple[int, ...]  # of files: another one when any was written or replaced


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


def version_of(*files: Path) -> Version:
    """Sizes, and when they were written; a file that is not there is named where it is opened."""
    found = [file.stat() for file in files if file.exists()]
    return tuple(number for one in found for number in (one.st_size, one.st_mtime_ns))


def not_finite(file: str, module: str) -> CheckpointError:
    return CheckpointError(
        f"{file}: {module} has numbers that are not finite (NaN or infinity), or are not once they "
        "are scaled and rounded."
    )


def read_arrays(file: Path, tensors: Mapping[str, StoredTensor]) -> dict[str, Array]:
    """Tensors of the types in `TYPES`, which lie where the header says: all in one reading."""
    if not tensors:
        return {}
    first = min(tensor.start for tensor in tensors.values())
    memory = np.empty(max(one.start + one.num_bytes for one in tensors.values()) - first, np.uint8)
    try:
        with file.open("rb", buffering=0) as stream:
            stream.seek(first)
            num_read = 0
            while num_read < len(memory):  # a system reads 2 GiB at a time
                more = stream.readinto(memory[num_read:].data)
                if not more:
                    raise CheckpointError(
                        f"{file}: was cut off while it was read: {first + num_read} bytes are "
                        f"left of it, {first + len(memory)} were there. Is somebody writing it?"
                    )
                num_read += more
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}.") from error
    return {name: _array(memory, first, tensor) for name, tensor in tensors.items()}


def _array(memory: Array, first: int, tensor: StoredTensor) -> Array:
    at = tensor.start - first
    return memory[at : at + tensor.num_bytes].view(TYPES[tensor.format]).reshape(tensor.shape)
