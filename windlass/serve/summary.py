"""What the server knows of one request when it has ended, for the log and the traces.

Plain values: an HTTP worker sends them to the server's process. They contain no key, and no text of
the client or the model unless --log-bodies asks for it.
"""

from __future__ import annotations

import re

import msgspec
from starlette.requests import Request

from windlass.serve.metrics import Outcome

_MAX_HEADER_CHARS = 256  # of a header's value that is kept
MAX_BODY_BYTES = 16 * 2**10  # of a body that --log-bodies keeps

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


class RequestSummary(msgspec.Struct, kw_only=True):
    """Facts about one request. Times are those of the monotonic clock, in seconds."""

    path: str
    began: float
    ended: float = 0.0
    phases: list[tuple[str, float]] = []  # before the engine, each with its end
    # Who asked for what.
    tenant: str = ""
    is_batch: bool = False  # a request of /v1/batches
    client_id: str = ""  # X-Request-Id
    user_agent: str = ""
    traceparent: str = ""
    tracestate: str = ""
    response_id: str = ""
    operation: str = ""  # as OpenTelemetry names it; "": the body was not read
    model: str = ""  # as the client names it
    adapter: str = ""
    fallback: str = ""  # why the answer is degraded (serve/fallback.py)
    fallback_model: str = ""  # "": the server's own, with fewer tokens
    stream: bool = False
    num_completions: int = 1
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    # How it ended.
    outcome: Outcome = "error"
    status: int = 0  # of the HTTP response; 0: none was sent so far
    reason: str = ""  # finish reason, error code, or why the client got no response
    finish_reasons: list[str] = []
    # Tokens, and their times as the client sees them.
    num_prompt: int = 0
    num_cached: int = 0
    num_output: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    ttft_s: float | None = None
    tpot_s: float | None = None  # the mean of its completions
    # With --log-bodies, the first MAX_BODY_BYTES of each.
    request_body: bytes = b""
    response_body: bytes = b""

    def read_headers(self, request: Request) -> None:
        def value(name: str) -> str:
            return request.headers.get(name, "")[:_MAX_HEADER_CHARS]

        self.client_id = value("x-request-id")
        self.user_agent = value("user-agent")
        self.traceparent = value("traceparent")
        self.tracestate = request.headers.get("tracestate", "")

    @property
    def trace_id(self) -> str:
        """The client's trace id (W3C Trace Context); "": it sent none."""
        found = _TRACEPARENT.match(self.traceparent)
        return found[1] if found is not None and found[1].strip("0") else ""
