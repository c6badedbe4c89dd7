"""Reads the header of a GGUF file: metadata and tensor offsets. Checks every byte count.

The gguf package's reader makes one array per vocabulary entry and needs seconds for a file that is
parsed here in a tenth of one. Big-endian files and version 1 are refused.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from windlass.errors import CheckpointError, UnsupportedError


class TensorType(NamedTuple):
    """A storage format: `block_size` values in `block_bytes` bytes."""

    name: str
    block_size: int
    block_bytes: int


# The numbers are those of the format. Types that are missing were withdrawn or hold integers.
TENSOR_TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
}

# Metadata value types: 0-7 and 10-12 are numbers, 8 a string, 9 an array.
_NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """The location of a tensor. The shape is in torch's order, the reverse of the file's."""

    shape: tuple[int, ...]
    type: TensorType
    type_id: int
    offset: int  # from the start of the file
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    path: Path
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def read_header(path: Path) -> GGUFHeader:
    """Parse and check a file's header; reads no tensor."""
    try:
        with path.open("rb") as stream:
            if path.stat().st_size < 24:
                raise CheckpointError(
                    f"{path}: is not a GGUF file: only {path.stat().st_size} bytes long."
                )
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Parser(path, data).parse()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}.") from error


class _Parser:
    """Walks the header once. Owns the position."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._at = 4

    def parse(self) -> GGUFHeader:
        if self._data[:4] != b"GGUF":
            raise CheckpointError(
                f"{self._path}: is not a GGUF file: it starts with {self._data[:4]!r}, not b'GGUF'."
            )
        version = self._number("I")
        if version not in (2, 3):
            reason = "is big-endian" if version & 0xFFFF == 0 else f"has GGUF version {version}"
            raise UnsupportedError(
                f"{self._path}: {reason}; versions 2 and 3, little-endian, are known. "
                "Convert the model again with a current llama.cpp."
            )
        num_tensors, num_pairs = self._number("Q"), self._number("Q")
        self._expect(num_tensors, 24, "tensors")
        self._expect(num_pairs, 12, "metadata entries")
        metadata = dict(self._pair() for _ in range(num_pairs))
        entries = [self._tensor() for _ in range(num_tensors)]
        return GGUFHeader(
            path=self._path,
            version=version,
            metadata=metadata,
            tensors=self._placed(entries, metadata),
        )

    def _number(self, code: str) -> Any:
        try:
            (value,) = struct.unpack_from("<" + code, self._data, self._at)
        except struct.error as error:
            raise self._cut_off() from error
        self._at += struct.calcsize("<" + code)
        return value

    def _text(self, what: str) -> str:
        length = self._number("Q")
        start, self._at = self._at, self._at + length
        if self._at > self._size:
            raise self._cut_off()
        try:
            return self._data[start : self._at].decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self._path}: {what} is not UTF-8: {error}.") from error

    def _pair(self) -> tuple[str, Any]:
        key = self._text("a metadata key")
        return key, self._value(key, self._number("I"))

    def _value(self, key: str, kind: int) -> Any:
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind == _STRING:
            return self._text(key)
        if kind != _ARRAY:
            raise CheckpointError(
                f"{self._path}: {key} has value type {kind}, which is none of GGUF's 0 to 12; "
                "the file is corrupt."
            )
        inner, count = self._number("I"), self._number("Q")
        if inner in _NUMBERS:
            self._expect(count, struct.calcsize(_NUMBERS[inner]), key)
            return list(self._numbers(_NUMBERS[inner], count))
        if inner == _STRING:
            self._expect(count, 8, key)
            return self._texts(key, count)
        raise UnsupportedError(f"{self._path}: {key} is an array of type {inner}, not known here.")

    def _numbers(self, code: str, count: int) -> tuple[Any, ...]:
        layout = struct.Struct(f"<{count}{code}")
        values = layout.unpack_from(self._data, self._at)
        self._at += layout.size
        return values

    def _texts(self, key: str, count: int) -> list[str]:
        """A vocabulary's worth of strings: one tight loop, since this is the start-up's longest."""
        data, at, length_at = self._data, self._at, _U64.unpack_from
        texts = []
        try:
            for _ in range(count):
                start = at + 8
                at = start + length_at(data, at)[0]
                texts.append(data[start:at].decode())
        except (struct.error, OverflowError) as error:
            raise self._cut_off() from error
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self._path}: {key}[{len(texts)}]: {error}.") from error
        if at > self._size:
            raise self._cut_off()
        self._at = at
        return texts

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._text("a tensor's name")
        num_dims = self._number("I")
        if not 1 <= num_dims <= 4:
            raise CheckpointError(
                f"{self._path}: tensor {name} has {num_dims} dimensions, not 1-4."
            )
        sizes = [self._number("Q") for _ in range(num_dims)]
        return name, tuple(reversed(sizes)), self._number("I"), self._number("Q")

    def _placed(
        self, entries: list[tuple[str, tuple[int, ...], int, int]], metadata: dict[str, Any]
    ) -> dict[str, GGUFTensor]:
        """Compute absolute file offsets, and check that every tensor is inside the file."""
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise CheckpointError(f"{self._path}: general.alignment is {alignment!r}.")
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, shape, type_id, offset in entries:
            kind = TENSOR_TYPES.get(type_id)
            if kind is None:
                raise UnsupportedError(
                    f"{self._path}: tensor {name} has storage type {type_id}, which is not known. "
                    f"Known: {', '.join(kind.name for kind in TENSOR_TYPES.values())}."
                )
            if name in tensors:
                raise CheckpointError(f"{self._path}: there are two tensors named {name}.")
            tensors[name] = self._checked(
                name,
                GGUFTensor(
                    shape=shape,
                    type=kind,
                    type_id=type_id,
                    offset=start + offset,
                    num_bytes=math.prod(shape) // kind.block_size * kind.block_bytes,
                ),
            )
        return tensors

    def _checked(self, name: str, tensor: GGUFTensor) -> GGUFTensor:
        if tensor.shape[-1] % tensor.type.block_size:
            raise CheckpointError(
                f"{self._path}: tensor {name} of shape {list(tensor.shape)} cannot be "
                f"{tensor.type.name}: its rows are no multiple of {tensor.type.block_size}."
            )
        end = tensor.offset + tensor.num_bytes
        if end > self._size:
            raise CheckpointError(
                f"{self._path}: is cut off: tensor {name} needs bytes {tensor.offset} to {end}, "
                f"the file ends at {self._size}. Fetch it again."
            )
        return tensor

    def _expect(self, count: int, least_bytes: int, what: str) -> None:
        """Refuse a count that the rest of the file cannot hold, before looping over it."""
        left = self._size - self._at
        if count * least_bytes > left:
            raise CheckpointError(
                f"{self._path}: announces {count} {what}, but only {left} bytes follow. "
                "The file is cut off or corrupt; fetch it again."
            )

    def _cut_off(self) -> CheckpointError:
        return CheckpointError(
            f"{self._path}: is cut off or corrupt: the header runs past the file's end at "
            f"{self._size} bytes. Fetch it again."
        )
