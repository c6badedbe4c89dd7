"""The ingress of a fleet: the server's whole API for each model, over the replicas of Ray Serve."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs

import msgspec
from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from windlass.build import open_model
from windlass.cluster.client import FleetClient
from windlass.cluster.fleet import Fleet, Model
from windlass.errors import UnsupportedError
from windlass.serve.app import create_app
from windlass.serve.live_config import LiveConfig, StartConfig
from windlass.serve.problems import problem_of
from windlass.serve.reload import Reloads
from windlass.serve.routes import make_router
from windlass.serve.services import Services, make_services
from windlass.serve.transport import CONNECTION

_log = logging.getLogger("windlass.cluster")

_MODEL_PATH = "/v1/models/"
_OF_ALL = (
    "/v1/models",
    "/metrics",
    "/health",
    "/health/ready",
    "/health/live",
    "/ping",
    "/v1/health",
)
_IN_FILE = "write it into the fleet file, and run `windlass cluster up` again"
_REFUSED = {
    ("PATCH", "/admin/config"): _IN_FILE,
    **dict.fromkeys(
        [("POST", "/v1/load_lora_adapter"), ("POST", "/v1/unload_lora_adapter")], _IN_FILE
    ),
    **dict.fromkeys(
        [("POST", "/admin/kv/save"), ("POST", "/admin/kv/load")],
        "replicas come and go; the router keeps the requests of a prefix together",
    ),
    **dict.fromkeys(
        [("POST", path) for path in ("/admin/sleep", "/admin/wake", "/sleep", "/wake_up")],
        "replicas start and stop with the load, see autoscaling in the fleet file",
    ),
}


def _log_failure(task: asyncio.Task[FastAPI]) -> None:
    if not task.cancelled() and task.exception() is not None:
        _log.error("a model of the fleet did not start: %s", task.exception())


class _Named(msgspec.Struct):
    """The part of a body that says which model answers."""

    model: str | None = None


class _ProxyConnection:
    """The connection of a request, which Ray Serve's proxy holds: it stops reading by itself."""

    cut_reason = None
    is_closing = False

    def cut_if_unread(self) -> None:
        """Do nothing: the outputs of one request are bounded by its max_tokens."""

    def release_body(self, num_bytes: int) -> None:
        """Do nothing: the body is in memory already."""


class ModelFront:
    """The API of one model: its services, and the application with all endpoints."""

    def __init__(self, fleet: Fleet, model: Model, handle: DeploymentHandle[Any]) -> None:
        self.model = model
        self._fleet = fleet
        self._client = FleetClient(model, handle)
        self._services: Services | None = None
        self._starting: asyncio.Task[FastAPI] | None = None
        self._writing: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Open the model, and start a replica of it if there is none."""
        self._starting = asyncio.create_task(self._start())
        self._starting.add_done_callback(_log_failure)

    async def app(self) -> FastAPI:
        """The application; holds requests until the first replica has started."""
        if self._starting is None or (self._starting.done() and self._starting.exception()):
            self.start()
        assert self._starting is not None
        return await asyncio.shield(self._starting)

    async def _start(self) -> FastAPI:
        card = (await asyncio.to_thread(open_model, self.model.engine)).card
        config = LiveConfig(self._fleet.serve_config(self.model))
        self._services = services = make_services(
            self._client,
            card,
            config,
            reloads=Reloads(),
            started=StartConfig(engine=self.model.engine),
        )
        if services.usage is not None:
            self._writing = asyncio.create_task(services.usage.write_forever())
        app = create_app(services, make_router(services))
        await self._client.start()
        return app

    @property
    def max_body_bytes(self) -> int:
        return self._fleet.serve_config(self.model).max_body_bytes

    @property
    def names(self) -> set[str]:
        return {self.model.name, *self.model.adapters}

    async def close(self) -> None:
        await self._client.close()
        if self._writing is not None:
            self._writing.cancel()
        if self._services is not None:
            self._services.close()


class IngressApp:
    """Sends each HTTP request to the front of its model.

    A body says the model with `model`; other requests with ?model=NAME. Without any, the first model of
    the fleet answers. Lists of models, metrics and health are those of all models.
    """

    def __init__(self, fronts: Sequence[ModelFront]) -> None:
        self._fronts = fronts
        self._by_name = {name: front for front in fronts for name in front.names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[CONNECTION] = _ProxyConnection()
        method, path = scope["method"], scope["path"]
        if (method, path) in _REFUSED:
            error = UnsupportedError(f"a fleet has no {path}: {_REFUSED[method, path]}.")
            await problem_of(error).response(path)(scope, receive, send)
        elif len(self._fronts) == 1:
            await (await self._fronts[0].app())(scope, receive, send)
        elif path in _OF_ALL:
            await self._answer_for_all(scope, receive, send)
        else:
            front, receive = await self._front_of(scope, receive)
            await (await front.app())(scope, receive, send)

    async def _front_of(self, scope: Scope, receive: Receive) -> tuple[ModelFront, Receive]:
        """The front of the request's model, and how it receives the body, which was read."""
        named = parse_qs(scope["query_string"].decode("latin-1")).get("model", [""])[0]
        if scope["path"].startswith(_MODEL_PATH):
            named = scope["path"].removeprefix(_MODEL_PATH)
        if not named and scope["method"] == "POST":
            messages = await _read_body(receive, self._fronts[0].max_body_bytes)
            named = _model_in(b"".join(each.get("body", b"") for each in messages))
            receive = _replaying(messages, receive)
        # The first front refuses an unknown name, after it has checked the key.
        return self._by_name.get(named, self._fronts[0]), receive

    async def _answer_for_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        answers = []
        for front in self._fronts:
            sent: list[Message] = []
            await (await front.app())(dict(scope), receive, _collecting(sent))
            answers.append(
                (sent[0]["status"], b"".join(each.get("body", b"") for each in sent[1:]))
            )
        status, body = max(answers, key=lambda each: each[0])
        if status == 200 and scope["path"] == "/v1/models":
            lists = [msgspec.json.decode(each)["data"] for _, each in answers]
            body = msgspec.json.encode(
                {"object": "list", "data": [x for each in lists for x in each]}
            )
        elif status == 200 and scope["path"] == "/metrics":
            body = merge_metrics([each.decode() for _, each in answers]).encode()
        is_text = scope["path"] == "/metrics" and status == 200
        media_type = CONTENT_TYPE_LATEST if is_text else "application/json"
        await Response(body, status, media_type=media_type)(scope, receive, send)


