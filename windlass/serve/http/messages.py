"""Messages between the server's process and its HTTP workers, encoded as msgpack."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from windlass import errors
from windlass.config import ServeConfig
from windlass.core.card import EngineReport
from windlass.core.trace import RequestTrace
from windlass.core.types import NewRequest, Output
from windlass.errors import EngineError, Overloaded, RequestError
from windlass.serve import problems
from windlass.serve.fallback import Forecast
from windlass.serve.metric_samples import MetricSample
from windlass.serve.metrics import Outcome
from windlass.serve.problems import RateLimited, Sleeping
from windlass.serve.summary import RequestSummary
from windlass.serve.tenants import TenantTable


class ErrorMessage(msgspec.Struct, frozen=True):
    """An error that ends a request; `kind` is the name of its class."""

    kind: str
    message: str
    param: str | None = None
    retry_after_s: float = 0.0
    headers: dict[str, str] = {}

    @classmethod
    def of(cls, error: EngineError) -> ErrorMessage:
        known = next(each for each in type(error).__mro__ if each.__name__ in _ERRORS)
        return cls(
            kind=known.__name__,
            message=str(error),
            param=error.param if isinstance(error, RequestError) else None,
            retry_after_s=error.retry_after_s if isinstance(error, Overloaded | Sleeping) else 0.0,
            headers=dict(error.headers) if isinstance(error, RateLimited) else {},
        )

    def error(self) -> EngineError:
        kind = _ERRORS[self.kind]
        if issubclass(kind, RequestError):
            return kind(self.message, self.param)
        if issubclass(kind, RateLimited):
            return kind(self.message, self.retry_after_s, self.headers)
        if issubclass(kind, Overloaded | Sleeping):
            return kind(self.message, self.retry_after_s)
        return kind(self.message)


_ERRORS = {
    name: value
    for module in (errors, problems)
    for name, value in vars(module).items()
    if isinstance(value, type) and issubclass(value, EngineError)
}


# ---- from a worker ---------------------------------------------------------------------------


class Open(msgspec.Struct, tag="open", frozen=True, kw_only=True):
    """Announces a response, for traces and costs; `Submit` with its requests follows."""

    response_id: str
    owner: str
    began: float
    request_ids: tuple[str, ...]
    path: str
    adapter: str
    fallback: str
    fallback_model: str
    more_rounds: bool
    key_id: str
    num_per_prompt: int


class EndRounds(msgspec.Struct, tag="end_rounds", frozen=True):
    """Ends the beam searches of a response."""

    first_id: str


class Submit(msgspec.Struct, tag="submit", frozen=True):
    """Sends the requests of one response to the engine."""

    requests: list[NewRequest]
    can_restart: bool  # nothing is sent to the client before the requests have ended
    engine: int  # 0: of the server's own model; then those of --fallback


class Abort(msgspec.Struct, tag="abort", frozen=True):
    request_id: str
    completed: bool


class GetTraces(msgspec.Struct, tag="get_traces", frozen=True):
    """Asks for the traces of a response that has ended."""

    number: int
    response_id: str
    owner: str


class Ended(msgspec.Struct, tag="ended", frozen=True):
    """Reports a request that has ended, for the log and the traces."""

    summary: RequestSummary
    first_id: str  # of its engine requests, as `Open` has announced them; "": there were none


class Admit(msgspec.Struct, tag="admit", frozen=True):
    """Asks whether the limits of a tenant allow a request, which holds them until `Release`."""

    number: int
    tenant: str
    num_tokens: int


class Release(msgspec.Struct, tag="release", frozen=True):
    """Ends the hold of `Admit`, if the answer was one."""

    number: int


class GetForecasts(msgspec.Struct, tag="get_forecasts", frozen=True):
    """Asks how a request of so many completions would fare with each step of --fallback."""

    number: int
    num_requests: int


class Received(msgspec.Struct, tag="received", frozen=True):
    """Counts a completion request, which `Finished` ends; so does the end of the worker."""


class Finished(msgspec.Struct, tag="finished", frozen=True):
    outcome: Outcome
    tenant: str


class Samples(msgspec.Struct, tag="samples", frozen=True):
    """The worker's metrics, once a second: also the heartbeat, and the first says that it serves."""

    samples: list[MetricSample]


class Synced(msgspec.Struct, tag="synced", frozen=True):
    """The reply to `Sync`: all messages before it were handled."""

    number: int
    samples: list[MetricSample]


FromWorker = (
    Open
    | EndRounds
    | Submit
    | Abort
    | GetTraces
    | Ended
    | Admit
    | Release
    | GetForecasts
    | Received
    | Finished
    | Samples
    | Synced
)


# ---- to a worker -----------------------------------------------------------------------------


class EngineView(msgspec.Struct, frozen=True):
    """What a worker must know of an engine."""

    report: EngineReport
    max_num_seqs: int
    adapters: list[str]


class State(msgspec.Struct, tag="state", frozen=True):
    """What a worker must know of the server; sent at the start and after each change."""

    engines: list[EngineView]  # of the server's own model, then those of --fallback
    tenants: TenantTable | None  # None: no keys file
    refusal: ErrorMessage | None  # why new requests are refused: the server drains or sleeps
    config: ServeConfig


class Outputs(msgspec.Struct, tag="outputs", frozen=True):
    outputs: list[Output]


class RequestsFailed(msgspec.Struct, tag="failed", frozen=True):
    """Ends the response that these requests belong to."""

    request_ids: list[str]
    error: ErrorMessage


class Restarted(msgspec.Struct, tag="restarted", frozen=True):
    """A request starts again in a restarted engine: its outputs so far are void."""

    request_id: str


class TracesReply(msgspec.Struct, tag="traces", frozen=True):
    number: int
    traces: list[RequestTrace] | None


class Admitted(msgspec.Struct, tag="admitted", frozen=True):
    """The reply to `Admit`; with an error, the request is refused."""

    number: int
    headers: dict[str, str]
    error: ErrorMessage | None


class Forecasts(msgspec.Struct, tag="forecasts", frozen=True):
    """The reply to `GetForecasts`."""

    number: int
    forecasts: list[Forecast]


class Sync(msgspec.Struct, tag="sync", frozen=True):
    """Asks for `Synced`, with the current metrics."""

    number: int


class Reload(msgspec.Struct, tag="reload", frozen=True):
    """Makes the worker read its files again: the server's process has received SIGHUP."""


class Stop(msgspec.Struct, tag="stop", frozen=True):
    """Ends the worker after its last responses."""


ToWorker = (
    State
    | Outputs
    | RequestsFailed
    | Restarted
    | TracesReply
    | Admitted
    | Forecasts
    | Sync
    | Reload
    | Stop
)

_encoder = msgspec.msgpack.Encoder()
_from_worker = msgspec.msgpack.Decoder(list[FromWorker])
_to_worker = msgspec.msgpack.Decoder(list[ToWorker])


def encode(messages: Sequence[FromWorker] | Sequence[ToWorker]) -> bytes:
    return _encoder.encode(messages)


def decode_from_worker(frame: bytes) -> list[FromWorker]:
    return _from_worker.decode(frame)


def decode_to_worker(frame: bytes) -> list[ToWorker]:
    return _to_worker.decode(frame)
