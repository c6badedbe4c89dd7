"""Static files of the package, held in memory and served under a strict content security policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# A page loads nothing from other hosts, runs no inline script, and cannot be framed. Trusted types
# make every assignment of text to innerHTML an error: model output can only become text.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # a new version is seen at once; an unchanged file is a 304
}


@dataclass(frozen=True, slots=True)
class _File:
    body: bytes
    headers: dict[str, str]


class StaticFiles:
    """Reads the files of a folder once."""

    def __init__(self, folder: Path) -> None:
        self._files = {
            path.name: _read(path) for path in folder.iterdir() if path.suffix in MEDIA_TYPES
        }

    def send(
        self, name: str, request: Request, headers: Mapping[str, str] = MappingProxyType({})
    ) -> Response:
        file = self._files.get(name)
        if file is None:
            raise HTTPException(404)
        if request.headers.get("if-none-match") == file.headers["ETag"]:
            return Response(status_code=304, headers={**file.headers, **headers})
        return Response(file.body, headers={**file.headers, **headers})


def _read(path: Path) -> _File:
    body = path.read_bytes()
    tag = blake2b(body, digest_size=8).hexdigest()
    kind = {"Content-Type": MEDIA_TYPES[path.suffix], "ETag": f'"{tag}"'}
    return _File(body, _HEADERS | kind)
