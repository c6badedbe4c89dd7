"""The static files of the web console, held in memory and served under a strict content security policy."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

PREFIX = "/console/"
_FOLDER = Path(__file__).parent / "console"
_MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# The page loads nothing from other hosts, runs no inline script, and cannot be framed. Trusted types
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
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # a new version is seen at once; an unchanged file is a 304
}

# The paths that need no key.
CONSOLE_PATHS = frozenset(
    {"/", *(PREFIX + each.name for each in _FOLDER.iterdir() if each.suffix in _MEDIA_TYPES)}
)


@dataclass(frozen=True, slots=True)
class _File:
    body: bytes
    headers: dict[str, str]


class ConsoleFiles:
    """Reads the files once, at start-up."""

    def __init__(self) -> None:
        names = [path.removeprefix(PREFIX) for path in CONSOLE_PATHS if path != "/"]
        self._files = {name: _read(_FOLDER / name) for name in names}

    async def page(self, request: Request) -> Response:
        """The console for a browser; other clients find nothing at /."""
        if "text/html" not in request.headers.get("accept", ""):
            raise HTTPException(404)
        return self._send("index.html", request, {"Vary": "Accept"})

    async def file(self, request: Request, name: str) -> Response:
        return self._send(name, request, {})

    def _send(self, name: str, request: Request, headers: dict[str, str]) -> Response:
        file = self._files.get(name)
        if file is None:
            raise HTTPException(404)
        if request.headers.get("if-none-match") == file.headers["ETag"]:
            return Response(status_code=304, headers=file.headers | headers)
        return Response(file.body, headers=file.headers | headers)


def _read(path: Path) -> _File:
    body = path.read_bytes()
    tag = blake2b(body, digest_size=8).hexdigest()
    kind = {"Content-Type": _MEDIA_TYPES[path.suffix], "ETag": f'"{tag}"'}
    return _File(body, _HEADERS | kind)
