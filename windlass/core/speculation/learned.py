"""Step costs: the table measured at start, corrected by the steps that run.

Wrong tables, load, a growing context and a slower host all appear here as ratios of observed to
expected seconds. Pure Python with no clock of its own.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from math import exp, log

from windlass.core.speculation.costs import DraftCosts, StepCosts

# Chosen with the simulations of governor.py, with wrong tables and 20 % noise.
_DECAY = 0.9  # per observation: about the last ten count. 0.8: -0.5 %
_TABLE_WEIGHT = 0.25  # observations that the table counts for. 1: -1 %; 0: -0.1 %, worst -11 %
_NEARNESS = 2  # exponent: an observation counts less for other sizes. 0: -0.2 %, worst -13 %
# Factor from the expected seconds at which a second observation must agree. Without: -0.3 %, and
# -7 % where steps stall.
_OUTLIER = 1.5
_MIN_DRAFT = 0.01  # of a plain step: no factor corrects a table entry of 0
_ENOUGH = 4.0  # observations after which a disagreement with the table is significant


@dataclass(slots=True)
class _Observed:
    """Decayed observations of one size."""

    weight: float = 0.0
    log_ratio: float = 0.0  # weighted sum


class Correction:
    """Ratio of observed to expected seconds of one kind of step, by size.

    A size without observations uses those of other sizes, weighted by nearness. A single
    observation far from the others is a disturbed step; two in a row are a change, and replace the
    history of that size.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, _Observed] = {}
        self._memo: dict[int, float] = {}  # looked up many times per step
        self._outlier = 0  # the last observation was far above the expected (1), or below (-1)

    def of(self, size: int) -> float:
        """The factor to multiply the table's seconds by."""
        size = _rounded(size)
        known = self._memo.get(size)
        if known is None:
            known = self._memo[size] = exp(self._log_ratio(size))
        return known

    def _log_ratio(self, size: int) -> float:
        weight, total = _TABLE_WEIGHT, 0.0
        for other, observed in self._sizes.items():
            near = (min(size, other) / max(size, other)) ** _NEARNESS
            weight += near * observed.weight
            total += near * observed.log_ratio
        return total / weight

    def observe(self, size: int, ratio: float) -> bool:
        """Learn from one step; False: an outlier that needs a second observation."""
        size, before = _rounded(size), self._outlier
        change = ratio / self.of(size)
        self._outlier = (change > _OUTLIER) - (change < 1 / _OUTLIER)
        if self._outlier:
            if self._outlier != before:
                return False
            self._sizes.pop(size, None)
        for observed in self._sizes.values():
            observed.weight *= _DECAY
            observed.log_ratio *= _DECAY
        observed = self._sizes.setdefault(size, _Observed())
        observed.weight += 1
        observed.log_ratio += log(ratio)
        self._memo.clear()
        return True

    @property
    def disagreement(self) -> float:
        """The largest factor, up or down, that enough observations agree on; 1: none."""
        sure = [observed for observed in self._sizes.values() if observed.weight >= _ENOUGH]
        return exp(max((abs(each.log_ratio / each.weight) for each in sure), default=0.0))


def _rounded(size: int) -> int:
    """Keep three significant bits, so that a large batch has few sizes."""
    shift = max(0, size.bit_length() - 3)
    return size >> shift << shift


@dataclass(frozen=True, slots=True)
class _Batch:
    """Corrections for one range of row counts: the host does more work for more rows."""

    plain: Correction = field(default_factory=Correction)
    verify: Correction = field(default_factory=Correction)  # relative to `plain`
    draft: Correction = field(default_factory=Correction)  # relative to `plain`


class LearnedCosts:
    """Owns the corrections.

    Verification and drafting are corrected relative to plain steps: a machine that becomes slower
    is slower for all of them.
    """

    def __init__(self, verify: StepCosts, plain: StepCosts, draft: DraftCosts | None) -> None:
        self._verify = verify
        self._plain = plain
        self._draft = draft
        self._batches: defaultdict[int, _Batch] = defaultdict(_Batch)
        self._prompts = Correction()

    def plain_s(self, num_rows: int, num_tokens: int | None = None) -> float:
        """Seconds of a step without drafts; `num_tokens` if it includes prompts."""
        return self._plain.of(num_tokens or num_rows) * self._speed(num_rows)

    def verify_s(self, num_rows: int, num_tokens: int) -> float:
        """Seconds of a step of `num_tokens`, draft tokens included."""
        seconds = self._verify.of(num_tokens) * self._speed(num_rows)
        return seconds * self._batch(num_rows).verify.of(num_tokens)

    def draft_s(self, num_rows: int, draft_length: int) -> float:
        """Seconds of drafting `draft_length` tokens for each row."""
        if self._draft is None or not draft_length:
            return 0.0
        seconds = self._table_draft_s(num_rows, draft_length) * self._speed(num_rows)
        return seconds * self._batch(num_rows).draft.of(draft_length)

    def _table_draft_s(self, num_rows: int, draft_length: int) -> float:
        assert self._draft is not None
        return max(self._draft.of(num_rows, draft_length), _MIN_DRAFT * self._plain.of(num_rows))

    def prompt_s(self, num_tokens: int) -> float:
        """Seconds that a draft model takes to compute `num_tokens` before it drafts."""
        if self._draft is None or num_tokens < 1:
            return 0.0
        return self._draft.prompt_token_s * num_tokens * self._prompts.of(num_tokens)

    def observe_prompt(self, num_tokens: int, seconds: float) -> None:
        expected = self._draft.prompt_token_s * num_tokens if self._draft is not None else 0.0
        if expected > 0.0 and seconds > 0.0:
            self._prompts.observe(num_tokens, seconds / expected)

    def observe_plain(self, num_rows: int, seconds: float) -> bool:
        """Learn from a plain step; False, as below: an outlier that needs a second observation."""
        return self._batch(num_rows).plain.observe(1, seconds / self._plain.of(num_rows))

    def observe_verify(self, num_rows: int, num_tokens: int, seconds: float) -> bool:
        expected = self._verify.of(num_tokens) * self._speed(num_rows)
        return self._batch(num_rows).verify.observe(num_tokens, seconds / expected)

    def observe_draft(self, num_rows: int, draft_length: int, seconds: float) -> bool:
        expected = self._table_draft_s(num_rows, draft_length) * self._speed(num_rows)
        return self._batch(num_rows).draft.observe(draft_length, seconds / expected)

    def observe_both(
        self, num_rows: int, num_tokens: int, draft_length: int, seconds: float
    ) -> bool:
        """Learn from a step that both verified and drafted."""
        expected = self._verify.of(num_tokens) + self._table_draft_s(num_rows, draft_length)
        ratio, batch = seconds / (expected * self._speed(num_rows)), self._batch(num_rows)
        return batch.verify.observe(num_tokens, ratio) and batch.draft.observe(draft_length, ratio)

    @property
    def disagreement(self) -> float:
        """The largest factor between observed seconds and the tables; 1: none."""
        batches = self._batches.values()
        found = [each.disagreement for batch in batches for each in (batch.verify, batch.draft)]
        return max(found, default=1.0)

    def _speed(self, num_rows: int) -> float:
        return self._batch(num_rows).plain.of(1)

    def _batch(self, num_rows: int) -> _Batch:
        return self._batches[num_rows.bit_length()]
