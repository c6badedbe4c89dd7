"""What steps cost: the table that was measured at start, corrected by the steps that run.

Wrong tables, load, a growing context and a host that is slower than it was are all seen here as
ratios of observed to expected seconds. Pure Python with no clock of its own.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from math import exp, log

from windlass.speculative.costs import Drafting, StepCosts

# tests/speculative/test_wrong_costs.py is what chose these: worlds with wrong tables and 20 % noise.
_FADE = 0.9  # per observation: about the last ten count
_TABLE_WEIGHT = 0.25  # observations that the table counts for
_NEARNESS = 2  # the exponent with which an observation counts less for other sizes
_OUTLIER = 1.5  # factor from the expected seconds at which a second observation must agree
_LEAST_DRAFT = 0.01  # of a plain step: no factor corrects a table that says 0
_ENOUGH = 4.0  # observations after which a disagreement with the table is no accident


@dataclass(slots=True)
class _Observed:
    """Observations of one size, faded."""

    weight: float = 0.0
    log_ratio: float = 0.0  # the sum, each with its weight


class Correction:
    """Observed over expected seconds of one kind of step, by its size.

    A size that was not observed takes part in what others showed, the nearer the more. A single
    observation far from the others is a step that was disturbed; two in a row are a change, and
    replace what was known of that size.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, _Observed] = {}
        self._known: dict[int, float] = {}  # asked many times a step
        self._suspect = 0  # the last observation was far above the expected (1), or below (-1)

    def of(self, size: int) -> float:
        """The factor for the table's seconds."""
        size = _rounded(size)
        known = self._known.get(size)
        if known is None:
            known = self._known[size] = exp(self._log_ratio(size))
        return known

    def _log_ratio(self, size: int) -> float:
        weight, total = _TABLE_WEIGHT, 0.0
        for other, seen in self._sizes.items():
            near = (min(size, other) / max(size, other)) ** _NEARNESS
            weight += near * seen.weight
            total += near * seen.log_ratio
        return total / weight

    def observe(self, size: int, ratio: float) -> bool:
        """Learn from one step; False: it is too far from the others to be believed alone."""
        size, before = _rounded(size), self._suspect
        change = ratio / self.of(size)
        self._suspect = (change > _OUTLIER) - (change < 1 / _OUTLIER)
        if self._suspect:
            if self._suspect != before:
                return False
            self._sizes.pop(size, None)
        for seen in self._sizes.values():
            seen.weight *= _FADE
            seen.log_ratio *= _FADE
        seen = self._sizes.setdefault(size, _Observed())
        seen.weight += 1
        seen.log_ratio += log(ratio)
        self._known.clear()
        return True

    @property
    def disagreement(self) -> float:
        """The largest factor, up or down, that enough observations agree on; 1: none."""
        sure = [one for one in self._sizes.values() if one.weight >= _ENOUGH]
        return exp(max((abs(one.log_ratio / one.weight) for one in sure), default=0.0))


def _rounded(size: int) -> int:
    """Three significant bits, so that a large batch has few sizes."""
    shift = max(0, size.bit_length() - 3)
    return size >> shift << shift


@dataclass(frozen=True, slots=True)
class _Batch:
    """Corrections for about one number of rows: with more of them a host has more to do."""

    plain: Correction = field(default_factory=Correction)
    verify: Correction = field(default_factory=Correction)  # beyond `plain`
    draft: Correction = field(default_factory=Correction)  # beyond `plain`


class LearnedCosts:
    """Owns the corrections. Verifying and drafting are corrected beyond what plain steps are:
    a machine that is slower than it was is so for all of them.
    """

    def __init__(self, verify: StepCosts, plain: StepCosts, draft: Drafting | None) -> None:
        self._verify = verify
        self._plain = plain
        self._draft = draft
        self._batches: defaultdict[int, _Batch] = defaultdict(_Batch)
        self._prompts = Correction()

    def plain_s(self, num_rows: int, num_tokens: int | None = None) -> float:
        """A step without drafts; `num_tokens` where there are prompts in it."""
        return self._plain.of(num_tokens or num_rows) * self._speed(num_rows)

    def verify_s(self, num_rows: int, num_tokens: int) -> float:
        """A step of so many tokens, drafts among them."""
        found = self._verify.of(num_tokens) * self._speed(num_rows)
        return found * self._batch(num_rows).verify.of(num_tokens)

    def draft_s(self, num_rows: int, depth: int) -> float:
        """Drafting so many tokens for each row."""
        if self._draft is None or not depth:
            return 0.0
        found = self._table_draft_s(num_rows, depth) * self._speed(num_rows)
        return found * self._batch(num_rows).draft.of(depth)

    def _table_draft_s(self, num_rows: int, depth: int) -> float:
        assert self._draft is not None
        return max(self._draft.of(num_rows, depth), _LEAST_DRAFT * self._plain.of(num_rows))

    def prompt_s(self, num_tokens: int) -> float:
        """A draft model that computes so many tokens before it drafts."""
        if self._draft is None or num_tokens < 1:
            return 0.0
        return self._draft.prompt_token_s * num_tokens * self._prompts.of(num_tokens)

    def observe_prompt(self, num_tokens: int, seconds: float) -> None:
        expected = self._draft.prompt_token_s * num_tokens if self._draft is not None else 0.0
        if expected > 0.0 and seconds > 0.0:
            self._prompts.observe(num_tokens, seconds / expected)

    def observe_plain(self, num_rows: int, seconds: float) -> bool:
        """False, as below: the step is too far from the others to be believed alone."""
        return self._batch(num_rows).plain.observe(1, seconds / self._plain.of(num_rows))

    def observe_verify(self, num_rows: int, num_tokens: int, seconds: float) -> bool:
        expected = self._verify.of(num_tokens) * self._speed(num_rows)
        return self._batch(num_rows).verify.observe(num_tokens, seconds / expected)

    def observe_draft(self, num_rows: int, depth: int, seconds: float) -> bool:
        expected = self._table_draft_s(num_rows, depth) * self._speed(num_rows)
        return self._batch(num_rows).draft.observe(depth, seconds / expected)

    def observe_both(self, num_rows: int, num_tokens: int, depth: int, seconds: float) -> bool:
        """A step that verified and drafted in one."""
        expected = self._verify.of(num_tokens) + self._table_draft_s(num_rows, depth)
        ratio, batch = seconds / (expected * self._speed(num_rows)), self._batch(num_rows)
        return batch.verify.observe(num_tokens, ratio) and batch.draft.observe(depth, ratio)

    @property
    def disagreement(self) -> float:
        """The largest factor between what was observed and the tables; 1: none."""
        batches = self._batches.values()
        found = [one.disagreement for batch in batches for one in (batch.verify, batch.draft)]
        return max(found, default=1.0)

    def _speed(self, num_rows: int) -> float:
        return self._batch(num_rows).plain.of(1)

    def _batch(self, num_rows: int) -> _Batch:
        return self._batches[num_rows.bit_length()]
