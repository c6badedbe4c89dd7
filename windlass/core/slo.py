"""Adjusts the size of steps to targets of TTFT and TPOT.

A running request gets a token from every step, so steps that are shorter than the TPOT target keep
it. The controller learns how long steps take, and limits what a plan adds to them: prompt tokens,
running requests and draft tokens. Only limits that any plan may change are used, so captured graphs
stay valid. It has no clock: the scheduler passes the measured time of each step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import mul
from typing import NamedTuple

from windlass.core.limits import SchedulerLimits, SloTimes
from windlass.core.request import Request
from windlass.core.step import Step
from windlass.core.types import SloStats

_log = logging.getLogger("windlass.engine")

_UNLIMITED = 2**31
# Fewest prompt tokens of a step, whatever the target: one block. Prompts must advance.
_MIN_CHUNK = 16
# Slow start: a plan has at most twice the rows and prompt tokens of the largest step measured, since
# the model of step times does not know how larger ones behave. These are the first.
_FIRST_ROWS, _FIRST_CHUNK = 4, 64
_FORGETTING = 0.95  # weight of a step relative to the one after it: the last 20 steps decide
_PRIOR = 100.0  # variance of the model's three weights before any step, in variances of a step
_MAX_ERROR = (
    1.0  # a step that took more than twice its prediction counts as twice: one pause is no trend
)
_PERCENTILE = 0.99  # share of steps that are to meet the target
_PERCENTILE_RATE = (
    0.05  # a step above the percentile raises it by 5 %, one below lowers it by 0.05 %
)
_MAX_MARGIN = 2.0
# Limits fall at once and rise only by 10 % or more: noise of the model then changes nothing.
_HYSTERESIS = 1.1
_MAX_STRETCH = 4.0  # max length of a step that computes a late prompt, in TPOT targets
_MIN_STEPS = 32  # measured before a target is called impossible
_POSSIBLE_AGAIN = 0.8  # of the target: the shortest step that makes it possible again
# While the target is impossible, steps are as long as two of the shortest. Shorter ones would cost
# throughput and gain less than that factor.
_IMPOSSIBLE_STRETCH = 2.0


class StepLimits(NamedTuple):
    """Limits of the next plan, in addition to the scheduler's fixed limits."""

    num_prompt_tokens: int = _UNLIMITED
    num_running: int = _UNLIMITED
    draft_length: int = _UNLIMITED


NO_LIMITS = StepLimits()


class NoSlo:
    """Sets no limits."""

    stats: SloStats | None = None

    def limits(self, running: Sequence[Request], now: float) -> StepLimits:  # noqa: ARG002
        return NO_LIMITS

    def observe(self, step: Step, seconds: float) -> None:
        pass


class StepTimes:
    """Seconds of a step as a linear function of its rows and of its tokens beyond one per row.

    Learned by recursive least squares that forget old steps.
    """

    def __init__(self, max_rows: int, max_tokens: int) -> None:
        self._max_rows, self._max_tokens = max_rows, max_tokens
        self._weights = [0.0, 0.0, 0.0]
        self._covariance = [[_PRIOR * (i == j) for j in range(3)] for i in range(3)]
        self.num_steps = 0

    @property
    def step_s(self) -> float:
        """Seconds of a step without rows."""
        return self._weights[0]

    @property
    def row_s(self) -> float:
        return self._weights[1] / self._max_rows

    @property
    def token_s(self) -> float:
        return self._weights[2] / self._max_tokens

    def predict(self, num_rows: int, num_extra: float) -> float:
        return self.step_s + self.row_s * num_rows + self.token_s * num_extra

    def observe(self, num_rows: int, num_extra: int, seconds: float) -> None:
        """Learn the time of a step."""
        self.num_steps += 1
        predicted = self.predict(num_rows, num_extra)
        error = seconds - predicted
        if self.num_steps > _MIN_STEPS:
            error = min(error, _MAX_ERROR * predicted)
        covariance = self._covariance
        sizes = (1.0, num_rows / self._max_rows, num_extra / self._max_tokens)
        products = [sum(map(mul, line, sizes)) for line in covariance]
        gain = 1 / (_FORGETTING + sum(map(mul, sizes, products)))
        # Forget only up to the prior variance. Otherwise the variance of weights that the steps do not
        # show would grow without bound.
        spread = sum(covariance[at][at] for at in range(3))
        growth = 1 / _FORGETTING if spread < _PRIOR else 1.0
        for i in range(3):
            self._weights[i] += gain * products[i] * error
            for j in range(3):
                covariance[i][j] = growth * (covariance[i][j] - gain * products[i] * products[j])


