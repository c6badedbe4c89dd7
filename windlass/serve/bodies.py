"""Bodies of HTTP requests and answers: read within a limit, written as JSON.

Large ones are decoded and encoded in a thread, since the event loop serves all clients.
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

_INLINE_ITEMS = 1_000  # tokens, each a microsecond


async def read_as(request: Request, read: Callable[[bytes], T], services: Services) -> T:
    """What `read` makes of the request's body."""
    raw = await read_body(request, services.config.max_body_bytes)
    return await decode_as(raw, read, services)


async def decode_as(raw: bytes, read: Callable[[bytes], T], services: Services) -> T:
    """What `read` makes of a body; in a thread where it is large."""
    if len(raw) <= INLINE_BYTES:
        return read(raw)
    return await services.workers.holding_gil(read, raw)


async def read_body(request: Request, most: int) -> bytes:
    """The request's JSON body, given up as soon as it is known to be longer than `most`."""
    _check_media_type(request)
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > most:
        raise _too_large(f"{length} bytes", most)
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > most:
            raise _too_large("longer", most)
    return bytes(body)


def _check_media_type(request: Request) -> None:
    """Refuse what a page can send without asking first: text, forms, or no type at all.

    Other clients may leave the type out.
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


def _too_large(size: str, most: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is {size}; this server takes {most} bytes (--max-body-bytes).")


def reply(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def reply_off_loop(
    services: Services,
    num_items: int,
    make: Callable[P, object],
    *args: P.args,
    **options: P.kwargs,
) -> Response:
    """A reply with what `make` returns; in a thread where it is made of many items."""
    if num_items <= _INLINE_ITEMS:
        return reply(make(*args, **options))
    value = await services.workers.releasing_gil(make, *args, **options)
    return await services.workers.holding_gil(reply, value)
