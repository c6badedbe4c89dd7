"""The stories of requests, kept for who asks later: those in flight and the last thousand others.

Found by the id that the client got, and only by who sent the request. What a story means is said
in explain.py.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from windlass.core.trace import RequestTrace
from windlass.serve.problems import TraceNotFound

_MOST_ENDED = 1000
_WAIT_S = 5.0


@dataclass(slots=True)
class Entry:
    """One HTTP request: its completions' stories, as far as they were told."""

    answer_id: str
    owner: str
    began: float
    request_ids: tuple[str, ...]
    traces: dict[str, RequestTrace] = field(default_factory=dict)
    lost: bool = False  # it failed, or the engine died with it: not all will be told
    told: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_open(self) -> bool:
        return not self.lost and len(self.traces) < len(self.request_ids)


class TraceStore:
    """Owns the entries. `charge` is told of each story and of whose it is; "": the server's own."""

    def __init__(
        self, charge: Callable[[str, RequestTrace], None], most: int = _MOST_ENDED
    ) -> None:
        self._charge = charge
        self._most = most
        self._by_id: dict[tuple[str, str], Entry] = {}
        self._by_request: dict[str, Entry] = {}
        self._ended: deque[Entry] = deque()

    def open(self, answer_id: str, owner: str, began: float, request_ids: tuple[str, ...]) -> Entry:
        """Enter a request that goes to the engine now. An id used again means the later one."""
        entry = Entry(answer_id, owner, began, request_ids)
        self._by_id[answer_id, owner] = entry
        self._by_request |= dict.fromkeys(request_ids, entry)
        return entry

    def give_up(self, entry: Entry) -> None:
        """It has failed: of what is not told yet, some may never be."""
        if entry.is_open:
            entry.lost = True
            self._close(entry)

    def tell(self, traces: list[RequestTrace] | None) -> None:
        """Take in stories of requests that have ended; None: all that were open are lost."""
        if traces is None:
            for entry in list(self._by_request.values()):
                self.give_up(entry)
            self._by_request.clear()
            return
        for trace in traces:
            found = self._by_request.pop(trace.request_id, None)
            self._charge(found.owner if found is not None else "", trace)
            if found is not None:
                found.traces[trace.request_id] = trace
                if len(found.traces) == len(found.request_ids):
                    self._close(found)

    def _close(self, entry: Entry) -> None:
        if entry.told.is_set():
            return
        entry.told.set()
        self._ended.append(entry)
        if len(self._ended) > self._most:
            oldest = self._ended.popleft()
            for request_id in oldest.request_ids:
                self._by_request.pop(request_id, None)
            if self._by_id.get((oldest.answer_id, oldest.owner)) is oldest:
                del self._by_id[oldest.answer_id, oldest.owner]

    async def complete(self, entry: Entry) -> list[RequestTrace] | None:
        """The stories of all its completions; one that was aborted is told a step later.

        None: the engine has not told them in time.
        """
        try:
            await asyncio.wait_for(entry.told.wait(), _WAIT_S)
        except TimeoutError:
            return None
        return list(entry.traces.values())

    def find(self, answer_id: str, owner: str | None) -> Entry:
        """The latest request of this id; `owner` None: whoever sent it."""
        if owner is not None:
            entry = self._by_id.get((answer_id, owner))
        else:
            found = (each for each in self._by_id.values() if each.answer_id == answer_id)
            entry = max(found, key=lambda each: each.began, default=None)
        if entry is None:
            raise TraceNotFound(
                f"no request {answer_id!r:.200} of yours is known here. The id is the field 'id' of "
                f"the answer (and X-Request-Id); the last {self._most} requests are kept."
            )
        return entry
