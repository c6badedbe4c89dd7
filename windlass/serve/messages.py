"""Messages between the HTTP process and the engine process, encoded as msgpack.

Types of core/ are encoded without conversion. A frame holds a list of messages, so that one step
needs one send. This module does not know sockets.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from windlass.core.card import EngineReport
from windlass.core.handover import HandedBlocks
from windlass.core.limits import EngineCaps
from windlass.core.memory import Memory
from windlass.core.trace import RequestTrace
from windlass.core.types import EngineStats, NewRequest, Output, PinnedPrefix


class Add(msgspec.Struct, tag="add", frozen=True):
    """Adds a request. `fingerprint` identifies its content; b"": the request is not tracked.

    `handed`: the blocks that another engine has computed for it.
    """

    request: NewRequest
    fingerprint: bytes = b""
    handed: HandedBlocks | None = None


class Abort(msgspec.Struct, tag="abort", frozen=True):
    request_id: str


class ResetPrefixCache(msgspec.Struct, tag="reset", frozen=True):
    number: int


class GetTrace(msgspec.Struct, tag="get_trace", frozen=True):
    number: int
    request_id: str


class GetMemory(msgspec.Struct, tag="get_memory", frozen=True):
    number: int


class Sleep(msgspec.Struct, tag="sleep", frozen=True):
    """Releases memory; no request may be running."""

    number: int


class Wake(msgspec.Struct, tag="wake", frozen=True):
    number: int


class PinPrefix(msgspec.Struct, tag="pin", frozen=True):
    """Keeps the cached blocks of a prompt from eviction, or with `on_device` False in tiers only."""

    number: int
    name: str
    request: NewRequest
    on_device: bool = True


class UnpinPrefix(msgspec.Struct, tag="unpin", frozen=True):
    number: int
    name: str


class LoadAdapter(msgspec.Struct, tag="load_adapter", frozen=True):
    """Loads an adapter. With `roots`, only from files inside of these folders, links resolved."""

    name: str
    folder: str
    roots: tuple[str, ...] = ()


class UnloadAdapter(msgspec.Struct, tag="unload_adapter", frozen=True):
    name: str


class Configure(msgspec.Struct, tag="configure", frozen=True, kw_only=True):
    """Sets what may change while the engine runs."""

    caps: EngineCaps
    hang_timeout: float
    log_level: str


class Stop(msgspec.Struct, tag="stop", frozen=True):
    """Ends the engine process without waiting for running requests."""


class Ready(msgspec.Struct, tag="ready", frozen=True):
    report: EngineReport


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """The engine could not be built. `kind` is the name of the error's class."""

    kind: str
    message: str


class Outputs(msgspec.Struct, tag="outputs", frozen=True):
    outputs: list[Output]


class HandedOver(msgspec.Struct, tag="handed_over", frozen=True):
    """The blocks of a request that ended with "handover" can be read now."""

    request_id: str
    blocks: HandedBlocks


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """The engine refused a request. `kind` is the name of the error's class."""

    request_id: str
    kind: str
    message: str
    param: str | None = None


class StepFailed(msgspec.Struct, tag="step_failed", frozen=True):
    """A step raised an error while requests with these fingerprints were running."""

    fingerprints: list[bytes]
    error: str


class Stats(msgspec.Struct, tag="stats", frozen=True):
    """The heartbeat. `num_adds`: Add messages that the engine has handled since it started."""

    stats: EngineStats
    num_adds: int


class Traces(msgspec.Struct, tag="traces", frozen=True):
    """Traces of ended requests; sent before their last outputs."""

    traces: list[RequestTrace]


class CacheReset(msgspec.Struct, tag="cache_reset", frozen=True):
    number: int
    num_blocks: int


class TraceReply(msgspec.Struct, tag="trace", frozen=True):
    number: int
    trace: RequestTrace | None  # None: the request has ended


class MemoryReply(msgspec.Struct, tag="memory", frozen=True):
    """The memory report, also after Sleep and Wake. `kind` is an error's class; "": no error."""

    number: int
    memory: Memory
    kind: str = ""
    message: str = ""


class PinReply(msgspec.Struct, tag="pinned", frozen=True):
    """The blocks that were pinned or released. `kind` is an error's class; "": no error."""

    number: int
    prefix: PinnedPrefix = PinnedPrefix()
    kind: str = ""
    message: str = ""
    param: str | None = None


class AdapterReply(msgspec.Struct, tag="adapter", frozen=True):
    """The result of a load or an unload. `kind` is an error's class; "": no error."""

    change: LoadAdapter | UnloadAdapter
    num_running: int = 0  # running requests that still use an unloaded adapter
    kind: str = ""
    message: str = ""


# A call carries a number, which its reply repeats.
Call = ResetPrefixCache | GetTrace | GetMemory | Sleep | Wake | PinPrefix | UnpinPrefix
Reply = CacheReset | TraceReply | MemoryReply | PinReply
ToEngine = Add | Abort | Call | LoadAdapter | UnloadAdapter | Configure | Stop
FromEngine = (
    Ready
    | Failed
    | Outputs
    | HandedOver
    | Refused
    | StepFailed
    | Stats
    | Traces
    | Reply
    | AdapterReply
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
