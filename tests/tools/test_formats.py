"""`windlass bench formats` on a tiny model: rows, failures, and resuming."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tools.conftest import Windlass
from tests.tools.quantize.conftest import write_model
from windlass.tools.bench.checkpoints import FORMATS, FormatInputs, find_formats

TEXT = "A windlass lifts heavy loads with a light lever. " * 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, an evaluation text, and calibration texts."""
    made = tmp_path_factory.mktemp("formats")
    write_model(made / "tiny")
    (made / "text.txt").write_text(TEXT)
    lines = [{"text": f"load {number} is lifted by a rope and a drum"} for number in range(4)]
    (made / "texts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return made


def _args(folder: Path, output: Path, *more: object) -> list[object]:
    sizes = ["--context", "64", "--samples", "4", "--sample-tokens", "32", "--repeat", "1"]
    where = ["--data", folder / "text.txt", "--work", folder / "work", "-o", output]
    return ["bench", "formats", folder / "tiny", *sizes, *where, "--num-threads", "1", *more]


def test_rows_and_resuming(windlass: Windlass, folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "formats.json"
    text = ("--calibration", folder / "texts.jsonl")
    names = "float32,int8,fp8-block,gptq-4,gptq-4-random"
    shown = windlass(*_args(folder, output, *text, "--formats", names))
    record = json.loads(output.read_text())
    assert [row["format"] for row in record["rows"]] == names.split(",")
    plain, int8, block, gptq, gptq_random = record["rows"]
    assert plain["bits"] == 32
    assert 8 < int8["bits"] <= 9
    assert 4 < gptq["bits"] < 5
    assert gptq["weight_bytes"] < int8["weight_bytes"] < plain["weight_bytes"]
    assert gptq["file_bytes"] > 0
    assert int8["file_bytes"] is None
    assert gptq["kl_mean"] > int8["kl_mean"] > 0
    assert int8["served_kl_mean"] > 0
    assert gptq_random["perplexity"] != gptq["perplexity"]
    for row in record["rows"]:
        assert row["tok_s_b1"] > 0
        assert row["speedup_b8"] > 0
    assert "perplexity" in block
    assert "| float32" not in shown
    assert "speedup over float32" in shown

    # One row is missing, one has no speed: only the missing figures are measured.
    record["rows"] = [row for row in record["rows"] if row["format"] != "int8"]
    del record["rows"][0]["tok_s_b1"]
    output.write_text(json.dumps(record))
    again = windlass(*_args(folder, output, *text, "--formats", names))
    assert "already has 3 of 5 rows" in again
    assert "1 of 1, int8: perplexity" in again
    assert "1 of 2, float32: " in again
    assert "quantising into" not in again
    assert len(json.loads(output.read_text())["rows"]) == 5


def test_a_failed_format_is_a_row_with_its_error(
    windlass: Windlass, folder: Path, tmp_path: Path
) -> None:
    output = tmp_path / "formats.json"
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "too few texts for four samples"}\n')
    names = ("--formats", "gptq-4,float32,rtn-4")
    shown = windlass(*_args(folder, output, *names, "--calibration", broken))
    rows = {row["format"]: row for row in json.loads(output.read_text())["rows"]}
    assert "has only 1 usable texts" in rows["gptq-4"]["error"]
    assert "gptq-4: failed: --samples 4" in shown
    assert rows["rtn-4"]["perplexity"] > 0
    assert rows["rtn-4"]["tok_s_b8"] > 0
    other = windlass(*_args(folder, output, *names, "--max-windows", 1), code=2)
    assert "needs --calibration" in other
    other = windlass(*_args(folder, output, "--formats", "rtn-4", "--max-windows", 1), code=2)
    assert "has results of another run (max_windows, calibration differ)" in other


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--formats int5", "'int5' is not known. Known: float32, float16, bfloat16, stored, int8"),
        ("--formats gptq-4", "--formats gptq-4: needs --calibration"),
        ("--formats gguf-q4_k", "--formats gguf-q4_k: needs --gguf-dir DIR, a folder"),
        ("--gguf-dir nowhere", "--gguf-dir nowhere: there is no such folder"),
        ("--dtype float16", "--dtype is set by the formats themselves"),
        ("--kv-cache-dtype fp8", "--kv-cache-dtype is set by the formats themselves"),
        ("--repeat 0", "--repeat must be at least 1"),
        ("--samples 0", "--samples must be at least 1"),
        ("--calibration nowhere.jsonl", "--calibration nowhere.jsonl: there is no such file"),
        ("--data nowhere.txt", "nowhere.txt: there is no such file"),
        ("-o .", "is a folder"),
    ],
)
def test_invalid_options_are_rejected(windlass: Windlass, args: str, message: str) -> None:
    assert message in windlass("bench", "formats", *args.split(), code=2)


def test_16_bit_and_kv_cache_formats_without_speed(
    windlass: Windlass, folder: Path, tmp_path: Path
) -> None:
    output = tmp_path / "formats.json"
    names = "float32,bfloat16,kv-int8,kv-fp8"
    windlass(*_args(folder, output, "--formats", names, "--no-speed"))
    record = json.loads(output.read_text())
    plain, half, int8, fp8 = record["rows"]
    assert not any(key.startswith("tok_s") for row in record["rows"] for key in row)
    assert record["notes"].endswith("Speeds: not measured.")
    assert half["file_bytes"] > 0
    assert half["kl_mean"] < int8["kl_mean"]
    assert half["perplexity"] == pytest.approx(plain["perplexity"], rel=0.01)
    assert 0 < int8["kl_mean"] < fp8["kl_mean"]
    again = windlass(*_args(folder, output, "--formats", names, "--no-speed"))
    assert "already has 4 of 4 rows" in again


def test_gguf_formats_need_their_file(windlass: Windlass, folder: Path, tmp_path: Path) -> None:
    names = ("--formats", "gguf-q4_k", "--gguf-dir", tmp_path, "--no-speed")
    shown = windlass(*_args(folder, tmp_path / "formats.json", *names))
    assert f"gguf-q4_k: failed: --gguf-dir: {tmp_path / 'Q4_K.gguf'} does not exist" in shown


def test_calibrated_formats_are_skipped_without_texts() -> None:
    logged: list[str] = []
    found = find_formats([], FormatInputs(gguf_dir=Path("made")), logged.append)
    assert {each.name for each in FORMATS} - {each.name for each in found} == {
        *("smoothquant", "gptq-4", "awq-4", "gptq-3"),
    }
    assert "skipped without --calibration: smoothquant" in logged[0]
    inputs = FormatInputs(Path("text"), Path("made"))
    assert find_formats([], inputs, logged.append) == list(FORMATS)
