"""The ingress of a fleet: the server's whole API for each model, over the replicas of Ray Serve."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
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
from windlass.cluster.bodies import read_body, replaying
from windlass.cluster.client import FleetClient
from windlass.cluster.fleet import Fleet, Model
from windlass.cluster.rollout import Samples
from windlass.cluster.split import Front, VersionedFront
from windlass.cluster.versions import FleetState, Version
from windlass.core.sampling import SamplingParams
from windlass.core.tokenizer import Tokenizer
from windlass.core.types import NewRequest, TokenLogprob
from windlass.errors import EngineError, RequestError, UnsupportedError
from windlass.serve.app import create_app
from windlass.serve.fallback import FallbackStep
from windlass.serve.fallback_chain import with_fallbacks
from windlass.serve.live_config import LiveConfig, StartConfig
from windlass.serve.problems import Busy, problem_of
from windlass.serve.quarantine import Suspects
from windlass.serve.reload import Reloads
from windlass.serve.routes import make_router
from windlass.serve.services import Services, make_services
from windlass.serve.summary import RequestSummary
from windlass.serve.transport import CONNECTION

_log = logging.getLogger("windlass.cluster")

_MODEL_PATH = "/v1/models/"
_TRACE_PATH = "/v1/requests/"
_LOAD_PATH = "/v1/load_lora_adapter"
_UNLOAD_PATH = "/v1/unload_lora_adapter"
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
    ("PATCH", "/admin/config"): "other replicas, and those that start later, would not have the "
    "change. Write settings of the API under `serve:` and engine options under `options:` of the model "
    "in the fleet file, and run `windlass cluster up` again",
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
    lora_name: str | None = None  # of an adapter to unload, which belongs to one model


class _ProxyConnection:
    """The connection of a request, which Ray Serve's proxy holds: it stops reading by itself."""

    cut_reason = None
    is_closing = False

    def cut_if_unread(self) -> None:
        """Do nothing: the outputs of one request are bounded by its max_tokens."""

    def release_body(self, num_bytes: int) -> None:
        """Do nothing: the body is in memory already."""


