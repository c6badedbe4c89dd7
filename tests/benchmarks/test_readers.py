"""Our checkpoints in other readers: the stored comparison, and the script that made it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from readers import compare_readers

from tests.tools.conftest import Windlass
from tests.tools.quantize.conftest import write_model
from windlass.errors import EngineError
from windlass.tools.eval.windows import Cut

ROOT = Path(__file__).parent.parent.parent
CUT = Cut("strided", 32, 32, 2)
TEXT = "A windlass lifts heavy loads with a light lever. " * 6


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    record = json.loads((ROOT / "benchmarks" / "readers.json").read_text())
    assert record["name"] == "readers"
    return {row["checkpoint"]: row for row in record["rows"]}


@pytest.mark.parametrize(
    ("checkpoint", "package", "rms"),
    [
        # gptqmodel dequantises to float16, the type of the file's scales: 7e-4 was measured.
        ("gptq", "gptqmodel", 1e-3),
        ("gptq-act-order", "gptqmodel", 1e-3),
        ("awq", "gptqmodel", 1e-3),
        # These dequantise to float32 as we do: only the order of sums differs.
        ("nf4", "bitsandbytes", 1e-5),
        ("compressed-tensors", "compressed-tensors", 1e-5),
    ],
)
def test_others_read_the_same_weights(
    rows: dict[str, dict[str, Any]], checkpoint: str, package: str, rms: float
) -> None:
    row = rows[checkpoint]
    assert package in row["reader"]
    assert row["tokens"] >= 512
    assert row["rms"] < rms
    assert row["kl_mean"] < 1e-5
    assert row["agreement"] > 0.99
    assert row["served_agreement"] > 0.97


@pytest.mark.slow
def test_a_checkpoint_is_compared(windlass: Windlass, tmp_path: Path) -> None:
    """Compare with the installed reader: transformers and compressed-tensors."""
    source, out = write_model(tmp_path / "tiny"), tmp_path / "out"
    (tmp_path / "text.txt").write_text(TEXT)
    windlass("quantize", source, "-o", out, "--method", "rtn", "--bits", "4", "--no-progress")
    row = compare_readers(out, Path(sys.executable), str(tmp_path / "text.txt"), CUT)
    assert row["format"] == "compressed-tensors"
    assert row["reader"].startswith("transformers ")
    assert row["tokens"] == 64
    assert row["rms"] < 1e-5
    assert row["served_rms"] > row["rms"]


def test_a_failing_reader_is_reported(tmp_path: Path) -> None:
    source = write_model(tmp_path / "tiny")
    (tmp_path / "text.txt").write_text(TEXT)
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'ImportError: no reader here' >&2\nexit 1\n")
    broken.chmod(0o755)
    with pytest.raises(EngineError, match="python cannot read it: ImportError: no reader here"):
        compare_readers(source, broken, str(tmp_path / "text.txt"), CUT)
