"""Queues engine outputs for one HTTP response. One consumer, no locks."""

from __future__ import annotations

import asyncio
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable

from windlass.core.types import Output
from windlass.errors import EngineError

Item = Output | EngineError


class Inbox:
    """Shared by the completions of one response; `open_ids` are the requests that have not ended."""

    __slots__ = ("_items", "_max_items", "_on_full", "_on_restart", "_waiting", "open_ids")

    def __init__(
        self, request_ids: Iterable[str], on_restart: Callable[[str], None] | None = None
    ) -> None:
        self.open_ids = set(request_ids)
        self._on_restart = on_restart
        self._items: deque[Item] = deque()
        self._max_items = sys.maxsize
        self._on_full: Callable[[], None] = lambda: None
        self._waiting: asyncio.Future[None] | None = None

    def limit(self, max_items: int, on_full: Callable[[], None]) -> None:
        """Call `on_full` for every item that arrives while `max_items` or more wait."""
        self._max_items = max_items
        self._on_full = on_full

    @property
    def can_restart(self) -> bool:
        """Whether requests may start again after outputs: nothing was sent to the client."""
        return self._on_restart is not None

    def restart(self, request_id: str) -> None:
        """Drop the outputs of a request, which starts again."""
        assert self._on_restart is not None
        self._items = deque(
            each
            for each in self._items
            if isinstance(each, EngineError) or each.request_id != request_id
        )
        self._on_restart(request_id)

    def put(self, item: Item) -> None:
        self._items.append(item)
        if len(self._items) > self._max_items:
            self._on_full()
        waiting = self._waiting
        if waiting is not None:
            self._waiting = None
            if not waiting.done():  # else the consumer was cancelled
                waiting.set_result(None)

    @property
    def is_empty(self) -> bool:
        """Whether `get` would wait."""
        return not self._items

    async def get(self) -> Item:
        """Remove and return the oldest item; waits for one. For one task at a time."""
        while not self._items:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        return self._items.popleft()


class InboxReader(ABC):
    """Reads and aborts requests in flight, wherever their engine runs; a subclass sends them."""

    @abstractmethod
    def _inbox_of(self, request_id: str) -> Inbox | None:
        """The inbox of a request in flight; None: there is no such request."""

    @abstractmethod
    def _tell_abort(self, request_id: str, completed: bool) -> None:
        """Tell the engine that a request is aborted, before `ended`."""

    @abstractmethod
    def ended(self, request_id: str, completed: bool) -> None:
        """Forget a request that has ended, and remove its id from its inbox."""

    async def next(self, inbox: Inbox) -> Output | None:
        """Wait for the next output; None: all requests have ended. Raises an error of any of them."""
        while inbox.open_ids:
            item = await inbox.get()
            if isinstance(item, EngineError):
                raise item
            if item.request_id not in inbox.open_ids:
                continue
            if item.finish is not None:
                self.ended(item.request_id, item.finish in ("stop", "length"))
                if item.error is not None or item.finish in ("error", "abort"):
                    raise item.exception()
            return item
        return None

    async def _outputs_of(self, submit: Callable[[], Inbox]) -> AsyncGenerator[Output, None]:
        """Send requests when the first output is read, and yield the outputs of all.

        Closing the generator aborts the unfinished requests.
        """
        inbox = submit()
        try:
            while (output := await self.next(inbox)) is not None:
                yield output
        finally:
            self.drop(inbox)

    def drop(self, inbox: Inbox) -> None:
        """Abort the requests of the inbox that have not ended."""
        for request_id in list(inbox.open_ids):
            self.abort(request_id)

    def abort(self, request_id: str, completed: bool = False) -> None:
        """Abort one request; it has no further outputs. Unknown ids are ignored.

        `completed`: the caller has all the output it needs, so the request counts as successful.
        """
        inbox = self._inbox_of(request_id)
        if inbox is None:
            return
        self._tell_abort(request_id, completed)
        self.ended(request_id, completed)
        inbox.put(Output(request_id, finish="abort"))  # wakes the consumer
