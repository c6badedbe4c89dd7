"""The native operations, the self-test programs, and the libraries of other SIMD backends."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.kernels.background import Background
from tests.kernels.native.backends import Backend, SelfTest, backend_folder, backend_pool
from windlass.kernels.native.ops import NativeOps
from windlass.kernels.native.pool import Pool, Workers


@pytest.fixture(scope="session")
def ops() -> NativeOps:
    return NativeOps(Workers(2).pool)


@pytest.fixture(scope="session")
def run_selftest(background: Background) -> Callable[[SelfTest], str]:
    """Return the output of a self-test."""
    return background.result


@pytest.fixture(scope="session")
def built_pool(background: Background, pytestconfig: pytest.Config) -> Callable[[Backend], Pool]:
    """Return the pool of a backend."""

    def wait(backend: Backend) -> Pool:
        background.result(backend)
        return backend_pool(backend, backend_folder(pytestconfig))

    return wait
