"""Calls to the engine process that expect one reply; a number pairs each reply with its call."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import TypeVar

from windlass.errors import WorkerDied
from windlass.serve import messages

T = TypeVar("T", bound=messages.Reply)


class PendingCalls:
    """Owns the calls that have no reply yet."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._pending: dict[int, asyncio.Future[messages.Reply]] = {}

    async def call(
        self,
        make_call: Callable[[int], messages.Call],
        reply_type: type[T],
        *,
        send: Callable[[messages.Call], None],
        timeout_s: float,
    ) -> T:
        """Number a call, send it and wait for its reply; a timeout is a WorkerDied."""
        number = next(self._numbers)
        future: asyncio.Future[messages.Reply] = asyncio.get_running_loop().create_future()
        self._pending[number] = future
        send(make_call(number))
        try:
            reply = await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            raise WorkerDied(f"the engine did not answer in {timeout_s:g} s.") from None
        finally:
            self._pending.pop(number, None)
        assert isinstance(reply, reply_type)
        return reply

    def on_reply(self, reply: messages.Reply) -> None:
        """Resolve the call of this reply, if its caller still waits."""
        future = self._pending.get(reply.number)
        if future is not None and not future.done():
            future.set_result(reply)

    def fail(self, why: str) -> None:
        """Fail all pending calls: the engine has died."""
        for future in self._pending.values():
            if not future.done():
                future.set_exception(WorkerDied(why))
