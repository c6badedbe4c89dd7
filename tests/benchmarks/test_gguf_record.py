"""The stored comparison with llama.cpp: the same files give the same perplexity."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf_perplexity import TYPES

RECORD = Path(__file__).parent.parent.parent / "benchmarks" / "gguf-perplexity.json"


ROWS: list[dict[str, Any]] = json.loads(RECORD.read_text())["rows"]


def test_most_types_were_measured() -> None:
    assert {"Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q4_0"} <= {row["type"] for row in ROWS} <= set(TYPES)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row["type"]))
def test_perplexity_matches_llama_cpp(row: dict[str, Any]) -> None:
    """With 3 bits, llama.cpp's quantisation of activations costs a little more."""
    assert row["type"] in row["types"]
    bound = 1.1 if row["type"] == "Q3_K" else 1
    assert abs(row["float32_pct"]) < bound
    assert abs(row["served_pct"]) < bound
