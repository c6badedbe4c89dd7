"""Expected properties of the stored measurements of weight formats, and the docs' tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from windlass.tools.bench.checkpoints import FORMATS

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    record = json.loads((ROOT / "benchmarks" / "formats.json").read_text())
    assert record["name"] == "formats"
    return {row["format"]: row for row in record["rows"]}


def test_no_format_failed(rows: dict[str, dict[str, Any]]) -> None:
    assert [row for row in rows.values() if "error" in row] == []
    assert all(row["perplexity"] > 1 for row in rows.values())


def test_every_format_has_a_row(rows: dict[str, dict[str, Any]]) -> None:
    assert {each.name for each in FORMATS} == rows.keys()


def test_int8_is_nearly_lossless(rows: dict[str, dict[str, Any]]) -> None:
    for served in ("", "served_"):
        assert rows["int8"][f"{served}agreement"] >= 0.99
        assert abs(rows["int8"][f"{served}increase_pct"]) <= 0.3


def test_other_8_bit_formats_cost_little(rows: dict[str, dict[str, Any]]) -> None:
    """Larger models lose less than this small one."""
    for name in ("int8+head", "rtn-8"):
        assert rows[name]["kl_mean"] < 0.003
        assert rows[name]["agreement"] > 0.97
        assert rows[name]["increase_pct"] < 1
    assert rows["int8"]["kl_mean"] < rows["rtn-8"]["kl_mean"]  # int8 has zero points
    assert rows["rtn-8"]["kl_mean"] < rows["w8a8"]["kl_mean"] / 5  # activations not quantised
    assert rows["smoothquant"]["kl_mean"] < rows["w8a8"]["kl_mean"]  # calibrated


def test_16_bit_formats_are_nearly_lossless(rows: dict[str, dict[str, Any]]) -> None:
    assert rows["float16"]["kl_mean"] < rows["bfloat16"]["kl_mean"] < 1e-4


@pytest.mark.parametrize("method", ["gptq-4", "awq-4"])
def test_calibrated_methods_beat_round_to_nearest(
    rows: dict[str, dict[str, Any]], method: str
) -> None:
    own, nearest = rows[method], rows["rtn-4"]
    assert own["bits"] == nearest["bits"]
    assert own["kernels"] == nearest["kernels"]
    assert own["kl_mean"] < nearest["kl_mean"]
    assert own["perplexity"] < nearest["perplexity"]
    assert own["agreement"] > nearest["agreement"]


def test_calibration_on_text_beats_random_tokens(rows: dict[str, dict[str, Any]]) -> None:
    assert rows["gptq-4"]["kl_mean"] < rows["gptq-4-random"]["kl_mean"]
    assert rows["gptq-4"]["perplexity"] < rows["gptq-4-random"]["perplexity"]


def test_3_bit_formats_work_and_cost_much(rows: dict[str, dict[str, Any]]) -> None:
    assert rows["gptq-3"]["kl_mean"] < rows["rtn-3"]["kl_mean"]
    for name in ("gptq", "rtn"):
        assert rows[f"{name}-3"]["kl_mean"] > 2 * rows[f"{name}-4"]["kl_mean"]
        assert rows[f"{name}-3"]["agreement"] < rows[f"{name}-4"]["agreement"]


def test_smaller_formats_take_less_memory(rows: dict[str, dict[str, Any]]) -> None:
    assert rows["int4"]["weight_bytes"] < rows["int8"]["weight_bytes"]
    assert rows["int8"]["weight_bytes"] < rows["float32"]["weight_bytes"]
    assert rows["gptq-3"]["file_bytes"] < rows["gptq-4"]["file_bytes"]
