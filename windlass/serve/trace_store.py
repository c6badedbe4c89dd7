"""Keeps request traces for `explain` and cost: those in flight and the last thousand ended ones.

Entries are found by the id that the client got, and only by the key that sent the request.
explain.py interprets the traces.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from windlass.core.trace import RequestTrace, merge_rounds
from windlass.serve.problems import TraceNotFound
from windlass.text.beam_search import search_of

_MAX_ENDED = 1000
_TRACE_TIMEOUT_S = 5.0


@dataclass(slots=True, kw_only=True)
class Entry:
    """One HTTP request and the traces of its completions that have arrived so far."""

    response_id: str
    owner: str
    began: float
    request_ids: tuple[str, ...]
    path: str = ""  # of the endpoint
    adapter: str = ""
    fallback: str = ""  # why the answer is degraded (serve/fallback.py)
    fallback_model: str = ""  # "": the server's own
    key_id: str = ""
    num_per_prompt: int = 1  # completions that share a prompt, which counts once in the usage
    traces: dict[str, RequestTrace] = field(default_factory=dict)
    replicas: set[int] = field(default_factory=set)  # that computed them
    more_rounds: bool = (
        False  # beam search: `request_ids` are searches, and each has further rounds
    )
    lost: bool = False  # the request failed or the engine died: some traces may never arrive
    closed: asyncio.Event = field(default_factory=asyncio.Event)  # all arrived, or `lost`

    @property
    def is_open(self) -> bool:
        if self.lost:
            return False
        return self.more_rounds or len(self.traces) < len(self.request_ids)

    @property
    def state(self) -> str:
        if self.lost:
            return "failed"
        return "running" if self.is_open else "ended"


class Traces(Protocol):
    """Where the endpoints that generate text announce their requests."""

    def open(self, entry: Entry) -> None:
        """Add a request that is sent to the engine now."""

    def mark_lost(self, entry: Entry) -> None:
        """Close an entry whose request failed."""

    def end_rounds(self, entry: Entry) -> None:
        """The searches of this entry send no further requests."""

    async def wait_closed(self, entry: Entry) -> list[RequestTrace] | None:
        """Wait for the traces of all completions; None: they did not arrive in time."""
        ...


class TraceStore:
    """Owns the entries. `charge` gets each trace, its entry and its name there; None: the server's own probes."""

    def __init__(
        self, charge: Callable[[Entry | None, RequestTrace, str], None], max_ended: int = _MAX_ENDED
    ) -> None:
        self._charge = charge
        self._max_ended = max_ended
        self._by_id: dict[tuple[str, str], Entry] = {}
        self._by_request: dict[str, Entry] = {}
        self._ended: deque[Entry] = deque()

    def open(self, entry: Entry) -> None:
        """Add a request that is sent to the engine now. A reused id refers to the latest request."""
        key = entry.response_id, entry.owner
        self._by_id.pop(key, None)  # the latest request is the last item
        self._by_id[key] = entry
        self._by_request |= dict.fromkeys(entry.request_ids, entry)

    def latest(self, owner: str | None, limit: int) -> list[Entry]:
        """The latest requests of a sender, in flight or ended, newest first; None: of any sender."""
        found = (each for each in reversed(self._by_id.values()) if owner in (None, each.owner))
        return list(islice(found, limit))

    def mark_lost(self, entry: Entry) -> None:
        """Close an entry whose request failed: its missing traces may never arrive."""
        if entry.is_open:
            entry.lost = True
            self._close(entry)

    def lose(self, request_ids: Collection[str]) -> None:
        """Close the entries of these requests: their engine died with the traces."""
        for request_id in request_ids:
            _, entry = self._take(request_id)
            if entry is not None:
                self.mark_lost(entry)

    def end_rounds(self, entry: Entry) -> None:
        entry.more_rounds = False
        if not entry.is_open:
            self._close(entry)

    def _take(self, request_id: str) -> tuple[str, Entry | None]:
        """The entry of a request whose trace has arrived or is lost, and the trace's name in it."""
        entry = self._by_request.pop(request_id, None)
        if entry is not None:
            return request_id, entry
        name = search_of(request_id)  # a search stays: its next rounds follow
        return name, self._by_request.get(name)

    def add(self, traces: list[RequestTrace], replica: int = 0) -> None:
        """Add the traces of requests that a replica has ended."""
        for trace in traces:
            name, found = self._take(trace.request_id)
            self._charge(found, trace, name)
            if found is not None:
                before = found.traces.get(name)
                found.traces[name] = trace if before is None else merge_rounds(before, trace)
                found.replicas.add(replica)
                if not found.is_open:
                    self._close(found)

    def _close(self, entry: Entry) -> None:
        if entry.closed.is_set():
            return
        entry.closed.set()
        self._ended.append(entry)
        if len(self._ended) > self._max_ended:
            oldest = self._ended.popleft()
            for request_id in oldest.request_ids:
                self._by_request.pop(request_id, None)
            if self._by_id.get((oldest.response_id, oldest.owner)) is oldest:
                del self._by_id[oldest.response_id, oldest.owner]

    async def wait_closed(self, entry: Entry) -> list[RequestTrace] | None:
        """Wait for the traces of all completions; None: they did not arrive in time.

        The trace of an aborted completion arrives one step later.
        """
        try:
            await asyncio.wait_for(entry.closed.wait(), _TRACE_TIMEOUT_S)
        except TimeoutError:
            return None
        return list(entry.traces.values())

    def knows(self, response_id: str) -> bool:
        """Whether any sender had a request of this id."""
        return any(known == response_id for known, _ in self._by_id)

    def find(self, response_id: str, owner: str | None) -> Entry:
        """Find the latest request of this id; `owner` None: of any sender."""
        if owner is not None:
            entry = self._by_id.get((response_id, owner))
        else:
            found = (each for each in self._by_id.values() if each.response_id == response_id)
            entry = max(found, key=lambda each: each.began, default=None)
        if entry is None:
            raise TraceNotFound(
                f"no request {response_id!r:.200} of yours is known here. The id is the field 'id' "
                f"of the response, or X-Request-Id with --enable-request-id-headers; the last "
                f"{self._max_ended} requests are kept."
            )
        return entry