class ModelFront:
    """The API of one version of a model: its services, and the application with all endpoints."""

    def __init__(
        self,
        fleet: Fleet,
        model: Model,
        handle: DeploymentHandle[Any],
        *,
        others: Callable[[str], ModelFront | None],
        is_taken: Callable[[Model, str], bool],
        suspects: Suspects,
    ) -> None:
        """`others`: the fronts of the fleet's models now, by name; all share the suspects.

        None: the model was removed, and a version that named it still answers. `is_taken`: whether
        a name belongs to another model than this one, or to an adapter of another.
        """
        self.model = model
        self._fleet = fleet
        self._others = others
        self._client = FleetClient(model, handle)
        self._client.suspects = suspects
        self._client.fleet_adapters.is_taken = lambda name: is_taken(model, name)
        self.on_end: Callable[[RequestSummary], None] = lambda _: None
        self._services: Services | None = None
        self._opened = asyncio.Event()  # set when there are services
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
        services = make_services(
            self._client,
            card,
            config,
            reloads=Reloads(),
            started=StartConfig(engine=self.model.engine),
        )
        self._services = services = replace(services, shares_strikes=True)
        self._opened.set()
        services.desk.on_end = lambda summary: self.on_end(summary)
        if services.usage is not None:
            self._writing = asyncio.create_task(services.usage.write_forever())
        if self.model.fallbacks:
            services = await self._with_fallbacks(services)
        app = create_app(services, make_router(services))
        await self._client.start()
        return app

    async def _with_fallbacks(self, services: Services) -> Services:
        """The services with the chain of the model, once its models are open."""
        steps: list[FallbackStep] = []
        found: dict[str, Services] = {}
        for step in (each.step for each in self.model.fallbacks):
            if step.model is not None:
                if (other := self._others(step.model)) is None:
                    continue
                found[step.model] = await other.opened()
            steps.append(step)

        def find(name: str) -> Services:
            """Of the version that answers now; the last known one while another opens."""
            other = self._others(name)
            if other is not None and other.services is not None:
                found[name] = other.services
            return found[name]

        return with_fallbacks(services, steps, find)

    @property
    def services(self) -> Services | None:
        """None: the model is not open yet."""
        return self._services

    async def opened(self) -> Services:
        """Wait for the services, which do not need a replica."""
        await self._opened.wait()
        assert self._services is not None
        return self._services

    def knows(self, response_id: str) -> bool:
        """Whether this model has answered a request of this id."""
        return self._services is not None and self._services.traces.knows(response_id)

    @property
    def max_body_bytes(self) -> int:
        return self._fleet.serve_config(self.model).max_body_bytes

    @property
    def names(self) -> set[str]:
        return {self.model.name, *self.model.adapters, *self._client.adapter_names}

    async def score(self, prompt: str, answer: str) -> float:
        """The log probability of `answer` after `prompt`, per character."""
        await self.app()
        assert self._services is not None
        tokens, num_prompt = _answer_tokens(self._services.card.tokenizer, prompt, answer)
        sampling = SamplingParams(max_tokens=1, prompt_logprobs=0)
        scores: list[TokenLogprob] = []
        async for output in self._client.generate(
            NewRequest(f"score-{uuid.uuid4().hex}", tokens, sampling), tracked=False
        ):
            scores += output.prompt_logprobs or ()
        # The first token of a prompt has no score.
        found = [each.logprob for each in scores[max(0, num_prompt - 1) :]]
        if not found:
            raise EngineError(f"no token of the answer {answer!r:.100} has a log probability.")
        return sum(found) / len(answer)

    async def close_when_idle(self) -> None:
        """Close when the requests in flight have ended."""
        if self._services is not None:
            timeout_s = self._fleet.serve_config(self.model).shutdown_timeout
            await self._services.desk.idle(timeout_s)
            await self._client.idle(timeout_s)  # of models whose fallback this is
        await self.close()

    async def close(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
        await self._client.close()
        if self._writing is not None:
            self._writing.cancel()
        if self._services is not None:
            self._services.close()


def _answer_tokens(tokenizer: Tokenizer, prompt: str, answer: str) -> tuple[list[int], int]:
    """The tokens of both, and how many of them belong to the prompt alone."""
    alone, whole = tokenizer.encode(prompt), tokenizer.encode(prompt + answer)
    num_prompt = 0
    while num_prompt < min(len(alone), len(whole)) and alone[num_prompt] == whole[num_prompt]:
        num_prompt += 1
    return whole, num_prompt


class IngressApp:
    """Sends each HTTP request to the front of its model.

    A body says the model with `model`; other requests with ?model=NAME. Without any, the first model of
    the fleet answers. Lists of models, metrics and health are those of all models.
    """

    def __init__(self, fronts: Sequence[VersionedFront], num_ingresses: int) -> None:
        self._fronts = fronts
        self._num_ingresses = num_ingresses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[CONNECTION] = _ProxyConnection()
        method, path = scope["method"], scope["path"]
        if (method, path) in _REFUSED:
            error = UnsupportedError(f"a fleet has no {path}: {_REFUSED[method, path]}.")
            await problem_of(error).response(path)(scope, receive, send)
        elif len(self._fronts) > 1 and path in _OF_ALL:
            await self._answer_for_all(scope, receive, send)
        else:
            front = self._fronts[0]
            if len(self._fronts) > 1:
                front, receive = await self._front_of(scope, receive)
            if path in (_LOAD_PATH, _UNLOAD_PATH) and (
                why_not := self._why_no_change(scope, front)
            ):
                await problem_of(why_not).response(path)(scope, receive, send)
            else:
                await (await front.app())(scope, receive, send)

    def _why_no_change(self, scope: Scope, front: VersionedFront) -> EngineError | None:
        """Why an adapter of this front cannot be loaded or unloaded now; None: it can."""
        if self._num_ingresses > 1:
            return UnsupportedError(
                f"each of the {self._num_ingresses} ingresses of this fleet would know other adapters: "
                f"{_IN_FILE}."
            )
        if front.is_updating:
            return Busy(
                "the model is being updated, and only one of its versions would have the change. Send "
                "the request again after the update."
            )
        if scope["path"] == _LOAD_PATH and len(self._fronts) > 1 and not _model_in_query(scope):
            return RequestError(
                "a fleet with several models needs the model that gets the adapter: add ?model=NAME.",
                "model",
            )
        return None

    async def _front_of(self, scope: Scope, receive: Receive) -> tuple[VersionedFront, Receive]:
        """The front of the request's model, and how it receives the body, which was read."""
        named = _model_in_query(scope)
        if scope["path"].startswith(_MODEL_PATH):
            named = scope["path"].removeprefix(_MODEL_PATH)
        if not named and scope["path"].startswith(_TRACE_PATH):
            response_id = scope["path"].removeprefix(_TRACE_PATH).rpartition("/")[0]
            for front in self._fronts:
                if front.knows(response_id):
                    return front, receive
        if not named and scope["method"] == "POST":
            messages = await read_body(receive, self._fronts[0].max_body_bytes)
            named = _model_in(b"".join(each.get("body", b"") for each in messages))
            receive = replaying(messages, receive)
        # The first front refuses an unknown name, after it has checked the key.
        found = (front for front in self._fronts if named in front.names)
        return next(found, self._fronts[0]), receive

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


def _model_in_query(scope: Scope) -> str:
    return parse_qs(scope["query_string"].decode("latin-1")).get("model", [""])[0]


def _collecting(sent: list[Message]) -> Send:
    async def collect(message: Message) -> None:
        sent.append(message)

    return collect


def _model_in(body: bytes) -> str:
    """The model that a body names; "": none, or the body is not an object, which its front reports."""
    try:
        named = msgspec.json.decode(body, type=_Named)
        return named.model or named.lora_name or ""
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

    def __init__(self, deployments: Sequence[DeploymentHandle[Any]]) -> None:
        """`deployments`: those of all versions, so that Serve starts them with the ingress."""
        del deployments  # `reconfigure` has those of the state
        self._state: FleetState | None = None
        self._fronts: dict[str, VersionedFront] = {}
        self._suspects = Suspects()
        self.answer = IngressApp((), 1)

    async def reconfigure(self, config: dict[str, Any]) -> None:
        """Follow the state of the fleet. Serve calls it at the start and after every change."""
        state = self._state = FleetState.model_validate(config)
        for gone in self._fronts.keys() - state.models.keys():
            self._fronts.pop(gone).retire()
        for name, model in state.models.items():
            if name not in self._fronts:
                self._fronts[name] = VersionedFront(self._make_front)
            self._fronts[name].follow(model)
        self.answer = IngressApp(
            [self._fronts[model.name] for model in state.fleet.models], state.fleet.ingress.replicas
        )

    def _make_front(self, version: Version) -> Front:
        assert self._state is not None
        fleet = self._state.fleet
        handle = serve.get_deployment_handle(version.deployment, fleet.name, _check_exists=False)
        return ModelFront(
            fleet,
            version.model,
            handle,
            others=self._stable_front,
            is_taken=self._is_taken,
            suspects=self._suspects,
        )

    def _stable_front(self, name: str) -> ModelFront | None:
        if name not in self._fronts:
            return None
        front = self._fronts[name].stable
        assert isinstance(front, ModelFront)
        return front

    def _is_taken(self, model: Model, name: str) -> bool:
        others = (front for other, front in self._fronts.items() if other != model.name)
        return any(name in front.names for front in others)

    # ---- for updates ---------------------------------------------------------------------------

    async def samples(self) -> dict[str, dict[int, Samples]]:
        """How the requests of each model's versions went since its update began."""
        return {name: front.samples() for name, front in self._fronts.items()}

    async def score(self, model: str, number: int, prompt: str, answer: str) -> float:
        """The log probability of an answer with one version, per character."""
        front = self._fronts[model].front_of(number)
        if front is None:
            raise EngineError(f"version {number} of {model} does not run in this ingress.")
        return await front.score(prompt, answer)

    async def __del__(self) -> None:
        await asyncio.gather(*(front.close() for front in self._fronts.values()))
