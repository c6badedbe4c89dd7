"""Bodies of HTTP requests and answers: read within a limit, written as JSON."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from windlass.serve.problems import BodyTooLarge


async def read_body(request: Request, most: int) -> bytes:
    """The request's body, given up as soon as it is known to be longer than `most`."""
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > most:
        raise _too_large(f"{length} bytes", most)
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > most:
            raise _too_large("longer", most)
    return bytes(body)


def _too_large(size: str, most: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is {size}; this server takes {most} bytes (--max-body-bytes).")


def reply(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
