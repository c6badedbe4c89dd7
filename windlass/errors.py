"""Every error that Windlass raises on purpose.

    EngineError
    ├── ConfigError          a setting is wrong or contradicts another
    ├── RequestError         a request is malformed: a field, a type, an empty prompt
    │   ├── CapacityError    a request that can never fit this engine
    │   ├── RequestBlocked   a request that has brought the engine down twice
    │   ├── AdapterNotFound  an adapter that is not loaded
    │   └── AdapterConflict  an adapter that cannot be loaded or unloaded now
    ├── CheckpointError      a model's files are missing, broken or incomplete
    ├── UnsupportedError     a model, format or feature that this version does not know
    ├── DownloadError        a model could not be fetched
    ├── QualityError         a model is worse than its quality gate allows
    ├── Overloaded           the queue is full now; try again later
    ├── OutOfMemory          a step did not fit the device; smaller ones may
    └── WorkerDied           the process that computes has ended

A message says what happened, with which values, and what to do.
"""


class EngineError(Exception):
    """The root: catch this to catch everything that Windlass raises on purpose."""


class ConfigError(EngineError):
    """A setting is out of range, unknown, or contradicts another one."""


class RequestError(EngineError):
    """A request is malformed. `param` names the field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class CapacityError(RequestError):
    """A request can never fit: longer than the context, or than the whole KV cache."""


class RequestBlocked(RequestError):
    """A request was running both times that the engine died, and is not run a third time."""


class AdapterNotFound(RequestError):
    """A request names an adapter that is not loaded, or not any more."""


class AdapterConflict(RequestError):
    """An adapter's name is taken, or its last requests are still running."""


class CheckpointError(EngineError):
    """A model's files are missing, truncated, corrupt or incomplete."""


class UnsupportedError(EngineError):
    """An architecture, file format or feature that this version does not know."""


class DownloadError(EngineError):
    """A model could not be fetched: no network, no space, a hash that differs."""


class QualityError(EngineError):
    """A model was measured and is worse than --min-agreement and its like allow."""


class Overloaded(EngineError):
    """The queue is full. `retry_after_s` is computed from the backlog."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class OutOfMemory(EngineError):
    """A step did not fit into the device's memory. The engine goes on with smaller steps."""


class WorkerDied(EngineError):
    """The engine process ended while requests were in flight."""
