"""With guesses and without: the same tokens and log probabilities, whatever is switched on."""

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
from windlass.core.types import Row, RowResult, SlotId, SlotInit, StepPlan, StepResult
from windlass.errors import ConfigError
from windlass.runner.runner import CompletedStep
from windlass.speculative import governor, ngram, start
from windlass.speculative.base import Draft, Seen
from windlass.speculative.costs import StepCosts
from windlass.speculative.measure import Costs, Room, measure
from windlass.speculative.ngram import NgramProposer
from windlass.speculative.speculation import Speculation

PROMPTS = [PROMPT, *SIBLINGS]
COUNT = 30


class Oracle:
    """Knows what comes, and says it with some errors: every length of acceptance occurs."""

    free = True
    in_step = False
    vocab = 500
    truth: list[list[int]]  # whole sequences, prompts included

    def __init__(self, _shortest: int, _longest: int, most: int) -> None:
        self._random = Random(4)
        self._most = most
        self._known: dict[SlotId, list[int]] = {}

    def admit(self, new: SlotInit) -> None:
        self._known[new.slot] = list(new.tokens)

    def forget(self, slot: SlotId) -> None:
        self._known.pop(slot, None)

    def begin(self, _wanted: int) -> None:
        pass

    def take_in(self, seen: Sequence[Seen]) -> None:
        for each in seen:
            self._known[each.slot] += each.tokens

    def backlog(self, _slot: SlotId, _num_tokens: int) -> int:
        return 0

    def propose(self, slots: Sequence[SlotId]) -> list[Draft]:
        drafts = []
        for slot in slots:
            known = self._known[slot]
            (whole, *_) = [each for each in self.truth if each[: len(known)] == known] or [[]]
            coming = whole[len(known) : len(known) + self._random.randint(0, self._most)]
            wrong = [(t + 1) % self.vocab if self._random.random() < 0.1 else t for t in coming]
            drafts.append(Draft(tuple(wrong)))
        return drafts


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return model_in(tmp_path_factory.mktemp("model"), eos_token_id=499)


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """Another shape, the same vocabulary with some tokens more."""
    path = tmp_path_factory.mktemp("small")
    return model_in(
        path, hidden_size=64, num_attention_heads=4, num_hidden_layers=1, vocab_size=516
    )


def model_in(path: Path, **changes: Any) -> Path:
    sizes = {"head_dim": 16, "intermediate_size": 224}
    (path / "config.json").write_text(json.dumps(CONFIG | sizes | changes))
    return path


@pytest.fixture
def eager(monkeypatch) -> None:
    """Every guess is tried, whatever it costs on a model this small."""

    def choose(_self: Any, _slots: Any, drafts: Sequence[Draft], _others: int) -> list[int]:
        return [len(draft.tokens) for draft in drafts]

    monkeypatch.setattr(governor.Governor, "choose", choose)
    monkeypatch.setattr(governor.Governor, "wanted", lambda self, *_: self._most_guesses)
    some = StepCosts({1: 1.0, 2: 1.0})
    monkeypatch.setattr(start, "measure", lambda *_: Costs(some, some))


def make(folder: Path, **options: Any) -> LLM:
    options = {"num_blocks": 200, "max_num_seqs": 16, "quantization": "int4", **options}
    return LLM(str(folder), load_format="dummy", device="cpu", **options)


def answers(llm: LLM, params: SamplingParams) -> list[tuple[list[int], list[Any], str | None]]:
    found = []
    for result in llm.generate(PROMPTS, params):
        output = result.outputs[0]
        found.append((output.token_ids, output.logprobs or [], output.finish_reason))
    return found


def check(folder: Path, monkeypatch, params: SamplingParams, **options: Any) -> LLM:
    """Both ways; returns the speculating one."""
    want = answers(make(folder, **options), params)
    truth = [[*p, *tokens] for p, (tokens, _, _) in zip(PROMPTS, want, strict=True)]
    monkeypatch.setattr(Oracle, "truth", truth, raising=False)
    monkeypatch.setattr(ngram, "NgramProposer", Oracle)
    llm = make(folder, spec="ngram", **options)
    compare(answers(llm, params), want)
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


WISHES: dict[str, dict[str, Any]] = {
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
    "a form": {"seed": 3, "ignore_eos": False, "structured_outputs": {"regex": "[a-p ,]*"}},
}


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("wish", WISHES)
def test_every_wish(folder: Path, monkeypatch, wish: str) -> None:
    options = {"max_tokens": COUNT, "ignore_eos": True, **WISHES[wish]}
    check(folder, monkeypatch, SamplingParams(**options))


ENGINES: dict[str, dict[str, Any]] = {
    "chunked prompts": {"max_num_batched_tokens": 40},
    "preemption": {"num_blocks": 50, "block_size": 4, "max_model_len": 160},
    "int8 KV": {"kv_cache_dtype": "int8"},
    "int8 weights": {"quantization": "int8"},
    "16-bit weights": {"quantization": None},
    "plain kernels": {"plain_kernels": True},
    "not recorded": {"enforce_eager": True},
    "small blocks": {"block_size": 4, "num_blocks": 400},
}


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine(folder: Path, monkeypatch, engine: str) -> None:
    params = SamplingParams(max_tokens=COUNT, ignore_eos=True, seed=1, logprobs=1, temperature=0.8)
    llm = check(folder, monkeypatch, params, **ENGINES[engine])
    if engine == "preemption":
        assert llm.engine.stats().num_preemptions > 0


