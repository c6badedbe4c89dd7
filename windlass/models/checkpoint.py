"""A model's tensors by name: what is stored, and reading all or some rows of it.

Safetensors here; GGUF in gguf_file.py; random weights in dummy.py. Headers are read when a
checkpoint is opened, data only when asked for. Torch is imported by the first `read`.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from windlass.errors import CheckpointError
from windlass.models.json_file import read_json

if TYPE_CHECKING:
    import torch

_MAX_HEADER_BYTES = 100_000_000  # the safetensors format's own limit


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as it lies in the file."""

    shape: tuple[int, ...]
    format: str  # "bf16", "f32", "Q4_1"
    num_bytes: int
    start: int = field(default=0, compare=False)  # in its file, where that is .safetensors


class Checkpoint(Protocol):
    """Tensors by their names in transformers, such as `model.layers.0.mlp.up_proj.weight`."""

    def names(self) -> Collection[str]:
        """Every tensor that the files hold; a loader accounts for each. Empty: made on demand."""
        ...

    def stored(self, name: str) -> StoredTensor:
        """How a tensor of `names()` is stored, without reading it."""
        ...

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: slice | None = None,
        *,
        raw: bool = False,
    ) -> torch.Tensor:
        """The tensor on the CPU; with `rows`, only that part of the first dimension is read.

        `shape` is what the whole tensor must have; a file that differs raises CheckpointError.
        With `raw` a tensor that reading would dequantise comes as its bytes, [rows, bytes]. Who
        keeps what it got copies it: it may lie in the file.
        """
        ...


def check_shape(name: str, stored: tuple[int, ...], expected: tuple[int, ...], file: Path) -> None:
    """Raise unless the file's shape is the one that the network needs."""
    if tuple(stored) != tuple(expected):
        raise CheckpointError(
            f"{file}: tensor {name} has shape {list(stored)}, the network needs {list(expected)}. "
            "The weights and the config do not belong together."
        )


def missing(name: str, names: Collection[str], where: Path) -> CheckpointError:
    return CheckpointError(
        f"{where}: there is no tensor {name} among {len(names)}. "
        "The checkpoint is incomplete, or of another architecture than its config says."
    )


class SafetensorsCheckpoint:
    """One or several .safetensors files. Owns their memory maps, opened when first read."""

    def __init__(self, files: Iterable[Path], index: Path | None = None) -> None:
        self._files = [Path(file) for file in files]
        self._stored: dict[str, StoredTensor] = {}
        self._homes: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        for file in self._files:
            self._add(file)
        if index is not None:
            self._check_index(index)

    def names(self) -> Collection[str]:
        return self._stored.keys()

    def stored(self, name: str) -> StoredTensor:
        if name not in self._stored:
            raise missing(name, self._stored, self._files[0].parent)
        return self._stored[name]

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: slice | None = None,
        *,
        raw: bool = False,
    ) -> torch.Tensor:
        """As the protocol says; nothing is dequantised here, so `raw` makes no difference."""
        del raw
        check_shape(name, self.stored(name).shape, shape, self._homes[name])
        handle = self._handle(self._homes[name])
        values: torch.Tensor = (
            handle.get_tensor(name) if rows is None else handle.get_slice(name)[rows]
        )
        return values

    def _handle(self, file: Path) -> Any:
        from safetensors import SafetensorError, safe_open

        if file not in self._open:
            try:
                self._open[file] = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{file}: cannot be opened: {error}.") from error
        return self._open[file]

    def _add(self, file: Path) -> None:
        for name, entry in read_header(file).items():
            if name in self._homes:
                raise CheckpointError(
                    f"tensor {name} is both in {self._homes[name].name} and in {file.name} "
                    f"({file.parent}). Remove the file that does not belong to the model."
                )
            self._homes[name] = file
            self._stored[name] = entry

    def _check_index(self, index: Path) -> None:
        for name, shard in weight_map(index).items():
            if name not in self._homes or self._homes[name].name != shard:
                raise CheckpointError(
                    f"{index}: tensor {name} should be in {shard}, but is not. "
                    "The index and the shards are from different versions; fetch them again."
                )


def weight_map(index: Path) -> dict[str, str]:
    """Tensor name to shard, from a model.safetensors.index.json."""
    found = read_json(index).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
        raise CheckpointError(f"{index}: has no weight_map of tensor names to files.")
    return found


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Names, shapes and sizes of a .safetensors file, checked against the file's length."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
                raise CheckpointError(
                    f"{file}: is not a safetensors file, or is cut off: {size} bytes long, "
                    f"with a header of {length} bytes. Fetch it again."
                )
            header = json.loads(stream.read(length))
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: the header is corrupt: {error}. Fetch it again.") from error
    return _entries(header, file, size, 8 + length)


def _entries(header: Any, file: Path, size: int, first: int) -> dict[str, StoredTensor]:
    """Tensors that lie one behind the other from `first` to the file's end, as the format has it."""
    entries: dict[str, StoredTensor] = {}
    try:
        for name, entry in header.items():
            if name != "__metadata__":
                entries[name] = _entry(name, entry, first)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{file}: the header is corrupt ({type(error).__name__}: {error}). Fetch it again."
        ) from error
    end = first
    for name, tensor in sorted(
        entries.items(), key=lambda item: (item[1].start, item[1].num_bytes)
    ):
        if tensor.start != end:
            raise CheckpointError(
                f"{file}: the header is corrupt: tensor {name} begins at byte {tensor.start}, the "
                f"one before it ends at {end}. Fetch it again."
            )
        end += tensor.num_bytes
    if end != size:
        raise CheckpointError(
            f"{file}: is cut off or damaged: {end - first} bytes of tensors are announced, "
            f"{size - first} are there. Fetch it again."
        )
    return entries


def _entry(name: str, entry: Any, first: int) -> StoredTensor:
    dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, start, end)):
        raise ValueError(f"tensor {name} has shape {shape} and lies from {start} to {end}")
    bits = _bits(dtype)
    if bits and math.prod(shape) * bits != (end - start) * 8:
        raise ValueError(f"tensor {name} of {shape} {dtype} has {end - start} bytes")
    return StoredTensor(tuple(shape), dtype.lower(), end - start, first + start)


@functools.cache
def _bits(dtype: str) -> int:
    """Of a number: F8_E4M3 has 8. 0: not known here."""
    found = re.match(r"[A-Z]+(\d+)", dtype)
    return int(found[1]) if found else 8 * (dtype == "BOOL")
