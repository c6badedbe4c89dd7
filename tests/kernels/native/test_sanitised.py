"""The kernels under AddressSanitizer and UBSan, in a program of their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.kernels.native.backends import SelfTest
from windlass.kernels.native.compiler import find_compilers, machine_flags

_FLAGS = ("-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
_COMPILERS, _ = find_compilers()
_COMMAND = _COMPILERS[0].command if _COMPILERS else ()


@pytest.mark.skipif(not _COMPILERS, reason="no C++ compiler")
@pytest.mark.parametrize("selftest", [SelfTest(_COMMAND, (*_FLAGS, *machine_flags()))], ids=["all"])
def test_sanitisers_find_nothing(
    selftest: SelfTest, run_selftest: Callable[[SelfTest], str]
) -> None:
    assert "all GEMMs agree" in run_selftest(selftest)
