"""`windlass ladder` on a tiny model: all rungs, resuming, and invalid options."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.tools.conftest import Windlass
from tests.tools.quantize.conftest import write_model
from windlass.tools.common.record import Record
from windlass.tools.common.report import COLUMNS
from windlass.tools.ladder.measure import Bench
from windlass.tools.ladder.report import corrected_tok_s, page, stacked_rows

SIZES = ("--num-requests", 4, "--low-requests", 2, "--prefix-len", 24, "--input-len", 6)
SMALL = (*SIZES, "--output-len", 4, "--num-threads", 1, "--no-progress", "--max-wait-ms", 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ladder") / "tiny"
    write_model(folder)
    return folder


def test_all_rungs_and_resuming(
    windlass: Windlass, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "ladder.json"
    command = ("ladder", model, *SMALL, "--price-per-hour", 2, "-o", output)
    real, calls = Bench.measure, []

    def interrupted(self: Bench, variant: Any, *rest: Any) -> Any:
        calls.append(variant.key)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(self, variant, *rest)

    monkeypatch.setattr(Bench, "measure", interrupted)
    shown = windlass(*command, code=130)
    assert "interrupted; the same command resumes the run" in shown
    kept = json.loads(output.read_text())["rows"]
    assert [row["rung"] for row in kept] == ["naive", "static", "continuous"]

    shown = windlass(*command)
    assert f"{output} already has 3 of 18 rows" in shown
    assert calls[4:6] == ["chunked, both", "prefix, alone"]
    record = json.loads(output.read_text())
    assert record["rows"][:3] == [
        {**row, "remarks": now["remarks"]}
        for row, now in zip(kept, record["rows"][:3], strict=True)
    ]
    _check(record, shown)
    html = output.with_suffix(".html").read_text()
    assert '"type": "waterfall"' in html
    later = tmp_path / "later.html"
    windlass("bench", "report", output, "-o", later)
    assert later.read_text() == html
    assert "https://" not in html.partition("<body>")[2]


def _check(record: dict[str, Any], shown: str) -> None:
    rows = {(row["rung"], row["mode"]): row for row in record["rows"]}
    assert len(rows) == 18
    reasons = {name for (name, _), row in rows.items() if "reason" in row}
    assert reasons == {"fp8", "gptq", "awq"}
    everything = rows["everything", "stacked"]
    for key in COLUMNS["ladder"]:
        for name in key.split("/"):
            assert everything[name] is not None, name
    assert (everything["weights"], everything["format"]) == ("int4", "int4, int8 KV")
    assert everything["memory_mib"] < rows["continuous", "base"]["memory_mib"]
    assert rows["continuous", "base"]["agreement"] == 1
    assert rows["int4", "alone"]["agreement"] < rows["int8", "alone"]["agreement"] < 1
    assert rows["prefix", "alone"]["sat_cached_share"] > 0
    assert rows["chunked", "both"]["sat_cached_share"] == 0
    assert everything["sat_usd_per_million"] == pytest.approx(
        2 / 3600 / everything["sat_tok_s"] * 1e6, rel=0.01
    )
    assert "| fp8 weights: a CPU has no fp8 arithmetic" in shown
    assert "everything: low load: " in shown
    assert "on eight short built-in texts" in shown
    measured = [row for row in record["rows"] if "reason" not in row]
    assert [row["rung"] for row in stacked_rows(measured)] == [
        *("naive", "static", "continuous", "chunked", "prefix", "int4", "kv", "spec"),
    ]
    tok_s = corrected_tok_s(measured, "sat")
    assert list(tok_s)[-1] == "everything"
    base = rows["continuous", "base"]
    assert tok_s["continuous batching"] == base["sat_tok_s"]
    assert tok_s["everything"] == pytest.approx(everything["sat_speedup"] * base["sat_tok_s"])
    assert "The ladder of tiny" in page(Record(**record))


def test_random_weights_have_no_quality(windlass: Windlass, tiny: Path, tmp_path: Path) -> None:
    output = tmp_path / "ladder.json"
    dummy = ("ladder", tiny, "--load-format", "dummy", *SMALL, "-o", output)
    shown = windlass(*dummy, "--rungs", "fp8,everything", "--workload", "random", "--low-rate", 50)
    rows = json.loads(output.read_text())["rows"]
    assert [row["rung"] for row in rows] == ["continuous", "fp8", "everything"]
    assert all(row["perplexity"] is None for row in rows)
    assert "No quality: the weights are random" in shown
    remarks = shown.partition("- everything: ")[2]
    assert re.search(r"saturation: \d+\.\d\dx continuous batching\.", remarks)
    del rows[1]["sat_read_mib"]  # as an earlier version wrote it
    output.write_text(json.dumps({**json.loads(output.read_text()), "rows": rows}))
    command = (*dummy, "--rungs", "fp8,everything", "--workload", "random", "--low-rate", 50)
    assert f"{output} already has 2 of 3 rows" in windlass(*command)
    assert json.loads(output.read_text())["rows"][1]["sat_read_mib"] > 0
    again = windlass(*dummy, "--rungs", "naive", code=2)
    assert "has results of another run (rungs, workload" in again


def test_one_load_and_fewer_requests_of_the_naive_rung(
    windlass: Windlass, tiny: Path, tmp_path: Path
) -> None:
    output = tmp_path / "ladder.json"
    few = ("--loads", "saturation", "--naive-requests", 2, "--rungs", "naive,everything")
    shown = windlass("ladder", tiny, "--load-format", "dummy", *SMALL, *few, "-o", output)
    naive, base, everything = json.loads(output.read_text())["rows"]
    assert (naive["sat_requests"], base["sat_requests"]) == (2, 4)
    assert everything["low_speedup"] is None
    assert not any(name in everything for name in ("low_tok_s", "low_kv_mib"))
    assert "ran only the first 2 requests" in shown
    assert "| - / " in shown
    html = output.with_suffix(".html").read_text()
    assert "at saturation, rung by rung" in html
    assert "at low load, rung by rung" not in html


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--rungs", "naive,quick"], "'quick' is not a rung"),
        (["--rungs", ","], "--rungs is empty"),
        (["--loads", "low,high"], "--loads: 'high' is not known. Known: low, saturation."),
        (["--naive-requests", "0"], "--naive-requests must be at least 1"),
        (["--weights", "fp8"], "--weights fp8: available are int8, int4"),
        (["--price-per-hour", "0"], "--price-per-hour must be above 0"),
        (["--workload", "poems"], "the workload 'poems' is not known"),
        (["--calibration", "texts.jsonl"], "has no effect without --full"),
        (["--full", "--calibration", "nowhere.jsonl"], "nowhere.jsonl: there is no such file"),
        (["--awq", "nowhere/at/all"], "nowhere/at/all"),
        (["--spec", "none"], "exclude the rung with --rungs instead"),
        (["-o", "."], "is a folder; name a file"),
        (["--prefix-len", "600"], "and the model 512 positions"),
    ],
)
def test_invalid_options_are_rejected(
    windlass: Windlass,
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    args: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    shown = windlass("ladder", tiny, "--load-format", "dummy", "--no-progress", *args, code=2)
    assert message in shown
    assert not list(tmp_path.glob("*.json"))
