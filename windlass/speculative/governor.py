"""How many draft tokens of each request go into the next step: as many as make the batch faster.

Pure Python with no clock of its own. It is given tables of what steps and drafting cost, then what
each step took and how many draft tokens were accepted. It compares expected tokens per second with
and without drafts; while none pay, steps are plain ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

from windlass.config import MAX_SPEC_TOKENS
from windlass.core.types import SlotId
from windlass.speculative.base import Draft
from windlass.speculative.budget import Budget
from windlass.speculative.costs import Drafting, StepCosts
from windlass.speculative.learned import LearnedCosts
from windlass.speculative.pause import Lengths, Pause

_FADE = 0.9  # evidence of one request: about the last ten verifications count
_FADE_ALL = 0.98  # evidence of all requests, by kind of draft
_WEIGHT = 2.0  # verifications that an expectation counts for
_WEIGHT_ALL = 4.0  # and the first expectation for all requests
_HOPE = 0.8  # acceptance of a kind of draft of which nothing is known yet
_MARGIN = 1.01  # the least expected gain: costs and chances are estimates
# With many requests: those with good drafts end early, and the rest go on in smaller steps that
# cost more per token.
_MARGIN_OF_MANY = 1.2
_STAY = 0.97  # hysteresis: the draft length stays while its rate is within 3 % of the best
_ASKED = 32  # requests whose records decide the draft length, and that try at once
_FEW = 8  # requests: more are many
# While every step has drafts, one of so many is a plain one, so that its time is known.
_PLAIN_EVERY, _PLAIN_STEPS = 64, 3


Backlog = Callable[[Sequence[SlotId]], Sequence[int]]


@dataclass(frozen=True, slots=True)
class _Pauses:
    """Lengths of pauses between looks, and between trials of one request."""

    looks: Lengths
    own_tries: Lengths


_OF_MANY = _Pauses(Lengths(16, 16, 512), Lengths(1, 16, 512))
_OF_FEW = _Pauses(Lengths(16, 16, 64), Lengths(1, 16, 512))
_OF_FEW_FREE = _Pauses(Lengths(16, 8, 8), Lengths(1, 16, 128))


@dataclass(frozen=True, slots=True)
class StepTime:
    """What a step without prompt tokens took."""

    num_rows: int
    num_tokens: int  # that it computed
    num_sampled: int  # that came out of it
    has_drafts: bool  # whether it verified any
    depth: int  # draft tokens made for each row after it, or in it
    step_s: float
    draft_s: float | None = 0.0  # None: drafts were made in the step


@dataclass(slots=True)
class _Record:
    """How the guesses of one request did. Counts fade, so that the latest matter most."""

    hits: list[float] = field(default_factory=list)  # by position
    tries: list[float] = field(default_factory=list)
    pause: Pause = field(default_factory=Pause)  # of its tries
    trying: bool = False  # whether its guess in flight is one

    def chances(self, expected: float, count: int) -> list[float]:
        """The chance that the guess at each position is reached and right."""
        rate, reached, chances = expected, 1.0, []
        for at in range(count):
            if at < len(self.tries):
                rate = (self.hits[at] + _WEIGHT * rate) / (self.tries[at] + _WEIGHT)
            reached *= rate
            chances.append(reached)
        return chances

    def note(self, num_drafts: int, num_accepted: int) -> None:
        missing = num_drafts - len(self.tries)
        self.hits += [0.0] * missing
        self.tries += [0.0] * missing
        for at in range(min(num_accepted + 1, num_drafts)):
            self.tries[at] = _FADE * self.tries[at] + 1
            self.hits[at] = _FADE * self.hits[at] + (at < num_accepted)

    def begin_anew(self) -> None:
        self.hits, self.tries = [], []

    def guesses(self, now: int, lengths: Lengths, trying: bool) -> None:
        """Its guesses go into the next step, because they promise something or as a try."""
        if not trying:
            self.pause.begin_anew()
        self.pause.in_vain(now, lengths)
        self.trying = trying


class Governor:
    """Owns the records of all slots, the learned costs, and the credit for trials.

    Drafts that pay by what is known are verified in every step. Where none do, two things happen
    now and then. A look asks the proposer for drafts, or first whether drafting would pay; looks in
    vain are followed by growing pauses (pause.py). A trial lets requests verify drafts that promise
    too little, since only that shows what they are worth now. It needs a look, enough credit for
    what it may lose, and that the request's own pause is over. Pauses are as at first again when
    drafts pay. Looks also start anew when half of the requests are gone, and, where they are free
    and there are few, with each new request.
    """

    def __init__(
        self,
        costs: StepCosts,
        max_positions_per_step: int,
        plain: StepCosts | None = None,
        drafting: Drafting | None = None,
        max_draft_tokens: int = MAX_SPEC_TOKENS,
        most_of: Callable[[int], int] | None = None,
    ) -> None:
        """A step can sample `max_positions_per_step`; one of n rows has room for `most_of(n)` drafts in each.

        `plain` are the costs of steps that carry no drafts, where these are cheaper; `drafting`
        those of drafting, where that is not free.
        """
        self._costs = LearnedCosts(costs, plain or costs, drafting)
        self._is_free = drafting is None
        self._most_guesses = max_draft_tokens
        self._most_positions = max_positions_per_step
        self._most_of = cache(most_of or (lambda _: max_draft_tokens))  # asked several times a step
        self._now = 0  # steps so far
        self._looks = Pause()
        self._pauses = _OF_MANY
        self._budget = Budget()
        self._left_out: set[SlotId] = set()  # requests whose prompts a draft model may not compute
        self._plain_at = 0  # the last step whose time was that of a plain one
        self._rows_then = 0  # at the last look
        self._slots: dict[SlotId, _Record] = {}
        self._last_kind = 0
        self._kinds: dict[int, tuple[float, float]] = {}  # first drafts: accepted, verified
        self._last_depth = 0
        self._is_trial = False  # whether the latest drafts were made for a trial

    @property
    def disagreement(self) -> float:
        """The largest factor between observed costs and the tables; 1: none."""
        return self._costs.disagreement

    def admit(self, slot: SlotId) -> None:
        record = self._slots[slot] = _Record()
        # Its first draft is no trial.
        record.pause.in_vain(self._now, self._pauses.own_tries)
        if self._pauses is _OF_FEW_FREE:
            self._looks.begin_anew()

    def forget(self, slot: SlotId) -> None:
        self._slots.pop(slot, None)

    def allows(self, num_rows: int) -> bool:
        """Whether a step of so many rows may have drafts at all."""
        return self._most_of(num_rows) > 0

    def rests(self, num_rows: int) -> bool:
        """Whether the next step is part of a pause; then it has passed, and nothing is to be asked."""
        if 2 * num_rows <= self._rows_then or self._looks.is_over(self._now + 1):
            return False
        self._pass_step()
        return True

    def _pass_step(self) -> None:
        self._now += 1
        self._budget.pass_step()

    def wanted(self, slots: Sequence[SlotId], free: bool, backlog: Backlog | None = None) -> int:
        """How many draft tokens to make for each of these requests after the next step.

        `backlog`: how many tokens of each a draft model has to compute before. This or `rests` is
        called once a step, which is how time passes here.
        """
        self._pass_step()
        num_rows = len(slots)
        if not self.allows(num_rows):
            return 0
        if 2 * num_rows <= self._rows_then:
            self._looks.begin_anew()
        if not self._looks.is_over(self._now):
            return 0
        self._rows_then = num_rows
        few = _OF_FEW_FREE if free else _OF_FEW
        self._pauses = few if num_rows <= _FEW else _OF_MANY
        if backlog is not None:
            self._leave_out(slots, backlog)
        records = self._records(slots)
        if not records:
            self._looks.in_vain(self._now, self._pauses.looks)
            return 0
        depth, pays = self._depth(num_rows, records)
        self._is_trial = not pays
        if pays:
            return 0 if self._is_plain_due() else depth
        while depth > 1 and not self._may_try(num_rows, num_rows * (1 + depth), depth):
            depth -= 1
        if self._may_try(num_rows, num_rows * (1 + depth), depth):
            # Requests that began a moment ago may try soon: until then this was no look.
            return depth if any(record.pause.is_over(self._now) for record in records) else 0
        self._looks.in_vain(self._now, self._pauses.looks)
        return 0

    def _is_plain_due(self) -> bool:
        """Whether the next step should be a plain one; given up where none of a few can be timed."""
        since = self._now - self._plain_at
        if since >= _PLAIN_EVERY + _PLAIN_STEPS:
            self._plain_at = self._now
            return False
        return since >= _PLAIN_EVERY

    def _may_try(self, num_rows: int, num_tokens: int, depth: int) -> bool:
        """Whether there is credit for such a step, were no draft accepted."""
        seconds = self._costs.verify_s(num_rows, num_tokens) + self._costs.draft_s(num_rows, depth)
        loss = seconds / self._costs.plain_s(num_rows) - 1
        return self._budget.allows_trial(loss)

    def is_hopeless(self, num_rows: int) -> bool:
        """Whether drafting costs so much that it would not pay if all drafts were accepted."""
        most = min(self._most_guesses, self._most_of(num_rows))
        if self._is_free or not most:
            return False
        highest = max(self._rate(num_rows, depth, 1.0 + depth) for depth in range(1, most + 1))
        return highest < self._least(num_rows)

    def _rate(self, num_rows: int, depth: int, tokens: float) -> float:
        """Tokens of a row per second, where each step verifies and makes `depth` draft tokens."""
        costs = self._costs
        seconds = costs.verify_s(num_rows, num_rows * (1 + depth)) + costs.draft_s(num_rows, depth)
        return tokens / seconds

    def _least(self, num_rows: int) -> float:
        """What drafts must promise: tokens of a row per second."""
        return _margin(num_rows) / self._costs.plain_s(num_rows)

    def _records(self, slots: Sequence[SlotId]) -> list[_Record]:
        """Of as many requests as are asked, and may have drafts."""
        found = [slot for slot in slots[:_ASKED] if slot in self._slots]
        return [self._slots[slot] for slot in found if self.may_draft(slot)]

    def may_draft(self, slot: SlotId) -> bool:
        """Whether drafts are to be made for a request, where `wanted` was not 0."""
        return slot not in self._left_out

    def _leave_out(self, slots: Sequence[SlotId], backlog: Backlog) -> None:
        """Leave out requests with so many tokens for a draft model to compute first that drafts
        would have to earn more than the budget has left.
        """
        self._left_out.clear()
        spent, plain_s = 0.0, self._costs.plain_s(len(slots))
        for slot, num_tokens in zip(slots, backlog(slots), strict=True):
            cost = self._costs.prompt_s(num_tokens) / plain_s
            spent += cost
            # Less than a plain step is what plain steps in between leave to compute.
            if cost > 1.0 and not self._budget.allows_prompts(spent):
                self._left_out.add(slot)
                spent -= cost

    def _depth(self, num_rows: int, records: Sequence[_Record]) -> tuple[int, bool]:
        """The draft length with the highest rate, at least one, and whether it would pay.

        The drafts are not made yet, and making them may cost more than they give.
        """
        most = min(self._most_guesses, self._most_of(num_rows))
        if self._is_free:
            return most, True
        expected = self._expected(self._last_kind)
        hopes = [record.chances(expected, most) for record in records]
        tokens, rates = 1.0, {}
        for depth in range(1, most + 1):
            tokens += sum(hope[depth - 1] for hope in hopes) / len(hopes)
            rates[depth] = self._rate(num_rows, depth, tokens)
        best = max(rates, key=rates.__getitem__)
        highest = rates[best]
        # A step that follows another of its kind may be launched before it is planned.
        if rates.get(self._last_depth, 0.0) > _STAY * highest:
            best = self._last_depth
        self._last_depth = best
        return best, highest > self._least(num_rows)

    def took(self, step: StepTime) -> None:
        """Learn from what a step took."""
        rows, costs = step.num_rows, self._costs
        depth = 0 if self._is_free else step.depth
        if not step.has_drafts and not depth:
            if costs.observe_plain(rows, step.step_s):
                self._plain_at = self._now
            return
        if depth and step.draft_s is None:
            sure = costs.observe_both(rows, step.num_tokens, depth, step.step_s)
        else:
            sure = costs.observe_verify(rows, step.num_tokens, step.step_s)
            if depth and step.draft_s:
                sure = costs.observe_draft(rows, depth, step.draft_s) and sure
        if sure:
            seconds = step.step_s + (step.draft_s or 0.0)
            self._budget.gain(step.num_sampled / rows - seconds / costs.plain_s(rows))
        else:  # Has the machine changed its speed? A plain step will show.
            self._plain_at = min(self._plain_at, self._now - _PLAIN_EVERY)

    def caught_up(self, num_rows: int, num_tokens: int, depth: int, seconds: float) -> None:
        """A draft model computed so many tokens that it lacked, and made `depth` draft tokens for
        each row, in so many seconds.
        """
        costs = self._costs
        plain_s, draft_s = costs.plain_s(num_rows), costs.draft_s(num_rows, depth)
        costs.observe_prompt(num_tokens, seconds - draft_s)
        self._budget.gain(-draft_s / plain_s)
        self._budget.pay_prompt(max(0.0, seconds - draft_s) / plain_s)

    def verified(self, slot: SlotId, kind: int, num_drafts: int, num_accepted: int) -> None:
        """So many of a request's draft tokens were accepted."""
        record = self._slots[slot]
        right = num_accepted > 0
        hits, tries = self._kinds.get(kind, (0.0, 0.0))
        self._kinds[kind] = (_FADE_ALL * hits + right, _FADE_ALL * tries + 1)
        self._last_kind = kind
        if record.trying and right:
            record.begin_anew()
            record.pause.begin_anew()
            self._looks.end(self._now)
        record.trying = False
        record.note(num_drafts, num_accepted)

    def choose(
        self, slots: Sequence[SlotId], drafts: Sequence[Draft], prompt_tokens: int
    ) -> list[int]:
        """How many tokens of each draft to verify. `prompt_tokens`: prompt tokens of the next step."""
        if all(draft.begun for draft in drafts):  # costs nothing more
            counts = [len(draft.tokens) for draft in drafts]
        else:
            counts = self._most_promising(slots, drafts, prompt_tokens)
        if any(counts):
            self._looks.begin_anew()
        else:
            self._looks.in_vain(self._now, self._pauses.looks)
        self._let_some_try(slots, drafts, counts)
        return counts

    def _most_promising(
        self, slots: Sequence[SlotId], drafts: Sequence[Draft], prompt_tokens: int
    ) -> list[int]:
        """How many tokens of each draft give the most tokens per second.

        Chances fall from token to token, so the best so many tokens of the batch are the first
        few of each request, and one pass over them in order of chance finds the best number.
        """
        counts = [0] * len(drafts)
        offers, widest = [], self._most_of(len(drafts))
        for i, (slot, draft) in enumerate(zip(slots, drafts, strict=True)):
            if draft.tokens:
                expected = self._expected(draft.kind)
                count = min(len(draft.tokens), widest)
                chances = self._slots[slot].chances(expected, count)
                offers += [(chance, i) for chance in chances]
        if not offers:
            return counts
        offers.sort(key=lambda offer: -offer[0])
        room = max(0, self._most_positions - len(drafts))
        depth = max(len(draft.tokens) for draft in drafts)
        likeliest = [chance for chance, _ in offers[:room]]
        for _, i in offers[: self._best_number(likeliest, len(drafts), prompt_tokens, depth)]:
            counts[i] += 1
        return counts

    def _let_some_try(
        self, slots: Sequence[SlotId], drafts: Sequence[Draft], counts: list[int]
    ) -> None:
        """Add trials to the drafts that promise something: one token each where drafting is free,
        else what was drafted, at the length that loses the least.
        """
        num_rows, own_tries = len(slots), self._pauses.own_tries
        room = self._most_positions - num_rows - sum(counts)
        num_trials = 0
        for i, (slot, draft) in enumerate(zip(slots, drafts, strict=True)):
            record = self._slots[slot]
            if counts[i]:
                record.guesses(self._now, own_tries, trying=False)
                continue
            if not draft.tokens or num_trials == _ASKED or not record.pause.is_over(self._now):
                continue
            count = 1 if self._is_free else min(len(draft.tokens), self._most_of(num_rows))
            num_tokens = num_rows + sum(counts) + count
            allowed = self._is_trial or self._may_try(num_rows, num_tokens, depth=0)
            if count <= room and allowed:
                record.guesses(self._now, own_tries, trying=True)
                counts[i], room, num_trials = count, room - count, num_trials + 1

    def _expected(self, kind: int) -> float:
        """The chance of a draft token before anything is known of its request."""
        hits, tries = self._kinds.get(kind, (0.0, 0.0))
        return (hits + _WEIGHT_ALL * _HOPE) / (tries + _WEIGHT_ALL)

    def _best_number(
        self, chances: Sequence[float], num_rows: int, prompt_tokens: int, depth: int
    ) -> int:
        """How many draft tokens, the likeliest first, give the most tokens per second, prompts
        included.
        """
        base, costs = num_rows + prompt_tokens, self._costs
        drafting = costs.draft_s(num_rows, depth)
        most = _margin(num_rows) * base / costs.plain_s(num_rows, base)
        best, tokens = 0, float(base)
        for count, chance in enumerate(chances, start=1):
            tokens += chance
            rate = tokens / (costs.verify_s(num_rows, base + count) + drafting)
            if rate > most:
                best, most = count, rate
        return best


def _margin(num_rows: int) -> float:
    return _MARGIN if num_rows <= _FEW else _MARGIN_OF_MANY
