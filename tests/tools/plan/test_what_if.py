"""`windlass plan --workload` and `--trace` from the command line, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tools.conftest import Windlass

DUMMY = ("--load-format", "dummy", "--num-threads", "1")
SMALL = ("--workload", "random", "--num-prompts", "4", "--input-len", "24", "--output-len", "6")


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of step costs, as another machine might have written it."""
    path = tmp_path_factory.mktemp("costs") / "steps.json"
    tables = {"tokens": {"1": 0.001, "2": 0.002}, "rows": {"1": 0.010, "2": 0.011}}
    numbers = dict.fromkeys(("choice_s", "one_kv_s", "kv_s", "pair_s", "host_s", "host_row_s"), 0.0)
    sizes = {"kv_dtype": "float16", "weight_bytes": 1000, "rows": 64, "tokens": 2048}
    found = {"costs": {**tables, **numbers, "windows": []}, "device": "cpu", **sizes}
    path.write_text(json.dumps(found | {"date": "2026-01-31"}))
    return path


def test_check_compares_prediction_with_measurement(
    windlass: Windlass, tiny: Path, tmp_path: Path
) -> None:
    output, kept = tmp_path / "record.json", tmp_path / "costs.json"
    args = ("--check", "--step-costs", kept, "--json", output, "--max-num-seqs", "8")
    shown = windlass("plan", tiny, *DUMMY, *SMALL, *args)
    assert "predicted" in shown
    written = json.loads(output.read_text())
    assert written["name"] == "plan-accuracy"
    (row,) = written["rows"]
    assert row["predicted_steps"] == row["measured_steps"]
    assert row["measured_output_throughput"] > 0
    predicted, measured = row["predicted_output_throughput"], row["measured_output_throughput"]
    paced = 100 * (predicted * row["pace"] / measured - 1)
    assert row["paced_difference_pct"] == pytest.approx(paced, rel=0.01, abs=0.2)
    assert json.loads(kept.read_text())["costs"]["rows"]
    again = windlass("plan", tiny, *DUMMY, *SMALL, "--step-costs", kept)
    assert "Predicted Serving Result" in again
    assert f"{kept}, measured on" in again


def test_trace_with_slo_reports_devices_needed(
    windlass: Windlass, tiny: Path, tmp_path: Path, costs: Path
) -> None:
    trace, output = tmp_path / "trace.jsonl", tmp_path / "plan.json"
    lines = [{"timestamp": 0.1 * i, "prompt": "word " * 20, "max_tokens": 8} for i in range(6)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    args = ("--trace", trace, "--step-costs", costs, "--num-blocks", "64", "--json", output)
    shown = windlass("plan", tiny, *DUMMY, *args, "--slo", "ttft_p50=1s")
    assert "Successful requests:                     6" in shown
    assert "Devices needed: 1" in shown
    assert json.loads(output.read_text())["rows"][0]["devices_needed"] == 1
    missed = windlass("plan", tiny, *DUMMY, *args, "--slo", "ttft_p99=1ms", code=1)
    assert "missed: ttft_p99 is" in missed
    assert "Not even 6 devices meet it" in missed
    trace.write_text("{nonsense")
    assert "line 1: is not JSON" in windlass("plan", tiny, *DUMMY, *args, code=2)


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (("--workload", "dreams"), "Known: chat"),
        (("--workload", "chat", "--memory", "1GiB"), "without --trace and --workload"),
        (("--request-rate", "4"), "with --trace or --workload"),
        (("--max-num-seqs", "4"), "is chosen by the plan"),
        (("--workload", "chat", "--trace", "x.jsonl"), "exclude each other"),
        (("--workload", "chat", "--spec", "ngram"), "cannot be predicted"),
        (("--workload", "chat", "--slo", "fast"), "expected a target such as ttft_p99"),
        (("--workload", "chat", "--repeat", "2"), "only with --check"),
    ],
)
def test_flags_without_effect_are_refused(
    windlass: Windlass, tiny: Path, args: tuple[str, ...], why: str
) -> None:
    assert why in windlass("plan", tiny, *DUMMY, *args, code=2)


def test_invalid_step_costs_are_refused(windlass: Windlass, tiny: Path, tmp_path: Path) -> None:
    broken = tmp_path / "costs.json"
    broken.write_text("{}")
    args = ("--workload", "chat", "--step-costs", broken)
    assert "holds no step costs" in windlass("plan", tiny, *DUMMY, *args, code=2)
