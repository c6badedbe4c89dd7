"""Questions to the engine that are answered once: each has a number, which its answer repeats."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import TypeVar

from windlass.errors import WorkerDied
from windlass.serve import messages

T = TypeVar("T", bound=messages.Answer)


class Calls:
    """Owns the questions that are on their way."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._open: dict[int, asyncio.Future[messages.Answer]] = {}

    async def ask(
        self,
        question: Callable[[int], messages.Question],
        kind: type[T],
        send: Callable[[messages.Question], None],
        timeout_s: float,
    ) -> T:
        """Send the question that `question` makes of a number, and wait for its answer."""
        number = next(self._numbers)
        call: asyncio.Future[messages.Answer] = asyncio.get_running_loop().create_future()
        self._open[number] = call
        send(question(number))
        try:
            answer = await asyncio.wait_for(call, timeout_s)
        except TimeoutError:
            raise WorkerDied(f"the engine did not answer in {timeout_s:g} s.") from None
        finally:
            self._open.pop(number, None)
        assert isinstance(answer, kind)
        return answer

    def answered(self, answer: messages.Answer) -> None:
        """Tell who waits for it, if anybody still does."""
        call = self._open.get(answer.number)
        if call is not None and not call.done():
            call.set_result(answer)

    def fail(self, why: str) -> None:
        """The engine is gone; nobody will answer."""
        for call in self._open.values():
            if not call.done():
                call.set_exception(WorkerDied(why))
