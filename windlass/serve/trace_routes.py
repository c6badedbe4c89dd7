"""The endpoints that read request traces: explain and cost."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from windlass.core.trace import RequestTrace
from windlass.errors import RequestError
from windlass.serve.bodies import reply
from windlass.serve.cost import CostTracker, cost_json
from windlass.serve.explain import Json, explain_trace, phases_of, trace_json
from windlass.serve.handle import EngineHandle
from windlass.serve.services import Services
from windlass.serve.trace_store import Entry

_NO_TRACE = "No trace was recorded: the request was refused, or the engine died with it."


class TraceRoutes:
    """Both endpoints show a client key its own requests, and an admin key all requests."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def owner_of(self, request: Request) -> str | None:
        """The name of the request's tenant; None: an admin, who sees all."""
        tenant = self._services.keys.tenant_of(request)
        return None if tenant.admin else tenant.name

    async def cost(self, request: Request) -> Response:
        costs = self._services.costs
        if costs is None:
            raise RequestError("this server has no price. Start it with --price-per-hour.")
        return reply(self.cost_for(request, costs))

    def cost_for(self, request: Request, costs: CostTracker) -> Json:
        """The costs that the request's key may see."""
        owner, keys = self.owner_of(request), self._services.keys
        if owner is None or not (keys.are_needed or keys.admins):
            return costs.summary()
        return costs.summary_of(owner)

    async def explain(self, request: Request, response_id: str) -> Response:
        entry = self._services.traces.find(response_id, self.owner_of(request))
        traces = {**entry.traces, **await self._running(entry)}
        body: Json = {
            "id": entry.response_id,
            "object": "request.explanation",
            "state": entry.state,
        }
        if traces:
            slowest = max(traces.values(), key=lambda each: phases_of(each, entry.began).total)
            body |= explain_trace(slowest, entry.began, self._client_of(entry).report)
        else:
            body |= {"dominated_by": None, "sentence": _NO_TRACE, "setting": None}
        if entry.fallback:
            model = entry.fallback_model or self._services.card.name
            body["fallback"] = {"reason": entry.fallback, "model": model}
        completions = [
            {"index": index, **self._completion(traces[name], entry.began)}
            for index, name in enumerate(entry.request_ids)
            if name in traces
        ]
        return reply({**body, "completions": completions})

    async def _running(self, entry: Entry) -> dict[str, RequestTrace]:
        """The traces so far of completions that have not ended."""
        found = {}
        for name in entry.request_ids if entry.is_open else ():
            if name not in entry.traces:
                trace = await self._client_of(entry).trace(name)
                if trace is not None:  # else it has ended meanwhile, and its trace has arrived
                    found[name] = trace
        return {name: trace for name, trace in found.items() if name not in entry.traces}

    def _client_of(self, entry: Entry) -> EngineHandle:
        """The engine of the model that answers a request."""
        services = self._services
        others = {} if services.fallbacks is None else services.fallbacks.engines
        return others.get(entry.fallback_model, services.client)

    def _completion(self, trace: RequestTrace, began: float) -> Json:
        costs = self._services.costs
        cost = {"cost": cost_json(costs.price.of([trace]))} if costs is not None else {}
        return {**trace_json(trace, began), **cost}
