"""Decides how many draft tokens of each request the next step verifies, for the highest throughput.

Pure Python with no clock of its own. It gets tables of step and drafting costs, then the time of
each step and the number of accepted draft tokens. It compares expected tokens per second with and
without drafts; while no drafts are profitable, steps are plain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from windlass.config import MAX_SPEC_TOKENS
from windlass.core.speculation.backoff import Backoff, BackoffSchedule
from windlass.core.speculation.budget import Budget
from windlass.core.speculation.costs import FEW, DraftCosts, StepCosts, margin
from windlass.core.speculation.learned import LearnedCosts
from windlass.core.types import Draft, SlotId

# Each constant was chosen with the simulations of tests/speculative/test_wrong_costs.py and
# test_never_slower.py. A percentage is the mean change of the speed in 59 such worlds.
_DECAY = 0.9  # evidence of one request. 1 (no decay): -0.2 %, -13 % where acceptance returns late
_DECAY_ALL = 0.98  # evidence of all requests, by kind of draft. 0.9: -0.6 %
_PRIOR_WEIGHT = 2.0  # verifications that the prior of a request counts for. 4: -0.1 %, worst -25 %
_PRIOR_WEIGHT_ALL = 4.0  # verifications that the prior of a kind counts for. 2: -0.1 %, worst -7 %
# Acceptance of a kind of draft without evidence. 1: drafts look profitable at twice their cost
# (test_governor.py); 0.5: -0.2 %, worst -13 %.
_PRIOR_ACCEPTANCE = 0.8
# Keep the draft length while its rate is within 3 % of the best: -0.2 % without. On CUDA a step of
# the same shape as the last one can also be pre-launched, which no simulation includes.
_HYSTERESIS = 0.97
# Requests whose records decide the draft length; also trials per step. No simulation needs a limit:
# it bounds the host's work for large batches.
_MAX_SAMPLED = 32
# While every step has drafts, one step in 64 is plain, so that the cost of plain steps stays known; a
# step that cannot be timed repeats twice. Without: 0.0 %, but up to -7 % for half-accepted drafts.
_PLAIN_EVERY, _PLAIN_STEPS = 64, 3


Backlog = Callable[[Sequence[SlotId]], Sequence[int]]


@dataclass(frozen=True, slots=True)
class _Schedules:
    """Back-off schedules of probes, and of the trials of one request."""

    probes: BackoffSchedule
    trials: BackoffSchedule


# With a patience of 1 for probes: -0.5 %, and -17 % for accepted drafts of n-grams.
_MANY_REQUESTS = _Schedules(
    probes=BackoffSchedule(patience=16, first=16, max_wait=512),
    trials=BackoffSchedule(patience=1, first=16, max_wait=512),
)
# With 512 for probes: -0.1 %, and -6 % where acceptance returns late.
_FEW_REQUESTS = _Schedules(
    probes=BackoffSchedule(patience=16, first=16, max_wait=64),
    trials=BackoffSchedule(patience=1, first=16, max_wait=512),
)
# With the probes of few requests: -0.06 %, and -4 % where acceptance returns late.
_FEW_REQUESTS_FREE = _Schedules(
    probes=BackoffSchedule(patience=16, first=8, max_wait=8),
    trials=BackoffSchedule(patience=1, first=16, max_wait=128),
)


@dataclass(frozen=True, slots=True)
class StepTime:
    """The measured time of a step without prompt tokens."""

    num_rows: int
    num_tokens: int  # computed
    num_sampled: int  # tokens that came out of the step
    has_drafts: bool  # whether it verified any
    draft_length: int  # draft tokens made for each row after it, or in it
    step_s: float
    draft_s: float | None = 0.0  # None: drafts were made in the step


@dataclass(slots=True)
class _Record:
    """Acceptance of one request's draft tokens. Counts decay, so recent steps matter most."""

    accepted: list[float] = field(default_factory=list)  # by position
    verified: list[float] = field(default_factory=list)
    backoff: Backoff = field(default_factory=Backoff)  # of its trials
    in_trial: bool = False  # whether its draft in flight is a trial

    def acceptance(self, prior: float, count: int) -> list[float]:
        """The probability, per position, that the draft token is reached and accepted."""
        rate, reached, found = prior, 1.0, []
        for at in range(count):
            if at < len(self.verified):
                rate = (self.accepted[at] + _PRIOR_WEIGHT * rate) / (
                    self.verified[at] + _PRIOR_WEIGHT
                )
            reached *= rate
            found.append(reached)
        return found

    def count(self, num_drafts: int, num_accepted: int) -> None:
        missing = num_drafts - len(self.verified)
        self.accepted += [0.0] * missing
        self.verified += [0.0] * missing
        for at in range(min(num_accepted + 1, num_drafts)):
            self.verified[at] = _DECAY * self.verified[at] + 1
            self.accepted[at] = _DECAY * self.accepted[at] + (at < num_accepted)

    def reset_counts(self) -> None:
        self.accepted, self.verified = [], []

    def drafts(self, now: int, schedule: BackoffSchedule, trial: bool) -> None:
        """Note that its draft goes into the next step, as a trial or because it is profitable."""
        if not trial:
            self.backoff.reset()
        self.backoff.failed(now, schedule)
        self.in_trial = trial


