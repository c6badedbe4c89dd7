"""A prefill server on another host as a decode server sees it: its link, and the requests it computes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from windlass.core.trace import RequestTrace
from windlass.core.types import Output
from windlass.handshake import Identity
from windlass.serve import messages
from windlass.serve.health import Health
from windlass.serve.prefill_link import Beat, FromPrefill, PrefillLink, ToPrefill, link_to_prefill
from windlass.tiers.peer_link import LinkRefused, join_port

_log = logging.getLogger("windlass.serve")

_SILENT_S = 10.0  # without a message, the server counts as lost
_RETRY_S = 1.0


class PrefillOwner(Protocol):
    """What a prefill server reports to the owner of the requests."""

    def on_outputs(self, engine: PrefillServer, outputs: list[Output]) -> None: ...

    def on_handed_over(self, engine: PrefillServer, handed: messages.HandedOver) -> None: ...

    def on_traces_of(self, engine: PrefillServer, traces: list[RequestTrace]) -> None: ...

    def on_prefill_refused(self, server: PrefillServer, refused: messages.Refused) -> None:
        """The server does not compute a request, or could not."""

    def on_prefill_up(self, server: PrefillServer) -> None:
        """The server takes requests from now on."""

    def on_prefill_lost(self, server: PrefillServer) -> None:
        """The server is out of reach, or its engine is down: its requests are lost."""


class PrefillServer:
    """Owns the link to one prefill server, and connects again when it is lost.

    `index` follows those of the replicas. `identity` returns that of this server's engines.
    """

    def __init__(
        self, index: int, address: str, owner: PrefillOwner, identity: Callable[[], Identity]
    ) -> None:
        self.index = index
        self.address = address
        self._owner = owner
        self._identity = identity
        self._link: PrefillLink[ToPrefill, FromPrefill] | None = None
        self._down = "it has not been connected"  # "": its engine takes requests
        self._task: asyncio.Task[None] | None = None
        self.untraced: set[str] = set()  # requests whose traces have not arrived

    # ---- the link ------------------------------------------------------------------------------

    async def start(self) -> None:
        """Connect, and stay connected. Raises LinkRefused; a server that is not there yet may follow."""
        try:
            await self._connect()
            assert self._link is not None
            for message in await self._link.receive(_SILENT_S):
                self._handle(message)
        except OSError as error:
            self._is_down(str(error))
            await self._leave()
        self._task = asyncio.create_task(self._stay_connected())

    async def _connect(self) -> None:
        link = await asyncio.to_thread(join_port, self.address, self._identity(), "requests")
        self._link = await link_to_prefill(link)

    async def _stay_connected(self) -> None:
        while True:
            try:
                if self._link is None:
                    await self._connect()
                await self._read()
            except (OSError, LinkRefused) as error:
                self._is_down(str(error))
                await self._leave()
                await asyncio.sleep(_RETRY_S)

    async def _read(self) -> None:
        assert self._link is not None
        while True:
            for message in await self._link.receive(_SILENT_S):
                self._handle(message)

    def _handle(self, message: FromPrefill) -> None:
        match message:
            case Beat(down) if down:
                self._is_down(down)
            case Beat() if self._down:
                _log.info("the prefill server at %s takes prompts", self.address)
                self._down = ""
                self._owner.on_prefill_up(self)
            case messages.Outputs(outputs):
                self._owner.on_outputs(self, outputs)
            case messages.HandedOver(request_id, blocks):
                blocks = blocks._replace(source=self.address)
                self._owner.on_handed_over(self, messages.HandedOver(request_id, blocks))
            case messages.Refused(request_id):
                self.untraced.discard(request_id)
                self._owner.on_prefill_refused(self, message)
            case messages.Traces(traces):
                self.untraced.difference_update(each.request_id for each in traces)
                self._owner.on_traces_of(self, traces)

    def _is_down(self, reason: str) -> None:
        """Log a new reason, and give the requests back."""
        if self._down != reason:
            _log.warning(
                "the prefill server at %s is lost, and prompts are computed here: %s",
                self.address,
                reason,
            )
        was_up, self._down = not self._down, reason
        if was_up:
            self._owner.on_prefill_lost(self)

    async def _leave(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            await link.close()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        await self._leave()

    # ---- requests ------------------------------------------------------------------------------

    def add(self, adds: Sequence[messages.Add]) -> None:
        """Send requests; the server must be up."""
        assert self._link is not None
        self.untraced.update(add.request.request_id for add in adds)
        self._link.send(*adds)

    def abort(self, request_id: str) -> None:
        if self._link is not None:
            self._link.send(messages.Abort(request_id))

    def health(self) -> Health:
        if not self._down:
            return Health(True)
        return Health(False, f"the prefill server at {self.address} is lost: {self._down}")
