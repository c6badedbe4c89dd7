"""The HTTP server of one process: uvicorn with our limits, without its signal handlers."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from windlass.config import ServeConfig
from windlass.serve.acceptor import Accept, Acceptor, accept_from
from windlass.serve.connections import ConnectionLimits, Connections
from windlass.serve.live_config import LiveConfig
from windlass.serve.metrics import Metrics
from windlass.serve.tls import Tls
from windlass.serve.transport import LimitedProtocol

LAST_RESPONSES_S = 2  # after the drain: for the error responses of the remaining requests


class HttpServer(uvicorn.Server):
    """Serves `app`. `accept`: where connections come from; None: from the sockets of `serve`."""

    def __init__(
        self,
        app: ASGIApp,
        config: LiveConfig,
        *,
        metrics: Metrics,
        max_connections: int,
        tls: Tls | None = None,
        accept: Accept | None = None,
    ) -> None:
        self.connections = Connections(
            ConnectionLimits.of(config.value, max_connections), metrics.connection_cut
        )
        protocol = partial(LimitedProtocol, connections=self.connections)
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                server_header=False,
                http=cast(type[asyncio.Protocol], protocol),
                timeout_graceful_shutdown=LAST_RESPONSES_S,
            )
        )

        def apply(value: ServeConfig) -> None:
            self.connections.limits = ConnectionLimits.of(value, max_connections)
            self.config.timeout_keep_alive = math.ceil(value.keep_alive_timeout)

        config.watch(apply)
        self._tls = tls
        self._accept = accept

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self._tls is None and self._accept is None:
            await super().startup(sockets)
            return
        await self.lifespan.startup()
        accepts = [self._accept] if self._accept else [accept_from(each) for each in sockets or ()]
        make_protocol = partial(
            cast(Callable[..., LimitedProtocol], self.config.http_protocol_class),
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        self.servers: list[Any] = [
            Acceptor(accept, self._tls, make_protocol=make_protocol, connections=self.connections)
            for accept in accepts
        ]
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def start(self, sockets: list[socket.socket] | None = None) -> asyncio.Task[None]:
        """Serve in a task, which is returned once the server listens."""
        serving = asyncio.create_task(self.serve(sockets=sockets))
        while not (self.started or serving.done()):
            await asyncio.sleep(0.01)
        if serving.done():
            await serving  # raises the error that prevented it from listening
        return serving
