"""The kernels under AddressSanitizer and UBSan, in a program of their own."""

from __future__ import annotations

import pytest

from tests.kernels.native.backends import build_selftest, run_checked
from windlass.kernels.native.compiled import find_compilers, machine_flags

_FLAGS = ("-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
_COMPILERS, _ = find_compilers()


@pytest.mark.skipif(not _COMPILERS, reason="no C++ compiler")
def test_sanitisers_find_nothing(pytestconfig: pytest.Config) -> None:
    flags = (*_FLAGS, *machine_flags())
    program = build_selftest(pytestconfig, _COMPILERS[0].command, flags)
    assert "all GEMMs agree" in run_checked(program)
