"""The comparison with llama.cpp, as far as it can be tested without its library."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind
from llama_cpp_throughput import LlamaEngine
from llama_library import LlamaCpp, find_library, type_of

from windlass.config import EngineConfig
from windlass.errors import ConfigError


def test_fallback_types_match_llama_cpp() -> None:
    assert type_of("blk.0.ffn_down.weight", 1536, Kind.Q4_K) == Kind.Q4_K
    assert type_of("blk.0.attn_q.weight", 576, Kind.Q4_K) == Kind.Q5_0
    assert type_of("blk.0.attn_q.weight", 576, Kind.Q2_K) == Kind.IQ4_NL
    assert type_of("token_embd.weight", 576, Kind.Q2_K) == Kind.Q8_0
    assert type_of("token_embd.weight", 576, Kind.Q8_0) == Kind.Q8_0


def test_an_invalid_library_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "llama.so"
    path.write_text("not a library")
    with pytest.raises(ConfigError, match="cannot be loaded as a library"):
        LlamaCpp(path)


_INSTALLED = any(find_spec(name) is not None for name in ("llama_cpp", "xllamacpp"))


@pytest.mark.skipif(_INSTALLED, reason="llama.cpp is installed")
def test_a_missing_library_is_reported() -> None:
    with pytest.raises(ConfigError, match="pip install llama-cpp-python"):
        find_library()


def test_a_model_that_llama_cpp_cannot_read_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"llama\.cpp reads GGUF files"):
        LlamaEngine(EngineConfig.of(), tmp_path / "llama.so", tmp_path)
