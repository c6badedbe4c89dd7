"""Which way to guess is taken, what is refused before weights are read, and what is kept of costs."""

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
from windlass.core.tokenizer import Tokenizer
from windlass.errors import CheckpointError, ConfigError, EngineError
from windlass.models.dummy import ByteTokenizer
from windlass.models.source import resolve
from windlass.runner import assemble
from windlass.serve.metrics import Metrics
from windlass.speculative import exits, start
from windlass.speculative.costs import Drafting, StepCosts
from windlass.speculative.draft_model import compare
from windlass.speculative.exits import candidates
from windlass.speculative.governor import Governor
from windlass.speculative.measure import Costs, SpotCheck
from windlass.speculative.notes import Notes
from windlass.speculative.which import kind_of, settled
from windlass.speculative_config import SpecName

SOME = Costs(
    StepCosts({1: 1.0, 4: 2.0}),
    StepCosts({1: 0.5, 2: 0.75}),
    Drafting({1: StepCosts({1: 0.1, 2: 0.1}), 4: StepCosts({1: 0.3, 2: 0.3})}),
)


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    """Nothing is measured that a test does not ask for."""
    monkeypatch.setattr(start, "measure", lambda *_: SOME)


def folder_of(path: Path, **changes: Any) -> Path:
    path.mkdir(exist_ok=True)
    config = CONFIG | {"head_dim": 16, "intermediate_size": 224} | changes
    (path / "config.json").write_text(json.dumps(config))
    return path


def make(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), load_format="dummy", device="cpu", num_blocks=50, **options)


def test_auto_takes_what_lies_in_the_folder(tmp_path: Path) -> None:
    model = folder_of(tmp_path / "model")
    heads = folder_of(tmp_path / "medusa", medusa_num_heads=3)
    eagle = folder_of(tmp_path / "eagle", architectures=["LlamaForCausalLMEagle3"])
    found = {}
    for path in (model, heads, eagle):
        options = {"model": "x", "load_format": "dummy", "spec": "auto", "spec_model": str(path)}
        found[path.name] = settled(EngineConfig.of(**options)).speculation.spec
        assert kind_of(resolve(ModelConfig(model=str(path), load_format="dummy")))
    assert found == {"model": "draft", "medusa": "medusa", "eagle": "eagle"}
    assert settled(EngineConfig.of(spec="auto")).speculation.spec == "ngram"
    chosen = make(model, spec="auto").report.choices[-1]
    assert chosen.value.startswith("ngram")
    assert chosen.reason.startswith("auto chose ngram")


class Shifted(ByteTokenizer):
    """Every token above 100 is the one before."""

    def token_bytes(self, token: int) -> bytes:
        return super().token_bytes(token - (token > 100))


class Gaps(ByteTokenizer):
    """Its last tokens mean nothing."""

    def token_bytes(self, token: int) -> bytes:
        return super().token_bytes(token) if token < 400 else b""


def test_vocabularies_are_compared_by_what_tokens_mean() -> None:
    config = EngineConfig.of(spec="draft", spec_model="small")
    own: Tokenizer = ByteTokenizer(500)
    compare(own, ByteTokenizer(512), config)
    compare(own, Gaps(500), config)
    with pytest.raises(ConfigError, match=r"399 tokens differ \(101 is 'e' and 'd'; .*, \.\.\.\)"):
        compare(own, Shifted(500), config)