async def _read_body(receive: Receive, max_bytes: int) -> list[Message]:
    """The messages of a body; the last one is missing where the body is too large."""
    messages: list[Message] = []
    num_bytes = 0
    while num_bytes <= max_bytes:
        message = await receive()
        messages.append(message)
        num_bytes += len(message.get("body", b""))
        if not message.get("more_body"):
            break
    return messages


def _replaying(messages: list[Message], receive: Receive) -> Receive:
    waiting = deque(messages)

    async def next_message() -> Message:
        return waiting.popleft() if waiting else await receive()

    return next_message


def _collecting(sent: list[Message]) -> Send:
    async def collect(message: Message) -> None:
        sent.append(message)

    return collect


def _model_in(body: bytes) -> str:
    """The model that a body names; "": none, or the body is not an object, which its front reports."""
    try:
        return msgspec.json.decode(body, type=_Named).model or ""
    except msgspec.DecodeError:
        return ""


def merge_metrics(texts: Sequence[str]) -> str:
    """One Prometheus page of several: a family's header once, with the samples of all."""
    families: dict[str, list[str]] = {}
    for text in texts:
        lines: list[str] = []
        for line in text.splitlines():
            if line.startswith("# HELP "):
                name = line.split(" ", 3)[2]
                lines = families.setdefault(name, [])
                is_new = not lines
            if is_new or not line.startswith("#"):
                lines.append(line)
    return "".join(f"{line}\n" for lines in families.values() for line in lines)


class _Entry:
    """The application that Ray Serve knows; the ingress of this process answers."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
        elif scope["type"] == "http":
            ingress = serve.get_replica_context().servable_object
            await ingress.answer(scope, receive, send)


async def _live(receive: Receive, send: Send) -> None:
    """Nothing happens at start and shutdown: Ray Serve makes and ends the ingress."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


@serve.ingress(_Entry())
class FleetIngress:
    """Owns the fronts of all models in one process of the ingress."""

    async def __init__(  # type: ignore[misc]
        self, fleet: Fleet, handles: Mapping[str, DeploymentHandle[Any]]
    ) -> None:
        self._fronts = [ModelFront(fleet, model, handles[model.name]) for model in fleet.models]
        self.answer = IngressApp(self._fronts)
        for front in self._fronts:
            front.start()

    async def __del__(self) -> None:
        for front in self._fronts:
            await front.close()
