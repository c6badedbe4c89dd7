"""The comparison with llama.cpp, as far as it goes without its library."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind

from windlass.errors import ConfigError
from windlass.tools.bench.gguf_perplexity import rows_before
from windlass.tools.bench.llama_cpp import LlamaCpp, type_of


def test_types_that_do_not_divide_fall_back_as_in_llama_cpp() -> None:
    assert type_of("blk.0.ffn_down.weight", 1536, Kind.Q4_K) == Kind.Q4_K
    assert type_of("blk.0.attn_q.weight", 576, Kind.Q4_K) == Kind.Q5_0
    assert type_of("blk.0.attn_q.weight", 576, Kind.Q2_K) == Kind.IQ4_NL
    assert type_of("token_embd.weight", 576, Kind.Q2_K) == Kind.Q8_0
    assert type_of("token_embd.weight", 576, Kind.Q8_0) == Kind.Q8_0


def test_what_is_no_library_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "llama.so"
    path.write_text("not a library")
    with pytest.raises(ConfigError, match="is no library that can be loaded"):
        LlamaCpp(path)


def test_a_run_goes_on_where_one_with_the_same_settings_ended(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    assert rows_before(path, {"windows": "8"}) == []
    rows = [{"type": "Q8_0"}]
    path.write_text(json.dumps({"settings": {"windows": "8"}, "rows": rows}))
    assert rows_before(path, {"windows": "8"}) == rows
    with pytest.raises(ConfigError, match="holds results of another run"):
        rows_before(path, {"windows": "20"})
