"""A model's tensors by name: their stored format, and reading of all or a region of each.

This file reads safetensors; gguf_file.py reads GGUF; dummy.py makes random weights. Opening a
checkpoint reads headers only. The first `read` imports torch.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from windlass.errors import CheckpointError
from windlass.models.json_file import read_json
from windlass.quant.shard import Region

if TYPE_CHECKING:
    import torch

_MAX_HEADER_BYTES = 100_000_000  # limit of the safetensors format


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Shape, format and size of a tensor in its file."""

    shape: tuple[int, ...]
    format: str  # "bf16", "f32", "Q4_1"
    num_bytes: int
    start: int = field(default=0, compare=False)  # byte offset in the file; safetensors only


class Checkpoint(Protocol):
    """Tensors by their names in transformers, such as `model.layers.0.mlp.up_proj.weight`."""

    def names(self) -> Collection[str]:
        """All tensors in the files; the loader must use each. Empty: tensors are made on demand."""
        ...

    def stored(self, name: str) -> StoredTensor:
        """The stored format of a tensor in `names()`. Does not read its data."""
        ...

    def read(
        self, name: str, shape: tuple[int, ...], region: Region = (), *, raw: bool = False
    ) -> torch.Tensor:
        """Read a tensor, or only a region of it, to the CPU.

        `shape` is the expected shape of the whole tensor; another shape raises CheckpointError, but
        dimensions of 1 do not count, a flat tensor is read in the expected shape, and the leading
        dimensions of a stacked tensor are merged. With `raw`, a
        quantised tensor is returned as its bytes [rows, bytes] instead of dequantised. The result may
        be a view of the memory-mapped file, of which only the region is read: copy it to keep it.
        """
        ...


def region_shape(shape: tuple[int, ...], region: Region) -> tuple[int, ...]:
    """The shape of a region of a tensor."""
    if not region:
        return shape
    slices = (*region, *(slice(None),) * (len(shape) - len(region)))
    return tuple(
        len(range(*piece.indices(size))) for size, piece in zip(shape, slices, strict=True)
    )


def check_shape(name: str, stored: tuple[int, ...], expected: tuple[int, ...], file: Path) -> None:
    """Raise CheckpointError unless the stored tensor can be read in the shape of the network."""
    found, needed = _squeezed(stored), _squeezed(expected)
    is_flat = len(found) == 1 and found[0] == math.prod(needed)
    is_stack = len(found) > len(needed) > 0 and (len(needed) == 1 or found[-1] == needed[-1])
    if found != needed and not is_flat and not (is_stack and math.prod(found) == math.prod(needed)):
        raise CheckpointError(
            f"{file}: tensor {name} has shape {list(stored)}, the network needs {list(expected)}. "
            "The weights and the config do not match."
        )


def _squeezed(shape: tuple[int, ...]) -> list[int]:
    return [size for size in shape if size != 1]


def missing(name: str, names: Collection[str], where: Path | None = None) -> CheckpointError:
    file = "the checkpoint" if where is None else str(where)
    return CheckpointError(
        f"{file}: no tensor {name} among {len(names)} tensors. "
        "The checkpoint is incomplete, or its architecture differs from the config."
    )


class SafetensorsCheckpoint:
    """One or more .safetensors files. Owns their memory maps, which open on the first read."""

    def __init__(self, files: Iterable[Path], index: Path | None = None) -> None:
        self._files = [Path(file) for file in files]
        self._stored: dict[str, StoredTensor] = {}
        self._file_of: dict[str, Path] = {}
        self._handles: dict[Path, Any] = {}
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
        self, name: str, shape: tuple[int, ...], region: Region = (), *, raw: bool = False
    ) -> torch.Tensor:
        """See `Checkpoint.read`. `raw` has no effect, since nothing is dequantised here."""
        del raw
        check_shape(name, self.stored(name).shape, shape, self._file_of[name])
        whole: torch.Tensor = self._handle(self._file_of[name]).get_tensor(name)
        return whole.view(shape)[region]  # views of the memory map: nothing is read yet

    def _handle(self, file: Path) -> Any:
        from safetensors import SafetensorError, safe_open

        if file not in self._handles:
            try:
                self._handles[file] = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{file}: cannot be opened: {error}.") from error
        return self._handles[file]

    def _add(self, file: Path) -> None:
        for name, entry in read_header(file).items():
            if name in self._file_of:
                raise CheckpointError(
                    f"tensor {name} is in both {self._file_of[name].name} and {file.name} "
                    f"({file.parent}). Remove the file that does not belong to the model."
                )
            self._file_of[name] = file
            self._stored[name] = entry

    def _check_index(self, index: Path) -> None:
        for name, shard in weight_map(index).items():
            if name not in self._file_of or self._file_of[name].name != shard:
                raise CheckpointError(
                    f"{index}: tensor {name} should be in {shard}, but is not. "
                    "The index and the shards are from different versions; download them again."
                )


def weight_map(index: Path) -> dict[str, str]:
    """Tensor name to shard, from a model.safetensors.index.json."""
    found = read_json(index).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
        raise CheckpointError(f"{index}: has no weight_map of tensor names to files.")
    return found


def read_header(
    file: Path, opener: Callable[[str, int], int] | None = None
) -> dict[str, StoredTensor]:
    """Names, shapes and sizes of a .safetensors file, checked against the file's length."""
    try:
        with open(file, "rb", opener=opener) as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
                raise CheckpointError(
                    f"{file}: is not a safetensors file, or is truncated: {size} bytes long, "
                    f"with a header of {length} bytes. Download it again."
                )
            header = json.loads(stream.read(length))
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{file}: the header is corrupt: {error}. Download it again."
        ) from error
    return _entries(header, file, size, 8 + length)


def _entries(header: Any, file: Path, size: int, first: int) -> dict[str, StoredTensor]:
    """Parse the header. Tensors must be contiguous from byte `first` to the end of the file."""
    entries: dict[str, StoredTensor] = {}
    try:
        for name, entry in header.items():
            if name != "__metadata__":
                entries[name] = _entry(name, entry, first)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{file}: the header is corrupt ({type(error).__name__}: {error}). Download it again."
        ) from error
    end = first
    for name, tensor in sorted(
        entries.items(), key=lambda item: (item[1].start, item[1].num_bytes)
    ):
        if tensor.start != end:
            raise CheckpointError(
                f"{file}: the header is corrupt: tensor {name} begins at byte {tensor.start}, the "
                f"previous tensor ends at {end}. Download it again."
            )
        end += tensor.num_bytes
    if end != size:
        raise CheckpointError(
            f"{file}: is truncated or damaged: the header lists {end - first} bytes of tensors, "
            f"the file has {size - first}. Download it again."
        )
    return entries


def _entry(name: str, entry: Any, first: int) -> StoredTensor:
    dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, start, end)):
        raise ValueError(f"tensor {name} has shape {shape} and byte range {start} to {end}")
    bits = _bits(dtype)
    if bits and math.prod(shape) * bits != (end - start) * 8:
        raise ValueError(f"tensor {name} of {shape} {dtype} has {end - start} bytes")
    return StoredTensor(
        shape=tuple(shape), format=dtype.lower(), num_bytes=end - start, start=first + start
    )


@functools.cache
def _bits(dtype: str) -> int:
    """Bits per element: 8 for F8_E4M3; 0 for an unknown dtype."""
    found = re.match(r"[A-Z]+(\d+)", dtype)
    return int(found[1]) if found else 8 * (dtype == "BOOL")
