"""Reads request bodies within a size limit, and writes JSON responses.

Large bodies are decoded and encoded in a thread, since the event loop serves all clients.
"""

from __future__ import annotations

import functools
import logging
import math
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import ParamSpec, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from windlass.config import ServeConfig
from windlass.errors import RequestError
from windlass.serve.abbreviate import abbreviate
from windlass.serve.body_limits import INLINE_BYTES
from windlass.serve.fallback import FALLBACK_MODES, FallbackMode
from windlass.serve.generation_services import GenerationServices
from windlass.serve.problems import BodyTooLarge, UnsupportedMediaType
from windlass.serve.protocol import MAX_DEADLINE_MS

_log = logging.getLogger("windlass.serve")

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")

_DEADLINE_HEADER = "x-windlass-deadline-ms"
_FALLBACK_HEADER = "x-windlass-fallback"
_MAX_HEADER_CHARS = 1_000
_MAX_INLINE_ITEMS = 1_000  # tokens, about a microsecond each


async def read_as(request: Request, read: Callable[[bytes], T], services: GenerationServices) -> T:
    """Read the request's body and decode it with `read`."""
    raw = await read_body(request, services.config.max_body_bytes)
    value = await decode_as(raw, read, services)
    check_unknown_fields(request, getattr(value, "unknown_fields", ()), services.config)
    return value


def check_unknown_fields(
    request: Request, unknown: Sequence[RequestError], config: ServeConfig
) -> None:
    """Treat unknown fields as --unknown-fields says; those to report are kept with the request."""
    if not unknown or config.unknown_fields == "ignore":
        return
    if config.unknown_fields == "error":
        raise unknown[0]
    names = [error.param or "" for error in unknown]
    _log.warning("%s: unknown fields: %s", request.url.path, ", ".join(map(repr, names)))
    request.state.unknown_fields = [name for name in names if name.isascii() and name.isprintable()]


def unknown_fields_header(request: Request) -> dict[str, str]:
    """A header with the names of the unknown fields of a request, if there were any."""
    names = getattr(request.state, "unknown_fields", None)
    return {"X-Windlass-Unknown-Fields": ", ".join(names)} if names else {}


def names_unknown_fields(
    endpoint: Callable[[S, Request], Awaitable[Response]],
) -> Callable[[S, Request], Awaitable[Response]]:
    """Add the header with unknown fields to the responses of an endpoint."""

    @functools.wraps(endpoint)
    async def named(self: S, request: Request) -> Response:
        response = await endpoint(self, request)
        response.headers.update(unknown_fields_header(request))
        return response

    return named


def relaxed_header(request: Request, keywords: Sequence[str]) -> dict[str, str]:
    """A header with the keywords of a JSON schema that are not enforced, if there are any."""
    if not keywords:
        return {}
    named = _printable(", ".join(keywords)[:_MAX_HEADER_CHARS])
    _log.warning("%s: keywords of the schema that are not enforced: %s", request.url.path, named)
    return {"X-Windlass-Schema-Relaxed": named}


def _printable(text: str) -> str:
    """Escape characters that an HTTP header cannot contain."""
    return "".join(char if " " <= char <= "~" else f"\\u{ord(char):04x}" for char in text)


def request_id_header(request: Request, response_id: str, config: ServeConfig) -> dict[str, str]:
    """The header with the request's id; raises if the id cannot be one."""
    given = request.headers.get("x-request-id")
    if given is not None:
        return {"X-Request-Id": given}
    if not config.enable_request_id_headers:
        return {}
    if not (response_id.isascii() and response_id.isprintable()):
        raise RequestError(
            f"request_id {response_id!r} cannot be sent back as X-Request-Id: a header has printable "
            "ASCII only. Use letters, digits and -.",
            "request_id",
        )
    return {"X-Request-Id": response_id}


def deadline_s(request: Request, deadline_ms: float | None) -> float | None:
    """Seconds from a request's arrival to its deadline: the earlier of field and header."""
    given = request.headers.get(_DEADLINE_HEADER)
    if given is not None:
        try:
            header_ms = float(given)
        except ValueError:
            header_ms = math.nan
        if not 0.0 < header_ms <= MAX_DEADLINE_MS:
            raise RequestError(
                f"the header X-Windlass-Deadline-Ms is {abbreviate(given)}; it must be a number of "
                f"milliseconds above 0, at most {MAX_DEADLINE_MS:,.0f}.",
                "deadline_ms",
            )
        deadline_ms = header_ms if deadline_ms is None else min(deadline_ms, header_ms)
    return None if deadline_ms is None else deadline_ms / 1000


def fallback_header(request: Request) -> FallbackMode | None:
    """The mode of degradation that a header sets; None: there is no such header."""
    given = request.headers.get(_FALLBACK_HEADER)
    if given is not None and given not in FALLBACK_MODES:
        raise RequestError(
            f"the header X-Windlass-Fallback is {abbreviate(given)}; it must be auto or none.",
            "fallback",
        )
    return None if given is None else FALLBACK_MODES[given]


async def decode_as(raw: bytes, read: Callable[[bytes], T], services: GenerationServices) -> T:
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
    services: GenerationServices,
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
