"""The data of the web console: what the server is, its current figures, and its latest requests.

Built from what the HTTP process knows already, so that polling costs the engine nothing.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from windlass.core.types import EngineStats
from windlass.errors import RequestError
from windlass.serve.bodies import reply
from windlass.serve.console_files import PREFIX, ConsoleFiles
from windlass.serve.explain import Json, phases_of, seconds_json
from windlass.serve.health import Health
from windlass.serve.services import Services
from windlass.serve.trace_routes import TraceRoutes
from windlass.serve.trace_store import Entry
from windlass.version import __version__

Endpoint = Callable[..., Awaitable[Response]]

_MAX_REQUESTS = 200


class ConsoleRoutes:
    """A client key sees the figures of the server, but only its own requests and costs."""

    def __init__(self, services: Services, trace_routes: TraceRoutes) -> None:
        self._services = services
        self._trace_routes = trace_routes

    def endpoints(self) -> dict[str, Endpoint]:
        """All paths of the console, by method GET."""
        files = ConsoleFiles()
        return {
            "/": files.page,
            f"{PREFIX}info": self.info,
            f"{PREFIX}state": self.state,
            f"{PREFIX}requests": self.requests,
            f"{PREFIX}{{name}}": files.file,
        }

    async def info(self) -> Response:
        """What changes only when the server or its engine starts."""
        services = self._services
        report, card = services.client.report, services.card
        return reply(
            {
                "version": __version__,
                "model": card.name,
                "architecture": card.architecture,
                "started": services.started,
                "has_chat_template": services.template is not None,
                "default_sampling": card.default_sampling,
                "price_per_hour": services.config.price_per_hour,
                "prefix_caching": report.prefix_caching,
                "limits": {
                    "max_model_len": report.max_model_len,
                    "max_num_seqs": services.client.max_num_seqs,
                    "max_num_batched_tokens": report.max_num_batched_tokens,
                    "kv_cache_tokens": report.capacity.num_tokens,
                },
                "choices": [*report.choices, *services.choices],
                "startup_seconds": report.seconds,
            }
        )

    async def state(self, request: Request) -> Response:
        """The current figures; counters count since the start of each engine."""
        services = self._services
        await services.metrics.refresh_workers()
        costs, backlog = services.costs, services.client.backlog
        health, tenant = services.readiness(), services.keys.tenant_of(request)
        return reply(
            {
                "time": time.time(),
                "health": _health_json(health),
                "num_in_flight": services.desk.num_in_flight,
                "num_waiting": backlog.num_waiting + backlog.num_unseen,
                "num_waiting_tokens": backlog.num_tokens,
                "engines": [
                    {"health": _health_json(each.health()), "stats": _without_names(each.stats)}
                    for each in services.client.replicas
                ],
                "adapters": {
                    name: folder
                    for name, folder in services.client.adapters.folders.items()
                    if tenant.may_use(name, ())
                },
                "latencies": services.metrics.latencies(),
                "cost": None if costs is None else self._trace_routes.cost_for(request, costs),
            }
        )

    async def requests(self, request: Request) -> Response:
        """The latest requests, in flight and ended, newest first."""
        owner = self._trace_routes.owner_of(request)
        entries = self._services.traces.latest(owner, _limit(request))
        return reply({"data": [self._entry_json(entry) for entry in entries]})

    def _entry_json(self, entry: Entry) -> Json:
        costs, traces = self._services.costs, list(entry.traces.values())
        age = time.monotonic() - entry.began
        body: Json = {
            "id": entry.response_id,
            "state": entry.state,
            "path": entry.path,
            "model": entry.adapter or self._services.card.name,
            "started": round(time.time() - age, 2),  # the same in every answer
            "elapsed": age if entry.is_open else None,
        }
        if not traces:
            return body
        slowest = max(traces, key=lambda each: phases_of(each, entry.began).total)
        phases, times = phases_of(slowest, entry.began), slowest.timeline
        return body | {
            "finish": slowest.finish,
            "seconds": seconds_json(phases),
            "first_token": None if times.first_token is None else times.first_token - entry.began,
            "prompt_tokens": times.num_prompt,
            "cached_tokens": times.num_cached,
            "output_tokens": sum(each.timeline.num_output for each in traces),
            "draft_tokens": sum(each.timeline.num_drafted for each in traces),
            "accepted_tokens": sum(each.timeline.num_accepted for each in traces),
            "cost": None if costs is None else costs.price.of(traces).total,
        }


def _without_names(stats: EngineStats) -> EngineStats:
    """Stats without the names of adapters, which may be other tenants'."""
    if stats.adapters is None:
        return stats
    return replace(stats, adapters=replace(stats.adapters, running=(), waiting=()))


def _health_json(health: Health) -> Json:
    if health.ok and not health.reason:
        return {"status": "ok", "reason": ""}
    return {"status": health.status, "reason": health.reason}


def _limit(request: Request) -> int:
    text = request.query_params.get("limit", str(_MAX_REQUESTS))
    if not text.isdecimal() or not 1 <= int(text) <= _MAX_REQUESTS:
        raise RequestError(
            f"limit is {text!r:.100}; it must be an integer from 1 to {_MAX_REQUESTS}.", "limit"
        )
    return int(text)
