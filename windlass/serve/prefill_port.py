"""The requests that a prefill server computes for decode servers on other hosts.

Its port (tiers/peer_link.py) also sends the KV blocks, which decode engines read from there. The engine
computes such a request as every other: queue limits, tenants and quarantine are the server's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable

from windlass.core.card import Choice
from windlass.core.trace import RequestTrace
from windlass.core.types import NewRequest
from windlass.errors import EngineError, RequestError
from windlass.handshake import Identity
from windlass.serve import messages
from windlass.serve.inbox import Inbox, Item
from windlass.serve.prefill_link import Beat, FromPrefill, PrefillLink, ToPrefill, link_to_decode
from windlass.serve.prefill_listener import PrefillListener
from windlass.serve.services import Services
from windlass.tiers.peer import RecordRing
from windlass.tiers.peer_link import PeerPort

_log = logging.getLogger("windlass.serve")

_BEAT_S = 1.0


class _RelayInbox(Inbox):
    """One request; its items go to the decode server at once."""

    __slots__ = ("_forward",)

    def __init__(self, request_id: str, forward: Callable[[str, Item], None]) -> None:
        super().__init__([request_id])
        self._forward = forward

    def put(self, item: Item) -> None:
        (request_id,) = self.open_ids or (None,)
        if request_id is not None:
            self._forward(request_id, item)


class PrefillPort:
    """Owns the links to decode servers and their requests. Created while the engine runs."""

    def __init__(self, services: Services, listener: PrefillListener) -> None:
        self._services = services
        self._client = client = services.client
        self._links: dict[str, PrefillLink[FromPrefill, ToPrefill]] = {}  # by request id
        # Of requests whose traces have not arrived; that of an aborted one follows later.
        self._untraced: dict[str, PrefillLink[FromPrefill, ToPrefill]] = {}
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._on_traces = client.on_traces
        client.on_traces = self._forward_traces
        client.on_handed = self._forward_handed
        self._port = PeerPort(
            [RecordRing(ring) for ring in listener.rings],
            listener.socket,
            identity=lambda: Identity(client.report.kv_facts, listener.secret),
            on_requests=self._take,
        )

    @property
    def choice(self) -> Choice:
        """A line of the start-up table."""
        return Choice("prefill port", str(self._port.port), "--role prefill: for decode servers")

    def _take(self, link: socket.socket, address: str) -> None:
        """In a thread of the port."""

        def start() -> None:
            task = asyncio.create_task(self._serve(link, address))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        try:
            self._loop.call_soon_threadsafe(start)
        except RuntimeError:  # the server has ended
            link.close()

    async def _serve(self, socket: socket.socket, address: str) -> None:
        link = await link_to_decode(socket)
        _log.info("a decode server at %s has connected", address)
        beats = asyncio.create_task(self._beat(link))
        how = "this server ends"
        try:
            while True:
                for message in await link.receive():
                    if isinstance(message, messages.Add):
                        self._add(message.request, link)
                    else:
                        self._abort(message.request_id, link)
        except OSError as error:
            how = str(error)
        finally:
            beats.cancel()
            for request_id in [name for name, each in self._links.items() if each is link]:
                self._abort(request_id, link)
            self._untraced = {
                name: each for name, each in self._untraced.items() if each is not link
            }
            _log.info("the link to the decode server at %s has ended: %s", address, how)
            await link.close()

    async def _beat(self, link: PrefillLink[FromPrefill, ToPrefill]) -> None:
        while True:
            health = self._client.health()
            link.send(Beat("" if health.ok else health.reason))
            await asyncio.sleep(_BEAT_S)

    # ---- requests ------------------------------------------------------------------------------

    def _add(self, request: NewRequest, link: PrefillLink[FromPrefill, ToPrefill]) -> None:
        services, request_id = self._services, request.request_id
        if request_id in self._links:
            error = RequestError(f"request_id {request_id!r} is in use.", "request_id")
            link.send(_refused(request_id, error))
            return
        self._links[request_id] = self._untraced[request_id] = link
        services.desk.hold()
        try:
            services.desk.check_open()
            services.admission.check(1, len(request.prompt))
            self._client.relay([request], _RelayInbox(request_id, self._forward))
        except EngineError as error:
            self._refuse(request_id, error)

    def _abort(self, request_id: str, link: PrefillLink[FromPrefill, ToPrefill]) -> None:
        if self._links.get(request_id) is link:  # else it has ended
            self._forget(request_id)
            self._client.abort(request_id)

    def _forward(self, request_id: str, item: Item) -> None:
        link = self._links.get(request_id)
        if link is None:
            return
        if isinstance(item, EngineError):
            self._refuse(request_id, item)
            # Not now: the client is handling the end of its engine.
            self._loop.call_soon(self._client.abort, request_id)
            return
        link.send(messages.Outputs([item]))
        if item.finish is not None and item.finish != "handover":  # else its blocks follow
            self._end(request_id, item.finish in ("stop", "length"))

    def _forward_handed(self, handed: messages.HandedOver) -> None:
        link = self._links.get(handed.request_id)
        if link is not None:
            link.send(handed)
            self._end(handed.request_id, completed=True)

    def _forward_traces(self, replica: int, traces: list[RequestTrace]) -> None:
        if self._on_traces is not None:
            self._on_traces(replica, traces)
        for trace in traces:
            link = self._untraced.pop(trace.request_id, None)
            if link is not None:
                link.send(messages.Traces([trace]))

    def _refuse(self, request_id: str, error: EngineError) -> None:
        self._links[request_id].send(_refused(request_id, error))
        self._forget(request_id)
        self._untraced.pop(request_id, None)

    def _end(self, request_id: str, completed: bool) -> None:
        self._forget(request_id)
        self._loop.call_soon(self._client.ended, request_id, completed)

    def _forget(self, request_id: str) -> None:
        del self._links[request_id]
        self._services.desk.release()

    async def close(self) -> None:
        """Close the port and all links: decode servers compute the rest."""
        self._port.close()
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*self._tasks, return_exceptions=True)


def _refused(request_id: str, error: EngineError) -> messages.Refused:
    return messages.Refused(request_id, type(error).__name__, message=str(error))
