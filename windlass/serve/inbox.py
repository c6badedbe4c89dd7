"""Where the outputs of some requests wait until their answer takes them. One who waits, no locks."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable

from windlass.core.types import Output
from windlass.errors import EngineError

Item = Output | EngineError


class Inbox:
    """Shared by the completions of one answer; `open_ids` are those that have not ended."""

    __slots__ = ("_items", "_waiting", "open_ids")

    def __init__(self, request_ids: Iterable[str]) -> None:
        self.open_ids = set(request_ids)
        self._items: deque[Item] = deque()
        self._waiting: asyncio.Future[None] | None = None

    def put(self, item: Item) -> None:
        self._items.append(item)
        waiting = self._waiting
        if waiting is not None:
            self._waiting = None
            if not waiting.done():  # else who waited was cancelled
                waiting.set_result(None)

    async def get(self) -> Item:
        """The oldest item that was not taken; waits for one. For one task at a time."""
        while not self._items:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        return self._items.popleft()
