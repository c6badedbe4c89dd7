"""How many replicas a model needs: its pending tokens against the measured rate of a replica.

A replica is busy for the time that its pending prompt and decode tokens take. Enough replicas are
those that compute all prompts within the target of the time to the first token, and all expected
output within `drain_s`. This module has no I/O and no clock; serve_policy.py calls it for Ray Serve.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

_TREND_S = 30.0  # samples that the trend is taken from
_MIN_TREND_S = 3.0
_MAX_GROWTH = 2.0  # of the number of replicas, in one decision
_KEPT_WINDOWS = 32  # of measured rates
_SLACK = 0.05  # of a replica, for which no further one starts


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingTargets:
    """When replicas start and stop."""

    min_replicas: int
    max_replicas: int
    ttft_s: float
    drain_s: float
    lead_s: float  # until a new replica answers
    down_delay_s: float  # between two stops, and after a start
    zero_delay_s: float  # without any request


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """What one replica has to do, and how fast it is. A rate of 0 is not known yet."""

    prompt_tokens: float
    decode_tokens: float  # expected
    prompt_rate: float  # tokens per second of step time
    decode_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLoad:
    """A model's replicas at a time; `num_queued`: requests that no replica has yet."""

    at: float
    replicas: Sequence[ReplicaLoad]
    num_queued: float = 0.0


@dataclass(frozen=True, slots=True)
class Decision:
    """The number of replicas to have, and why."""

    num_replicas: int
    reason: str


class RateMeter:
    """The rate of a replica with a full batch: the highest of the last windows of work."""

    def __init__(self, min_tokens: int = 64) -> None:
        self._min_tokens = min_tokens
        self._last = (0, 0.0)
        self._rates: deque[float] = deque(maxlen=_KEPT_WINDOWS)

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Add counters of tokens and their step time since the engine's start."""
        last_tokens, last_seconds = self._last
        if num_tokens < last_tokens:  # the engine was restarted
            last_tokens, last_seconds = 0, 0.0
        if num_tokens - last_tokens >= self._min_tokens and seconds > last_seconds:
            self._rates.append((num_tokens - last_tokens) / (seconds - last_seconds))
            self._last = num_tokens, seconds

    @property
    def tokens_per_s(self) -> float:
        """0: not known yet."""
        return max(self._rates, default=0.0)


@dataclass(frozen=True, slots=True)
class _Work:
    """Seconds of one replica."""

    at: float
    prompt_s: float
    decode_s: float

    def needed(self, targets: ScalingTargets) -> float:
        """The replicas that do this work in time."""
        return self.prompt_s / targets.ttft_s + self.decode_s / targets.drain_s