GUESSERS: dict[str, dict[str, Any]] = {
    "draft": {"spec": "draft", "spec_quantization": "int8"},
    "self": {"spec": "self", "spec_exit_layer": 1},
    "lookahead": {"spec": "lookahead"},
}


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("engine", ENGINES)
def test_every_way_to_guess(folder: Path, small: Path, engine: str) -> None:
    options = ENGINES[engine]
    count = {"plain kernels": 8, "preemption": COUNT}.get(engine, 16)
    kinds = [
        "seeded",
        {"preemption": "greedy", "small blocks": "logprobs"}.get(engine, "penalties"),
    ]
    wishes = [SamplingParams(max_tokens=count, ignore_eos=True, **WISHES[kind]) for kind in kinds]
    off = make(folder, **options)
    want = [answers(off, wish) for wish in wishes]
    for guesser, own in GUESSERS.items():
        if guesser == "draft":
            own = {**own, "spec_model": str(small)}
        llm = make(folder, **options, **own)
        for wish, each in zip(wishes, want, strict=True):
            compare(answers(llm, wish), each)
        stats = llm.engine.stats()
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens, guesser
        assert (stats.num_preemptions > 0) == (engine == "preemption")


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_draft_model_that_is_the_same_is_always_right(folder: Path, prefix_caching: bool) -> None:
    """So its pages hold what they should: after rejections, shared prefixes and other requests."""
    same = {"spec": "draft", "spec_model": str(folder), "spec_quantization": "int4"}
    llm = make(folder, num_blocks=60, block_size=4, prefix_caching=prefix_caching, **same)
    for wish in ({"temperature": 0.0}, {"seed": 5}, {"seed": 6, "top_k": 30}):
        params = SamplingParams(max_tokens=20, ignore_eos=True, **wish)
        llm.generate([PROMPT, PROMPT[:41], PROMPT[:40]], params)
        llm.generate([PROMPT[:60], SIBLINGS[3]], params)
    stats = llm.engine.stats()
    assert stats.num_draft_tokens > 150
    assert stats.num_accepted_tokens == stats.num_draft_tokens


@pytest.mark.usefixtures("eager")
def test_cached_prefixes_are_those_of_accepted_tokens(folder: Path, monkeypatch) -> None:
    """What was sealed while guesses were rejected serves the next request."""
    params = SamplingParams(max_tokens=COUNT, ignore_eos=True, temperature=0.0)
    llm = check(folder, monkeypatch, params)
    longer = [whole[:-1] for whole in Oracle.truth]
    again = llm.generate(longer, SamplingParams(max_tokens=1, temperature=0.0))
    assert [r.outputs[0].token_ids[0] for r in again] == [whole[-1] for whole in Oracle.truth]
    assert llm.engine.stats().prefix_hits > 0


class Counting:
    """A runner that only notes what it is asked for."""

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> CompletedStep:
        self.plans.append(plan)
        return CompletedStep(StepResult([RowResult([0])] * len(plan.rows)))


@pytest.mark.parametrize(
    "room",
    [
        Room(288, 32, 9, 1000, 16),
        Room(12, 4, 9, 1000, 16),
        Room(300, 32, 9, 3, 4),
        Room(1, 1, 1, 1, 4),
    ],
)
def test_costs_are_measured_within_the_room_there_is(room: Room) -> None:
    runner, now = Counting(), iter(range(1000))
    costs = measure(runner, NgramProposer(2, 4, 8), room, clock=lambda: next(now) / 1000)
    assert 0 < costs.guessed.of(1) <= costs.guessed.of(2)
    tables: dict[SlotId, tuple[int, ...]] = {}
    for plan in runner.plans:
        assert plan.num_tokens <= room.positions
        assert len(plan.rows) <= room.rows
        tables |= {row.slot: row.blocks for row in plan.rows if row.blocks}
        held = [block for row in plan.rows for block in tables[row.slot]]
        assert len(set(held)) == len(held)
        assert all(block < room.num_blocks for block in held)
        for row in plan.rows:
            assert row.start + row.num_tokens <= len(tables[row.slot]) * room.block_size


def test_a_slot_that_was_given_away_meanwhile_does_not_count() -> None:
    """Steps may overlap: an abort frees a slot whose sample is still on its way."""
    some = StepCosts({1: 1.0, 2: 1.0})
    proposer = NgramProposer(1, 2, 4)
    runner = Speculation(Counting(), proposer, governor.Governor(some, 100), dict)
    wish = SamplingParams()

    def step(name: str, freed: list[SlotId]) -> StepPlan:
        new = SlotInit(name, SlotId(0), [5, 6], 2, wish, frozenset(), 0)
        return StepPlan([Row(name, SlotId(0), 0, 2, (5, 6), (), True)], [new], freed)

    first = runner.submit(step("a", []))
    draft_runner = runner.submit(step("b", [SlotId(0)]))
    first.wait()
    assert proposer._unread[SlotId(0)] == [5, 6]
    runner.submit(StepPlan([], freed=[SlotId(0)]))
    draft_runner.wait()
    assert proposer._unread == {}


