"""The endpoints /openapi.json and /docs, a page that shows it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cached_property
from pathlib import Path

import msgspec
from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from windlass.serve.openapi import describe
from windlass.serve.services import Services
from windlass.serve.static_files import StaticFiles

_FOLDER = Path(__file__).parent / "docs"


class ApiDocs:
    """Describes the routes that `router` has when the document is first requested."""

    def __init__(self, services: Services, router: APIRouter) -> None:
        self._services = services
        self._router = router
        self._files = StaticFiles(_FOLDER)

    def add_routes(self) -> None:
        endpoints: dict[str, Callable[..., Awaitable[Response]]] = {
            "/openapi.json": self.openapi,
            "/docs": self.page,
            "/docs/{name}": self.file,
        }
        for path, endpoint in endpoints.items():
            self._router.add_api_route(
                path,
                endpoint,
                methods=["GET", "HEAD"],
                response_model=None,
                include_in_schema=False,
            )

    @cached_property
    def _document(self) -> bytes:
        routes = [each for each in self._router.routes if isinstance(each, APIRoute)]
        needs_key = self._services.keys.are_needed
        return msgspec.json.encode(
            describe(routes, self._services.config.root_path, needs_key=needs_key)
        )

    async def openapi(self) -> Response:
        document = await self._services.workers.releasing_gil(lambda: self._document)
        return Response(document, media_type="application/json")

    async def page(self, request: Request) -> Response:
        return self._files.send("index.html", request)

    async def file(self, request: Request, name: str) -> Response:
        return self._files.send(name, request)
