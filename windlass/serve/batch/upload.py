"""Reads a file from a multipart/form-data body, as it arrives."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path

from starlette.requests import Request

from windlass.errors import RequestError
from windlass.serve.batch.database import storage_errors
from windlass.serve.batch.results import append_private
from windlass.serve.problems import BodyTooLarge, UnsupportedMediaType
from windlass.serve.transport import CONNECTION, LimitedProtocol

_MAX_PARTS = 16
_MAX_HEADER_BYTES = 8 * 2**10  # of one part
_MAX_FIELD_BYTES = 4 * 2**10
_MAX_BOUNDARY_BYTES = 200
_MAX_FORM_BYTES = _MAX_PARTS * (_MAX_HEADER_BYTES + _MAX_FIELD_BYTES)  # beside the file
_WRITE_BYTES = 2**20
_MAX_FILENAME_CHARS = 255


@dataclass(frozen=True, slots=True)
class Upload:
    """The fields of a form, and the file that was written."""

    fields: dict[str, str]
    filename: str
    num_bytes: int


async def read_upload(request: Request, path: Path, max_bytes: int) -> Upload:
    """Write the form's `file` to `path`, which belongs to the caller, also after an error."""
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > max_bytes + _MAX_FORM_BYTES:
        raise _too_large(max_bytes)
    form, fields = _FormReader(request), dict[str, str]()
    filename, num_bytes = "", None
    num_parts = 0
    async for headers in form.parts():
        num_parts += 1
        if num_parts > _MAX_PARTS:
            raise RequestError(f"the form has more than {_MAX_PARTS} parts.")
        name = headers.get_param("name", header="content-disposition")
        if name == "file":
            if num_bytes is not None:
                raise RequestError("the form has two files; send one.", "file")
            filename = _filename(headers)
            num_bytes = await _write(form.content(), path, max_bytes)
        elif isinstance(name, str):
            fields[name] = await _text(form.content(), name)
        else:
            raise RequestError("a part of the form has no name.")
    if num_bytes is None:
        raise RequestError("file is missing: send it as a part of multipart/form-data.", "file")
    return Upload(fields, filename, num_bytes)


def _filename(headers: Message) -> str:
    """The client's name of the file, without its folders."""
    name = headers.get_filename() or "upload.jsonl"
    return re.split(r"[/\\]", name)[-1][:_MAX_FILENAME_CHARS]


async def _write(chunks: AsyncIterator[bytes], path: Path, max_bytes: int) -> int:
    buffer, num_bytes = bytearray(), 0
    with storage_errors(path):
        async for chunk in chunks:
            num_bytes += len(chunk)
            if num_bytes > max_bytes:
                raise _too_large(max_bytes)
            buffer += chunk
            if len(buffer) >= _WRITE_BYTES:
                await asyncio.to_thread(append_private, path, bytes(buffer))
                buffer.clear()
        await asyncio.to_thread(append_private, path, bytes(buffer))
    return num_bytes


async def _text(chunks: AsyncIterator[bytes], name: str) -> str:
    text = bytearray()
    async for chunk in chunks:
        text += chunk
        if len(text) > _MAX_FIELD_BYTES:
            raise RequestError(f"{name[:100]} is longer than {_MAX_FIELD_BYTES:,} bytes.")
    try:
        return text.decode()
    except UnicodeDecodeError:
        raise RequestError(f"{name[:100]} is not UTF-8.") from None


class _FormReader:
    """Splits a body at its boundary. The content of a part must be read before the next part."""

    def __init__(self, request: Request) -> None:
        self._delimiter = b"\r\n--" + _boundary(request)
        self._chunks = request.stream()
        self._connection: LimitedProtocol | None = request.scope.get(CONNECTION)
        self._buffer = bytearray(b"\r\n")  # the first boundary may begin the body

    async def parts(self) -> AsyncIterator[Message]:
        """Yield the headers of each part."""
        async for _ in self.content():
            pass  # text before the first part has no meaning
        while not await self._is_last():
            head = await self._until(b"\r\n\r\n")
            yield HeaderParser().parsestr(head.decode(errors="replace"))

    async def content(self) -> AsyncIterator[bytes]:
        """Yield the bytes up to the next boundary."""
        while True:
            end = self._buffer.find(self._delimiter)
            if end >= 0:
                yield bytes(self._buffer[:end])
                del self._buffer[: end + len(self._delimiter)]
                return
            safe = len(self._buffer) - len(self._delimiter)
            if safe > 0:
                yield bytes(self._buffer[:safe])
                del self._buffer[:safe]
            await self._receive()

    async def _is_last(self) -> bool:
        """Whether the boundary that was just read ends the body; skips the line's end."""
        while len(self._buffer) < 2:
            await self._receive()
        mark = bytes(self._buffer[:2])
        if mark not in (b"--", b"\r\n"):
            raise _malformed("a boundary is not followed by a line's end")
        if mark == b"--":
            async for chunk in self._chunks:
                self._release(chunk)  # text after the last part has no meaning
            return True
        return False

    async def _until(self, mark: bytes) -> bytes:
        while (end := self._buffer.find(mark)) < 0:
            if len(self._buffer) > _MAX_HEADER_BYTES:
                raise _malformed(f"a part has more than {_MAX_HEADER_BYTES} bytes of headers")
            await self._receive()
        head = bytes(self._buffer[2:end])
        del self._buffer[: end + len(mark)]
        return head

    async def _receive(self) -> None:
        chunk = await anext(self._chunks, b"")
        if not chunk:
            raise _malformed("it ends within a part")
        self._release(chunk)
        self._buffer += chunk

    def _release(self, chunk: bytes) -> None:
        """An upload is not kept in memory, so it does not count as a buffered body."""
        if self._connection is not None:
            self._connection.release_body(len(chunk))


def _boundary(request: Request) -> bytes:
    message = Message()
    given = request.headers.get("content-type", "")
    message["content-type"] = given
    boundary = message.get_boundary()
    if message.get_content_type() != "multipart/form-data" or not boundary:
        raise UnsupportedMediaType(
            f"the body's Content-Type is {given!r:.200}. Send the file as multipart/form-data "
            "(curl: -F file=@batch.jsonl -F purpose=batch)."
        )
    raw = boundary.encode(errors="replace")
    if len(raw) > _MAX_BOUNDARY_BYTES:
        raise _malformed(f"its boundary is longer than {_MAX_BOUNDARY_BYTES} bytes")
    return raw


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"the file is larger than {max_bytes:,} bytes (--max-file-bytes).")


def _malformed(why: str) -> RequestError:
    return RequestError(f"the form is malformed: {why}.")
