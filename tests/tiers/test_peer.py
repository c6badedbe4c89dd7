"""Records between engines: shared memory and TCP, with dead, slow and lying peers."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from mmap import mmap
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import pytest

from windlass.core.handover import HandedBlocks, PeerRecord
from windlass.errors import ConfigError
from windlass.handshake import Hello, Identity, Welcome, receive_frame, send_frame
from windlass.parallel.segment import Segment
from windlass.tiers.fingerprint import digest_of
from windlass.tiers.peer import LocalSource, PeerExport, PeerStore, RecordRing
from windlass.tiers.peer_link import (
    Join,
    LinkKind,
    LinkRefused,
    PeerPort,
    RemoteSource,
    join_port,
)

SIZE = 5000
PRINT = b"f" * 16
SECRET = b"a secret of the cluster"


def key(number: int) -> bytes:
    return number.to_bytes(17, "little")


def record(number: int, size: int = SIZE) -> memoryview:
    return memoryview(random.Random(number).randbytes(size))


def exported(memory: bytearray | mmap, source: str = "0") -> PeerExport:
    return PeerExport(RecordRing(memory), source=source, record_bytes=SIZE, fingerprint=PRINT)


def reader_of(memory: bytearray | mmap, fingerprint: bytes = PRINT) -> PeerStore:
    source = LocalSource(RecordRing(memory), fingerprint)
    return PeerStore({"0": source}, record_bytes=SIZE)


def fetched(store: PeerStore, number: int) -> bytes | None:
    out = bytearray(SIZE)
    return bytes(out) if store.get(key(number), memoryview(out)) else None


def test_a_record_is_found_after_it_was_announced() -> None:
    memory = bytearray(20 * SIZE)
    export, store = exported(memory), reader_of(memory)
    for number in range(5):
        assert export.put(key(number), record(number))
    assert not store.contains(key(3))
    assert fetched(store, 3) is None
    handed = export.hand_over([key(3), key(4), key(99)])
    assert handed.num_failed == 1
    store.announce(handed)
    assert store.contains(key(3))
    assert fetched(store, 3) == record(3)
    assert not store.contains(key(3))  # the device has it
    stats = store.stats()
    assert (stats.hits, stats.misses, stats.corrupt, stats.num_records) == (1, 1, 0, 1)
    assert not store.put(key(1), record(1))
    assert export.stats().writes == 5


def test_an_overwritten_record_is_a_miss() -> None:
    memory = bytearray(12 * SIZE)
    export, store = exported(memory), reader_of(memory)
    export.put(key(0), record(0))
    store.announce(export.hand_over([key(0)]))
    for number in range(1, 30):
        export.put(key(number), record(number))
    assert fetched(store, 0) is None
    assert (store.stats().misses, store.stats().corrupt) == (1, 0)
    assert export.stats().num_records <= 12
    # A record that would be overwritten soon is written again.
    before = export.stats().writes
    assert export.put(key(29), record(29))
    assert export.stats().writes == before
    assert export.put(key(21), record(21))
    assert export.stats().writes == before + 1


def test_no_damaged_or_foreign_record_is_returned() -> None:
    """Any byte of the memory may change: the result is the record, or a miss."""
    memory = bytearray(6 * SIZE)
    export = exported(memory)
    export.put(key(7), record(7))
    handed = export.hand_over([key(7)])
    for at in [*range(64 + 64), *range(200, 64 + SIZE, 331)]:
        memory[at] ^= 0x10
        store = reader_of(memory)
        store.announce(handed)
        assert fetched(store, 7) in (None, bytes(record(7)))
        if 64 <= at < 64 + 14 + 17 or 128 <= at < 64 + SIZE:
            store.announce(handed)
            assert fetched(store, 7) is None, at
        memory[at] ^= 0x10
    foreign = reader_of(memory, b"other weights of")
    foreign.announce(handed)
    assert fetched(foreign, 7) is None
    wrong_key = HandedBlocks("0", [PeerRecord(key(8), handed.records[0].sequence)])
    store = reader_of(memory)
    store.announce(wrong_key)
    assert fetched(store, 8) is None


def test_memory_for_too_few_records_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--kv-transfer-gb .* has room for 1 KV blocks"):
        exported(bytearray(2 * SIZE))


def write_forever(segment: Segment, pipe: Connection) -> None:
    export = exported(segment.map)
    export.put(key(0), record(0))
    pipe.send(export.hand_over([key(0)]))
    number = 1
    while True:
        export.put(key(number), record(number))
        number += 1


def test_a_writer_that_is_killed_leaves_no_wrong_record() -> None:
    """The reader looks at all sequences after the writer has died in mid-write."""
    segment = Segment(40 * SIZE)
    context = multiprocessing.get_context("spawn")
    for _ in range(3):
        ours, theirs = context.Pipe()
        writer = context.Process(target=write_forever, args=(segment, theirs))
        writer.start()
        ours.recv()
        store = reader_of(segment.map)
        for number in range(200):  # while it writes
            store.announce(HandedBlocks("0", [PeerRecord(key(number), number + 1)]))
            assert fetched(store, number) in (None, record(number))
        os.kill(writer.pid or 0, signal.SIGKILL)
        writer.join()
        found = 0
        for number in range(20_000):
            store.announce(HandedBlocks("0", [PeerRecord(key(number), number + 1)]))
            got = fetched(store, number)
            assert got in (None, record(number))
            found += got is not None
        assert found <= 40
    segment.close()


# ---- TCP ---------------------------------------------------------------------------------------

FACTS = {"the Windlass version": "1.0", "the KV block size": "16"}
IDENTITY = Identity(FACTS, SECRET)


def listen() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


class Port:
    """The port of an engine with a ring of its own."""

    def __init__(self) -> None:
        memory = bytearray(40 * SIZE)
        self.export = PeerExport(
            RecordRing(memory), source="", record_bytes=SIZE, fingerprint=digest_of(FACTS)
        )
        self.links: list[socket.socket] = []
        self.server = PeerPort(
            [RecordRing(memory)],
            listen(),
            identity=lambda: IDENTITY,
            on_requests=lambda link, _address: self.links.append(link),
        )
        self.address = f"127.0.0.1:{self.server.port}"

    def close(self) -> None:
        self.server.close()


@pytest.fixture
def port() -> Iterator[Port]:
    made = Port()
    yield made
    made.close()


def remote(
    address: str, identity: Identity = IDENTITY, stalled_s: float = 5.0, **options: Any
) -> PeerStore:
    def connect(name: str) -> RemoteSource:
        return RemoteSource(name, identity, stalled_s)

    store = PeerStore({}, record_bytes=SIZE, connect=connect, **options)
    records = [PeerRecord(key(number), number + 1) for number in range(30)]
    store.announce(HandedBlocks(address, records))
    return store


def test_records_over_tcp(port: Port) -> None:
    for number in range(20):
        port.export.put(key(number), record(number))
    store = remote(port.address)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda number: fetched(store, number), range(20)))
    assert found == [record(number) for number in range(20)]
    assert store.stats().hits == 20
    assert fetched(store, 25) is None  # never written
    assert store.contains(key(26))  # the link stays
    store.close()


@pytest.mark.parametrize("kind", ["records", "requests"])
@pytest.mark.parametrize(
    ("identity", "reason"),
    [
        (
            Identity(FACTS, b"a wrong secret"),
            "its cluster secret is not that of the prefill server",
        ),
        (
            Identity({**FACTS, "the KV block size": "32"}, SECRET),
            "the KV block size is 32 on the decode server, and 16 on the prefill server",
        ),
        (Identity({}, SECRET), "the Windlass version is unknown on the decode server"),
    ],
)
def test_strangers_get_nothing(port: Port, kind: LinkKind, identity: Identity, reason: str) -> None:
    with pytest.raises(
        LinkRefused, match=f"the prefill server at .* refuses this server: {reason}"
    ):
        join_port(port.address, identity, kind)
    assert not port.links
    port.export.put(key(0), record(0))
    store = remote(port.address, identity)
    assert fetched(store, 0) is None
    assert not store.contains(key(1))  # no record of that engine is tried again


def test_a_port_that_does_not_know_the_secret_is_refused() -> None:
    """It says Welcome to everybody."""
    listener = listen()

    def welcome() -> None:
        link, _ = listener.accept()
        send_frame(link, Hello("windlass-kv-1", b"nonce"))
        receive_frame(link, Join)
        send_frame(link, Welcome(b"proof"))

    threading.Thread(target=welcome, daemon=True).start()
    with pytest.raises(LinkRefused, match="does not know the cluster secret"):
        join_port(f"127.0.0.1:{listener.getsockname()[1]}", IDENTITY, "requests")
    listener.close()


def test_a_link_for_requests_is_given_away(port: Port) -> None:
    with join_port(port.address, IDENTITY, "requests") as link:
        while not port.links:
            threading.Event().wait(0.01)
        port.links[0].sendall(b"hello")
        assert link.recv(5) == b"hello"
    port.links[0].close()


def test_a_prompt_has_a_limit_of_time_from_its_first_record() -> None:
    now = [100.0]
    memory = bytearray(20 * SIZE)
    export = exported(memory)
    for number in range(4):
        export.put(key(number), record(number))
    store = PeerStore(
        {"0": LocalSource(RecordRing(memory), PRINT)},
        record_bytes=SIZE,
        limit_s=10.0,
        clock=lambda: now[0],
    )
    store.announce(export.hand_over([key(0), key(1)]))
    now[0] = 200.0  # in the queue
    assert fetched(store, 0) == record(0)
    store.announce(export.hand_over([key(2), key(3)]))
    now[0] = 211.0
    assert fetched(store, 1) is None
    assert fetched(store, 2) == record(2)


def test_a_stalled_record_ends_the_transfer() -> None:
    """The engine answers the handshake, and then nothing."""
    listener = listen()

    def stall() -> None:
        link, _ = listener.accept()
        hello = Hello("windlass-kv-1", b"nonce")
        send_frame(link, hello)
        join = receive_frame(link, Join)
        assert join is not None
        send_frame(link, Welcome(IDENTITY.proof("prefill", hello, join.nonce)))
        threading.Event().wait()

    threading.Thread(target=stall, daemon=True).start()
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    store = remote(address, limit_s=0.2)  # of the prompt: other prompts of that engine stay
    assert fetched(store, 0) is None
    assert store.contains(key(1))
    assert fetched(store, 1) is None
    store = remote(address, stalled_s=0.2)
    assert fetched(store, 0) is None
    assert not store.contains(key(1))
    listener.close()


def lie(listener: socket.socket, say: bytes | None) -> None:
    """Answer every connection with these bytes; None: say nothing."""
    links = []
    while True:
        try:
            link, _ = listener.accept()
        except OSError:
            return
        links.append(link)
        if say is not None:
            with contextlib.suppress(OSError):  # the reader may have left
                link.sendall(say)
                link.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("say", [None, b"", b"HTTP/1.1 400 Bad Request\r\n\r\n" * 9])
def test_what_is_no_engine_is_a_miss(say: bytes | None) -> None:
    listener = listen()
    threading.Thread(target=lie, args=(listener, say), daemon=True).start()
    store = remote(f"127.0.0.1:{listener.getsockname()[1]}", stalled_s=0.2)
    assert fetched(store, 0) is None
    assert not any(store.contains(key(number)) for number in range(30))
    listener.close()


def test_a_closed_port_is_a_miss() -> None:
    listener = listen()
    port = listener.getsockname()[1]
    listener.close()
    assert fetched(remote(f"127.0.0.1:{port}"), 0) is None


class _Relay:
    """Forwards TCP to a server, and changes or cuts what the server says after so many bytes."""

    def __init__(self, port: int, *, flip_at: int | None = None, cut_at: int | None = None) -> None:
        self._flip_at, self._cut_at = flip_at, cut_at
        self.listener = listen()
        self._port = port
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        client, _ = self.listener.accept()
        server = socket.create_connection(("127.0.0.1", self._port))
        threading.Thread(target=self._copy, args=(client, server), daemon=True).start()
        with contextlib.suppress(OSError):  # the reader may have left
            self._forward(client, server)
        client.close()

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        seen = 0
        while data := bytearray(server.recv(65536)):
            if self._flip_at is not None and seen <= self._flip_at < seen + len(data):
                data[self._flip_at - seen] ^= 1
            if self._cut_at is not None and seen + len(data) > self._cut_at:
                client.sendall(data[: self._cut_at - seen])
                return
            client.sendall(data)
            seen += len(data)

    def _copy(self, origin: socket.socket, target: socket.socket) -> None:
        try:
            while data := origin.recv(65536):
                target.sendall(data)
        except OSError:
            pass
        target.close()


# Bytes of the port before its first reply: the frames of Hello and Welcome.
GREETING = sum(
    4 + len(msgspec.msgpack.encode(each))
    for each in (Hello("windlass-kv-1", bytes(32)), Welcome(bytes(32)))
)


@pytest.mark.parametrize(
    "fault",
    [
        {"flip_at": 0},
        {"flip_at": 12},
        {"flip_at": 60},
        {"flip_at": GREETING - 3},
        {"flip_at": GREETING + 2},
        {"flip_at": GREETING + 1000},
        {"cut_at": GREETING + 3},
        {"cut_at": GREETING + 3000},
        {"cut_at": 10},
    ],
    ids=str,
)
def test_a_damaged_or_cut_stream_is_a_miss(port: Port, fault: dict[str, int]) -> None:
    port.export.put(key(0), record(0))
    relay = _Relay(port.server.port, **fault)
    store = remote(f"127.0.0.1:{relay.listener.getsockname()[1]}", stalled_s=1.0)
    assert fetched(store, 0) is None
    relay.listener.close()


def serve_until_killed(pipe: Connection) -> None:
    port = Port()
    for number in range(20):
        port.export.put(key(number), record(number))
    pipe.send(port.address)
    pipe.recv()


def test_a_killed_server_is_a_miss() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve_until_killed, args=(theirs,))
    process.start()
    store = remote(ours.recv())
    assert fetched(store, 0) == record(0)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    assert fetched(store, 1) is None
    assert not store.contains(key(2))
    assert store.stats().corrupt == 0


def test_links_of_a_server_that_was_started_again_are_opened_anew(port: Port) -> None:
    """The first record after its start is no miss."""
    port.export.put(key(0), record(0))
    port.export.put(key(1), record(1))
    store = remote(port.address)
    assert fetched(store, 0) == record(0)
    for link in list(port.server._links):
        link.shutdown(socket.SHUT_RDWR)
    assert fetched(store, 1) == record(1)
