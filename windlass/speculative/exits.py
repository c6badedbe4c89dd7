"""Which layer to leave at: measured on the model's own answers, once for a machine and a model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from windlass.core.sampling import SamplingParams
from windlass.core.types import BlockId, Row, SlotId, SlotInit, StepPlan
from windlass.models.card import load_card
from windlass.runner.assemble import Assembled
from windlass.speculative.base import SpeculationContext
from windlass.speculative.costs import StepCosts
from windlass.speculative.speculation import Submits

_TEXTS = (
    "Here is a short story about a lighthouse keeper and the ship that came back:\n\n",
    "def median(values):\n    ",
    "Question: Why does bread rise when it is baked?\nAnswer:",
    "The meeting was moved to Thursday, since two of the members are away. Please note that",
)
_SHARES = (0.25, 1 / 3, 0.5, 2 / 3, 0.75)  # of the layers
_LENGTH = 32  # tokens of each answer
_REPEATS = 5
_ROWS = 32  # at once
_LEAST_GAIN = 0.9

Tried = tuple[int, Submits]  # a layer, and what leaves there


@dataclass(frozen=True, slots=True)
class Exit:
    """A layer to leave at, and why this one."""

    layer: int
    reason: str
    gain: float = 1.0  # times the speed without guesses that is hoped for

    @property
    def pays(self) -> bool:
        """Whether a text that is easier than those it was measured on might gain by it."""
        return self.gain >= _LEAST_GAIN


@dataclass(frozen=True, slots=True)
class _Answer:
    """A text that the target has gone on with; its keys and values are in the pages."""

    slot: SlotId
    tokens: list[int]
    num_prompt: int
    blocks: tuple[BlockId, ...]

    @property
    def admission(self) -> SlotInit:
        wish = SamplingParams(temperature=0.0)
        return SlotInit("", self.slot, self.tokens, self.num_prompt, wish, frozenset(), 0)


def candidates(num_layers: int) -> list[int]:
    """Layers worth a try: from a quarter of them to three."""
    return sorted({min(max(1, round(share * num_layers)), num_layers - 1) for share in _SHARES})


def best_exit(
    context: SpeculationContext,
    made: Assembled,
    make: Callable[[Assembled, int], Iterable[Tried]],
    clock: Callable[[], float] = time.perf_counter,
) -> Exit:
    """The exit with the most expected tokens per second, or what an earlier start found.

    Uses the first slots and blocks: nobody has them yet.
    """
    known = _remembered(context.notes.of("exit"), context.hparams.num_layers)
    if known is not None:
        return known
    most = context.config.speculation.max_draft_tokens
    most_rows = min(context.limits.max_num_seqs, _ROWS)
    answers = _answers(context, made, most_rows)
    if not answers:
        return Exit(context.hparams.num_layers // 2, "half of them: there is no room to measure")
    target = _target_costs(made.runner, answers[0], most, clock)
    plain, best, highest = 1 / target.of(1), Exit(0, ""), 0.0
    for layer, runner in make(made, most_rows):
        alike = _alike(runner, answers, most_rows)
        seconds = _seconds(runner, [_row(answers[0], 0)], clock)
        rate, count = _expected(alike, seconds, target, most)
        if rate > highest:
            highest = rate
            gain = f"{rate / plain:.2f} times the speed with {count}"
            reason = f"{alike:.0%} alike, {1000 * seconds:.1f} ms a guess, hoped for: {gain}"
            best = Exit(layer, reason, rate / plain)
    context.notes.note("exit", [best.layer, best.reason, best.gain])
    return best


def _remembered(found: Any, num_layers: int) -> Exit | None:
    try:
        layer, reason, gain = found
        best = Exit(int(layer), str(reason), float(gain))
        return best if 1 <= best.layer < num_layers else None
    except (TypeError, ValueError):
        return None


def _expected(alike: float, seconds: float, target: StepCosts, most: int) -> tuple[float, int]:
    """Tokens per second at the best number of guesses, and this number."""
    best, tokens, chance = (0.0, 0), 1.0, 1.0
    for count in range(1, most + 1):
        chance *= alike
        tokens += chance
        best = max(best, (tokens / (count * seconds + target.of(1 + count)), count))
    return best


# ---- steps -------------------------------------------------------------------------------------


def _answers(context: SpeculationContext, made: Assembled, most_rows: int) -> list[_Answer]:
    """What the target says to each text, greedily; as many texts as there is room for."""
    tokenizer = load_card(context.files, context.config.model).tokenizer
    size, free = made.capacity.block_size, made.capacity.num_blocks
    answers: list[_Answer] = []
    for text in _TEXTS[:most_rows]:
        tokens = tokenizer.encode(text)
        end = len(tokens) + _LENGTH
        count = -(-end // size)
        if not tokens or end > made.max_model_len or count > free:
            continue
        blocks = tuple(BlockId(free - 1 - i) for i in range(count))
        free -= count
        answers.append(_Answer(SlotId(len(answers)), tokens, len(tokens), blocks))
    for answer in answers:
        _go_on(made.runner, answer)
    return answers


def _go_on(runner: Submits, answer: _Answer) -> None:
    count = len(answer.tokens)
    row = Row("", answer.slot, 0, count, tuple(answer.tokens), answer.blocks, True)
    plan = StepPlan([row], [answer.admission], [answer.slot])
    for _ in range(_LENGTH):
        answer.tokens.extend(runner.submit(plan).wait().rows[0].tokens)
        plan = StepPlan([_row(answer, len(answer.tokens) - 1)])


def _row(answer: _Answer, at: int) -> Row:
    return Row("", answer.slot, at, 1, (answer.tokens[at],), (), True)


def _alike(runner: Submits, answers: Sequence[_Answer], most_rows: int) -> float:
    """How often what leaves early says the target's next token, the right ones before it given.

    A row for every place: the pages have all keys and values before it already.
    """
    rows = [
        (_row(answer, at), answer.tokens[at + 1])
        for answer in answers
        for at in range(answer.num_prompt - 1, len(answer.tokens) - 1)
    ]
    tables = [_row(answer, 0)._replace(blocks=answer.blocks) for answer in answers]
    runner.submit(StepPlan(tables, [answer.admission for answer in answers])).wait()
    right = 0
    for first in range(0, len(rows), most_rows):
        some = rows[first : first + most_rows]
        results = runner.submit(StepPlan([row for row, _ in some])).wait().rows
        pairs = zip(results, some, strict=True)
        right += sum(result.tokens[0] == truth for result, (_, truth) in pairs)
    return right / len(rows)


def _target_costs(
    runner: Submits, answer: _Answer, most: int, clock: Callable[[], float]
) -> StepCosts:
    most = min(most, len(answer.tokens) - 1)
    seconds = {}
    for count in sorted({0, 1, most // 2, most}):
        tokens = tuple(answer.tokens[: 1 + count])
        row = _row(answer, 0)._replace(num_tokens=1 + count, tokens=tokens, num_drafts=count)
        seconds[1 + count] = _seconds(runner, [row], clock)
    return StepCosts(seconds)


def _seconds(runner: Submits, rows: list[Row], clock: Callable[[], float]) -> float:
    """The best time of a step that is run a few times."""
    times = []
    for _ in range(_REPEATS):
        start = clock()
        runner.submit(StepPlan(rows)).wait()
        times.append(clock() - start)
    return min(times)