def test_what_came_in_steps_without_guesses_is_told_when_guesses_are_wanted() -> None:
    some = StepCosts({1: 1.0, 2: 1.0})
    proposer = NgramProposer(1, 2, 4)
    tokens = {SlotId(0): [5, 6], SlotId(1): [8]}
    judge = governor.Governor(some, 100, most_of=lambda rows: 4 * (rows == 1))
    runner = Speculation(Counting(), proposer, judge, lambda: tokens)
    wish = SamplingParams()
    new = [
        SlotInit(str(slot), slot, list(known), len(known), wish, frozenset(), 0)
        for slot, known in tokens.items()
    ]
    rows = [Row(each.request_id, each.slot, 0, 1, (5,), (), True) for each in new]
    for step in range(3):  # of more rows than may guess
        results = runner.run(StepPlan(rows, new if step == 0 else [])).rows
        for row, result in zip(rows, results, strict=True):
            tokens[row.slot] += result.tokens
    passing = SlotInit("x", SlotId(2), [3], 1, wish, frozenset(), 0)
    runner.run(StepPlan([], [passing], num_pending_admissions=2))
    runner.run(StepPlan([], freed=[SlotId(2)], num_pending_admissions=2))
    assert proposer._unread == {}, "nobody need know yet who came, nor ever who went"
    runner.run(StepPlan(rows[:1]))
    assert set(proposer._slots) == set(judge._slots) == {0, 1}
    assert proposer._slots[SlotId(0)]._tokens == [*tokens[SlotId(0)], *results[0].tokens]
    assert proposer._unread[SlotId(1)] == tokens[SlotId(1)]


def test_a_large_step_behind_one_with_guesses_is_told_later_and_times_nothing() -> None:
    """Nobody looks at its results: not even at when they came."""
    some = StepCosts({1: 1.0, 2: 1.0})
    proposer = NgramProposer(1, 2, 4)
    tokens = {SlotId(0): [5, 6], SlotId(1): [8]}
    judge = governor.Governor(some, 100, most_of=lambda rows: 4 * (rows == 1))
    timed: list[float] = []
    judge.took = lambda step: timed.append(step.step_s)
    now = 0.0
    runner = Speculation(Counting(), proposer, judge, lambda: tokens, clock=lambda: now)
    new = [
        SlotInit(str(slot), slot, list(known), len(known), SamplingParams(), frozenset(), 0)
        for slot, known in tokens.items()
    ]
    rows = [Row(each.request_id, each.slot, 0, 1, (5,), (), True) for each in new]
    small, large = StepPlan(rows[:1], new), StepPlan(rows)
    first, draft_runner = runner.submit(small), runner.submit(large)
    now = 1.0
    tokens[SlotId(0)] += first.wait().rows[0].tokens
    assert timed == [1.0]
    third = runner.submit(StepPlan(rows[:1]))
    now = 4.0
    for row, result in zip(rows, draft_runner.wait().rows, strict=True):
        tokens[row.slot] += result.tokens
    third.wait()
    assert timed == [1.0]
    assert proposer._slots[SlotId(0)]._tokens == [5, 6, 0, 0, 0]
    assert proposer._unread[SlotId(1)] == [8, 0]


@pytest.mark.parametrize(("joining", "guesses"), [(0, True), (1, False)])
def test_nobody_guesses_for_a_step_that_will_have_too_many_rows(
    joining: int, guesses: bool
) -> None:
    some = StepCosts({1: 1.0, 2: 1.0})
    judge = governor.Governor(some, 100, most_of=lambda rows: 4 * (rows == 1))
    tokens = {SlotId(0): [0, 0, 0]}
    runner = Speculation(Counting(), NgramProposer(1, 2, 4), judge, lambda: tokens)
    new = SlotInit("a", SlotId(0), [0, 0, 0], 3, SamplingParams(), frozenset(), 0)
    row = Row("a", SlotId(0), 0, 3, (0, 0, 0), (), True)
    result = runner.run(StepPlan([row], [new], num_pending_admissions=joining)).rows[0]
    assert bool(result.drafts) == guesses


def test_the_start_up_table_says_what_guesses_and_what_it_costs(folder: Path) -> None:
    chosen = {c.what: c for c in make(folder, spec="ngram", spec_tokens=5).report.choices}
    assert chosen["speculation"].value == "ngram, up to 5 guesses, 2 to 4 tokens alike"
    assert "ms" in chosen["speculation"].reason


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"spec": "ngram", "spec_tokens": 0}, "between 1 and 64, got 0"),
        ({"spec": "ngram", "spec_tokens": 1000}, "between 1 and 64, got 1000"),
        ({"spec": "ngram", "spec_ngram_min": 5}, "there is no length"),
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
def test_settings_that_cannot_be_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        EngineConfig.of(**options)
