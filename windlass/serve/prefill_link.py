"""Messages between a decode server and a prefill server on another host.

They are those between an HTTP process and its engine (messages.py). The clocks of two hosts differ: every
frame has the sender's time, and the receiver shifts the times in it to its own clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Generic, TypeVar

import msgspec

from windlass.core.trace import RequestTrace
from windlass.core.types import Timeline
from windlass.serve import messages

_LENGTH = struct.Struct("<I")
_MAX_FRAME_BYTES = 2**28  # a prompt of millions of tokens


class Beat(msgspec.Struct, tag="beat", frozen=True):
    """The prefill server lives. `down`: why its engine does not; "": it does."""

    down: str = ""


ToPrefill = messages.Add | messages.Abort
FromPrefill = messages.Outputs | messages.HandedOver | messages.Refused | messages.Traces | Beat

Sent = TypeVar("Sent")
Received = TypeVar("Received")


class PrefillLink(Generic[Sent, Received]):
    """Sends and receives frames; one end of a connection."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        decode: Callable[[bytes], list[Received]],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._decode = decode

    def send(self, *batch: Sent) -> None:
        """Send without waiting. A link that is closed is noticed by `receive`."""
        frame = msgspec.msgpack.encode((time.monotonic(), batch))
        self._writer.write(_LENGTH.pack(len(frame)) + frame)

    async def receive(self, timeout_s: float | None = None) -> list[Received]:
        """The next messages. Raises OSError if the link has ended or is silent for so long."""
        try:
            async with asyncio.timeout(timeout_s):
                (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
                if length > _MAX_FRAME_BYTES:
                    raise ConnectionError(f"it sent a message of {length} bytes")
                return self._decode(await self._reader.readexactly(length))
        except TimeoutError as error:
            raise ConnectionError(f"it said nothing for {timeout_s:g} s") from error
        except asyncio.IncompleteReadError as error:
            raise ConnectionError("it closed the link") from error
        except msgspec.DecodeError as error:
            raise ConnectionError(f"it sent a message that cannot be decoded: {error}") from error

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):  # the other end has closed it
            await self._writer.wait_closed()


async def link_to_prefill(link: socket.socket) -> PrefillLink[ToPrefill, FromPrefill]:
    """The decode server's end of a connection."""
    return PrefillLink(*await asyncio.open_connection(sock=link), _decode_from_prefill)


async def link_to_decode(link: socket.socket) -> PrefillLink[FromPrefill, ToPrefill]:
    """The prefill server's end of a connection."""
    return PrefillLink(*await asyncio.open_connection(sock=link), _decode_to_prefill)


# ---- frames: the sender's time, and messages ---------------------------------------------------

_to_prefill = msgspec.msgpack.Decoder(tuple[float, list[ToPrefill]])
_from_prefill = msgspec.msgpack.Decoder(tuple[float, list[FromPrefill]])


def _decode_to_prefill(frame: bytes) -> list[ToPrefill]:
    sent_at, batch = _to_prefill.decode(frame)
    shift_s = time.monotonic() - sent_at
    return [_shift_deadline(each, shift_s) for each in batch]


def _decode_from_prefill(frame: bytes) -> list[FromPrefill]:
    sent_at, batch = _from_prefill.decode(frame)
    shift_s = time.monotonic() - sent_at
    return [_shift_times(each, shift_s) for each in batch]


def _shift_deadline(message: ToPrefill, seconds: float) -> ToPrefill:
    if isinstance(message, messages.Abort) or message.request.deadline is None:
        return message
    request = replace(message.request, deadline=message.request.deadline + seconds)
    return messages.Add(request, message.fingerprint)


def _shift_times(message: FromPrefill, seconds: float) -> FromPrefill:
    if isinstance(message, messages.Outputs):
        found = [
            each
            if each.timeline is None
            else each._replace(timeline=_later(each.timeline, seconds))
            for each in message.outputs
        ]
        return messages.Outputs(found)
    if isinstance(message, messages.Traces):
        return messages.Traces([_later_trace(each, seconds) for each in message.traces])
    return message


def _later_trace(trace: RequestTrace, seconds: float) -> RequestTrace:
    return replace(trace, timeline=_later(trace.timeline, seconds), ended=trace.ended + seconds)


def _later(times: Timeline, seconds: float) -> Timeline:
    def shifted(at: float | None) -> float | None:
        return None if at is None else at + seconds

    return replace(
        times,
        arrived=times.arrived + seconds,
        admitted=shifted(times.admitted),
        first_token=shifted(times.first_token),
        last_token=shifted(times.last_token),
    )
