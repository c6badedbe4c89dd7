"""`windlass tune` end to end on a tiny model, and the files that it writes."""

from __future__ import annotations

import builtins
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.tools.conftest import Windlass
from tests.tools.quantize.conftest import write_model
from windlass.cli.config_file import read_config
from windlass.cli.options import ENGINE_OPTIONS, MODEL_ARGUMENT, SERVE_OPTIONS
from windlass.config import EngineConfig
from windlass.tools.common.drive import EngineRun
from windlass.tools.common.load import Load
from windlass.tools.common.requests import Timing
from windlass.tools.common.slo import Slo
from windlass.tools.plan.quality import REFERENCE
from windlass.tools.tune.report import verdict
from windlass.tools.tune.results import TrialResult, best_of
from windlass.tools.tune.space import ModelFormat, Settings
from windlass.tools.tune.tune import TuneConfig, Tuner, TuneResult

DUMMY = ("--load-format", "dummy", "--num-threads", "1")
LOAD = ("--workload", "random", "--num-prompts", "3", "--input-len", "16", "--output-len", "5")
FEW = ("--trials", "6", "--finalists", "1", "--max-formats", "1", "--no-speculate")
ONCE = ("--runs", "1")


def read_as_serve(path: Path) -> EngineConfig:
    found = read_config(path, [MODEL_ARGUMENT, *ENGINE_OPTIONS, *SERVE_OPTIONS])
    return EngineConfig.of(**found)


def test_written_config_is_accepted_by_serve(
    windlass: Windlass, tiny: Path, tmp_path: Path
) -> None:
    output, report = tmp_path / "windlass.yaml", tmp_path / "tune.json"
    args = ("-o", output, "--json", report, "--price-per-hour", "2", "--profile", "chat")
    shown = windlass("tune", tiny, *DUMMY, *LOAD, *FEW, "--slo", "ttft_p99=60s", *args)
    assert "The SLO is met: ttft_p99" in shown
    assert "run 3 requests each, 2 times" in shown
    assert re.search(r"measuring: \d+ runs, about \d+ s and the time to start", shown)
    config = read_as_serve(output)
    assert config.model.model == str(tiny)
    assert config.scheduler.profile == "chat"
    written = json.loads(report.read_text())
    measured = [row for row in written["rows"] if row["how"] == "measured"]
    # The starting point of the profile is measured too.
    assert any("32 sequences, 4,096 tokens" in row["settings"] for row in written["rows"])
    tried = [row["options"].get("max_num_seqs") for row in measured]
    assert config.scheduler.max_num_seqs in tried
    assert measured[0]["usd_per_million"] > 0
    assert {row["runs"] for row in measured} == {2}
    assert all(row["spread_pct"] >= 0 for row in measured)
    # The fastest KV type varies from run to run here.
    assert 0.99 <= measured[0]["quality"] <= 1.0
    assert output.read_text().startswith("# Written by windlass tune")


def test_nearest_settings_are_written_if_nothing_meets_the_slo(
    windlass: Windlass, tiny: Path, tmp_path: Path
) -> None:
    output = tmp_path / "windlass.yaml"
    args = ("--slo", "e2el_p99=0.000001ms", "-o", output)
    shown = windlass("tune", tiny, *DUMMY, *LOAD, *FEW, *ONCE, *args, code=1)
    assert "Nothing meets the SLO e2el_p99=1e-06ms; the nearest misses it: e2el_p99 is" in shown
    assert read_as_serve(output).scheduler.max_num_seqs


