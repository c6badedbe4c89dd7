"""Choosing the method, refusals before weights are read, and cached costs."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.runner.test_deterministic import CONFIG
from windlass import LLM, SamplingParams
from windlass.config import EngineConfig, ModelConfig, SpecConfig, flag
from windlass.core.speculation.costs import Costs, DraftCosts, StepCosts
from windlass.core.speculation.governor import Governor
from windlass.core.tokenizer import Tokenizer
from windlass.errors import CheckpointError, ConfigError, EngineError
from windlass.measurement_cache import MeasurementCache
from windlass.models.dummy import ByteTokenizer
from windlass.models.source import resolve
from windlass.runner import load as loading
from windlass.serve.metrics import Metrics
from windlass.speculative import exits, setup
from windlass.speculative.auto import detect_method, resolve_auto
from windlass.speculative.draft_model import compare_vocabularies
from windlass.speculative.exits import candidate_layers
from windlass.speculative.measure import SpotCheck
from windlass.speculative_config import SpecName

SOME = Costs(
    StepCosts({1: 1.0, 4: 2.0}),
    StepCosts({1: 0.5, 2: 0.75}),
    DraftCosts({1: StepCosts({1: 0.1, 2: 0.1}), 4: StepCosts({1: 0.3, 2: 0.3})}),
)


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    """Replace the measurement by fixed costs."""
    monkeypatch.setattr(setup, "measure", lambda *_: SOME)


def folder_of(path: Path, **changes: Any) -> Path:
    path.mkdir(exist_ok=True)
    config = CONFIG | {"head_dim": 16, "intermediate_size": 224} | changes
    (path / "config.json").write_text(json.dumps(config))
    return path


def make(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), load_format="dummy", device="cpu", num_blocks=50, **options)


def test_auto_detects_the_method_from_the_folder(tmp_path: Path) -> None:
    model = folder_of(tmp_path / "model")
    heads = folder_of(tmp_path / "medusa", medusa_num_heads=3)
    eagle = folder_of(tmp_path / "eagle", architectures=["LlamaForCausalLMEagle3"])
    found = {}
    for path in (model, heads, eagle):
        options = {"model": "x", "load_format": "dummy", "spec": "auto", "spec_model": str(path)}
        found[path.name] = resolve_auto(EngineConfig.of(**options)).speculation.spec
        assert detect_method(resolve(ModelConfig(model=str(path), load_format="dummy")))
    assert found == {"model": "draft", "medusa": "medusa", "eagle": "eagle"}
    assert resolve_auto(EngineConfig.of(spec="auto")).speculation.spec == "ngram"
    chosen = make(model, spec="auto").report.choices[-1]
    assert chosen.value.startswith("ngram")
    assert chosen.reason.startswith("auto chose ngram")


class Shifted(ByteTokenizer):
    """Every token above 100 has the text of the token before."""

    def token_bytes(self, token: int) -> bytes:
        return super().token_bytes(token - (token > 100))


class Gaps(ByteTokenizer):
    """Its last tokens have no text."""

    def token_bytes(self, token: int) -> bytes:
        return super().token_bytes(token) if token < 400 else b""


def test_vocabularies_are_compared_by_text() -> None:
    config = EngineConfig.of(spec="draft", spec_model="small")
    own: Tokenizer = ByteTokenizer(500)
    compare_vocabularies(own, ByteTokenizer(512), config)
    compare_vocabularies(own, Gaps(500), config)
    with pytest.raises(ConfigError, match=r"399 tokens differ \(101 is 'e' and 'd'; .*, \.\.\.\)"):
        compare_vocabularies(own, Shifted(500), config)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"max_position_embeddings": 100}, {"spec": "draft"}, "has 100 positions.*with 512"),
        ({"medusa_num_heads": 2}, {"spec": "draft"}, "is a head, not a model. Use --spec medusa"),
        (None, {"spec": "draft"}, "--spec-model: .*has neither config.json nor"),
        (None, {"spec": "auto"}, "--spec-model: .*has neither config.json nor"),
        ({}, {"spec": "self", "spec_exit_layer": 2}, "between 1 and 1, since the model has 2"),
    ],
)
def test_errors_are_raised_before_weights_are_read(
    tmp_path: Path,
    monkeypatch,
    changes: dict[str, Any] | None,
    options: dict[str, Any],
    message: str,
) -> None:
    def read(*_: Any) -> None:
        raise AssertionError("weights were read")

    model, other = folder_of(tmp_path / "model"), tmp_path / "other"
    other.mkdir()
    if changes is not None:
        folder_of(other, **changes)
    if options["spec"] != "self":
        options = {**options, "spec_model": str(other)}
    monkeypatch.setattr(loading, "load", read)
    with pytest.raises(EngineError, match=message):
        make(model, **options)


def test_errors_of_a_draft_model_name_its_own_flags(tmp_path: Path) -> None:
    awq = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 32,
        "zero_point": True,
        "version": "gemm",
    }
    other = folder_of(tmp_path / "other", quantization_config=awq)
    message = r"--spec-model .*other: --spec-quantization fp8: .* quantised already \(awq\)"
    with pytest.raises(ConfigError, match=message):
        make(
            folder_of(tmp_path / "model"),
            spec="draft",
            spec_model=str(other),
            spec_quantization="fp8",
        )


def test_a_missing_draft_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"--spec-model: .*no such file or folder"):
        make(folder_of(tmp_path / "model"), spec="draft", spec_model=str(tmp_path / "nowhere"))


def test_the_docs_list_every_flag_and_metric() -> None:
    page = (Path(__file__).parents[2] / "docs" / "speculation.md").read_text(encoding="utf-8")
    for item in fields(SpecConfig):
        (line,) = [
            line for line in page.splitlines() if line.startswith(f"| `{flag(item.name)}` |")
        ]
        shown = line.split("|")[2].strip()
        assert shown.startswith("" if item.default is None else str(item.default))
    for name in get_args(SpecName):
        assert f"`{name}`" in page or name == "none"
    metrics = Metrics("m").render([True]).decode()
    for name in set(re.findall(r"windlass:spec_decode_(\w+?)(?:_total|_created)?\{", metrics)):
        assert f"| `{name}` |" in page


def test_candidate_exit_layers() -> None:
    assert candidate_layers(30) == [8, 10, 15, 20, 22]
    assert candidate_layers(2) == [1]


def test_the_exit_layer_is_measured_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = folder_of(tmp_path / "model", num_hidden_layers=4)
    for min_gain, value in ((100.0, "none"), (0.0, "self")):
        monkeypatch.setattr(exits, "_MIN_GAIN", min_gain)
        llm = make(model, spec="self", spec_tokens=2)
        choice = llm.report.choices[-1]
        assert choice.value.startswith(value)
        text = choice.reason if value == "none" else choice.value
        assert "of 4 layers (" in text
        assert "% agreement" in text
        if value == "none":
            assert text.startswith("self was requested and would be slower: self, the first")
            llm.generate([[1, 2, 3, 1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=20))
            assert llm.engine.stats().num_draft_tokens == 0
    tiny = LLM(
        str(model), load_format="dummy", device="cpu", num_blocks=2, spec="self", max_model_len=32
    )
    assert "no room to measure" in tiny.report.choices[-1].value


def test_costs_are_measured_once(tmp_path: Path, monkeypatch) -> None:
    model, kept, times = folder_of(tmp_path / "model"), tmp_path / "cache.json", []
    monkeypatch.setattr(
        setup, "open_measurement_cache", lambda *_args, **_options: MeasurementCache(kept)
    )
    monkeypatch.setattr(setup, "measure", lambda *_: times.append(1) or SOME)
    agreeing = SpotCheck(SOME.plain.of(1))
    monkeypatch.setattr(setup, "spot_check", lambda *_: agreeing)
    monkeypatch.setattr(setup, "machine_load", lambda: 0)
    reasons = [make(model, spec="ngram").report.choices[-1].reason for _ in range(2)]
    assert len(times) == 1
    assert "earlier start" not in reasons[0]
    assert "measured at an earlier start" in reasons[1]
    assert SOME.describe() in reasons[1]
    with monkeypatch.context() as faster:
        faster.setattr(setup, "spot_check", lambda *_: SpotCheck(SOME.plain.of(1) / 1.25))
        reason = make(model, spec="ngram").report.choices[-1].reason
        assert "measured again: costs of an earlier start were off by 1.25 times" in reason
    make(model, spec="ngram", spec_tokens=3)
    assert len(times) == 3, "other limits, and costs that a spot check rejects, are measured again"
    for broken, message in [
        ("{", "cannot be read"),
        ("[]", "holds no JSON object"),
        ('{"costs at load 0": {"room": 1}}', None),
        ('{"costs at load 0": 3}', "are invalid"),
    ]:
        kept.write_text(broken)
        times.clear()
        reason = make(model, spec="ngram").report.choices[-1].reason
        assert len(times) == 1
        assert message is None or message in reason
    (tmp_path / "file").write_text("")
    kept = tmp_path / "file" / "cache.json"
    reason = make(model, spec="ngram").report.choices[-1].reason
    assert "cannot be written" in reason


def test_costs_are_cached_by_machine_load(tmp_path: Path, monkeypatch) -> None:
    model, kept, times = folder_of(tmp_path / "model"), tmp_path / "cache.json", []
    monkeypatch.setattr(
        setup, "open_measurement_cache", lambda *_args, **_options: MeasurementCache(kept)
    )
    monkeypatch.setattr(setup, "measure", lambda *_: times.append(1) or SOME)
    monkeypatch.setattr(setup, "spot_check", lambda *_: SpotCheck(SOME.plain.of(1)))
    for load in (0, 2, 0, 2):
        monkeypatch.setattr(setup, "machine_load", lambda now=load: now)
        make(model, spec="ngram")
    assert len(times) == 2


@pytest.mark.parametrize(("plain_s", "draft_s", "off"), [(0.5, 0.3, 1.0), (0.6, 0.3, 1.2)])
def test_a_spot_check_compares_steps_and_drafting(
    plain_s: float, draft_s: float, off: float
) -> None:
    assert SpotCheck(plain_s, 4, draft_s).disagreement(SOME) == pytest.approx(off)
    assert SpotCheck(plain_s, 4, draft_s + 0.8).disagreement(SOME) > 1.9, "drafts take longer"


def test_cached_costs_that_running_steps_contradict_are_dropped(
    tmp_path: Path, monkeypatch
) -> None:
    model, kept, times = folder_of(tmp_path / "model"), tmp_path / "cache.json", []
    monkeypatch.setattr(
        setup, "open_measurement_cache", lambda *_args, **_options: MeasurementCache(kept)
    )
    monkeypatch.setattr(setup, "measure", lambda *_: times.append(1) or SOME)
    monkeypatch.setattr(setup, "spot_check", lambda *_: SpotCheck(SOME.plain.of(1)))
    monkeypatch.setattr(setup, "machine_load", lambda: 0)
    for disagreement, count in ((1.1, 1), (1.3, 1), (1.0, 2)):
        monkeypatch.setattr(Governor, "disagreement", disagreement)
        llm = make(model, spec="ngram")
        for _ in range(2):  # a request's end is processed in the next request's first step
            llm.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=4))
        assert len(times) == count


def test_never_profitable_drafts_are_reported(tmp_path: Path, monkeypatch) -> None:
    model, message = folder_of(tmp_path / "model"), "would not pay here if all were accepted"
    for cost in (0.1, 10.0):
        draft_costs = StepCosts({1: cost, 2: cost})
        costs = replace(SOME, drafting=DraftCosts({1: draft_costs, 4: draft_costs}))
        monkeypatch.setattr(setup, "measure", lambda *_, found=costs: found)
        reason = make(model, spec="self", spec_exit_layer=1).report.choices[-1].reason
        assert (message in reason) == (cost == 10.0)


def test_typical_acceptance_is_reported(tmp_path: Path) -> None:
    llm = make(folder_of(tmp_path / "model"), spec="ngram", spec_acceptance="typical")
    assert "typical acceptance at 0.9 CHANGES THE DISTRIBUTION" in llm.report.choices[-1].reason
