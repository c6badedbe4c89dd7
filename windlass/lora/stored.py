"""An adapter's weights as stored in its .safetensors file: arrays over one buffer.

Reading hundreds of tensors through torch takes longer than quantising them. The file is read, not
memory-mapped: if it is truncated or its disk fails, access to a mapping would kill the process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from windlass.errors import CheckpointError
from windlass.lora.open_below import Opener
from windlass.models.checkpoint import StoredTensor

Array = np.ndarray[Any, np.dtype[Any]]

# numpy has no bfloat16: uint16 holds its bits.
TYPES = {"bf16": np.uint16, "f16": np.float16, "f32": np.float32, "f64": np.float64}

Version = tuple[int, ...]  # of files; changes when a file is written or replaced


class StoredWeights(NamedTuple):
    """Unscaled LoRA weights of one module. The delta is scaling * up @ down."""

    down: Array  # [rank, in]
    up: Array  # [out, rank]
    scaling: float = 1.0


@dataclass(frozen=True, slots=True)
class StoredAdapter:
    """LoRA weights by module name, like `Adapter`, but unscaled and unchecked."""

    name: str
    modules: Mapping[str, StoredWeights]
    file: str


def version_of(*files: Path, opener: Opener | None = None) -> Version:
    """Sizes and modification times of the existing files. A missing file raises when it is read."""
    numbers: list[int] = []
    for file in files:
        try:
            with open(file, "rb", opener=opener) as stream:
                stat = os.fstat(stream.fileno())
        except FileNotFoundError:
            continue
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}.") from error
        numbers += (stat.st_size, stat.st_mtime_ns)
    return tuple(numbers)


def not_finite(file: str, module: str) -> CheckpointError:
    return CheckpointError(
        f"{file}: {module} has values that are not finite (NaN or infinity), or become so when "
        "scaled and converted."
    )


def read_arrays(
    file: Path, tensors: Mapping[str, StoredTensor], opener: Opener | None = None
) -> dict[str, Array]:
    """Read tensors in one sequential read; those of other types than `TYPES` as bytes."""
    if not tensors:
        return {}
    first = min(tensor.start for tensor in tensors.values())
    end = max(tensor.start + tensor.num_bytes for tensor in tensors.values())
    memory = np.empty(end - first, np.uint8)
    try:
        with open(file, "rb", buffering=0, opener=opener) as stream:
            stream.seek(first)
            num_read = 0
            while num_read < len(memory):  # Linux reads at most 2 GiB per call
                more = stream.readinto(memory[num_read:].data)
                if not more:
                    raise CheckpointError(
                        f"{file}: was truncated while it was read: {first + num_read} bytes are "
                        f"left of {first + len(memory)}. Is another process writing it?"
                    )
                num_read += more
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}.") from error
    return {name: _array(memory, first, tensor) for name, tensor in tensors.items()}


def _array(memory: Array, first: int, tensor: StoredTensor) -> Array:
    start = tensor.start - first
    found = memory[start : start + tensor.num_bytes]
    if tensor.format not in TYPES:
        return found
    return found.view(TYPES[tensor.format]).reshape(tensor.shape)
