"""Choices that these tests make for the engine: packed small weights, and fixed GEMM tilings."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from windlass.kernels import linears


@pytest.fixture(scope="session", autouse=True)
def packed() -> Iterator[None]:
    """Keep small weights packed, so that these tests use the kernels for packed weights."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linears, "_SMALL", 0)
        yield


@pytest.fixture
def fixed_tilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose GEMM tilings without timing them.

    On a busy GPU, two engines may choose different ones, and sum in different orders.
    """
    monkeypatch.setattr("windlass.kernels.triton.gemm._time", lambda *_: 1.0)
