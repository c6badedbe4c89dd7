"""Chooses the exit layer: measured on the model's own answers, once per machine and model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from windlass.core.speculation.costs import StepCosts
from windlass.core.types import BlockId, Row, SlotId, SlotInit, StepPlan
from windlass.models.card import load_card
from windlass.runner.assemble import Assembled
from windlass.speculative.base import SpeculationContext, Submits

_TEXTS = (
    "Here is a short story about a lighthouse keeper and the ship that came back:\n\n",
    "def median(values):\n    ",
    "Question: Why does bread rise when it is baked?\nAnswer:",
    "The meeting was moved to Thursday, since two of the members are away. Please note that",
)
_FRACTIONS = (0.25, 1 / 3, 0.5, 2 / 3, 0.75)  # of the layers
_LENGTH = 32  # tokens of each answer
_REPEATS = 5
_MAX_ROWS = 32
_MIN_GAIN = 0.9

Candidate = tuple[int, Submits]  # a layer, and a runner that exits there


@dataclass(frozen=True, slots=True)
class ExitLayer:
    """The chosen exit layer, with the reason."""

    layer: int
    reason: str
    gain: float = 1.0  # expected speed relative to plain steps

    @property
    def may_pay(self) -> bool:
        """Whether drafting could pay on texts that are easier to predict than the measured ones."""
        return self.gain >= _MIN_GAIN


@dataclass(frozen=True, slots=True)
class _Answer:
    """A text with the target's continuation, whose keys and values are in the KV cache."""

    slot: SlotId
    tokens: list[int]
    num_prompt: int
    blocks: tuple[BlockId, ...]

    @property
    def init(self) -> SlotInit:
        return SlotInit.greedy(self.slot, self.tokens, num_prompt=self.num_prompt)


def candidate_layers(num_layers: int) -> list[int]:
    """Exit layers to measure: from a quarter to three quarters of the layers."""
    return sorted({min(max(1, round(part * num_layers)), num_layers - 1) for part in _FRACTIONS})


def choose_exit(
    context: SpeculationContext,
    made: Assembled,
    make: Callable[[Assembled, int], Iterable[Candidate]],
) -> ExitLayer:
    """The exit with the most expected tokens per second, or the cached one of an earlier start.

    Uses the first slots and blocks, which no request has yet.
    """
    known = _from_json(context.cache.get("exit"), context.hparams.num_layers)
    if known is not None:
        return known
    max_draft_tokens = context.config.speculation.max_draft_tokens
    max_rows = min(context.limits.max_num_seqs, _MAX_ROWS)
    answers = _answers(context, made, max_rows)
    if not answers:
        half = context.hparams.num_layers // 2
        return ExitLayer(half, "half of them: there is no room to measure")
    target = _target_costs(made.runner, answers[0], max_draft_tokens)
    plain, best, highest = 1 / target.of(1), ExitLayer(0, ""), 0.0
    for layer, runner in make(made, max_rows):
        agreement = _agreement(runner, answers, max_rows)
        seconds = _seconds(runner, [_row(answers[0], 0)])
        rate, length = _expected_rate(
            agreement, seconds, target=target, max_draft_tokens=max_draft_tokens
        )
        if rate > highest:
            highest = rate
            reason = (
                f"{agreement:.0%} agreement, {1000 * seconds:.1f} ms per draft token, expected: "
                f"{rate / plain:.2f} times the speed with {length}"
            )
            best = ExitLayer(layer, reason, rate / plain)
    context.cache.put("exit", [best.layer, best.reason, best.gain])
    return best


def _from_json(found: Any, num_layers: int) -> ExitLayer | None:
    try:
        layer, reason, gain = found
        best = ExitLayer(int(layer), str(reason), float(gain))
        return best if 1 <= best.layer < num_layers else None
    except (TypeError, ValueError):
        return None


def _expected_rate(
    agreement: float, seconds: float, *, target: StepCosts, max_draft_tokens: int
) -> tuple[float, int]:
    """The expected tokens per second at the best draft length, and this length."""
    best, tokens, chance = (0.0, 0), 1.0, 1.0
    for count in range(1, max_draft_tokens + 1):
        chance *= agreement
        tokens += chance
        best = max(best, (tokens / (count * seconds + target.of(1 + count)), count))
    return best


# ---- steps -------------------------------------------------------------------------------------


def _answers(context: SpeculationContext, made: Assembled, max_rows: int) -> list[_Answer]:
    """The target's greedy answers to the texts that fit."""
    tokenizer = load_card(context.files, context.config.model).tokenizer
    size, free = made.capacity.block_size, made.capacity.num_blocks
    answers: list[_Answer] = []
    for text in _TEXTS[:max_rows]:
        tokens = tokenizer.encode(text)
        end = len(tokens) + _LENGTH
        count = -(-end // size)
        if not tokens or end > made.max_model_len or count > free:
            continue
        blocks = tuple(BlockId(free - 1 - i) for i in range(count))
        free -= count
        slot = SlotId(len(answers))
        answers.append(_Answer(slot=slot, tokens=tokens, num_prompt=len(tokens), blocks=blocks))
    for answer in answers:
        _generate(made.runner, answer)
    return answers


def _generate(runner: Submits, answer: _Answer) -> None:
    row = Row.unowned(answer.slot, tuple(answer.tokens), blocks=answer.blocks)
    plan = StepPlan([row], [answer.init], [answer.slot])
    for _ in range(_LENGTH):
        answer.tokens.extend(runner.submit(plan).wait().rows[0].tokens)
        plan = StepPlan([_row(answer, len(answer.tokens) - 1)])


def _row(answer: _Answer, at: int) -> Row:
    return Row.unowned(answer.slot, (answer.tokens[at],), start=at)


def _agreement(runner: Submits, answers: Sequence[_Answer], max_rows: int) -> float:
    """The share of positions where the exit predicts the target's next token, given its prefix.

    One row per position: the KV cache has all keys and values before it already.
    """
    rows = [
        (_row(answer, at), answer.tokens[at + 1])
        for answer in answers
        for at in range(answer.num_prompt - 1, len(answer.tokens) - 1)
    ]
    tables = [_row(answer, 0)._replace(blocks=answer.blocks) for answer in answers]
    runner.submit(StepPlan(tables, [answer.init for answer in answers])).wait()
    num_equal = 0
    for first in range(0, len(rows), max_rows):
        some = rows[first : first + max_rows]
        results = runner.submit(StepPlan([row for row, _ in some])).wait().rows
        pairs = zip(results, some, strict=True)
        num_equal += sum(result.tokens[0] == truth for result, (_, truth) in pairs)
    return num_equal / len(rows)


def _target_costs(runner: Submits, answer: _Answer, max_draft_tokens: int) -> StepCosts:
    longest = min(max_draft_tokens, len(answer.tokens) - 1)
    seconds = {}
    for count in sorted({0, 1, longest // 2, longest}):
        tokens = tuple(answer.tokens[: 1 + count])
        row = _row(answer, 0)._replace(num_tokens=1 + count, tokens=tokens, num_drafts=count)
        seconds[1 + count] = _seconds(runner, [row])
    return StepCosts(seconds)


def _seconds(runner: Submits, rows: list[Row]) -> float:
    """The best time of a few runs of a step."""
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        runner.submit(StepPlan(rows)).wait()
        times.append(time.perf_counter() - start)
    return min(times)