class Scaler:
    """Owns the history of one model's load."""

    def __init__(self, targets: ScalingTargets) -> None:
        self._targets = targets
        self._work: deque[_Work] = deque()
        self._needed: deque[tuple[float, int]] = deque()  # of the last `down_delay_s`
        self._changed_at = -math.inf
        self._last_request_at = -math.inf
        self._rates = (0.0, 0.0)

    def decide(self, load: ModelLoad, num_replicas: int) -> Decision:
        """The number of replicas to have from now on; `num_replicas`: have been asked for."""
        targets, now = self._targets, load.at
        is_idle = not load.num_queued and not any(
            each.prompt_tokens or each.decode_tokens for each in load.replicas
        )
        # Replicas that start have no requests yet, and nothing reports of them.
        is_starting = not load.replicas and num_replicas > 0
        if not is_idle or is_starting or self._last_request_at == -math.inf:
            self._last_request_at = now
        work = self._measure(load)
        needed, reason = 0, "no request"
        if not is_idle:
            needed, reason = self._needed_replicas(load, work, num_replicas)
        self._needed.append((now, needed))
        while self._needed[0][0] < now - targets.down_delay_s:
            self._needed.popleft()
        chosen, reason = self._limited(needed, num_replicas, now=now, reason=reason)
        if chosen != num_replicas:
            self._changed_at = now
        return Decision(chosen, reason)

    def _measure(self, load: ModelLoad) -> _Work:
        """The work of all replicas in seconds of one; 0 as long as no rate is known."""
        known = [each for each in load.replicas if each.prompt_rate and each.decode_rate]
        if known:
            count = len(known)
            self._rates = (
                sum(each.prompt_rate for each in known) / count,
                sum(each.decode_rate for each in known) / count,
            )
        prompt_rate, decode_rate = self._rates
        work = _Work(load.at, 0.0, 0.0)
        if prompt_rate:
            work = _Work(
                load.at,
                sum(each.prompt_tokens for each in load.replicas) / prompt_rate,
                sum(each.decode_tokens for each in load.replicas) / decode_rate,
            )
        self._work.append(work)
        while self._work[0].at < load.at - _TREND_S:
            self._work.popleft()
        return work

    def _needed_replicas(self, load: ModelLoad, work: _Work, num_replicas: int) -> tuple[int, str]:
        targets = self._targets
        if not self._rates[0]:
            return max(1, num_replicas), "the rate of a replica is not known yet"
        expected = self._expected(work)
        needed = max(1, math.ceil(expected.needed(targets) - _SLACK))
        if load.num_queued and num_replicas == 0:
            return needed, f"{load.num_queued:g} requests wait, and there is no replica"
        reason = (
            f"{work.prompt_s:.2f} s of prompts and {work.decode_s:.2f} s of output"
            f"{' and growing' if expected is not work else ''}; one replica does {targets.ttft_s:g} s "
            f"and {targets.drain_s:g} s of them in time"
        )
        return needed, reason

    def _expected(self, work: _Work) -> _Work:
        """The work when a replica that starts now answers, if the work grows."""
        span = work.at - self._work[0].at
        if span < _MIN_TREND_S:
            return work
        lead = self._targets.lead_s
        prompt = work.prompt_s + max(0.0, lead * _slope(self._work, "prompt_s"))
        decode = work.decode_s + max(0.0, lead * _slope(self._work, "decode_s"))
        if (prompt, decode) == (work.prompt_s, work.decode_s):
            return work
        return _Work(work.at, prompt, decode)

    def _limited(
        self, needed: int, num_replicas: int, *, now: float, reason: str
    ) -> tuple[int, str]:
        """Up at once and at most twofold, down one at a time and late."""
        targets = self._targets
        low, high = targets.min_replicas, targets.max_replicas
        if needed > num_replicas:
            most = max(1, math.ceil(_MAX_GROWTH * num_replicas))
            return max(low, min(needed, most, high)), reason
        if num_replicas <= low:
            return low, reason
        if num_replicas > high:
            return high, f"at most {high} are allowed"
        most_needed = max(count for _, count in self._needed)
        waited = now - max(self._changed_at, self._needed[0][0])
        if num_replicas == 1:
            idle_s = now - self._last_request_at
            if idle_s >= targets.zero_delay_s:
                return 0, f"no request for {idle_s:.0f} s"
            return 1, reason
        # The history may begin one sample after the delay.
        if most_needed < num_replicas and waited >= 0.9 * targets.down_delay_s:
            return max(low, 1, num_replicas - 1), f"{most_needed} are enough for {waited:.0f} s"
        return num_replicas, reason


def _slope(samples: Sequence[_Work], name: str) -> float:
    """The least-squares slope of a field over time."""
    count = len(samples)
    times = [each.at for each in samples]
    values = [getattr(each, name) for each in samples]
    mean_t, mean_v = sum(times) / count, sum(values) / count
    spread = sum((each - mean_t) ** 2 for each in times)
    if not spread:
        return 0.0
    return sum((t - mean_t) * (v - mean_v) for t, v in zip(times, values, strict=True)) / spread
