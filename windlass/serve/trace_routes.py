"""What is told of requests afterwards: why one took so long, and what they cost."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from windlass.core.trace import RequestTrace
from windlass.errors import RequestError
from windlass.serve.bodies import reply
from windlass.serve.cost import NOBODY, cost_json
from windlass.serve.explain import Json, explained, phases_of, trace_json
from windlass.serve.keys import name_of
from windlass.serve.services import Services
from windlass.serve.trace_store import Entry

_NOTHING = "Nothing was recorded: it was refused, or the engine died with it."


class TraceRoutes:
    """Two endpoints; each shows a key's owner its own, and an admin everybody's."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def _owner(self, request: Request) -> str | None:
        """Who asks; None: an admin."""
        if self._services.door.is_admin(request):
            return None
        return name_of(request) if self._services.keys.clients else NOBODY

    async def cost(self, request: Request) -> Response:
        costs = self._services.costs
        if costs is None:
            raise RequestError("this server knows no price. Start it with --price-per-hour.")
        owner, keys = self._owner(request), self._services.keys
        if owner is None or not (keys.clients or keys.admins):
            return reply(costs.summary())
        return reply(costs.summary_of(owner))

    async def explain(self, request: Request, answer_id: str) -> Response:
        entry = self._services.traces.find(answer_id, self._owner(request))
        traces = {**entry.traces, **await self._running(entry)}
        made: Json = {
            "id": entry.answer_id,
            "object": "request.explanation",
            "state": _state(entry),
        }
        if traces:
            slowest = max(traces.values(), key=lambda each: phases_of(each, entry.began).total)
            made |= explained(slowest, entry.began, self._services.client.report)
        else:
            made |= {"dominated_by": None, "sentence": _NOTHING, "setting": None}
        completions = [
            {"index": index, **self._completion(traces[name], entry.began)}
            for index, name in enumerate(entry.request_ids)
            if name in traces
        ]
        return reply({**made, "completions": completions})

    async def _running(self, entry: Entry) -> dict[str, RequestTrace]:
        """Completions that have not ended are told as far as they have come."""
        found = {}
        for name in entry.request_ids if entry.is_open else ():
            if name not in entry.traces:
                trace = await self._services.client.trace(name)
                if trace is not None:  # else it has ended meanwhile, and its last word is there
                    found[name] = trace
        return {name: trace for name, trace in found.items() if name not in entry.traces}

    def _completion(self, trace: RequestTrace, began: float) -> Json:
        costs = self._services.costs
        cost = {"cost": cost_json(costs.price.of([trace]))} if costs is not None else {}
        return {**trace_json(trace, began), **cost}


def _state(entry: Entry) -> str:
    if entry.lost:
        return "failed"
    return "running" if entry.is_open else "ended"
