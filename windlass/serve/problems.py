"""Maps exceptions to HTTP error responses: one table, one body format."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.responses import Response

from windlass.errors import (
    AdapterConflict,
    AdapterNotFound,
    CapacityError,
    ConfigError,
    DeadlineExceeded,
    EngineError,
    Overloaded,
    RanTwice,
    RequestBlocked,
    RequestError,
    UnsupportedError,
    WorkerDied,
)

_refused = logging.getLogger("windlass.refused")

_MAX_LOGGED_CHARS = 400
_MAX_LOGGED_ID = 64
_RETRY_S = 5  # after the engine died: about the time of a restart


class ModelNotFound(RequestError):
    """The request names a model that this server does not have."""


class TraceNotFound(RequestError):
    """No request of this id is known, or another key sent it."""


class ResponseNotFound(RequestError):
    """No response of this id is stored, or another key sent its request."""


class ObjectNotFound(RequestError):
    """No file or batch of this id exists, or another key made it."""


class PrefixConflict(RequestError):
    """The name of a prefix belongs to another one."""


class ForeignOrigin(RequestError):
    """A web page of another origin sent the request."""


class BodyTooLarge(RequestError):
    """The request's body is longer than --max-body-bytes."""


class UnsupportedMediaType(RequestError):
    """The request's body is not declared as JSON."""


class InvalidKey(RequestError):
    """The request has no valid key."""


class NotAllowed(RequestError):
    """The request's tenant may not do that."""


class RateLimited(Overloaded):
    """The request's tenant is above a limit of its own. `headers`: what is left of its limits."""

    def __init__(
        self, message: str, retry_after_s: float, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message, retry_after_s)
        self.headers = headers or {}


class BudgetExceeded(RateLimited):
    """The request's tenant has spent its budget of this day or month."""


class AdminOnly(RequestError):
    """The request needs an admin key, or its path is outside of the operator's folders."""


class Draining(WorkerDied):
    """The server is shutting down and accepts no new requests."""


class Sleeping(WorkerDied):
    """The server sleeps. `retry_after_s`: the expected time to wake it."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class StorageError(EngineError):
    """A file or batch cannot be read or written: the disk is full, or broken."""


class ConfigConflict(RequestError):
    """The config is not the version that the request is for."""


class Busy(RequestError):
    """The operation is not possible while requests are running."""


@dataclass(frozen=True, slots=True)
class Problem:
    """An error response."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}

    def anthropic_body(self) -> dict[str, Any]:
        default = "api_error" if self.status >= 500 else "invalid_request_error"
        kind = _ANTHROPIC_TYPES.get(self.status, default)
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def ollama_body(self) -> dict[str, Any]:
        return {"error": self.message}

    def log(self, path: str, request_id: str = "") -> None:
        """Log a refusal: status, path, field, and the id that the client or the server gave it."""
        fields = {"status": self.status, "path": path, "field": self.param, "id": request_id}
        named = [
            f"{name} {value[:_MAX_LOGGED_ID]!r}"
            for name, value in fields.items()
            if isinstance(value, str) and value and name != "path"
        ]
        message = " ".join(self.message.split())[:_MAX_LOGGED_CHARS]
        text = f"answered {', '.join([str(self.status), *named])} to {path or 'a connection'}: {message}"
        level = logging.ERROR if self.status in (500, 507) else logging.INFO
        _refused.log(level, "%s", text, extra={"fields": {k: v for k, v in fields.items() if v}})

    def response(self, path: str) -> Response:
        """The response to a request of `path`, in the format of its API."""
        if path.endswith(_ANTHROPIC_PATHS):
            body = self.anthropic_body()
        else:
            body = self.ollama_body() if path.startswith("/api/") else self.body()
        return Response(msgspec.json.encode(body), self.status, self.headers, "application/json")


_ANTHROPIC_PATHS = ("/v1/messages", "/v1/messages/count_tokens")
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

# The first row whose class matches applies, so a subclass must precede its parent.
_TABLE: tuple[tuple[type[EngineError], int, str, str | None], ...] = (
    (ModelNotFound, 404, "invalid_request_error", "model_not_found"),
    (TraceNotFound, 404, "not_found_error", "request_not_found"),
    (ResponseNotFound, 404, "invalid_request_error", "response_not_found"),
    (ObjectNotFound, 404, "invalid_request_error", "not_found"),
    (AdapterNotFound, 404, "invalid_request_error", "model_not_found"),
    (AdapterConflict, 409, "invalid_request_error", "adapter_conflict"),
    (PrefixConflict, 409, "invalid_request_error", "prefix_conflict"),
    (Busy, 409, "invalid_request_error", "busy"),
    (ConfigConflict, 412, "invalid_request_error", "config_changed"),
    (InvalidKey, 401, "authentication_error", "invalid_api_key"),
    (NotAllowed, 403, "permission_error", "not_allowed"),
    (AdminOnly, 403, "permission_error", "admin_only"),
    (ForeignOrigin, 403, "permission_error", "foreign_origin"),
    (BodyTooLarge, 413, "invalid_request_error", "body_too_large"),
    (RequestBlocked, 422, "invalid_request_error", "request_blocked"),
    (UnsupportedMediaType, 415, "invalid_request_error", "unsupported_media_type"),
    (CapacityError, 400, "invalid_request_error", "context_length_exceeded"),
    (RequestError, 400, "invalid_request_error", None),
    (UnsupportedError, 400, "invalid_request_error", "unsupported"),
    (ConfigError, 400, "invalid_request_error", None),
    (BudgetExceeded, 429, "insufficient_quota", "insufficient_quota"),
    (RateLimited, 429, "rate_limit_error", "rate_limit_exceeded"),
    (Overloaded, 429, "rate_limit_error", "overloaded"),
    (DeadlineExceeded, 504, "timeout_error", "deadline_exceeded"),
    (Draining, 503, "service_unavailable_error", "shutting_down"),
    (Sleeping, 503, "service_unavailable_error", "sleeping"),
    (WorkerDied, 503, "service_unavailable_error", "engine_unavailable"),
    (StorageError, 507, "server_error", "storage_error"),
    (EngineError, 500, "internal_server_error", None),
)

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    503: "service_unavailable_error",
}


def problem_of(error: EngineError) -> Problem:
    """The error response for `error`."""
    status, kind, code = next(row[1:] for row in _TABLE if isinstance(error, row[0]))
    param = error.param if isinstance(error, RequestError) else None
    headers: dict[str, str] = {}
    if isinstance(error, Overloaded | Sleeping):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    elif status == 503:
        headers["Retry-After"] = str(_RETRY_S)
    elif status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, DeadlineExceeded | BudgetExceeded | RanTwice):
        # OpenAI's and Anthropic's clients would send the request again, for nothing.
        headers["X-Should-Retry"] = "false"
    if isinstance(error, RateLimited):
        headers |= error.headers
    return Problem(status, str(error), kind, param=param, code=code, headers=headers)


def problem_of_status(
    status: int, message: str, code: str | None = None, **headers: str
) -> Problem:
    """An error response without an exception: unknown path, wrong method, missing key."""
    default = "invalid_request_error" if status < 500 else "internal_server_error"
    return Problem(status, message, _TYPES.get(status, default), code=code, headers=dict(headers))