@dataclass(frozen=True, slots=True, kw_only=True)
class SloTargets:
    """Targets in seconds; None: no target."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    max_rows: int = 1
    max_tokens: int = 1
    num_stages: int = 1  # steps per token of a request


@dataclass(slots=True)
class SloController:
    """Owns the model of step times and the limits that follow from it. `warn` writes to the log."""

    targets: SloTargets
    warn: Callable[[str], None]
    _times: StepTimes = field(init=False)
    _margin: float = 1.0  # 99th percentile of measured over predicted time
    _seen_rows: int = _FIRST_ROWS // 2
    _seen_extra: int = _FIRST_CHUNK // 2
    _limits: StepLimits = NO_LIMITS
    _num_rows: int = 0  # of the last plan
    _is_possible: bool = True
    _has_warned: bool = False
    _is_stretched: bool = False
    _changes: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._times = StepTimes(self.targets.max_rows, self.targets.max_tokens)

    def set_times(self, times: SloTimes) -> None:
        """Change the targets; what was learned of step times stays."""
        if (times.ttft_s, times.tpot_s) == (self.targets.ttft_s, self.targets.tpot_s):
            return
        self.targets = replace(self.targets, ttft_s=times.ttft_s, tpot_s=times.tpot_s)
        self._limits = NO_LIMITS
        self._is_possible, self._has_warned, self._is_stretched = True, False, False

    # ---- observation -------------------------------------------------------------------------

    def observe(self, step: Step, seconds: float) -> None:
        """Learn the time of a step, from commit to commit."""
        num_rows = len(step.members)
        num_extra = step.num_tokens - num_rows
        self._seen_rows = max(self._seen_rows, num_rows)
        self._seen_extra = max(self._seen_extra, num_extra)
        predicted = self._times.predict(num_rows, num_extra)
        tpot_s = self.targets.tpot_s
        if tpot_s is not None and self._times.num_steps >= _MIN_STEPS:
            if predicted > tpot_s / self.targets.num_stages / 2:  # only long steps matter
                self._learn_margin(seconds > predicted * self._margin)
            self._judge(tpot_s / self.targets.num_stages)
        self._times.observe(num_rows, num_extra, seconds)

    def _learn_margin(self, is_above: bool) -> None:
        move = _PERCENTILE if is_above else _PERCENTILE - 1
        moved = self._margin * math.exp(_PERCENTILE_RATE * move)
        self._margin = min(_MAX_MARGIN, max(1.0, moved))

    def _judge(self, target_s: float) -> None:
        """Decide whether the target can be met at all."""
        shortest_s = self._times.predict(1, _MIN_CHUNK)
        if self._is_possible and shortest_s > target_s:
            self._is_possible = False
            self._count("tpot_impossible")
            if not self._has_warned:
                self._has_warned = True
                self.warn(
                    f"--slo-tpot-ms {1000 * (self.targets.tpot_s or 0):g} cannot be met: a step of one "
                    f"request and {_MIN_CHUNK} prompt tokens takes {1000 * shortest_s:.3g} ms. Steps "
                    f"are kept below {1000 * _IMPOSSIBLE_STRETCH * shortest_s:.3g} ms instead."
                )
        elif not self._is_possible and shortest_s < _POSSIBLE_AGAIN * target_s:
            self._is_possible = True

    # ---- limits ------------------------------------------------------------------------------

    def limits(self, running: Sequence[Request], now: float) -> StepLimits:
        """The limits of the next plan."""
        self._num_rows = num_rows = len(running)
        target_s = self._target_s()
        if target_s is None:
            return NO_LIMITS
        times = self._times
        draft_length = self._fitting(target_s, num_rows) // (2 * max(1, num_rows))
        if not self._is_possible:
            draft_length = _UNLIMITED  # drafts may help to meet the target
        num_drafts = sum([min(len(each.drafts), draft_length) for each in running])
        chunk = self._chunk(target_s, num_rows, num_drafts)
        max_rows = self._seen_rows * 2
        if times.row_s > 0.0:
            left_s = target_s - times.step_s - times.token_s * _MIN_CHUNK
            max_rows = min(max_rows, int(left_s / times.row_s))
        self._settle(chunk, max(1, min(max_rows, self.targets.max_rows)), draft_length)
        stretched_s = self._stretched(running, now, target_s)
        if stretched_s <= target_s:
            self._is_stretched = False
            return self._limits
        if not self._is_stretched:
            self._is_stretched = True
            self._count("prompt_tokens_raised_for_ttft")
        chunk = self._chunk(stretched_s, num_rows, num_drafts)
        return self._limits._replace(num_prompt_tokens=chunk)

    def _target_s(self) -> float | None:
        """How long a step may be predicted to take."""
        if self.targets.tpot_s is None:
            return None
        if not self._is_possible:
            return _IMPOSSIBLE_STRETCH * self._times.predict(1, _MIN_CHUNK)
        return self.targets.tpot_s / self.targets.num_stages / self._margin

    def _fitting(self, target_s: float, num_rows: int) -> int:
        """Tokens beside one per row that a step of `target_s` computes."""
        left_s = target_s - self._times.predict(num_rows, 0)
        most = min(self.targets.max_tokens, 2 * self._seen_extra)
        if self._times.token_s <= 0.0:
            return most
        return max(0, min(most, int(left_s / self._times.token_s)))

    def _chunk(self, target_s: float, num_rows: int, num_drafts: int) -> int:
        return max(_MIN_CHUNK, self._fitting(target_s, num_rows) - num_drafts)

    def _stretched(self, running: Sequence[Request], now: float, target_s: float) -> float:
        """How long a step may take when a prompt would miss its TTFT target in short steps.

        Running requests that have been faster than their TPOT target can afford a longer step.
        """
        if self.targets.ttft_s is None or self.targets.tpot_s is None:
            return target_s
        num_left, at_risk, spare_s = 0, False, _MAX_STRETCH * target_s
        for request in running:
            first = request.timeline.first_token
            if first is None:
                num_left += max(0, request.num_prompt - request.planned)
                left_s = request.timeline.arrived + self.targets.ttft_s - now
                need_s = target_s * math.ceil(num_left / self._limits.num_prompt_tokens)
                at_risk |= 0.0 < left_s < need_s
            else:
                spare_s = min(spare_s, first + self.targets.tpot_s * request.num_output - now)
        return spare_s if at_risk else target_s

    def _settle(self, chunk: int, num_running: int, draft_length: int) -> None:
        """Take over new limits: lower ones at once, higher ones only if they are clearly higher."""
        wanted = StepLimits(chunk, num_running, draft_length)
        if wanted == self._limits:
            return
        settled = []
        for name, new, old in zip(_NAMES, wanted, self._limits, strict=True):
            if new < old or new >= _HYSTERESIS * old:
                settled.append(new)
                if new != old and old != _UNLIMITED:
                    self._count(f"{name}_lowered_for_tpot" if new < old else f"{name}_raised")
            else:
                settled.append(old)
        self._limits = StepLimits(*settled)

    def _count(self, change: str) -> None:
        self._changes[change] = self._changes.get(change, 0) + 1

    @property
    def stats(self) -> SloStats:
        """The current limits, and how fast prompts are computed within them."""
        limits, targets, times = self._limits, self.targets, self._times
        chunk = min(limits.num_prompt_tokens, targets.max_tokens)
        step_s = times.predict(min(self._num_rows, targets.max_rows), chunk)
        return SloStats(
            ttft_s=targets.ttft_s,
            num_prompt_tokens=chunk,
            num_running=min(limits.num_running, targets.max_rows),
            draft_length=None if limits.draft_length >= _UNLIMITED else limits.draft_length,
            prompt_tokens_per_s=chunk / step_s if step_s > 0.0 else 0.0,
            is_possible=self._is_possible,
            changes=dict(self._changes),
        )


_NAMES = ("prompt_tokens", "running", "draft_tokens")


def make_slo(times: SloTimes, limits: SchedulerLimits) -> NoSlo | SloController:
    """The controller of an engine with these targets."""
    if times == SloTimes():
        return NoSlo()
    targets = SloTargets(
        ttft_s=times.ttft_s,
        tpot_s=times.tpot_s,
        max_rows=limits.max_num_seqs,
        max_tokens=limits.max_num_batched_tokens,
        num_stages=limits.num_stages,
    )
    return SloController(targets, _log.warning)


def with_times(
    slo: NoSlo | SloController, times: SloTimes, limits: SchedulerLimits
) -> NoSlo | SloController:
    """The controller for other targets: `slo` itself with what it has learned, if both have a target."""
    if isinstance(slo, NoSlo) or times == SloTimes():
        return make_slo(times, limits)
    slo.set_times(times)
    return slo
