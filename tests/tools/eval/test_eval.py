"""`windlass eval` from the command line, on a tiny model with random weights."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.tools.eval.conftest import Run
from windlass.build import open_model
from windlass.build_scorer import build_scorer
from windlass.cli.main import app
from windlass.cli.reference import reference_config
from windlass.config import EngineConfig, GateConfig
from windlass.errors import ConfigError, EngineError
from windlass.runner.scoring import ScoringLimits, Window
from windlass.tools.eval import run as program
from windlass.tools.eval.gates import misses
from windlass.tools.eval.metrics import Comparison, Quality

SAME = ("--against-options", "load_format=dummy")
OTHER = ("--against-options", "load_format=dummy,seed=1")


def test_model_equals_itself(evaluate: Run, text_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    code, shown, _ = evaluate("--data", text_file, "--context", 128, *SAME, "--json", path)
    assert code == 0
    assert "agreement" in shown
    record = json.loads(path.read_text())
    (row,) = record["rows"]
    assert record["name"] == "quality"
    assert row["tokens"] == len(text_file.read_text()) - 1
    assert (row["kl_mean"], row["kl_max"], row["rank_shift"]) == (0, 0, 0)
    assert (row["agreement"], row["ppl_ratio"]) == (1, 1)
    assert row["perplexity"] == row["reference_perplexity"]
    assert {"command", "commit", "hardware", "date", "versions"} <= record.keys()
    assert record["settings"]["reference"]["options"]["load_format"] == "dummy"


def test_gates_and_exit_codes(evaluate: Run, text_file: Path) -> None:
    short = ("--data", text_file, "--context", 64, "--max-windows", 2)
    code, shown, errors = evaluate(*short, *OTHER, "--min-agreement", "99%", "--max-kl", "0.0001")
    assert code == 1
    assert "below --min-agreement 0.99" in errors
    assert "above --max-kl 0.0001" in errors
    assert "perplexity" in shown  # the table is printed nevertheless
    assert evaluate(*short, *OTHER, "--min-agreement", "0")[0] == 0
    assert evaluate(*short, *SAME, "--max-ppl-increase", "0.3%", "--min-agreement", 1)[0] == 0


@pytest.mark.parametrize(
    ("agreement", "ratio", "kl", "missed"),
    [
        (0.995, 1.001, 0.001, []),
        (0.98, 1.001, 0.001, ["1.0000 points below --min-agreement 0.99"]),
        (0.995, 1.005, 0.001, ["0.2000 points above --max-ppl-increase 0.003"]),
        (0.995, 0.9, 0.03, ["0.020000 above --max-kl 0.01"]),
        (math.nan, math.nan, math.nan, ["agreement nan", "increase of nan", "KL nan"]),
    ],
)
def test_missed_limits_are_sentences(
    agreement: float, ratio: float, kl: float, missed: list[str]
) -> None:
    found = Comparison(20.0, ratio, 0.0, kl, kl, kl, agreement, 0.0)
    gate = GateConfig(min_agreement=0.99, max_ppl_increase=0.003, max_kl=0.01)
    sentences = misses(Quality(100, 20.0 * ratio, 0.1, found), gate)
    assert len(sentences) == len(missed)
    for sentence, part in zip(sentences, missed, strict=True):
        assert part in sentence


def test_results_by_label(evaluate: Run, labelled: Path, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    code, _, _ = evaluate("--data", labelled, "--context", 256, *OTHER, "-o", path)
    assert code == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["label"] for row in rows] == ["all", "prose", "code", "chat"]
    total = sum(row["tokens"] for row in rows[1:])
    assert rows[0]["tokens"] == total
    mean = sum(row["kl_mean"] * row["tokens"] for row in rows[1:]) / total
    assert rows[0]["kl_mean"] == pytest.approx(mean, rel=1e-5)
    # Every byte is a token, and the first token of a document is not scored.
    assert (
        rows[3]["tokens"]
        == len("[user]What is a winch?[assistant]A machine that pulls a rope.") - 1
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--min-agreement", "0.9"], "give --against"),
        (["--min-agreement", "99"], "Write 99 per cent as 0.99 or 99%"),
        (["--max-ppl-increase", "little"], "is not a share"),
        (["--context", "4096"], "more than the 512 positions"),
        (["--against-options", "dtyp=float32"], "Did you mean 'dtype'?"),
        (["--against-options", "dtype"], "expected name=value"),
        (["--against-options", "block_size=big"], "block_size: expected a whole number"),
        (["--limit", "3"], "apply only with --tasks"),
        (["--tasks", ","], "--tasks is empty"),
        (["--json", "."], "is a folder"),
        (["--data", "no-such-file.jsonl"], "no such file or folder"),
        (["--method", "llama.cpp", "--context", "512", "--data", "SHORT"], "at least 512"),
        (["--data", "LABELLED", "--method", "llama.cpp", "--context", "64"], "one running text"),
        (["--data", "ONE"], "line 1: has 1 tokens; at least 2"),
    ],
)
def test_bad_input_is_refused(
    evaluate: Run, text_file: Path, labelled: Path, tmp_path: Path, args: list, message: str
) -> None:
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "one.jsonl").write_text('{"text": "x"}\n')
    names = {"SHORT": tmp_path / "short.txt", "LABELLED": labelled, "ONE": tmp_path / "one.jsonl"}
    chosen = [] if "--data" in args else ["--data", text_file]
    code, _, errors = evaluate(*chosen, *[names.get(arg, arg) for arg in args])
    assert code == 2
    assert message in " ".join(errors.split())


def test_messages_need_a_chat_template(tiny: Path, labelled: Path) -> None:
    words = ["eval", str(tiny), "--load-format", "dummy", "--data", str(labelled), "--no-progress"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert "has no chat template" in result.stderr


def test_ctrl_c_keeps_measured_windows(
    evaluate: Run, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare, calls = program.compare, []

    def interrupted(*args: object) -> object:
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return compare(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(program, "compare", interrupted)
    path = tmp_path / "result.json"
    args = ["--data", text_file, "--context", 64, *OTHER, "--min-agreement", 1, "--json", path]
    code, _, errors = evaluate(*args)
    assert code == 130
    assert "Interrupted: 2 of" in errors
    record = json.loads(path.read_text())
    assert record["settings"]["windows_done"] == 2
    assert record["rows"][0]["tokens"] == 63 + 32


def test_reference_inherits_only_machine_options() -> None:
    own = {"model": "m", "device": "cpu", "dtype": "float16", "max_num_seqs": 3}
    config = reference_config(own, None, "kv-cache-memory-bytes=1MiB, --block-size=32")
    assert (config.model.model, config.model.device, config.model.dtype) == ("m", "cpu", "auto")
    assert (config.cache.kv_cache_memory_bytes, config.cache.block_size) == (2**20, 32)
    assert config.scheduler.max_num_seqs is None
    assert reference_config(own, "other", None).model.model == "other"


def test_chunks_and_batches_give_the_same_logits(toy: Path) -> None:
    config = EngineConfig.of(model=str(toy), load_format="dummy", num_threads=1)
    opened = open_model(config)
    windows = [Window(range(5, 75)), Window(range(9, 20), 4), Window([7]), Window(range(90, 120))]
    whole = build_scorer(config, opened.source, ScoringLimits(70, 128, 8))
    cut = build_scorer(config, opened.source, ScoringLimits(70, 16, 2), whole.weights)
    values = {}
    for name, built in (("whole", whole), ("cut", cut)):
        for chunk in built.scorer.logits(windows):
            for i, row in enumerate(chunk.values):
                values[name, chunk.window, chunk.start + i] = row
    expected = [
        (w, i) for w, window in enumerate(windows) for i in range(window.first, len(window.tokens))
    ]
    assert len(values) == 2 * len(expected)
    for w, i in expected:
        assert values["whole", w, i].sub(values["cut", w, i]).abs().max() < 1e-5
    with pytest.raises(EngineError, match="this scorer takes 1 to 70"):
        list(whole.scorer.logits([Window(range(71))]))


def test_different_tokenizers_cannot_be_compared(toy: Path, tiny: Path, text_file: Path) -> None:
    # The tiny model has no tokenizer: its byte tokens have other ids.
    config = EngineConfig.of(model=str(toy), load_format="dummy")
    other = EngineConfig.of(model=str(tiny), load_format="dummy")
    from windlass.tools.eval.data import read_corpus
    from windlass.tools.eval.windows import Cut

    with pytest.raises(ConfigError, match="different tokens"):
        program.measure(config, other, read_corpus(str(text_file)), Cut(context=64))
