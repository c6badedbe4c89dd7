"""Splits the requests of a model between two versions while it is updated, and records how they go.

The requests of a conversation stay with one version, as far as the body shows which they are: so both
versions find their prefixes. A request that the new version refuses or fails, before anything was sent,
is answered by the old one; it counts as an error of the new one. Exceptions are responses that say not
to try again: the deadline has passed, or the request has run twice.
"""

from __future__ import annotations

import asyncio
import logging
import random
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from windlass.cluster.bodies import read_body, replaying
from windlass.cluster.rollout import Samples
from windlass.cluster.versions import ModelState, Version
from windlass.errors import EngineError
from windlass.serve.summary import RequestSummary

_log = logging.getLogger("windlass.cluster")

_KEPT = 1000  # latencies of each version, a random part of all
_NO_RETRY = (b"x-should-retry", b"false")
_OVERLOADED = 429  # depends on the load, not on the version


class Front(Protocol):
    """The API of one version."""

    on_end: Callable[[RequestSummary], None]

    @property
    def max_body_bytes(self) -> int: ...

    @property
    def names(self) -> set[str]: ...

    def start(self) -> None: ...

    async def app(self) -> ASGIApp: ...

    def knows(self, response_id: str) -> bool: ...

    async def score(self, prompt: str, answer: str) -> float: ...

    async def close_when_idle(self) -> None: ...


class Outcomes:
    """How the requests of one version went."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_errors = 0
        self._num_latencies = 0
        self._latencies: list[float] = []

    def add(self, summary: RequestSummary) -> None:
        """Count a request that has ended. Clients that went away say nothing about the version."""
        if summary.outcome == "aborted" or summary.status == _OVERLOADED:
            return
        self.num_requests += 1
        if summary.outcome != "success":
            self.num_errors += 1
            return
        seconds = summary.ended - summary.began
        self._num_latencies += 1
        if len(self._latencies) < _KEPT:
            self._latencies.append(seconds)
        elif (place := random.randrange(self._num_latencies)) < _KEPT:
            self._latencies[place] = seconds

    def samples(self) -> Samples:
        return Samples(self.num_requests, self.num_errors, tuple(self._latencies))


class _Conversation(msgspec.Struct):
    """The parts of a body that requests of one conversation have in common."""

    prompt_cache_key: Any = None
    user: Any = None
    messages: Any = None


def conversation_in(body: bytes) -> bytes:
    """What identifies the conversation of a body; empty: the body does not show it."""
    try:
        found = msgspec.json.decode(body, type=_Conversation)
    except msgspec.DecodeError:
        return b""  # the version that gets it reports the error
    messages = found.messages if isinstance(found.messages, list) else []
    users = [each for each in messages if isinstance(each, dict) and each.get("role") == "user"]
    for each in (found.prompt_cache_key, found.user, *users[:1]):
        if each:
            return msgspec.json.encode(each)
    return b""


def goes_to_next(body: bytes, number: int, share: float) -> bool:
    """Whether the version `number`, which answers a share of the requests, gets this one."""
    key = conversation_in(body)
    place = zlib.crc32(b"%d %s" % (number, key)) / 2**32 if key else random.random()
    return place < share


class VersionedFront:
    """Owns the fronts of all versions of one model in this process."""

    def __init__(self, make_front: Callable[[Version], Front]) -> None:
        self._make_front = make_front
        self._fronts: dict[int, tuple[Version, Front]] = {}
        self._outcomes: dict[int, Outcomes] = {}
        self._state: ModelState | None = None
        self._closing: set[asyncio.Task[None]] = set()

    def follow(self, state: ModelState) -> None:
        """Have a front of each version that runs; those of others end with their last request."""
        before, self._state = self._state, state
        versions = {each.number: each for each in state.versions}
        for number in [*self._fronts]:
            version, front = self._fronts[number]
            if version != versions.get(number):
                del self._fronts[number]
                self._close(front)
        for number, version in versions.items():
            if number not in self._fronts:
                front = self._make_front(version)
                self._fronts[number] = version, front
                front.start()
        if state.next is not None and (before is None or before.next != state.next):
            self._outcomes = {each.number: Outcomes() for each in (state.stable, state.next)}
        for number, (_, front) in self._fronts.items():
            front.on_end = self._outcomes.setdefault(number, Outcomes()).add

    def _close(self, front: Front) -> None:
        task = asyncio.create_task(front.close_when_idle())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def retire(self) -> None:
        """Close all fronts when their requests have ended."""
        for _, front in self._fronts.values():
            self._close(front)

    async def close(self) -> None:
        self.retire()
        await asyncio.gather(*self._closing)

    def samples(self) -> dict[int, Samples]:
        """How the requests of each version went since the update began."""
        return {number: each.samples() for number, each in self._outcomes.items()}

    def front_of(self, number: int) -> Front | None:
        found = self._fronts.get(number)
        return None if found is None else found[1]

    # ---- as the ingress sees it ----------------------------------------------------------------

    def knows(self, response_id: str) -> bool:
        """Whether a version has answered a request of this id, also one of another model."""
        return any(front.knows(response_id) for _, front in self._fronts.values())

    @property
    def is_updating(self) -> bool:
        return len(self._fronts) > 1

    @property
    def stable(self) -> Front:
        """Of the version that answers, without an update."""
        assert self._state is not None
        return self._fronts[self._state.stable.number][1]

    @property
    def names(self) -> set[str]:
        return self.stable.names

    @property
    def max_body_bytes(self) -> int:
        return self.stable.max_body_bytes

    async def app(self) -> ASGIApp:
        """The application; holds requests until the first replica has started."""
        return self._split if self.is_updating else await self.stable.app()

    async def _split(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            await (await self.stable.app())(scope, receive, send)
            return
        messages = await read_body(receive, self.max_body_bytes)
        front = self._choose(messages)
        if front is not self.stable:
            attempt = _Attempt(send)
            try:
                app = await front.app()
            except EngineError as error:
                _log.warning("the old version answers: the new one does not start: %s", error)
            else:
                await app(dict(scope), replaying(messages, receive), attempt.send)
                if not attempt.has_failed:
                    return
                _log.warning("the old version answers a request that the new one has not answered")
        await (await self.stable.app())(scope, replaying(messages, receive), send)

    def _choose(self, messages: Sequence[Message]) -> Front:
        state = self._state
        assert state is not None
        found = None if state.next is None else self._fronts.get(state.next.number)
        if state.next is None or found is None or not state.share:
            return self.stable
        body = b"".join(each.get("body", b"") for each in messages)
        return found[1] if goes_to_next(body, state.next.number, state.share) else self.stable


class _Attempt:
    """Passes a response on, unless it is an error."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_failed = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] >= 400:
            self.has_failed = _NO_RETRY not in message.get("headers", ())
        if not self.has_failed:
            await self._send(message)
