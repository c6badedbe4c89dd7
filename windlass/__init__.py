"""Windlass: LLM inference with a measured cost for every speed-up.

    from windlass import LLM, SamplingParams
    LLM("default").generate(["Hello"], SamplingParams(max_tokens=32))

Public names are imported on first use, so that `import windlass` is fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from windlass.version import __version__ as __version__

_HOMES = {
    "LLM": "windlass.llm",
    "AsyncLLM": "windlass.async_llm",
    "SamplingParams": "windlass.core.sampling",
    "BeamSearchParams": "windlass.text.beam_search",
    "StructuredOutputs": "windlass.core.structured",
    "EngineConfig": "windlass.config",
    "ServeConfig": "windlass.config",
    "CapacityError": "windlass.errors",
    "CheckpointError": "windlass.errors",
    "ConfigError": "windlass.errors",
    "DownloadError": "windlass.errors",
    "EngineError": "windlass.errors",
    "OutOfMemory": "windlass.errors",
    "Overloaded": "windlass.errors",
    "QualityError": "windlass.errors",
    "RequestError": "windlass.errors",
    "UnsupportedError": "windlass.errors",
    "WorkerDied": "windlass.errors",
}

__all__ = sorted([*_HOMES, "__version__"])

if TYPE_CHECKING:
    from windlass.async_llm import AsyncLLM as AsyncLLM
    from windlass.config import EngineConfig as EngineConfig
    from windlass.config import ServeConfig as ServeConfig
    from windlass.core.sampling import SamplingParams as SamplingParams
    from windlass.core.structured import StructuredOutputs as StructuredOutputs
    from windlass.llm import LLM as LLM
    from windlass.text.beam_search import BeamSearchParams as BeamSearchParams


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'windlass' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
