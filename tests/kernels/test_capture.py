"""No garbage is collected during a capture."""

from __future__ import annotations

import gc

import pytest

from windlass.kernels.capture import garbage_kept


@pytest.mark.parametrize("is_enabled", [True, False])
def test_garbage_is_kept(is_enabled: bool) -> None:
    (gc.enable if is_enabled else gc.disable)()
    try:
        with garbage_kept():
            assert not gc.isenabled()
        assert gc.isenabled() is is_enabled
    finally:
        gc.enable()
