"""Fixtures of the tests of the tools, for the scripts of benchmarks/scripts."""

from __future__ import annotations

from tests.tools.conftest import tiny, windlass

__all__ = ["tiny", "windlass"]
