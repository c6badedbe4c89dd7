"""What the two processes of a server say to each other, as msgpack.

The types of core travel as they are. A frame holds a list of messages, so that a step's worth of
news is one send. Nothing here knows sockets.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from windlass.core.card import EngineReport
from windlass.core.memory import Memory
from windlass.core.trace import RequestTrace
from windlass.core.types import EngineStats, NewRequest, Output


class Add(msgspec.Struct, tag="add", frozen=True):
    """`fingerprint` identifies the request's content; b"": the request is not tracked."""

    request: NewRequest
    fingerprint: bytes = b""


class Abort(msgspec.Struct, tag="abort", frozen=True):
    request_id: str


class ResetPrefixCache(msgspec.Struct, tag="reset", frozen=True):
    number: int


class GetTrace(msgspec.Struct, tag="tell_story", frozen=True):
    number: int
    request_id: str


class GetMemory(msgspec.Struct, tag="tell_memory", frozen=True):
    number: int


class Sleep(msgspec.Struct, tag="sleep", frozen=True):
    """Give memory back; no request may be running."""

    number: int


class Wake(msgspec.Struct, tag="wake", frozen=True):
    number: int


class LoadAdapter(msgspec.Struct, tag="load_adapter", frozen=True):
    name: str
    folder: str


class UnloadAdapter(msgspec.Struct, tag="unload_adapter", frozen=True):
    name: str


class Stop(msgspec.Struct, tag="stop", frozen=True):
    """Leave the loop and end the process; running requests are not waited for."""


class Ready(msgspec.Struct, tag="ready", frozen=True):
    report: EngineReport


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """The engine could not be built. `kind` is the name of the error's class."""

    kind: str
    message: str


class Outputs(msgspec.Struct, tag="outputs", frozen=True):
    outputs: list[Output]


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """The engine did not take a request. `kind` is the name of the error's class."""

    request_id: str
    kind: str
    message: str
    param: str | None = None


class StepFailed(msgspec.Struct, tag="step_failed", frozen=True):
    """A step raised an error while requests with these fingerprints were running."""

    fingerprints: list[bytes]
    error: str


class Stats(msgspec.Struct, tag="stats", frozen=True):
    """The heartbeat. `num_adds`: requests that the engine has seen since it started."""

    stats: EngineStats
    num_adds: int


class Traces(msgspec.Struct, tag="stories", frozen=True):
    """Of requests that have ended; comes before their last outputs."""

    traces: list[RequestTrace]


class CacheReset(msgspec.Struct, tag="cache_reset", frozen=True):
    number: int
    num_blocks: int


class TraceReply(msgspec.Struct, tag="story", frozen=True):
    number: int
    trace: RequestTrace | None  # None: the request has ended


class MemoryReply(msgspec.Struct, tag="memory", frozen=True):
    """How things stand afterwards: `kind` is the class of an error; "": there was none."""

    number: int
    memory: Memory
    kind: str = ""
    message: str = ""


class AdapterAnswer(msgspec.Struct, tag="adapter", frozen=True):
    """What became of a load or an unload: `kind` is the class of an error; "": there was none."""

    asked: LoadAdapter | UnloadAdapter
    num_running: int = 0  # requests with an unloaded adapter that are still to end
    kind: str = ""
    message: str = ""


Question = ResetPrefixCache | GetTrace | GetMemory | Sleep | Wake
Answer = CacheReset | TraceReply | MemoryReply
ToEngine = Add | Abort | Question | LoadAdapter | UnloadAdapter | Stop
FromEngine = (
    Ready | Failed | Outputs | Refused | StepFailed | Stats | Traces | Answer | AdapterAnswer
)

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(list[ToEngine])
_from_engine = msgspec.msgpack.Decoder(list[FromEngine])


def encode(messages: Sequence[ToEngine] | Sequence[FromEngine]) -> bytes:
    return _encoder.encode(messages)


def decode_to_engine(frame: bytes) -> list[ToEngine]:
    return _to_engine.decode(frame)


def decode_from_engine(frame: bytes) -> list[FromEngine]:
    return _from_engine.decode(frame)