class Governor:
    """Owns the records of all slots, the learned costs, and the budget for trials.

    Drafts with enough expected gain are verified in every step. While there are none, two things
    happen from time to time. A probe asks the proposer for drafts, or, where drafting has a cost,
    first whether drafting would pay; failed probes back off (backoff.py). A trial lets requests
    verify drafts with too little expected gain, since only verification shows their current
    acceptance. It needs a probe, enough budget for its possible loss, and that the request's own
    back-off is over. Profitable drafts reset the back-off. Probes also restart when half of the
    requests are gone, and, where drafting is free and requests are few, with each new request.
    """

    def __init__(
        self,
        costs: StepCosts,
        max_positions_per_step: int,
        plain: StepCosts | None = None,
        drafting: DraftCosts | None = None,
        max_draft_tokens: int = MAX_SPEC_TOKENS,
        max_drafts_per_row: Sequence[int] = (),
    ) -> None:
        """A step can sample `max_positions_per_step`; each of n rows, `max_drafts_per_row[n]` drafts.

        More rows than the table has use its last entry; an empty table sets no limit.

        `plain`: costs of steps without drafts, where these are cheaper. `drafting`: costs of
        drafting; None: drafting is free.
        """
        self._costs = LearnedCosts(costs, plain or costs, drafting)
        self._is_free = drafting is None
        self._max_draft_tokens = max_draft_tokens
        self._cap = MAX_SPEC_TOKENS
        self._max_positions = max_positions_per_step
        self._max_drafts_per_row = tuple(max_drafts_per_row) or (max_draft_tokens,)
        self._now = 0  # steps so far
        self._probes = Backoff()
        self._schedules = _MANY_REQUESTS
        self._budget = Budget()
        self._excluded: set[SlotId] = set()  # requests whose prompts a draft model may not compute
        self._plain_at = 0  # the last step with the time of a plain step
        self._rows_at_probe = 0  # at the last probe
        self._slots: dict[SlotId, _Record] = {}
        self._last_kind = 0
        self._kinds: dict[int, tuple[float, float]] = {}  # first draft tokens: accepted, verified
        self._last_length = 0
        self._is_trial = False  # whether the latest drafts were made for a trial

    @property
    def disagreement(self) -> float:
        """The largest factor between observed costs and the tables; 1: none."""
        return self._costs.disagreement

    def admit(self, slot: SlotId) -> None:
        record = self._slots[slot] = _Record()
        # The first draft of a request is no trial.
        record.backoff.failed(self._now, self._schedules.trials)
        if self._schedules is _FEW_REQUESTS_FREE:
            self._probes.reset()

    def forget(self, slot: SlotId) -> None:
        self._slots.pop(slot, None)

    def allows(self, num_rows: int) -> bool:
        """Whether a step of `num_rows` may have drafts at all."""
        return self._max_drafts(num_rows) > 0

    def cap(self, max_draft_tokens: int | None) -> None:
        """Set the max draft tokens per row; 0: no drafts; None: as at construction."""
        self._cap = MAX_SPEC_TOKENS if max_draft_tokens is None else max_draft_tokens

    def _max_drafts(self, num_rows: int) -> int:
        table = self._max_drafts_per_row
        return min(table[min(num_rows, len(table) - 1)], self._cap)

    def pass_idle_step(self, num_rows: int) -> bool:
        """Whether probes back off in the next step; if so, it counts as passed."""
        if 2 * num_rows <= self._rows_at_probe or self._probes.is_due(self._now + 1):
            return False
        self._pass_step()
        return True

    def _pass_step(self) -> None:
        self._now += 1
        self._budget.pass_step()

    def draft_length(
        self, slots: Sequence[SlotId], free: bool, backlog: Backlog | None = None
    ) -> int:
        """The number of draft tokens to make for each of these requests after the next step.

        `backlog`: the number of tokens of each that a draft model computes first. Either this or
        `pass_idle_step` is called once per step, which advances the governor's step count.
        """
        self._pass_step()
        num_rows = len(slots)
        if not self.allows(num_rows):
            return 0
        if 2 * num_rows <= self._rows_at_probe:
            self._probes.reset()
        if not self._probes.is_due(self._now):
            return 0
        self._rows_at_probe = num_rows
        few = _FEW_REQUESTS_FREE if free else _FEW_REQUESTS
        self._schedules = few if num_rows <= FEW else _MANY_REQUESTS
        if backlog is not None:
            self._exclude(slots, backlog)
        records = self._records(slots)
        if not records:
            self._probes.failed(self._now, self._schedules.probes)
            return 0
        length, pays = self._best_length(num_rows, records)
        self._is_trial = not pays
        if pays:
            return 0 if self._is_plain_due() else length
        while length > 1 and not self._allows_trial(num_rows, num_rows * (1 + length), length):
            length -= 1
        if self._allows_trial(num_rows, num_rows * (1 + length), length):
            # Requests that started recently are due for a trial soon: until then this is no probe.
            return length if any(record.backoff.is_due(self._now) for record in records) else 0
        self._probes.failed(self._now, self._schedules.probes)
        return 0

    def _is_plain_due(self) -> bool:
        """Whether the next step should be plain; gives up when none of a few can be timed."""
        since = self._now - self._plain_at
        if since >= _PLAIN_EVERY + _PLAIN_STEPS:
            self._plain_at = self._now
            return False
        return since >= _PLAIN_EVERY

    def _allows_trial(self, num_rows: int, num_tokens: int, draft_length: int) -> bool:
        """Whether the budget covers such a step if every draft token is rejected."""
        costs = self._costs
        seconds = costs.verify_s(num_rows, num_tokens) + costs.draft_s(num_rows, draft_length)
        return self._budget.allows_trial(seconds / costs.plain_s(num_rows) - 1)

    def _rate(self, num_rows: int, draft_length: int, tokens: float) -> float:
        """Tokens per row and second if each step verifies and makes `draft_length` draft tokens."""
        costs = self._costs
        verify_s = costs.verify_s(num_rows, num_rows * (1 + draft_length))
        return tokens / (verify_s + costs.draft_s(num_rows, draft_length))

    def _min_rate(self, num_rows: int) -> float:
        """Tokens per row and second above which drafts are profitable."""
        return margin(num_rows) / self._costs.plain_s(num_rows)

    def _records(self, slots: Sequence[SlotId]) -> list[_Record]:
        """Records of the first requests that may have drafts."""
        found = [slot for slot in slots[:_MAX_SAMPLED] if slot in self._slots]
        return [self._slots[slot] for slot in found if slot not in self._excluded]

    @property
    def excluded(self) -> tuple[SlotId, ...]:
        """Requests without drafts, when `draft_length` was not 0."""
        return tuple(self._excluded)

    def _exclude(self, slots: Sequence[SlotId], backlog: Backlog) -> None:
        """Exclude requests whose backlog costs a draft model more than the budget covers."""
        self._excluded.clear()
        spent, plain_s = 0.0, self._costs.plain_s(len(slots))
        for slot, num_tokens in zip(slots, backlog(slots), strict=True):
            cost = self._costs.prompt_s(num_tokens) / plain_s
            spent += cost
            # Plain steps between drafts leave a backlog that costs less than one plain step.
            if cost > 1.0 and not self._budget.allows_prompts(spent):
                self._excluded.add(slot)
                spent -= cost

    def _best_length(self, num_rows: int, records: Sequence[_Record]) -> tuple[int, bool]:
        """The draft length with the highest rate, at least one, and whether it is profitable.

        The drafts do not exist yet, and making them may cost more than they gain.
        """
        longest = min(self._max_draft_tokens, self._max_drafts(num_rows))
        if self._is_free:
            return longest, True
        prior = self._prior(self._last_kind)
        expected = [record.acceptance(prior, longest) for record in records]
        tokens, rates = 1.0, {}
        for length in range(1, longest + 1):
            tokens += sum(each[length - 1] for each in expected) / len(expected)
            rates[length] = self._rate(num_rows, length, tokens)
        best = max(rates, key=rates.__getitem__)
        highest = rates[best]
        # A step of the same shape as the last one can be pre-launched.
        if rates.get(self._last_length, 0.0) > _HYSTERESIS * highest:
            best = self._last_length
        self._last_length = best
        return best, highest > self._min_rate(num_rows)

    def observe_step(self, step: StepTime) -> None:
        """Learn from the time of a step."""
        rows, costs = step.num_rows, self._costs
        length = 0 if self._is_free else step.draft_length
        if not step.has_drafts and not length:
            if costs.observe_plain(rows, step.step_s):
                self._plain_at = self._now
            return
        if length and step.draft_s is None:
            sure = costs.observe_both(
                num_rows=rows,
                num_tokens=step.num_tokens,
                draft_length=length,
                seconds=step.step_s,
            )
        else:
            sure = costs.observe_verify(rows, step.num_tokens, step.step_s)
            if length and step.draft_s:
                sure = costs.observe_draft(rows, length, step.draft_s) and sure
        if sure:
            seconds = step.step_s + (step.draft_s or 0.0)
            self._budget.gain(step.num_sampled / rows - seconds / costs.plain_s(rows))
        else:  # The machine may have changed its speed, which a plain step will show.
            self._plain_at = min(self._plain_at, self._now - _PLAIN_EVERY)

    def observe_catch_up(
        self, *, num_rows: int, num_tokens: int, draft_length: int, seconds: float
    ) -> None:
        """Learn from a draft model that computed a backlog of `num_tokens`, then drafted."""
        costs = self._costs
        plain_s, draft_s = costs.plain_s(num_rows), costs.draft_s(num_rows, draft_length)
        costs.observe_prompt(num_tokens, seconds - draft_s)
        self._budget.gain(-draft_s / plain_s)
        self._budget.pay_prompt(max(0.0, seconds - draft_s) / plain_s)

    def verified(self, slot: SlotId, kind: int, num_drafts: int, num_accepted: int) -> None:
        """Count the acceptance of one request's draft."""
        record = self._slots[slot]
        hit = num_accepted > 0
        accepted, verified = self._kinds.get(kind, (0.0, 0.0))
        self._kinds[kind] = (_DECAY_ALL * accepted + hit, _DECAY_ALL * verified + 1)
        self._last_kind = kind
        if record.in_trial and hit:
            record.reset_counts()
            record.backoff.reset()
            self._probes.end_wait(self._now)
        record.in_trial = False
        record.count(num_drafts, num_accepted)

    def choose(
        self,
        slots: Sequence[SlotId],
        drafts: Sequence[Draft],
        prompt_tokens: int,
        prelaunched: bool = False,
    ) -> list[int]:
        """The number of tokens of each draft to verify; the next step also has `prompt_tokens`.

        `prelaunched`: a step that verifies all of them already runs.
        """
        if prelaunched:  # the step already verifies all of them
            counts = [len(draft.tokens) for draft in drafts]
        else:
            counts = self._most_profitable(slots, drafts, prompt_tokens)
        if any(counts):
            self._probes.reset()
        else:
            self._probes.failed(self._now, self._schedules.probes)
        self._add_trials(slots, drafts, counts)
        return counts

    def _most_profitable(
        self, slots: Sequence[SlotId], drafts: Sequence[Draft], prompt_tokens: int
    ) -> list[int]:
        """The number of tokens of each draft that gives the most tokens per second.

        Acceptance falls from position to position, so the n likeliest draft tokens of the batch are
        the first few of each request. One pass in order of acceptance finds the best n.
        """
        counts = [0] * len(drafts)
        offers, widest = [], self._max_drafts(len(drafts))
        for i, (slot, draft) in enumerate(zip(slots, drafts, strict=True)):
            if draft.tokens:
                count = min(len(draft.tokens), widest)
                expected = self._slots[slot].acceptance(self._prior(draft.kind), count)
                offers += [(chance, i) for chance in expected]
        if not offers:
            return counts
        offers.sort(key=lambda offer: -offer[0])
        room = max(0, self._max_positions - len(drafts))
        length = max(len(draft.tokens) for draft in drafts)
        best = self._best_count(
            [chance for chance, _ in offers[:room]],
            num_rows=len(drafts),
            prompt_tokens=prompt_tokens,
            draft_length=length,
        )
        for _, i in offers[:best]:
            counts[i] += 1
        return counts

    def _add_trials(
        self, slots: Sequence[SlotId], drafts: Sequence[Draft], counts: list[int]
    ) -> None:
        """Add trials to the profitable drafts: one token each where drafting is free, else the
        whole draft, whose length was chosen to lose the least.
        """
        num_rows, schedule = len(slots), self._schedules.trials
        room = self._max_positions - num_rows - sum(counts)
        num_trials = 0
        for i, (slot, draft) in enumerate(zip(slots, drafts, strict=True)):
            record = self._slots[slot]
            if counts[i]:
                record.drafts(self._now, schedule, trial=False)
                continue
            is_due = record.backoff.is_due(self._now)
            if not draft.tokens or num_trials == _MAX_SAMPLED or not is_due:
                continue
            widest = self._max_drafts(num_rows)
            count = 1 if self._is_free else min(len(draft.tokens), widest)
            num_tokens = num_rows + sum(counts) + count
            allowed = self._is_trial or self._allows_trial(num_rows, num_tokens, draft_length=0)
            if count <= room and allowed:
                record.drafts(self._now, schedule, trial=True)
                counts[i], room, num_trials = count, room - count, num_trials + 1

    def _prior(self, kind: int) -> float:
        """The acceptance of a kind of draft, for a request without evidence of its own."""
        accepted, verified = self._kinds.get(kind, (0.0, 0.0))
        return (accepted + _PRIOR_WEIGHT_ALL * _PRIOR_ACCEPTANCE) / (verified + _PRIOR_WEIGHT_ALL)

    def _best_count(
        self, expected: Sequence[float], *, num_rows: int, prompt_tokens: int, draft_length: int
    ) -> int:
        """The number of draft tokens, likeliest first, with the most tokens per second, prompt
        tokens included.
        """
        base, costs = num_rows + prompt_tokens, self._costs
        draft_s = costs.draft_s(num_rows, draft_length)
        highest = margin(num_rows) * base / costs.plain_s(num_rows, base)
        best, tokens = 0, float(base)
        for count, chance in enumerate(expected, start=1):
            tokens += chance
            rate = tokens / (costs.verify_s(num_rows, base + count) + draft_s)
            if rate > highest:
                best, highest = count, rate
        return best
