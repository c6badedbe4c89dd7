"""The policy of an update: a canary, then replica by replica, or back to the old version.

Pure decisions: the caller reports how many replicas of both versions it has and how their requests
went, and `Rollout.step` returns how many it should have. The caller starts and drains replicas. A
replica is drained only when the others that are ready are enough.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from windlass.cluster.compare import greater, more_errors
from windlass.errors import ConfigError

# canary: one part of the requests; rolling: to the new version; rollback: to the old one.
Phase = Literal["canary", "rolling", "rollback", "updated", "rolled back"]

_NUM_TESTS = 3  # errors, latency, quality
_FIRST_LOOK = 1 / 8  # of `min_requests`; further looks at twice as many requests each


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """Limits of an update. A version counts as worse if a test says so at `significance`."""

    canary_share: float = 0.05  # of the requests, while the canary is compared
    min_requests: int = 200  # that the canary answers before the update goes on; 0: no canary
    min_scores: int = (
        0  # scored answers of the canary before the update goes on; 0: no quality gate
    )
    max_canary_s: float = 3600.0
    significance: float = 0.01  # probability that a version as good as the old one is rolled back
    max_latency_ratio: float = 1.2  # of the new version's latencies to the old ones'
    max_score_drop: float = 0.0
    max_surge: int = 1  # replicas above the needed ones
    max_unavailable: int = 0  # ready replicas below the needed ones
    max_failures: int = 2  # starts and crashes of new replicas
    progress_deadline_s: float = 1800.0  # without a further ready replica of the new version

    def __post_init__(self) -> None:
        if not 0.0 < self.canary_share <= 1.0 or not 0.0 < self.significance < 1.0:
            raise ConfigError(
                "canary_share is above 0 and at most 1, and significance between 0 and 1; got "
                f"{self.canary_share} and {self.significance}."
            )
        if self.max_surge < 1 and (self.max_unavailable < 1 or self.min_requests):
            raise ConfigError(
                f"max_surge must be at least 1, got {self.max_surge}: a canary is a further replica. "
                "Without a canary, max_unavailable: 1 stops an old replica before a new one starts."
            )
        if self.min_scores and not self.min_requests:
            raise ConfigError("min_scores needs a canary: set min_requests above 0.")


@dataclass(frozen=True, slots=True)
class Samples:
    """The requests that one version has answered since the update began."""

    num_requests: int = 0
    num_errors: int = 0
    latencies_s: tuple[float, ...] = ()  # of requests that succeeded; a random part is enough
    scores: tuple[float, ...] = ()  # quality of answers, higher is better

    def __add__(self, other: Samples) -> Samples:
        return Samples(
            self.num_requests + other.num_requests,
            self.num_errors + other.num_errors,
            self.latencies_s + other.latencies_s,
            self.scores + other.scores,
        )


@dataclass(frozen=True, slots=True)
class VersionView:
    """The replicas of one version as the caller sees them."""

    num_ready: int = 0
    num_starting: int = 0
    num_draining: int = 0  # they finish their requests and get no new ones
    num_failures: int = 0  # starts that failed and crashes, since the update began
    failure: str = ""  # why no further replica is started; "": starts are tried
    samples: Samples = field(default_factory=Samples)

    @property
    def num_all(self) -> int:
        return self.num_ready + self.num_starting + self.num_draining


@dataclass(frozen=True, slots=True)
class Target:
    """The replicas that each version should have, and the new version's share of the requests."""

    num_old: int
    num_new: int
    new_share: float
    phase: Phase
    reason: str  # of the phase


@dataclass(frozen=True, slots=True)
class RolloutState:
    """What an update remembers; plain values, so that a restarted controller goes on with it."""

    phase: Phase = "canary"
    reason: str = "the update has begun"
    num_looks: int = 0  # comparisons so far
    began: float | None = None  # None: `step` was not called yet
    progressed_at: float = 0.0
    most_ready: int = 0  # new replicas


