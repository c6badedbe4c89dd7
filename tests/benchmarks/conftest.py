"""Fixtures of tests/tools, for the tests of benchmarks/scripts."""

from __future__ import annotations

from tests.tools.conftest import tiny, windlass

__all__ = ["tiny", "windlass"]
