"""The exceptions that Windlass raises deliberately.

    EngineError
    ├── ConfigError          a setting is wrong or contradicts another
    ├── RequestError         a request is malformed: a field, a type, an empty prompt
    │   ├── CapacityError    a request can never fit this engine
    │   ├── RequestBlocked   a request was running at two engine crashes
    │   ├── AdapterNotFound  an adapter is not loaded
    │   └── AdapterConflict  an adapter cannot be loaded or unloaded now
    ├── CheckpointError      a model's files are missing, broken or incomplete
    │   └── ShardError       a weight cannot be divided among this number of ranks
    ├── UnsupportedError     this version does not support the model, format or feature
    ├── DownloadError        a model could not be downloaded
    ├── QualityError         a model is worse than its quality gate allows
    ├── Overloaded           the queue is full now; try again later
    ├── DeadlineExceeded     a request's deadline has passed, or cannot be met any more
    ├── OutOfMemory          a step did not fit into device memory; a smaller one may
    └── WorkerDied           the engine process has ended
        ├── EngineCrashed    it ended while it ran this request
        └── RanTwice         two processes have ended with this request, which does not run again

A message states what happened, with the values, and what to do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class EngineError(Exception):
    """Base class of all exceptions that Windlass raises deliberately."""


class ConfigError(EngineError):
    """A setting is out of range, unknown, or contradicts another setting."""


class RequestError(EngineError):
    """A request is malformed. `param` names the field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class CapacityError(RequestError):
    """A request can never fit: longer than the context, or than the whole KV cache."""


class RequestBlocked(RequestError):
    """A request was running at two engine crashes and is refused from then on."""


class AdapterNotFound(RequestError):
    """A request names an adapter that is not loaded."""


class AdapterConflict(RequestError):
    """An adapter's name is taken, or its last requests are still running."""


class CheckpointError(EngineError):
    """A model's files are missing, truncated, corrupt or incomplete."""


class ShardError(CheckpointError):
    """A weight's format or size does not allow this number of tensor-parallel ranks."""


class UnsupportedError(EngineError):
    """This version does not support an architecture, file format or feature."""


class DownloadError(EngineError):
    """A model could not be downloaded: no network, no space, or a wrong hash."""


class QualityError(EngineError):
    """A model's measured quality is below --min-agreement or another limit of the gate."""


class Overloaded(EngineError):
    """The queue is full. `retry_after_s` is computed from the backlog."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(EngineError):
    """A request's deadline passed before its first token, or cannot be met any more."""


class OutOfMemory(EngineError):
    """A step did not fit into device memory. The engine continues with smaller steps."""


class WorkerDied(EngineError):
    """The engine process ended while requests were in flight."""


class EngineCrashed(WorkerDied):
    """The engine process ended while it was running this request."""


class RanTwice(WorkerDied):
    """Two processes have ended with this request; it does not run again."""


@contextmanager
def file_errors(what: str) -> Iterator[None]:
    """Report errors of the system as ConfigError; `what`: the flag and the path."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{what}: {error.strerror or error}.") from error
