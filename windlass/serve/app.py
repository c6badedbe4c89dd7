"""The ASGI application: endpoints, middleware, and error responses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from inspect import signature

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from windlass.config import ServeConfig
from windlass.errors import EngineError
from windlass.serve.console_files import CONSOLE_PATHS
from windlass.serve.generation_services import GenerationServices
from windlass.serve.hosts import HostGuard
from windlass.serve.keys import KeyGuard
from windlass.serve.live_config import LiveConfig
from windlass.serve.problems import problem_of, problem_of_status
from windlass.serve.response import ClientDisconnected

_Endpoint = Callable[[Request], Awaitable[Response]]


def create_app(services: GenerationServices, router: APIRouter) -> FastAPI:
    """Create the application with the endpoints of `router`. The engine need not be running yet."""
    config, live = services.config, services.live
    app = FastAPI(
        title="Windlass",
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
    )
    app.root_path = config.root_path  # as an argument it is deprecated
    app.include_router(router)
    for kind, handler in _HANDLERS.items():
        app.add_exception_handler(kind, handler)
    app.add_exception_handler(Exception, _internal_error)
    app.add_middleware(_PlainPosts, endpoints=_plain_posts(router, config.root_path))
    if services.keys.are_needed:
        app.add_middleware(
            KeyGuard,
            keys=services.keys,
            root_path=config.root_path,
            open_paths=CONSOLE_PATHS if config.console else frozenset(),
        )
    app.add_middleware(_Cors, live=live)
    app.add_middleware(HostGuard, config=live)
    return app


def _plain_posts(router: APIRouter, root_path: str) -> dict[str, _Endpoint]:
    """The endpoints of POST requests that take nothing but the request, by path."""
    return {
        root_path + route.path: route.endpoint
        for route in router.routes
        if isinstance(route, APIRoute)
        and route.methods == {"POST"}
        and list(signature(route.endpoint).parameters) == ["request"]
    }


class _PlainPosts:
    """Middleware that calls endpoints directly: FastAPI's routing takes a third of a short request's time."""

    def __init__(self, app: ASGIApp, endpoints: Mapping[str, _Endpoint]) -> None:
        self._app = app
        self._endpoints = endpoints
        self._direct = ExceptionMiddleware(self._call, handlers=_HANDLERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_plain = (
            scope["type"] == "http"
            and scope["method"] == "POST"
            and scope["path"] in self._endpoints
        )
        await (self._direct if is_plain else self._app)(scope, receive, send)

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._endpoints[scope["path"]](Request(scope, receive, send))
        await response(scope, receive, send)


class _Cors:
    """Middleware that lets pages of the current --allowed-origins read responses."""

    def __init__(self, app: ASGIApp, live: LiveConfig) -> None:
        self._plain = self._app = app
        self._origins: tuple[str, ...] = ()
        live.watch(self._apply)

    def _apply(self, config: ServeConfig) -> None:
        if config.allowed_origins == self._origins:
            return
        self._origins = config.allowed_origins
        self._app = self._plain
        if self._origins:
            self._app = CORSMiddleware(
                self._plain,
                allow_origins=self._origins,
                allow_methods=["*"],
                allow_headers=["*"],
                allow_credentials=False,
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


async def _engine_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, EngineError)
    problem = problem_of(error)
    problem.log(request.url.path, _id_of(request))
    return problem.response(request.url.path)


def _id_of(request: Request) -> str:
    """The id of a request that got far enough to have one, else the client's; "" without either."""
    given = request.headers.get("x-request-id", "")
    return str(getattr(request.state, "response_id", given))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    messages = {
        404: f"there is nothing at {request.url.path}.",
        405: f"{request.url.path} does not support {request.method}.",
    }
    message = messages.get(error.status_code, str(error.detail))
    problem = problem_of_status(error.status_code, message, **dict(error.headers or {}))
    problem.log(request.url.path, _id_of(request))
    return problem.response(request.url.path)


async def _disconnected(_request: Request, _error: Exception) -> Response:
    return Response(status_code=499)  # the client has disconnected


async def _internal_error(request: Request, error: Exception) -> Response:
    problem = problem_of_status(500, f"an internal error: {type(error).__name__}.")
    return problem.response(request.url.path)


_HANDLERS: dict[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
    EngineError: _engine_error,
    HTTPException: _http_error,
    ClientDisconnect: _disconnected,
    ClientDisconnected: _disconnected,
}
