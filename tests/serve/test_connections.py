"""Connection limits, with a fake clock."""

from __future__ import annotations

import asyncio
import resource
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from windlass.config import AUTO, ServeConfig
from windlass.errors import ConfigError
from windlass.serve.connections import ConnectionLimits, Connections, CutReason, RateWindow
from windlass.serve.descriptors import RESERVE, connection_cap
from windlass.serve.transport import LimitedProtocol

LIMITS = ConnectionLimits.of(
    ServeConfig(body_timeout=10, write_timeout=10, min_transfer_rate=100), max_connections=3
)


class World:
    """A table of connections, its clock, and the counted cuts."""

    def __init__(self, limits: ConnectionLimits = LIMITS) -> None:
        self.now = 0.0
        self.cuts: Counter[CutReason] = Counter()
        self.table = Connections(
            limits, lambda reason: self.cuts.update([reason]), lambda: self.now
        )

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.table.sweep()


class FakeConnection:
    def __init__(self, world: World) -> None:
        self._world = world
        self.cut_by: CutReason | None = None

    def abort(self) -> None:
        """Do nothing: there is no socket."""

    def check(self, now: float) -> None:
        """Do nothing: the client never stalls."""

    def cut(self, reason: CutReason) -> None:
        self.cut_by = reason
        self._world.table.release(self)


def test_the_rate_is_checked_per_window() -> None:
    window = RateWindow(span_s=10, min_rate=100, now=0, num_bytes=0)
    assert not window.is_stalled(9.9, 0)
    assert not window.is_stalled(10, 1000)
    assert not window.is_stalled(19.9, 1000)
    assert window.is_stalled(20, 1999)  # an earlier burst does not count
    window.restart(30, 5000)
    assert not window.is_stalled(39, 5000)
    assert window.is_stalled(40, 5000)


def test_the_longest_idle_connection_is_evicted() -> None:
    world = World()
    first, second, third, fourth = (FakeConnection(world) for _ in range(4))
    for connection in (first, second, third):
        assert world.table.admit(connection)
        world.now += 1
    world.table.mark_busy(first)
    assert world.table.admit(fourth)
    assert (first.cut_by, second.cut_by, third.cut_by) == (None, "evicted", None)
    assert world.table.num_open == 3


def test_new_connections_are_not_evicted() -> None:
    world = World()
    old = [FakeConnection(world) for _ in range(3)]
    assert all(map(world.table.admit, old))
    assert not world.table.admit(FakeConnection(world))
    assert world.cuts == {"too_many": 1}
    world.now += LIMITS.evict_after
    assert world.table.admit(FakeConnection(world))


def test_busy_connections_are_not_evicted() -> None:
    world = World()
    old = [FakeConnection(world) for _ in range(3)]
    for connection in old:
        world.table.admit(connection)
        world.table.mark_busy(connection)
    world.now += 1000
    assert not world.table.admit(FakeConnection(world))
    world.table.release(old[0])
    world.table.release(old[0])
    assert world.table.admit(FakeConnection(world))
    world.table.mark_waiting(old[0])  # closed already
    assert world.table.num_open == 3


def test_the_number_of_lingering_connections_is_limited() -> None:
    world = World()
    lingering = [world.table.may_linger(FakeConnection(world)) for _ in range(RESERVE)]
    assert 0 < lingering.count(True) < RESERVE / 2


# ---- connection limit ------------------------------------------------------------------------


