"""Updates: never fewer ready replicas than needed, and they end with one version."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from math import comb

import pytest

from windlass.cluster.compare import greater, more_errors
from windlass.cluster.rollout import Rollout, RolloutConfig, RolloutState, Samples, VersionView
from windlass.errors import ConfigError

CONFIG = RolloutConfig(min_requests=80, canary_share=0.1, max_canary_s=1e6)


@dataclass
class Version:
    """The replicas of one version: steps until each is ready, or until each is drained."""

    num_ready: int = 0
    starting: list[int] = field(default_factory=list)
    draining: list[int] = field(default_factory=list)
    num_failures: int = 0
    error_rate: float = 0.0
    latency_s: float = 1.0
    fails_to_start: bool = False
    requests: int = 0
    errors: int = 0
    latencies: list[float] = field(default_factory=list)

    def view(self) -> VersionView:
        samples = Samples(self.requests, self.errors, tuple(self.latencies))
        return VersionView(
            num_ready=self.num_ready,
            num_starting=len(self.starting),
            num_draining=len(self.draining),
            num_failures=self.num_failures,
            samples=samples,
        )

    def scale(self, target: int, chance: random.Random) -> None:
        while self.num_ready + len(self.starting) < target:
            self.starting.append(chance.randint(1, 4))
        while self.num_ready + len(self.starting) > target and self.starting:
            self.starting.pop()
        while self.num_ready > target:
            self.num_ready -= 1
            self.draining.append(chance.randint(0, 5))

    def advance(self) -> None:
        self.draining = [each - 1 for each in self.draining if each > 0]
        self.starting = [each - 1 for each in self.starting]
        done = self.starting.count(0)
        self.starting = [each for each in self.starting if each > 0]
        if self.fails_to_start:
            self.num_failures += done
        else:
            self.num_ready += done

    def serve(self, num_requests: int, chance: random.Random) -> None:
        for _ in range(num_requests):
            self.requests += 1
            if chance.random() < self.error_rate:
                self.errors += 1
            else:
                self.latencies.append(self.latency_s * chance.lognormvariate(0, 0.5))


def update(
    new: Version,
    *,
    seed: int = 0,
    config: RolloutConfig = CONFIG,
    num_needed: int = 3,
    scales: bool = False,
) -> tuple[Rollout, Version, Version]:
    """Run an update to its end and check every step of it."""
    chance = random.Random(seed)
    rollout, old = Rollout(config), Version(num_ready=num_needed)
    for step in range(2000):
        if scales and chance.random() < 0.05:
            num_needed = chance.randint(1, 6)
        before = old.num_ready + new.num_ready
        was_over = rollout.is_over
        target = rollout.step(old.view(), new.view(), num_needed=num_needed, now=10.0 * step)
        if chance.random() < 0.2:  # a controller that starts again goes on from its state
            rollout = Rollout(config, rollout.state)
        old.scale(target.num_old, chance)
        new.scale(target.num_new, chance)
        ready = old.num_ready + new.num_ready
        assert ready >= min(num_needed - config.max_unavailable, before), (step, target)
        if not scales:
            num_all = old.view().num_all + new.view().num_all
            assert num_all <= num_needed + config.max_surge, (step, target)
        assert 0.0 <= target.new_share <= 1.0
        assert new.num_ready or target.new_share == 0.0
        if was_over:
            break
        num_new = sum(chance.random() < target.new_share for _ in range(20))
        new.serve(num_new, chance)
        old.serve(20 - num_new, chance)
        for version in (old, new):
            version.advance()
    assert rollout.is_over
    assert old.view().num_all == 0 or new.view().num_all == 0
    return rollout, old, new


@pytest.mark.parametrize("seed", range(40))
def test_random_updates_keep_enough_replicas_and_end_with_one_version(seed: int) -> None:
    chance = random.Random(seed)
    new = Version(
        error_rate=chance.choice([0.0, 0.0, 0.3]),
        latency_s=chance.choice([1.0, 1.0, 3.0]),
        fails_to_start=chance.random() < 0.2,
    )
    config = replace(CONFIG, max_surge=chance.randint(1, 3))
    needed = chance.randint(1, 6)
    scales = chance.random() < 0.5
    rollout, old, new = update(new, seed=seed, config=config, num_needed=needed, scales=scales)
    is_good = not (new.error_rate or new.latency_s > 1.0 or new.fails_to_start)
    assert rollout.state.phase == ("updated" if is_good else "rolled back"), rollout.state
    assert (new if is_good else old).num_ready > 0


@pytest.mark.parametrize("num_needed", [1, 3])
def test_without_room_an_old_replica_stops_first(num_needed: int) -> None:
    config = RolloutConfig(min_requests=0, max_surge=0, max_unavailable=1)
    rollout, old, new = update(Version(), config=config, num_needed=num_needed)
    assert (rollout.state.phase, old.num_ready, new.num_ready) == ("updated", 0, num_needed)


def test_a_version_that_serve_gives_up_is_rolled_back() -> None:
    rollout = Rollout(CONFIG)
    rollout.step(VersionView(2), VersionView(), num_needed=2, now=0.0)
    rollout.step(VersionView(2), VersionView(failure="no such file"), num_needed=2, now=1.0)
    assert (rollout.state.phase, rollout.state.reason) == ("rolled back", "no such file")


def test_a_good_version_replaces_the_old_one() -> None:
    rollout, old, new = update(Version())
    assert (rollout.state.phase, old.num_ready, new.num_ready) == ("updated", 0, 3)


@pytest.mark.parametrize(
    ("new", "reason"),
    [
        (Version(error_rate=0.3), "requests failed"),
        (Version(latency_s=2.0), "median latency"),
        (Version(fails_to_start=True), "failed 3 times"),
    ],
)
def test_a_bad_version_is_rolled_back_with_its_reason(new: Version, reason: str) -> None:
    rollout, old, new = update(new)
    assert (rollout.state.phase, old.num_ready, new.num_ready) == ("rolled back", 3, 0)
    assert reason in rollout.state.reason


def test_a_version_that_turns_bad_in_mid_update_is_rolled_back() -> None:
    rollout = Rollout(CONFIG, RolloutState(phase="rolling", num_looks=4, began=0.0))
    old = VersionView(num_ready=2, samples=Samples(1000, 0))
    new = VersionView(num_ready=1, samples=Samples(200, 40))
    target = rollout.step(old, new, num_needed=3, now=1.0)
    assert target.phase == "rollback"
    assert target.num_old == 3
    assert target.num_new == 1  # until the third old replica is ready
    assert target.new_share == pytest.approx(1 / 3)


def test_lower_scores_are_rolled_back() -> None:
    chance = random.Random(0)
    config = replace(CONFIG, min_scores=40, max_score_drop=0.02)

    def scores(mean: float) -> tuple[float, ...]:
        return tuple(chance.gauss(mean, 0.1) for _ in range(60))

    for mean, phase in ((0.9, "rolling"), (0.7, "rollback")):
        rollout = Rollout(config)
        old = VersionView(num_ready=3, samples=Samples(800, 0, (), scores(0.9)))
        new = VersionView(num_ready=1, samples=Samples(80, 0, (), scores(mean)))
        assert rollout.step(old, new, num_needed=3, now=0.0).phase == phase


def test_without_scores_the_quality_gate_waits() -> None:
    rollout = Rollout(replace(CONFIG, min_scores=40, max_canary_s=100.0))
    old = VersionView(num_ready=3, samples=Samples(800, 0))
    new = VersionView(num_ready=1, samples=Samples(80, 0))
    assert rollout.step(old, new, num_needed=3, now=0.0).phase == "canary"
    target = rollout.step(old, new, num_needed=3, now=101.0)
    assert target.phase == "rollback"
    assert "0 of 40 were scored" in target.reason


def test_an_update_without_progress_is_rolled_back() -> None:
    rollout = Rollout(replace(CONFIG, min_requests=0, progress_deadline_s=60.0))
    old, new = VersionView(num_ready=3), VersionView(num_starting=1)
    assert rollout.step(old, new, num_needed=3, now=0.0).phase == "rolling"
    assert rollout.step(old, new, num_needed=3, now=61.0).phase == "rollback"


def test_an_equal_version_is_seldom_rolled_back() -> None:
    """The looks share the significance: of 300 equal versions about 3 may be refused."""
    config = replace(CONFIG, min_requests=64)
    refused = 0
    for seed in range(300):
        chance, rollout = random.Random(seed), Rollout(config)
        old, new = Version(error_rate=0.1), Version(error_rate=0.1)
        while rollout.state.phase == "canary":
            old.serve(60, chance)
            new.serve(8, chance)
            views = replace(old.view(), num_ready=3), replace(new.view(), num_ready=1)
            rollout.step(*views, num_needed=3, now=0.0)
        refused += rollout.state.phase == "rollback"
    assert refused <= 6


def test_p_values_are_those_of_counting() -> None:
    chance = random.Random(1)
    for _ in range(20):
        old, new = chance.randint(1, 60), chance.randint(1, 60)
        a, b = chance.randint(0, old), chance.randint(0, new)
        ways = sum(
            comb(a + b, k) * comb(old + new - a - b, new - k) for k in range(b, min(a + b, new) + 1)
        )
        expected = ways / comb(old + new, new)
        assert more_errors(a, old, new_errors=b, new_requests=new) == pytest.approx(expected)
    for shift in (0.0, 0.3, 0.6):
        lower = [round(chance.gauss(0, 1), 1) for _ in range(30)]
        upper = [round(chance.gauss(shift, 1), 1) for _ in range(20)]
        # A rank test does not depend on which order-preserving values the ranks stand for: compare
        # it with the share of random relabellings that have at least this many larger pairs.
        found, pooled = num_larger(lower, upper), lower + upper
        hits = 0
        for _ in range(1000):
            chance.shuffle(pooled)
            hits += num_larger(pooled[:30], pooled[30:]) >= found
        assert greater(lower, upper) == pytest.approx(hits / 1000, abs=0.04)
    assert greater([1.0] * 7, [2.0] * 7) == 1.0
    assert greater([1.0] * 9, [1.0] * 9) == 1.0
    assert more_errors(0, 0, new_errors=5, new_requests=5) == 1.0


def num_larger(lower: list[float], upper: list[float]) -> float:
    """The pairs in which the second value is larger; equal ones count half."""
    return sum((y > x) + 0.5 * (y == x) for x in lower for y in upper)


def test_bad_limits_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_surge"):
        RolloutConfig(max_surge=0, max_unavailable=1)
    with pytest.raises(ConfigError, match="max_surge"):
        RolloutConfig(max_surge=0, min_requests=0)
    with pytest.raises(ConfigError, match="canary_share"):
        RolloutConfig(canary_share=0.0)
    with pytest.raises(ConfigError, match="min_scores"):
        RolloutConfig(min_requests=0, min_scores=5)
