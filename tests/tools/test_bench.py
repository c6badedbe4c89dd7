"""Benchmark commands on a tiny model with random weights."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.tools.conftest import Windlass
from windlass.config import EngineConfig
from windlass.errors import ConfigError
from windlass.tools.bench.throughput import with_rows
from windlass.tools.common.report import cell
from windlass.tools.common.workload import find

ROOT = Path(__file__).parent.parent.parent


def test_throughput_of_both_engines(windlass: Windlass, tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    sizes = ["--num-requests", "3", "--input-len", "20", "--output-len", "6", "--repeat", "2"]
    workloads = "decode_b2,ragged,prefill,prefix"
    shown = windlass(
        *("bench", "throughput", tiny, "--load-format", "dummy", "--workload", workloads),
        *(*sizes, "--engine", "windlass,transformers", "-o", path),
    )
    record = json.loads(path.read_text())
    assert record["name"] == "throughput"
    assert record["settings"]["read_gb_s"] > 0
    rows = record["rows"]
    assert len(rows) == 8
    for own, other in zip(rows[::2], rows[1::2], strict=True):
        assert (own["engine"], other["engine"]) == ("windlass", "transformers")
        assert own["workload"] == other["workload"]
        assert own["requests"] == other["requests"]
        assert own["output_tok_s"] > 0
        assert other["output_tok_s"] > 0
        assert len(own["all_seconds"]) == 2
        assert other["first_ratio"] > 0
        assert "first_ratio" not in own
    assert rows[0]["workload"] == "decode_b2[input_len=20,output_len=6]"
    assert rows[0]["decode_step_ms"] > 0
    assert rows[0]["bandwidth_pct"] > 0
    assert rows[4]["decode_tok_s"] is None  # one output token each: no decode steps
    if "int8_tops" in record["settings"]:  # else torch computes
        assert record["settings"]["int8_tops"] > 0
        assert rows[4]["int8_pct"] > 0
        assert "int8_pct" not in rows[0]
    assert re.search(r"^decode_b2\[input_len=20,output_len=6\] +windlass ", shown, re.MULTILINE)


def test_a_repeat_computes_every_prompt(windlass: Windlass, tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    args = ["--workload", "io64x2x2", "--repeat", "3"]
    windlass("bench", "throughput", tiny, "--load-format", "dummy", *args, "-o", path)
    assert json.loads(path.read_text())["rows"][0]["prompt_tokens_computed"] == 128


def test_transformers_in_smaller_batches(windlass: Windlass, tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    args = ["--workload", "io8x3x5", "--batch", "2", "--engine", "transformers"]
    windlass("bench", "throughput", tiny, "--load-format", "dummy", *args, "-o", path)
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["requests"], row["steps"]) == (5, 9)
    assert row["decode_tok_s"] is None


def test_latency(windlass: Windlass, tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    args = ["--batch", "1,3", "--input-len", "8", "--output-len", "4"]
    windlass("bench", "latency", tiny, "--load-format", "dummy", *args, "-o", path)
    record = json.loads(path.read_text())
    assert record["name"] == "latency"
    assert [row["requests"] for row in record["rows"]] == [1, 3]
    assert all(row["decode_step_ms"] > 0 for row in record["rows"])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("throughput --workload fast", "workload 'fast' is not known"),
        ("throughput --engine vllm", "--engine must be one or more of windlass, transformers"),
        ("throughput --repeat 0", "--repeat must be at least 1"),
        ("throughput --workload mixed --batch 2", "--batch has no effect"),
        ("throughput -o .", "is a folder"),
        ("latency --batch few", "expected numbers such as 1,8,64,256"),
        (
            "levers speed",
            "lever 'speed' is not known. Known: adapters, batching, prefix, scheduler, speculation",
        ),
        ("levers adapters --adapters 0", "--adapters 0 needs the lever adapters and at least 1"),
        ("levers --num-requests 0", "--num-requests must be at least 1"),
    ],
)
def test_invalid_options_are_rejected(windlass: Windlass, args: str, message: str) -> None:
    assert message in windlass("bench", *args.split(), code=2)


def test_max_num_seqs_is_raised_for_the_workload() -> None:
    logged: list[str] = []
    wide = find("decode_b999")
    config = with_rows(EngineConfig.of(), [find("mixed"), wide], logged.append)
    assert config.scheduler.max_num_seqs == 999
    assert "as decode_b999 needs it" in logged[0]
    assert with_rows(EngineConfig.of(), [find("decode_b2")], logged.append) == EngineConfig.of()
    with pytest.raises(ConfigError, match="needs 999 concurrent rows, --max-num-seqs allows 8"):
        with_rows(EngineConfig.of(max_num_seqs=8), [wide], logged.append)


def test_levers(windlass: Windlass, tiny: Path, tmp_path: Path) -> None:
    config = tmp_path / "engine.yaml"
    config.write_text("load-format: dummy\nhf-overrides: {max_position_embeddings: 2048}\n")
    results = tmp_path / "results"
    args = ("--model", tiny, "--num-requests", "3", "--config", config, "-o", results)
    windlass("bench", "levers", "batching", "prefix", *args)
    batching = json.loads((results / "batching.json").read_text())["rows"]
    assert [row["variant"] for row in batching] == ["continuous", "static", "none"]
    assert batching[0]["steps"] < batching[2]["steps"]
    on, off = json.loads((results / "prefix.json").read_text())["rows"]
    assert on["prompt_tokens_computed"] < off["prompt_tokens_computed"] == 3 * 1032
    config.write_text(config.read_text() + "lora-dtype: int8\n")
    windlass("bench", "levers", "adapters", "--adapters", "7", *args)
    record = json.loads((results / "adapters.json").read_text())
    assert record["settings"]["lora_dtype"] == "int8"
    rows = record["rows"]
    assert [row["adapters"] for row in rows[:2]] == [1, 3]
    assert rows[2]["workload"] == "12 requests, 7 registered"
    assert all(row["ratio"] > 0 for row in rows)
    assert 1 <= rows[0]["machines_together"] <= rows[0]["machines_apart"]
    assert 0 < rows[0]["usd_hour_together"] <= rows[0]["usd_hour_apart"]


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (1234.56, "1,235"), (12.5, "12.5"), (12345, "12,345")]
)
def test_cells(value: float | None, text: str) -> None:
    assert cell(value) == text


@pytest.mark.parametrize(
    ("name", "billions"), [("llama-3.1-8b", 8.03), ("qwen3-0.6b", 0.596), ("smollm2-135m", 0.1345)]
)
def test_benchmark_models_have_the_nominal_size(name: str, billions: float) -> None:
    from windlass.cli.model_report import examine

    model = str(ROOT / "benchmarks" / "models" / name)
    found = examine(EngineConfig.of(model=model, load_format="dummy", dtype="bfloat16"))
    assert found["estimate"]["weight_bytes"] / 2e9 == pytest.approx(billions, rel=2e-3)
