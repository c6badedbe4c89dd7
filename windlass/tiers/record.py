"""The format of a stored record: a header, then the bytes of one block.

    magic | version, key length | fingerprint | key | length | checksum | hits || block
    |------------------- in the checksum -------------------|                  |-------|

The checksum is a CRC-32, which is as fast as the page cache; a hash would halve the speed of reads.
It also recognises a file whose writer, or machine, died before all of it was on disk. The number of
hits changes in place and is not part of the checksum.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

from windlass.tiers.fingerprint import DIGEST_BYTES

VERSION = 1
MAX_KEY_BYTES = 32

_MAGIC = b"WINDLKV\n"
_CHECKED = struct.Struct(f"<8sII{DIGEST_BYTES}s{MAX_KEY_BYTES}sQ")
_CHECKSUM = struct.Struct("<Q")
HITS = struct.Struct("<Q")
HITS_OFFSET = _CHECKED.size + _CHECKSUM.size
HEADER_BYTES = HITS_OFFSET + HITS.size


@dataclass(frozen=True, slots=True)
class Header:
    """What the header of a record states."""

    fingerprint: bytes
    key: bytes
    num_bytes: int
    hits: int


def make_header(fingerprint: bytes, key: bytes, block: memoryview) -> bytes:
    """The header of a block, with its checksum and no hits."""
    assert len(key) <= MAX_KEY_BYTES, f"a key of {len(key)} bytes"
    checked = _CHECKED.pack(_MAGIC, VERSION, len(key), fingerprint, key, block.nbytes)
    return checked + _CHECKSUM.pack(_checksum(checked, block)) + HITS.pack(0)


def parse_header(header: bytes | bytearray) -> Header | None:
    """Read a header, which may be wrong; None: it has another magic or version, or is too short."""
    if len(header) < HEADER_BYTES:
        return None
    magic, version, key_bytes, fingerprint, key, num_bytes = _CHECKED.unpack_from(header)
    if magic != _MAGIC or version != VERSION or key_bytes > MAX_KEY_BYTES:
        return None
    (hits,) = HITS.unpack_from(header, HITS_OFFSET)
    return Header(fingerprint, key[:key_bytes], num_bytes, hits)


def check_record(header: bytes | bytearray, block: memoryview) -> Header | None:
    """Read the header of a block; None: it is not that of an intact record."""
    found = parse_header(header)
    if found is None or found.num_bytes != block.nbytes:
        return None
    (checksum,) = _CHECKSUM.unpack_from(header, _CHECKED.size)
    return found if checksum == _checksum(header[: _CHECKED.size], block) else None


def _checksum(checked: bytes | bytearray, block: memoryview) -> int:
    return zlib.crc32(block, zlib.crc32(checked))