class Rollout:
    """Owns the state of one update."""

    def __init__(self, config: RolloutConfig, state: RolloutState | None = None) -> None:
        self._config = config
        if state is None:
            state = RolloutState()
            if not config.min_requests:
                state = replace(state, phase="rolling", reason="no canary was requested")
        self.state = state

    @property
    def is_over(self) -> bool:
        return self.state.phase in ("updated", "rolled back")

    def step(self, old: VersionView, new: VersionView, *, num_needed: int, now: float) -> Target:
        """Decide how many replicas each version should have now. Call it every few seconds.

        `num_needed` may change between calls. Until `is_over`, at least `num_needed` replicas, less
        `max_unavailable`, stay ready if that many were.
        """
        self._note_progress(new, now)
        phase = self.state.phase
        if phase in ("canary", "rolling"):
            self._judge(old, new, now)
            phase = self.state.phase
        if phase == "canary":
            return self._canary(old, new, num_needed)
        if phase in ("rolling", "updated"):
            num_new, num_old = self._shift(new, old, num_needed)
            if phase == "rolling" and not old.num_all and new.num_ready >= num_needed:
                self._enter("updated", "all replicas have the new version")
            return self._target(num_old, num_new, _share_of(new, old))
        num_old, num_new = self._shift(old, new, num_needed)
        if phase == "rollback" and not new.num_all and old.num_ready >= num_needed:
            self._enter("rolled back", self.state.reason)
        # The old replicas take what they can; the rest goes to new ones rather than nowhere.
        share = max(0.0, 1.0 - old.num_ready / max(1, num_needed)) if new.num_ready else 0.0
        return self._target(num_old, num_new, share)

    def _canary(self, old: VersionView, new: VersionView, num_needed: int) -> Target:
        num_new = max(1, min(self._config.max_surge, round(self._config.canary_share * num_needed)))
        share = self._config.canary_share if new.num_ready else 0.0
        return self._target(num_needed, num_new, share if old.num_ready else _share_of(new, old))

    def _shift(self, to: VersionView, away: VersionView, num_needed: int) -> tuple[int, int]:
        """The numbers of replicas of both versions on the way to one of them."""
        num_away = max(0, num_needed - to.num_ready - self._config.max_unavailable)
        if not away.num_all:
            num_away = 0  # gone ones do not come back
        room = num_needed + self._config.max_surge - max(num_away, away.num_all)
        num_to = min(num_needed, max(room, to.num_ready + to.num_starting))
        return num_to, num_away

    def _target(self, num_old: int, num_new: int, new_share: float) -> Target:
        state = self.state
        return Target(num_old, num_new, new_share, phase=state.phase, reason=state.reason)

    # ---- judging the new version -------------------------------------------------------------

    def _note_progress(self, new: VersionView, now: float) -> None:
        state = self.state
        if state.began is None:
            self.state = replace(state, began=now, progressed_at=now)
        elif new.num_ready > state.most_ready:
            self.state = replace(state, most_ready=new.num_ready, progressed_at=now)

    def _judge(self, old: VersionView, new: VersionView, now: float) -> None:
        """Go on to the next phase, or back, if there is enough to decide."""
        config, state = self._config, self.state
        worse = self._worse(old.samples, new.samples)
        if new.failure:
            self._enter("rollback", new.failure)
        elif new.num_failures > config.max_failures:
            self._enter("rollback", f"new replicas failed {new.num_failures} times")
        elif worse:
            self._enter("rollback", worse)
        elif state.phase == "rolling":
            if old.num_all and now - state.progressed_at > config.progress_deadline_s:
                waited = f"no further replica was ready within {config.progress_deadline_s:g} s"
                self._enter("rollback", waited)
        elif self._has_enough(new.samples):
            self._enter("rolling", "the canary is not worse than the old version")
            self.state = replace(self.state, progressed_at=now)
        elif state.began is not None and now - state.began > config.max_canary_s:
            count, scores = new.samples.num_requests, len(new.samples.scores)
            self._enter(
                "rollback",
                f"the canary answered {count} of {config.min_requests} requests, and {scores} of "
                f"{config.min_scores} were scored, in {config.max_canary_s:g} s; lower them or allow "
                "more time",
            )

    def _has_enough(self, samples: Samples) -> bool:
        config = self._config
        return (
            samples.num_requests >= config.min_requests and len(samples.scores) >= config.min_scores
        )

    def _worse(self, old: Samples, new: Samples) -> str:
        """Why the new version is worse; "": no test says so, or it is not time for a look.

        Looks at doubling numbers of requests share `significance`, so that many looks do not make a
        wrong verdict more likely: 6 / (pi * look) ** 2 of it each, which sums to 1.
        """
        config, state = self._config, self.state
        next_look = math.ceil(config.min_requests * _FIRST_LOOK * 2**state.num_looks)
        if not config.min_requests or new.num_requests < next_look:
            return ""
        self.state = replace(state, num_looks=state.num_looks + 1)
        level = config.significance / _NUM_TESTS * 6 / (math.pi * self.state.num_looks) ** 2
        errors = more_errors(
            old.num_errors,
            old.num_requests,
            new_errors=new.num_errors,
            new_requests=new.num_requests,
        )
        if errors < level:
            return (
                f"{new.num_errors} of {new.num_requests} requests failed, with the old version "
                f"{old.num_errors} of {old.num_requests} (p = {errors:.2g})"
            )
        accepted = [each * config.max_latency_ratio for each in old.latencies_s]
        latency = greater(accepted, new.latencies_s)
        if latency < level:
            return (
                f"the median latency is {_median(new.latencies_s):.3g} s, with the old version "
                f"{_median(old.latencies_s):.3g} s (p = {latency:.2g})"
            )
        least = [each - config.max_score_drop for each in old.scores]
        quality = greater(new.scores, least)
        if quality < level:
            return (
                f"the median score is {_median(new.scores):.3g}, with the old version "
                f"{_median(old.scores):.3g} (p = {quality:.2g})"
            )
        return ""

    def _enter(self, phase: Phase, reason: str) -> None:
        self.state = replace(self.state, phase=phase, reason=reason)


def _share_of(version: VersionView, other: VersionView) -> float:
    """The share of a version by its ready replicas."""
    num_ready = version.num_ready + other.num_ready
    return version.num_ready / num_ready if num_ready else 0.0


def _median(values: tuple[float, ...]) -> float:
    return sorted(values)[len(values) // 2]
