"""llama.cpp as an engine to measure: what is said where it cannot be had."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from windlass.errors import ConfigError
from windlass.tools.bench.llama_engine import find_library
from windlass.tools.bench.throughput import Order
from windlass.tools.bench.workloads import Sizes, find_all

_INSTALLED = any(find_spec(name) is not None for name in ("llama_cpp", "xllamacpp"))


@pytest.mark.skipif(_INSTALLED, reason="llama.cpp is installed")
def test_a_missing_library_is_explained() -> None:
    with pytest.raises(ConfigError, match="pip install llama-cpp-python"):
        find_library()


def test_it_is_among_the_engines() -> None:
    order = Order(find_all("decode_b1", Sizes()), ("windlass", "llama.cpp"), gguf=Path("m.gguf"))
    assert order.engines == ("windlass", "llama.cpp")
    with pytest.raises(ConfigError, match=r"llama\.cpp"):
        Order(find_all("decode_b1", Sizes()), ("lama",))
