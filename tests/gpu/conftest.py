"""Keeps small weights packed, so that these tests use the kernels for packed weights."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from windlass.kernels import linears


@pytest.fixture(scope="session", autouse=True)
def packed() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linears, "_SMALL", 0)
        yield
