"""Speculation leaves tokens and log probabilities unchanged, with every option."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.runner.test_deterministic import CONFIG, PROMPT, SIBLINGS
from windlass import LLM, SamplingParams
from windlass.config import EngineConfig
from windlass.core.speculation import governor
from windlass.core.speculation.costs import Costs, StepCosts
from windlass.core.types import Draft, RowResult, SlotId, SlotInit, StepPlan, StepResult
from windlass.errors import ConfigError
from windlass.runner.executor import CompletedStep
from windlass.speculative import ngram, setup
from windlass.speculative.base import SlotUpdate
from windlass.speculative.measure import MeasureLimits, measure
from windlass.speculative.ngram import NgramProposer

PROMPTS = [PROMPT, *SIBLINGS]
COUNT = 30


class Oracle:
    """A proposer that knows the output and drafts it with some errors: acceptance varies."""

    free = True
    in_step = False
    vocab = 500
    truth: list[list[int]]  # whole sequences, prompts included

    def __init__(self, _min_ngram: int, _max_ngram: int, max_draft_tokens: int) -> None:
        self._random = Random(4)
        self._max_draft_tokens = max_draft_tokens
        self._known: dict[SlotId, list[int]] = {}

    def admit(self, new: SlotInit) -> None:
        self._known[new.slot] = list(new.tokens)

    def forget(self, slot: SlotId) -> None:
        self._known.pop(slot, None)

    def update(self, updates: Sequence[SlotUpdate]) -> None:
        for each in updates:
            self._known[each.slot] += each.tokens

    def backlog(self, _slot: SlotId) -> int:
        return 0

    def propose(self, slots: Sequence[SlotId], _draft_length: int) -> list[Draft]:
        drafts = []
        for slot in slots:
            known = self._known[slot]
            (whole, *_) = [each for each in self.truth if each[: len(known)] == known] or [[]]
            count = self._random.randint(0, self._max_draft_tokens)
            coming = whole[len(known) : len(known) + count]
            drafted = [(t + 1) % self.vocab if self._random.random() < 0.1 else t for t in coming]
            drafts.append(Draft(tuple(drafted)))
        return drafts


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return model_in(tmp_path_factory.mktemp("model"), eos_token_id=499)


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """Another shape, with the same vocabulary and some more tokens."""
    path = tmp_path_factory.mktemp("small")
    return model_in(
        path, hidden_size=64, num_attention_heads=4, num_hidden_layers=1, vocab_size=516
    )


def model_in(path: Path, **changes: Any) -> Path:
    sizes = {"head_dim": 16, "intermediate_size": 224}
    (path / "config.json").write_text(json.dumps(CONFIG | sizes | changes))
    return path


@pytest.fixture
def verify_all(monkeypatch) -> None:
    """Verify every draft token, whatever it costs on a model this small."""

    def choose(_self: Any, _slots: Any, drafts: Sequence[Draft], *_: Any) -> list[int]:
        return [len(draft.tokens) for draft in drafts]

    monkeypatch.setattr(governor.Governor, "choose", choose)
    monkeypatch.setattr(governor.Governor, "draft_length", lambda self, *_: self._max_draft_tokens)
    some = StepCosts({1: 1.0, 2: 1.0})
    monkeypatch.setattr(setup, "measure", lambda *_: Costs(some, some))


def make(folder: Path, **options: Any) -> LLM:
    options = {"num_blocks": 200, "max_num_seqs": 16, "quantization": "int4", **options}
    return LLM(str(folder), load_format="dummy", device="cpu", **options)


def prompts_for(engine: str) -> list[list[int]]:
    """Few for the plain kernels, which are slow."""
    return PROMPTS[:4] if engine == "plain kernels" else PROMPTS


def outputs_of(
    llm: LLM, params: SamplingParams, prompts: list[list[int]] = PROMPTS
) -> list[tuple[list[int], list[Any], str | None]]:
    found = []
    for result in llm.generate(prompts, params):
        output = result.outputs[0]
        found.append((output.token_ids, output.logprobs or [], output.finish_reason))
    return found


def check(
    folder: Path,
    monkeypatch,
    params: SamplingParams,
    prompts: list[list[int]] = PROMPTS,
    **options: Any,
) -> LLM:
    """Compare with and without speculation; returns the speculating LLM."""
    want = outputs_of(make(folder, **options), params, prompts)
    truth = [[*p, *tokens] for p, (tokens, _, _) in zip(prompts, want, strict=True)]
    monkeypatch.setattr(Oracle, "truth", truth, raising=False)
    monkeypatch.setattr(ngram, "NgramProposer", Oracle)
    llm = make(folder, spec="ngram", **options)
    compare(outputs_of(llm, params, prompts), want)
    stats = llm.engine.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert sum(stats.accepted_per_position) == stats.num_accepted_tokens
    return llm


def compare(got: list[Any], want: list[Any]) -> None:
    for (tokens, scores, finish), (want_tokens, want_scores, want_finish) in zip(
        got, want, strict=True
    ):
        assert (tokens, finish) == (want_tokens, want_finish)
        assert [s.token for s in scores] == [s.token for s in want_scores]
        assert [s.logprob for s in scores] == pytest.approx(
            [s.logprob for s in want_scores], abs=1e-4
        )


SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"seed": 3},
    "truncated": {"seed": 3, "top_k": 20, "top_p": 0.9, "temperature": 0.7},
    "min_p": {"seed": 3, "min_p": 0.05},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.3},
    "bad words": {"seed": 3, "bad_token_ids": ((7,), (8, 9))},
    "min_tokens": {"seed": 3, "min_tokens": 9, "stop_token_ids": tuple(range(0, 500, 6))},
    "stop token": {"seed": 3, "ignore_eos": False, "stop_token_ids": tuple(range(0, 500, 20))},
    "logprobs": {"seed": 3, "logprobs": 3},
    "scored prompts": {"temperature": 0.0, "prompt_logprobs": 1, "logprobs": 0},
    "deterministic": {"seed": 3, "deterministic": True, "logprobs": 0},
    "structured output": {
        "seed": 3,
        "ignore_eos": False,
        "structured_outputs": {"regex": "[a-p ,]*"},
    },
}


@pytest.mark.usefixtures("verify_all")
@pytest.mark.parametrize("sampling", SAMPLING)
def test_every_sampling_option(folder: Path, monkeypatch, sampling: str) -> None:
    options = {"max_tokens": COUNT, "ignore_eos": True, **SAMPLING[sampling]}
    check(folder, monkeypatch, SamplingParams(**options))


ENGINES: dict[str, dict[str, Any]] = {
    "chunked prompts": {"max_num_batched_tokens": 40},
    "preemption": {"num_blocks": 50, "block_size": 4, "max_model_len": 160},
    "int8 KV": {"kv_cache_dtype": "int8"},
    "int8 weights": {"quantization": "int8"},
    "16-bit weights": {"quantization": None},
    "plain kernels": {"plain_kernels": True},
    "eager": {"enforce_eager": True},
    "small blocks": {"block_size": 4, "num_blocks": 400},
}


@pytest.mark.usefixtures("verify_all")
@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_option(folder: Path, monkeypatch, engine: str) -> None:
    params = SamplingParams(max_tokens=COUNT, ignore_eos=True, seed=1, logprobs=1, temperature=0.8)
    llm = check(folder, monkeypatch, params, prompts_for(engine), **ENGINES[engine])
    if engine == "preemption":
        assert llm.engine.stats().num_preemptions > 0


METHODS: dict[str, dict[str, Any]] = {
    "draft": {"spec": "draft", "spec_quantization": "int8"},
    "self": {"spec": "self", "spec_exit_layer": 1},
    "lookahead": {"spec": "lookahead"},
}


@pytest.mark.usefixtures("verify_all")
@pytest.mark.parametrize("engine", ENGINES)
def test_every_method(folder: Path, small: Path, engine: str) -> None:
    options, prompts = ENGINES[engine], prompts_for(engine)
    count = {"plain kernels": 8, "preemption": COUNT}.get(engine, 16)
    kinds = [
        "seeded",
        {"preemption": "greedy", "small blocks": "logprobs"}.get(engine, "penalties"),
    ]
    params = [SamplingParams(max_tokens=count, ignore_eos=True, **SAMPLING[kind]) for kind in kinds]
    off = make(folder, **options)
    want = [outputs_of(off, each, prompts) for each in params]
    for method, own in METHODS.items():
        if method == "draft":
            own = {**own, "spec_model": str(small)}
        llm = make(folder, **options, **own)
        for one, expected in zip(params, want, strict=True):
            compare(outputs_of(llm, one, prompts), expected)
        stats = llm.engine.stats()
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens, method
        assert (stats.num_preemptions > 0) == (engine == "preemption")


@pytest.mark.usefixtures("verify_all")
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_an_identical_draft_model_is_always_accepted(folder: Path, prefix_caching: bool) -> None:
    """So its KV cache is right after rejections, shared prefixes and other requests."""
    same = {"spec": "draft", "spec_model": str(folder), "spec_quantization": "int4"}
    llm = make(folder, num_blocks=60, block_size=4, prefix_caching=prefix_caching, **same)
    for options in ({"temperature": 0.0}, {"seed": 5}, {"seed": 6, "top_k": 30}):
        params = SamplingParams(max_tokens=20, ignore_eos=True, **options)
        llm.generate([PROMPT, PROMPT[:41], PROMPT[:40]], params)
        llm.generate([PROMPT[:60], SIBLINGS[3]], params)
    stats = llm.engine.stats()
    assert stats.num_draft_tokens > 150
    assert stats.num_accepted_tokens == stats.num_draft_tokens


@pytest.mark.usefixtures("verify_all")
def test_cached_prefixes_hold_accepted_tokens_only(folder: Path, monkeypatch) -> None:
    """Blocks sealed while draft tokens were rejected serve the next request."""
    params = SamplingParams(max_tokens=COUNT, ignore_eos=True, temperature=0.0)
    llm = check(folder, monkeypatch, params)
    longer = [whole[:-1] for whole in Oracle.truth]
    again = llm.generate(longer, SamplingParams(max_tokens=1, temperature=0.0))
    assert [r.outputs[0].token_ids[0] for r in again] == [whole[-1] for whole in Oracle.truth]
    assert llm.engine.stats().prefix_hits > 0


class RecordingRunner:
    """A runner that computes nothing and records its plans."""

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> CompletedStep:
        self.plans.append(plan)
        return CompletedStep(StepResult([RowResult([0])] * len(plan.rows)))


@pytest.mark.parametrize(
    ("max_positions", "max_rows", "max_row_tokens", "num_blocks", "block_size"),
    [(288, 32, 9, 1000, 16), (12, 4, 9, 1000, 16), (300, 32, 9, 3, 4), (1, 1, 1, 1, 4)],
)
def test_costs_are_measured_within_the_limits(
    max_positions: int, max_rows: int, max_row_tokens: int, num_blocks: int, block_size: int
) -> None:
    limits = MeasureLimits(
        max_positions=max_positions,
        max_rows=max_rows,
        max_row_tokens=max_row_tokens,
        num_blocks=num_blocks,
        block_size=block_size,
    )
    runner, now = RecordingRunner(), iter(range(1000))
    costs = measure(runner, NgramProposer(2, 4, 8), limits, clock=lambda: next(now) / 1000)
    assert 0 < costs.verify.of(1) <= costs.verify.of(2)
    tables: dict[SlotId, tuple[int, ...]] = {}
    for plan in runner.plans:
        assert plan.num_tokens <= max_positions
        assert len(plan.rows) <= max_rows
        tables |= {row.slot: row.blocks for row in plan.rows if row.blocks}
        held = [block for row in plan.rows for block in tables[row.slot]]
        assert len(set(held)) == len(held)
        assert all(block < num_blocks for block in held)
        for row in plan.rows:
            assert row.start + row.num_tokens <= len(tables[row.slot]) * block_size


def test_the_start_up_table_shows_the_proposer_and_its_costs(folder: Path) -> None:
    chosen = {c.what: c for c in make(folder, spec="ngram", spec_tokens=5).report.choices}
    value = "ngram, up to 5 draft tokens, n-grams of 2 to 4 tokens"
    assert chosen["speculation"].value == value
    assert "ms" in chosen["speculation"].reason


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"spec": "ngram", "spec_tokens": 0}, "between 1 and 64, got 0"),
        ({"spec": "ngram", "spec_tokens": 1000}, "between 1 and 64, got 1000"),
        ({"spec": "ngram", "spec_ngram_min": 5}, "there is no n-gram length"),
        ({"spec": "ngram", "spec_ngram_min": 0}, "at least 1"),
        ({"spec_tokens": 4}, "does nothing without speculation"),
        ({"spec": "oracle"}, "one of none, auto, ngram"),
        ({"spec": "draft"}, "needs a model"),
        ({"spec": "eagle"}, "needs a head"),
        ({"spec": "self", "spec_model": "x"}, "--spec-model does nothing with --spec self"),
        ({"spec": "self", "spec_exit_layer": 0}, "at least 1"),
        ({"spec": "ngram", "spec_exit_layer": 2}, "--spec-exit-layer does nothing"),
        ({"spec": "ngram", "spec_alternatives": 2}, "--spec-alternatives does nothing"),
        (
            {"spec": "medusa", "spec_model": "x", "spec_alternatives": 4},
            "between 0 and 3, got 4",
        ),
        ({"spec": "lookahead", "spec_ngram_max": 8}, "--spec-ngram-max does nothing"),
        ({"spec": "ngram", "spec_threshold": 0.5}, "without --spec-acceptance typical"),
        (
            {"spec": "ngram", "spec_acceptance": "typical", "spec_threshold": 1.5},
            "above 0 and at most 1, got 1.5",
        ),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.of(**options)
