"""The broadcast of commands to other ranks: order, wrap-around, messages larger than the ring."""

from __future__ import annotations

import socket
import threading
from random import Random

import pytest

from windlass.parallel.channel import Receiver, Sender, make_ring


def test_readers_get_every_message_in_order() -> None:
    pairs = [socket.socketpair() for _ in range(3)]
    random = Random(1)
    # Up to five times the ring, so that it wraps around and long messages go in pieces.
    messages = [random.randbytes(random.choice([0, 1, 100, 999, 1000, 5000])) for _ in range(200)]
    ring = make_ring(2, 1000)
    near, far = [pair[0] for pair in pairs[:2]], [pairs[2][0]]
    receivers = [
        Receiver(pairs[0][1], (ring, 2, 0)),
        Receiver(pairs[1][1], (ring, 2, 1)),
        Receiver(pairs[2][1]),
    ]
    found: list[list[bytes | None]] = [[] for _ in receivers]

    def read(index: int) -> None:
        while (message := receivers[index].receive()) is not None:
            found[index].append(message)

    threads = [threading.Thread(target=read, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    sender = Sender(ring, near, far)
    for message in messages:
        sender.send(message, lambda: None)
    for own, _ in pairs:
        own.close()
    for thread in threads:
        thread.join(60)
    assert found == [messages] * 3


def test_a_reader_that_is_gone_ends_the_wait_for_room() -> None:
    own, other = socket.socketpair()

    def check() -> None:
        raise RuntimeError("rank 1 is lost")

    sender = Sender(make_ring(1, 100), [own])
    sender.send(bytes(90), check)
    with pytest.raises(RuntimeError, match="rank 1 is lost"):
        sender.send(bytes(90), check)
    other.close()
    own.close()
