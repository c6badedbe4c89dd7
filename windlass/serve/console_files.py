"""The static files of the web console."""

from __future__ import annotations

from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from windlass.serve.static_files import MEDIA_TYPES, StaticFiles

PREFIX = "/console/"
_FOLDER = Path(__file__).parent / "console"
# The paths that need no key.
CONSOLE_PATHS = frozenset(
    {"/", *(PREFIX + each.name for each in _FOLDER.iterdir() if each.suffix in MEDIA_TYPES)}
)


class ConsoleFiles:
    """Reads the files once, at start-up."""

    def __init__(self) -> None:
        self._files = StaticFiles(_FOLDER)

    async def page(self, request: Request) -> Response:
        """The console for a browser; other clients find nothing at /."""
        if "text/html" not in request.headers.get("accept", ""):
            raise HTTPException(404)
        return self._files.send("index.html", request, {"Vary": "Accept"})

    async def file(self, request: Request, name: str) -> Response:
        return self._files.send(name, request)