@pytest.mark.parametrize(
    ("changes", "options", "told"),
    [
        ({"max_position_embeddings": 100}, {"spec": "draft"}, "knows 100 positions.*with 512"),
        ({"medusa_num_heads": 2}, {"spec": "draft"}, "is a head, not a model. Use --spec medusa"),
        (None, {"spec": "draft"}, "--spec-model: .*has neither config.json nor"),
        (None, {"spec": "auto"}, "--spec-model: .*has neither config.json nor"),
        ({}, {"spec": "self", "spec_exit_layer": 2}, "between 1 and 1, since the model has 2"),
    ],
)
def test_what_cannot_be_is_refused_before_weights_are_read(
    tmp_path: Path,
    monkeypatch,
    changes: dict[str, Any] | None,
    options: dict[str, Any],
    told: str,
) -> None:
    def read(*_: Any) -> None:
        raise AssertionError("weights were read")

    model, other = folder_of(tmp_path / "model"), tmp_path / "other"
    other.mkdir()
    if changes is not None:
        folder_of(other, **changes)
    if options["spec"] != "self":
        options = {**options, "spec_model": str(other)}
    monkeypatch.setattr(assemble, "load", read)
    with pytest.raises(EngineError, match=told):
        make(model, **options)


def test_what_a_draft_models_weights_refuse_is_told_by_its_own_flags(tmp_path: Path) -> None:
    awq = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 32,
        "zero_point": True,
        "version": "gemm",
    }
    other = folder_of(tmp_path / "other", quantization_config=awq)
    told = r"--spec-model .*other: --spec-quantization fp8: .* quantised already \(awq\)"
    with pytest.raises(ConfigError, match=told):
        make(
            folder_of(tmp_path / "model"),
            spec="draft",
            spec_model=str(other),
            spec_quantization="fp8",
        )


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"--spec-model: .*no such file or folder"):
        make(folder_of(tmp_path / "model"), spec="draft", spec_model=str(tmp_path / "nowhere"))


def test_the_page_has_every_flag_and_metric() -> None:
    page = (Path(__file__).parents[2] / "docs" / "speculation.md").read_text(encoding="utf-8")
    for item in fields(SpecConfig):
        (line,) = [
            line for line in page.splitlines() if line.startswith(f"| `{flag(item.name)}` |")
        ]
        shown = line.split("|")[2].strip()
        assert shown.startswith("" if item.default is None else str(item.default))
    for name in get_args(SpecName):
        assert f"`{name}`" in page or name == "none"
    metrics = Metrics("m").render(engine_up=True).decode()
    for name in set(re.findall(r"windlass:spec_decode_(\w+?)(?:_total|_created)?\{", metrics)):
        assert f"| `{name}` |" in page


def test_exits_to_try() -> None:
    assert candidates(30) == [8, 10, 15, 20, 22]
    assert candidates(2) == [1]