def test_ctrl_c_keeps_measured_results(
    windlass: Windlass, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, measure = tmp_path / "windlass.yaml", Tuner._measure
    calls = []

    def interrupted(self: Tuner, settings: Settings) -> None:
        calls.append(settings)
        if len(calls) > 1:
            raise KeyboardInterrupt
        measure(self, settings)

    monkeypatch.setattr(Tuner, "_measure", interrupted)
    few = ("--trials", "6", "--finalists", "2", "--max-formats", "1")
    shown = windlass("tune", tiny, *DUMMY, *LOAD, *few, "-o", output, code=130)
    assert "1 were measured" in shown
    assert read_as_serve(output).scheduler.max_num_seqs == calls[0].max_num_seqs


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (("--slo", "fast"), "expected a target such as ttft_p99"),
        (("--trials", "0"), "--trials must be at least 1"),
        (("--runs", "0"), "--runs must be at least 1"),
        (("--formats", "int9"), "'int9' is not a format. Known: as stored, 16 bit, "),
        (("--formats", ","), "--formats is empty"),
        (("--min-quality", "2"), "--min-quality must be from 0 to 1"),
        (("--workload", "chat,rag"), "tune takes one load"),
        (("--workload", "dreams"), "Known: chat"),
    ],
)
def test_bad_input_is_refused(
    windlass: Windlass, tiny: Path, args: tuple[str, ...], why: str
) -> None:
    assert why in windlass("tune", tiny, *DUMMY, *args, code=2)


def test_quality_of_formats_is_measured(windlass: Windlass, tmp_path: Path) -> None:
    model, report = tmp_path / "tiny", tmp_path / "tune.json"
    write_model(model)
    args = ("--formats", "as stored,int4", "--min-quality", "0.9999", "--json", report)
    more = ("--trials", "8", "--finalists", "2", "--no-speculate", "--num-threads", "1", *ONCE)
    shown = windlass("tune", model, *LOAD, *args, *more, "-o", tmp_path / "windlass.yaml")
    assert "int4: measured quality 0." in shown
    assert "Not tried: measured below --min-quality 0.9999: " in shown
    written = json.loads(report.read_text())
    assert "int4 (" in written["settings"]["left_out"]
    assert {row["quality_basis"] for row in written["rows"]} <= {"reference", "measured"}
    assert all(row["quality"] >= 0.9999 for row in written["rows"])


def _result(speeds: Sequence[float], kv_bytes: int, name: str = "") -> TrialResult:
    timing = Timing(0.0, 0.0, 1.0, 4, 100, (1.0,), (100,))
    runs = tuple(EngineRun([timing], 100 / speed, 1, 1, 1, 1.0, 0, 0, 4) for speed in speeds)
    format = ModelFormat(name or "format", {}, REFERENCE)
    summaries = tuple(Slo().summarise(run) for run in runs)
    return TrialResult(
        settings=Settings(format, 8, 512),
        is_measured=True,
        runs=runs,
        summaries=summaries,
        slo=Slo(),
        kv_bytes=kv_bytes,
    )


def test_choice_accounts_for_noise() -> None:
    fast, small = _result((100, 104), 2000, "fast"), _result((99, 103), 1000, "small")
    assert best_of([fast, small]) is small
    slow = _result((80, 82), 10, "slow")
    assert best_of([slow, fast, small]) is small
    assert best_of([fast, slow]) is fast
    found = TuneResult(measured=[fast, slow])
    config = TuneConfig(engine_options={}, load=Load("random"), slo=Slo())
    assert "1.25 times the next, more than runs of the same settings differ (4%)" in " ".join(
        verdict(found, config)
    )
    found.measured = [fast, small]
    assert "within the 4% that runs of the same settings" in " ".join(verdict(found, config))
    found.measured = [_result((100, 140), 2000, "noisy"), slow]
    assert "differ by up to 29%: other work uses this machine" in " ".join(verdict(found, config))


def test_missing_optuna_is_reported(
    windlass: Windlass, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **more: Any) -> Any:
        if name == "optuna":
            raise ImportError(name)
        return real(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)
    assert "windlass-llm[tune]" in windlass("tune", tiny, *DUMMY, *LOAD, code=2)


def test_settings_become_serve_options() -> None:
    options = {"quantization": "int4", "kv_cache_dtype": "int8"}
    format = ModelFormat("int4, int8 KV", options, REFERENCE)
    settings = Settings(format, 8, 512, num_blocks=64, spec="ngram")
    config = settings.config({"model": "default"})
    assert (config.model.quantization, config.cache.num_blocks) == ("int4", 64)
    assert (config.speculation.spec, config.scheduler.max_num_seqs) == ("ngram", 8)
    other = ModelFormat("", {"quantization": "int4"}, REFERENCE)
    assert format.weights_key == other.weights_key
