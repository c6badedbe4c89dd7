"""Reads request bodies within a size limit, and writes JSON responses.

Large bodies are decoded and encoded in a thread, since the event loop serves all clients.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from windlass.serve.body_limits import INLINE_BYTES
from windlass.serve.problems import BodyTooLarge, UnsupportedMediaType
from windlass.serve.services import Services

P = ParamSpec("P")
T = TypeVar("T")

_MAX_INLINE_ITEMS = 1_000  # tokens, about a microsecond each


async def read_as(request: Request, read: Callable[[bytes], T], services: Services) -> T:
    """Read the request's body and decode it with `read`."""
    raw = await read_body(request, services.config.max_body_bytes)
    return await decode_as(raw, read, services)


async def decode_as(raw: bytes, read: Callable[[bytes], T], services: Services) -> T:
    """Decode a body with `read`, in a thread if it is large."""
    if len(raw) <= INLINE_BYTES:
        return read(raw)
    return await services.workers.holding_gil(read, raw)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Read the request's JSON body; stops as soon as it is longer than `max_bytes`."""
    _check_media_type(request)
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > max_bytes:
        raise _too_large(f"{length} bytes", max_bytes)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise _too_large("longer", max_bytes)
    return bytes(body)


def _check_media_type(request: Request) -> None:
    """Refuse media types that a web page can send without a CORS preflight.

    Those are text, forms and no type at all. Clients other than browsers may omit the type.
    """
    given = request.headers.get("content-type")
    if given is None and "origin" not in request.headers:
        return
    kind = (given or "").partition(";")[0].strip().lower()
    if kind != "application/json" and not re.fullmatch(r"application/[^/]+\+json", kind):
        raise UnsupportedMediaType(
            f"the body's Content-Type is {given!r:.200}. Send it as application/json "
            "(curl: -H 'Content-Type: application/json')."
        )


def _too_large(size: str, max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"the body is {size}; this server accepts {max_bytes} bytes (--max-body-bytes)."
    )


def reply(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def reply_off_loop(
    services: Services,
    num_items: int,
    make: Callable[P, object],
    *args: P.args,
    **options: P.kwargs,
) -> Response:
    """Reply with the result of `make`; runs it in a thread if it has many items."""
    if num_items <= _MAX_INLINE_ITEMS:
        return reply(make(*args, **options))
    value = await services.workers.releasing_gil(make, *args, **options)
    return await services.workers.holding_gil(reply, value)
