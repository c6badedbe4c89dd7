"""Whether steps run only to compile the kernels that they launch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_compiling: ContextVar[bool] = ContextVar("compiling", default=False)


def is_compiling() -> bool:
    """Whether kernels that are launched are only compiled, and compute nothing."""
    return _compiling.get()


@contextmanager
def compile_only() -> Iterator[None]:
    """Within the context, `is_compiling`."""
    token = _compiling.set(True)
    try:
        yield
    finally:
        _compiling.reset(token)