def test_the_exit_is_measured_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = folder_of(tmp_path / "model", num_hidden_layers=4)
    for least, told in ((100.0, "none"), (0.0, "self")):
        monkeypatch.setattr(exits, "_LEAST_GAIN", least)
        llm = make(model, spec="self", spec_tokens=2)
        choice = llm.report.choices[-1]
        assert choice.value.startswith(told)
        said = choice.reason if told == "none" else choice.value
        assert "of 4 layers (" in said
        assert "% alike" in said
        if told == "none":
            assert said.startswith("self was asked for and would be slower: self, the first")
            llm.generate([[1, 2, 3, 1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=20))
            assert llm.engine.stats().num_draft_tokens == 0
    tiny = LLM(
        str(model), load_format="dummy", device="cpu", num_blocks=2, spec="self", max_model_len=32
    )
    assert "no room to measure" in tiny.report.choices[-1].value


def test_costs_are_measured_once(tmp_path: Path, monkeypatch) -> None:
    model, kept, times = folder_of(tmp_path / "model"), tmp_path / "notes.json", []
    monkeypatch.setattr(start, "notes_for", lambda *_: Notes(kept))
    monkeypatch.setattr(start, "measure", lambda *_: times.append(1) or SOME)
    agreeing = SpotCheck(SOME.plain.of(1))
    monkeypatch.setattr(start, "spot_check", lambda *_: agreeing)
    monkeypatch.setattr(start, "load_of_machine", lambda: 0)
    reasons = [make(model, spec="ngram").report.choices[-1].reason for _ in range(2)]
    assert len(times) == 1
    assert "earlier start" not in reasons[0]
    assert "measured at an earlier start" in reasons[1]
    assert SOME.describe() in reasons[1]
    with monkeypatch.context() as faster:
        faster.setattr(start, "spot_check", lambda *_: SpotCheck(SOME.plain.of(1) / 1.25))
        reason = make(model, spec="ngram").report.choices[-1].reason
        assert "measured anew: costs of an earlier start were off by 1.25 times" in reason
    make(model, spec="ngram", spec_tokens=3)
    assert len(times) == 3, "other rooms and machines that were busy then are measured anew"
    for broken, told in [
        ("{", "cannot be read"),
        ("[]", "holds no JSON object"),
        ('{"costs at load 0": {"room": 1}}', None),
        ('{"costs at load 0": 3}', "not whole"),
    ]:
        kept.write_text(broken)
        times.clear()
        reason = make(model, spec="ngram").report.choices[-1].reason
        assert len(times) == 1
        assert told is None or told in reason
    (tmp_path / "file").write_text("")
    kept = tmp_path / "file" / "notes.json"
    reason = make(model, spec="ngram").report.choices[-1].reason
    assert "cannot be written" in reason


def test_costs_are_kept_by_the_load_of_the_machine(tmp_path: Path, monkeypatch) -> None:
    model, kept, times = folder_of(tmp_path / "model"), tmp_path / "notes.json", []
    monkeypatch.setattr(start, "notes_for", lambda *_: Notes(kept))
    monkeypatch.setattr(start, "measure", lambda *_: times.append(1) or SOME)
    monkeypatch.setattr(start, "spot_check", lambda *_: SpotCheck(SOME.plain.of(1)))
    for load in (0, 2, 0, 2):
        monkeypatch.setattr(start, "load_of_machine", lambda now=load: now)
        make(model, spec="ngram")
    assert len(times) == 2


@pytest.mark.parametrize(("plain_s", "draft_s", "off"), [(0.5, 0.3, 1.0), (0.6, 0.3, 1.2)])
def test_a_spot_check_compares_steps_and_drafting(
    plain_s: float, draft_s: float, off: float
) -> None:
    assert SpotCheck(plain_s, 4, draft_s).disagreement(SOME) == pytest.approx(off)
    assert SpotCheck(plain_s, 4, draft_s + 0.8).disagreement(SOME) > 1.9, "drafts take longer"


def test_costs_that_running_steps_disagree_with_are_measured_at_the_next_start(
    tmp_path: Path, monkeypatch
) -> None:
    model, kept, times = folder_of(tmp_path / "model"), tmp_path / "notes.json", []
    monkeypatch.setattr(start, "notes_for", lambda *_: Notes(kept))
    monkeypatch.setattr(start, "measure", lambda *_: times.append(1) or SOME)
    monkeypatch.setattr(start, "spot_check", lambda *_: SpotCheck(SOME.plain.of(1)))
    monkeypatch.setattr(start, "load_of_machine", lambda: 0)
    for disagreement, count in ((1.1, 1), (1.3, 1), (1.0, 2)):
        monkeypatch.setattr(Governor, "disagreement", disagreement)
        llm = make(model, spec="ngram")
        for _ in range(2):  # the end of a request is seen in the next one's first step
            llm.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=4))
        assert len(times) == count


def test_guesses_that_can_never_pay_are_told(tmp_path: Path, monkeypatch) -> None:
    model, told = folder_of(tmp_path / "model"), "would not pay here if all were accepted"
    for cost in (0.1, 10.0):
        making = StepCosts({1: cost, 2: cost})
        costs = replace(SOME, drafting=Drafting({1: making, 4: making}))
        monkeypatch.setattr(start, "measure", lambda *_, found=costs: found)
        reason = make(model, spec="self", spec_exit_layer=1).report.choices[-1].reason
        assert (told in reason) == (cost == 10.0)


def test_typical_acceptance_is_marked(tmp_path: Path) -> None:
    llm = make(folder_of(tmp_path / "model"), spec="ngram", spec_acceptance="typical")
    assert "typical acceptance at 0.9 CHANGES THE DISTRIBUTION" in llm.report.choices[-1].reason
