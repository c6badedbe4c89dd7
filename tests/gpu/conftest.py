"""Choices that these tests make for the engine: packed small weights, and fixed GEMM tilings."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from windlass.config import CacheConfig
from windlass.kernels import linears


@pytest.fixture(scope="session", autouse=True)
def packed() -> Iterator[None]:
    """Keep small weights packed, so that these tests use the kernels for packed weights."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linears, "_SMALL", 0)
        yield


@pytest.fixture(scope="session", autouse=True)
def small_caches() -> Iterator[None]:
    """Give engines small KV caches where several pytest workers share the GPU."""
    with pytest.MonkeyPatch.context() as patch:
        if "PYTEST_XDIST_WORKER" in os.environ:
            defaults = CacheConfig.__init__.__kwdefaults__
            patch.setitem(defaults, "kv_cache_memory_bytes", 2**30)
        yield


@pytest.fixture
def fixed_tilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose GEMM tilings without timing them.

    On a busy GPU, two engines may choose different ones, and sum in different orders.
    """
    monkeypatch.setattr("windlass.kernels.triton.gemm._time", lambda *_: 1.0)
