"""The kernels under AddressSanitizer and UBSan, in a program of their own, and other levels' kernels without."""

from __future__ import annotations

import platform
from collections.abc import Callable

import pytest

from tests.kernels.native.backends import SelfTest
from windlass.kernels.native.compiler import find_compilers, machine_flags
from windlass.kernels.native.levels import cpu_features, runnable

_FLAGS = ("-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
_COMPILERS, _ = find_compilers()
_COMMAND = _COMPILERS[0].command if _COMPILERS else ()


@pytest.mark.skipif(not _COMPILERS, reason="no C++ compiler")
@pytest.mark.parametrize("selftest", [SelfTest(_COMMAND, (*_FLAGS, *machine_flags()))], ids=["all"])
def test_sanitisers_find_nothing(
    selftest: SelfTest, run_selftest: Callable[[SelfTest], str]
) -> None:
    assert "all GEMMs agree" in run_selftest(selftest)


_LEVELS = runnable(platform.machine(), cpu_features())[1:] if _COMPILERS else []


@pytest.mark.slow
@pytest.mark.parametrize(
    "selftest",
    [SelfTest(_COMMAND, ("-O1", *level.flags)) for level in _LEVELS],
    ids=[level.name for level in _LEVELS],
)
def test_the_operations_of_lower_levels_match_their_definitions(
    selftest: SelfTest, run_selftest: Callable[[SelfTest], str]
) -> None:
    """The levels of a wheel that this CPU can run, below its own."""
    assert "all GEMMs agree" in run_selftest(selftest)