@pytest.fixture
def soft_limit(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    limit = [1024]
    monkeypatch.setattr(resource, "getrlimit", lambda _what: (limit[0], limit[0]))
    monkeypatch.setattr("psutil.Process.num_fds", lambda _self: 30)
    return limit


def test_the_connection_limit_leaves_a_reserve(soft_limit: list[int]) -> None:
    assert connection_cap(AUTO).value == str(1024 - 30 - RESERVE)
    soft_limit[0] = 2**20
    assert connection_cap(AUTO).value == "8192"
    assert connection_cap(20_000).value == "20000"
    soft_limit[0] = resource.RLIM_INFINITY
    assert connection_cap(AUTO).value == "8192"


@pytest.mark.parametrize(("limit", "requested"), [(64, AUTO), (94, AUTO), (1024, 1000)])
def test_too_few_descriptors_are_an_error(
    soft_limit: list[int], limit: int, requested: int
) -> None:
    soft_limit[0] = limit
    with pytest.raises(ConfigError, match=rf"{limit:,} descriptors, 30 in use.*ulimit -n"):
        connection_cap(requested)


# ---- one connection --------------------------------------------------------------------------


class FakeTransport(asyncio.Transport):
    """Collects written bytes; reports `unread` as the size of the write buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.unread = 0
        self.closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:  # type: ignore[override]
        self.written += data

    def get_write_buffer_size(self) -> int:
        return self.unread

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.closing = True

    def can_write_eof(self) -> bool:
        return False

    def pause_reading(self) -> None:
        """Do nothing: the test delivers all input."""

    def resume_reading(self) -> None:
        """Do nothing: the test delivers all input."""


async def never_respond(_scope: Scope, receive: Receive, _send: Send) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def connect(world: World) -> tuple[LimitedProtocol, FakeTransport]:
    config = uvicorn.Config(never_respond, lifespan="off", ws="none", log_config=None)
    state: dict[str, Any] = {}
    protocol = LimitedProtocol(
        connections=world.table,
        config=config,
        server_state=ServerState(),
        app_state=state,
    )
    transport = FakeTransport()
    protocol.connection_made(transport)
    return protocol, transport


HEAD = b"POST / HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n"


def test_a_slow_but_advancing_body_is_accepted() -> None:
    async def main() -> None:
        world = World()
        protocol, transport = connect(world)
        protocol.data_received(HEAD)
        for _ in range(100):
            protocol.data_received(b"a" * 100)
            await asyncio.sleep(0)  # the application reads
            world.pass_time(1)
        assert transport.written == b""
        for _ in range(25):
            protocol.data_received(b"a")
            world.pass_time(1)
        assert transport.written.startswith(b"HTTP/1.1 408 ")
        assert world.cuts == {"body_timeout": 1}
        protocol.connection_lost(None)
        await asyncio.sleep(0)

    asyncio.run(main())


def test_a_body_that_waits_for_the_server_is_not_cut() -> None:
    async def main() -> None:
        world = World()
        protocol, transport = connect(world)
        protocol.data_received(HEAD + b"a" * 100_000)  # the application has not read it yet
        for _ in range(100):
            world.pass_time(1)
        assert protocol.flow.read_paused
        assert transport.written == b""
        protocol.connection_lost(None)
        await asyncio.sleep(0)
        assert world.table.num_body_bytes == 0

    asyncio.run(main())


def test_a_reader_is_cut_when_it_stops_reading() -> None:
    async def main() -> None:
        world = World()
        protocol, transport = connect(world)
        protocol.data_received(b"GET / HTTP/1.1\r\n\r\n")
        protocol.pause_writing()
        transport.unread = 100_000
        for _ in range(60):
            transport.unread -= 100
            world.pass_time(1)
        assert not transport.closing
        for _ in range(25):
            world.pass_time(1)
        assert transport.closing
        assert world.cuts == {"write_timeout": 1}
        protocol.connection_lost(None)
        await asyncio.sleep(0)

    asyncio.run(main())


def test_waiting_for_a_response_has_no_timeout() -> None:
    async def main() -> None:
        world = World()
        protocol, transport = connect(world)
        protocol.data_received(b"GET / HTTP/1.1\r\n\r\n")
        world.pass_time(1e6)
        assert not transport.closing
        assert transport.written == b""
        protocol.connection_lost(None)
        await asyncio.sleep(0)

    asyncio.run(main())


def test_bodies_of_all_connections_share_a_budget() -> None:
    async def main() -> None:
        world = World(replace(LIMITS, max_buffered_body_bytes=150_000))
        connections = [connect(world) for _ in range(2)]
        for protocol, _transport in connections:
            protocol.data_received(HEAD + b"a" * 100_000)
        first, second = (transport.written for _protocol, transport in connections)
        assert first == b""
        assert second.startswith(b"HTTP/1.1 503 ")
        for protocol, _transport in connections:
            protocol.connection_lost(None)
        await asyncio.sleep(0)
        assert world.table.num_body_bytes == 0

    asyncio.run(main())


def is_evicted(world: World, transport: FakeTransport) -> bool:
    """Whether a new connection takes the place of this one; the table has one place."""
    world.table.admit(FakeConnection(world))
    return transport.closing


ONE = replace(LIMITS, max_connections=1)


@pytest.mark.parametrize(
    ("data", "evicted"),
    [
        (b"", True),
        (b"GET / HT", True),
        (HEAD, True),
        (HEAD + b"a" * 1000, True),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n", True),
        (b"GET / HTTP/1.1\r\n\r\n", False),
        (b"GET / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n", False),
        (b"POST / HTTP/1.1\r\nContent-Length: 3\r\n\r\naaa", False),
        (b"GET / HTTP/1.1\r\n\r\n" + HEAD, False),  # the first one is running
        (b"GET / HTTP/1.1\r\n\r\nGET / HT", False),
    ],
)
def test_an_incomplete_request_does_not_keep_its_place(data: bytes, evicted: bool) -> None:
    async def main() -> None:
        world = World(ONE)
        protocol, transport = connect(world)
        protocol.data_received(data)
        await asyncio.sleep(0)
        world.pass_time(ONE.evict_after)
        assert is_evicted(world, transport) == evicted
        protocol.connection_lost(None)
        await asyncio.sleep(0)

    asyncio.run(main())


def test_a_body_that_arrives_fast_keeps_its_place() -> None:
    async def main() -> None:
        world = World(ONE)
        protocol, transport = connect(world)
        protocol.data_received(HEAD)
        for _ in range(10):
            world.pass_time(0.9)
            protocol.data_received(b"a" * 70_000)
            await asyncio.sleep(0)  # the application reads
            assert not is_evicted(world, transport)
        for _ in range(2):
            world.pass_time(0.9)
            protocol.data_received(b"a" * 512)
        assert is_evicted(world, transport)
        protocol.connection_lost(None)
        await asyncio.sleep(0)

    asyncio.run(main())


def test_a_body_that_the_application_does_not_read_keeps_its_place() -> None:
    async def main() -> None:
        world = World(ONE)
        protocol, transport = connect(world)
        protocol.data_received(HEAD + b"a" * 100_000)
        for _ in range(10):
            world.pass_time(0.5)
            assert not is_evicted(world, transport)
        protocol.connection_lost(None)
        await asyncio.sleep(0)

    asyncio.run(main())


UPGRADE = b"GET / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n"


def test_an_upgrade_closes_the_connection_after_the_response() -> None:
    """The parser stops after an upgrade request."""

    async def main() -> None:
        world = World()
        protocol, transport = connect(world)
        protocol.data_received(UPGRADE + b"\r\n" + b"noise" * 100_000)
        assert not protocol.cycle.keep_alive
        assert not transport.closing
        protocol.data_received(b"noise" * 300_000)
        assert transport.closing
        protocol.connection_lost(None)
        await asyncio.sleep(0)

    asyncio.run(main())


def test_an_upgrade_with_a_body_is_refused() -> None:
    """The parser would drop the body, and the application would see an empty one."""

    async def main() -> None:
        world = World()
        protocol, transport = connect(world)
        protocol.data_received(UPGRADE + b"Content-Length: 4\r\n\r\nbody")
        assert transport.written.startswith(b"HTTP/1.1 400 ")
        protocol.connection_lost(None)
        await asyncio.sleep(0)

    asyncio.run(main())
