"""Small weights stay packed in these tests: their kernels are what is tested."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from windlass.kernels import linears


@pytest.fixture(scope="session", autouse=True)
def packed() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linears, "_SMALL", 0)
        yield
