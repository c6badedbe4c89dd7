"""The policy of the number of replicas, without Ray."""

from __future__ import annotations

import itertools

import pytest

from windlass.cluster.autoscaling import (
    Decision,
    ModelLoad,
    RateMeter,
    ReplicaLoad,
    Scaler,
    ScalingTargets,
)

TARGETS = ScalingTargets(
    min_replicas=0,
    max_replicas=8,
    ttft_s=1.0,
    drain_s=10.0,
    lead_s=20.0,
    down_delay_s=60.0,
    zero_delay_s=120.0,
)


def load_at(
    at: float, *, prompts: float = 0, outputs: float = 0, replicas: int = 1, queued: int = 0
) -> ModelLoad:
    """`prompts` and `outputs`: tokens of all replicas, of which one computes 1,000 and 100 per second."""
    each = ReplicaLoad(
        prompt_tokens=prompts / max(1, replicas),
        decode_tokens=outputs / max(1, replicas),
        prompt_rate=1000.0,
        decode_rate=100.0,
    )
    return ModelLoad(at=at, replicas=[each] * replicas, num_queued=queued)


class Fleet:
    """Follows every decision at once."""

    def __init__(self, **changes: float) -> None:
        fields = {name: getattr(TARGETS, name) for name in TARGETS.__slots__}
        self.scaler = Scaler(ScalingTargets(**{**fields, **changes}))
        self.replicas = 1
        self.now = 0.0

    def run(self, seconds: float = 1.0, **load: float) -> Decision:
        for _ in range(int(seconds)):
            at = load_at(self.now, replicas=self.replicas, **load)  # type: ignore[arg-type]
            decision = self.scaler.decide(at, self.replicas)
            self.replicas = decision.num_replicas
            self.now += 1.0
        return decision


@pytest.mark.parametrize(
    ("prompts", "outputs", "expected"),
    [
        (0, 50, 1),
        (900, 0, 1),
        (1500, 0, 2),  # 1.5 s of prompts in 1 s
        (0, 1900, 2),  # 19 s of output in 10 s
        (500, 700, 2),  # half a replica, and seven tenths
        (1_000_000, 0, 8),  # no more than allowed
    ],
)
def test_replicas_for_pending_tokens(prompts: int, outputs: int, expected: int) -> None:
    fleet = Fleet(lead_s=0.001)  # without a trend
    for _ in range(5):  # at most twofold in one decision
        fleet.run(prompts=prompts, outputs=outputs)
    assert fleet.replicas == expected


def test_a_decision_at_most_doubles_the_replicas() -> None:
    fleet = Fleet()
    counts = []
    for _ in range(4):
        fleet.run(prompts=100_000)
        counts.append(fleet.replicas)
    assert counts == [2, 4, 8, 8]


def test_growing_work_starts_a_replica_before_it_is_needed() -> None:
    early, late = Fleet(lead_s=20.0), Fleet(lead_s=0.001)
    started = {}
    for name, fleet in (("early", early), ("late", late)):
        for second in range(60):
            fleet.run(prompts=20 * second)  # 1,000 tokens, a full replica, after 50 s
            if fleet.replicas > 1:
                started[name] = second
                break
    assert started["early"] <= 35
    assert started["late"] >= 50


def test_a_steady_load_has_no_trend() -> None:
    fleet = Fleet()
    fleet.run(60, prompts=900)
    assert fleet.replicas == 1


def test_replicas_stop_late_and_one_at_a_time() -> None:
    fleet = Fleet(min_replicas=1)
    fleet.run(5, prompts=10_000)
    assert fleet.replicas == 8
    ends = []
    for _ in range(500):
        before = fleet.replicas
        fleet.run(outputs=100)
        if fleet.replicas < before:
            assert fleet.replicas == before - 1
            ends.append(fleet.now)
    assert fleet.replicas == 1
    assert ends[0] >= 54  # after the burst
    assert all(later - earlier >= 50 for earlier, later in itertools.pairwise(ends))


def test_a_short_gap_stops_nothing() -> None:
    fleet = Fleet(lead_s=0.001)
    fleet.run(5, prompts=3000)
    assert fleet.replicas == 3
    for _ in range(10):
        fleet.run(40)  # idle
        fleet.run(5, prompts=3000)
    assert fleet.replicas == 3


def test_to_zero_only_after_the_delay_and_where_it_is_allowed() -> None:
    fleet = Fleet()
    fleet.run(3, prompts=10)
    fleet.run(119)
    assert fleet.replicas == 1
    decision = fleet.run()
    assert fleet.replicas == 0
    assert "no request for" in decision.reason
    one = Fleet(min_replicas=1)
    one.run(500)
    assert one.replicas == 1


def test_a_queued_request_starts_the_first_replica() -> None:
    fleet = Fleet()
    fleet.run(3, prompts=10)
    fleet.run(300)
    assert fleet.replicas == 0
    decision = fleet.run(queued=3)
    assert fleet.replicas == 1
    assert "3 requests wait" in decision.reason


def test_without_a_measured_rate_the_number_stays() -> None:
    unknown = ReplicaLoad(prompt_tokens=1e6, decode_tokens=1e6, prompt_rate=0, decode_rate=0)
    scaler = Scaler(TARGETS)
    decision = scaler.decide(ModelLoad(at=0.0, replicas=[unknown] * 2), 2)
    assert decision == Decision(2, "the rate of a replica is not known yet")


def test_the_rate_is_that_of_a_full_batch() -> None:
    meter = RateMeter(min_tokens=10)
    assert meter.tokens_per_s == 0.0
    meter.observe(100, 1.0)
    meter.observe(105, 1.9)  # too few tokens to count
    meter.observe(400, 2.0)
    assert meter.tokens_per_s == pytest.approx(300.0)
    meter.observe(450, 4.0)  # a small batch is slower
    assert meter.tokens_per_s == pytest.approx(300.0)
    meter.observe(50, 0.1)  # a restarted engine counts from zero
    assert meter.tokens_per_s == pytest.approx(500.0)


def test_a_replica_that_starts_is_not_stopped() -> None:
    """Its time without requests begins when it answers."""
    fleet = Fleet(zero_delay_s=10.0)
    for now in range(30):
        assert fleet.scaler.decide(ModelLoad(at=now, replicas=()), 1).num_replicas == 1
    assert fleet.scaler.decide(load_at(35.0), 1).num_replicas == 1
    assert fleet.scaler.decide(load_at(40.0), 1).num_replicas == 0
