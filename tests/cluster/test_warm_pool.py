"""Warm pools: memory is never exceeded, and the models most likely to be needed are kept."""

from __future__ import annotations

import random

import pytest

from windlass.cluster.autoscaling import Decision as Scaling
from windlass.cluster.autoscaling import ModelLoad
from windlass.cluster.pool_scaling import FleetPool, ReplicaMemory
from windlass.cluster.warm_pool import (
    Demand,
    PooledModel,
    StartTimes,
    State,
    WarmPoolConfig,
    plan,
)
from windlass.errors import ConfigError

GIB = 2**30


def model(name: str, state: State = "asleep", **changes: object) -> PooledModel:
    values: dict[str, object] = {
        "awake_bytes": 4 * GIB,
        "asleep_bytes": 2 * GIB,
        "start_s": 30.0,
        "wake_s": 2.0,
    }
    return PooledModel(name=name, state=state, **(values | changes))  # type: ignore[arg-type]


def states(models: list[PooledModel], demand: Demand, gib: int, now: float) -> dict[str, State]:
    config = WarmPoolConfig(memory_bytes=gib * GIB)
    decisions = plan({each.name: each for each in models}, demand, config=config, now=now)
    return {name: each.state for name, each in decisions.items()}


def test_demand_decays_by_half() -> None:
    demand = Demand(half_life_s=100.0)
    demand.add("a", 0.0, 10)
    assert demand.rate("a", 100.0) == pytest.approx(demand.rate("a", 0.0) / 2)
    assert demand.rate("b", 100.0) == 0.0
    assert 0.0 < demand.likelihood("a", 100.0, 10.0) < demand.likelihood("a", 100.0, 100.0) < 1.0
    # A steady rate of one request per second is measured as such.
    for second in range(2000):
        demand.add("c", float(second))
    assert demand.rate("c", 1999.0) == pytest.approx(1.0, rel=0.02)


def test_the_likeliest_models_stay_asleep() -> None:
    demand = Demand()
    for name, count in (("a", 1), ("b", 5), ("c", 20)):
        demand.add(name, 0.0, count)
    models = [model("a"), model("b"), model("c"), model("d")]
    found = states(models, demand, gib=4, now=1000.0)
    assert found == {"a": "stopped", "b": "asleep", "c": "asleep", "d": "stopped"}


def test_a_model_with_requests_wakes_and_an_idle_one_makes_room() -> None:
    demand = Demand()
    demand.add("idle", 0.0)
    demand.add("wanted", 1000.0)
    models = [model("idle", "awake"), model("wanted", num_pending=3)]
    assert states(models, demand, gib=6, now=1000.0) == {"idle": "asleep", "wanted": "awake"}
    assert states(models, demand, gib=4, now=1000.0) == {"idle": "stopped", "wanted": "awake"}


def test_a_model_stays_awake_for_a_while() -> None:
    demand = Demand()
    demand.add("a", 0.0)
    assert states([model("a", "awake")], demand, gib=8, now=299.0) == {"a": "awake"}
    assert states([model("a", "awake")], demand, gib=8, now=301.0) == {"a": "asleep"}
    assert states([model("a", always_awake=True)], demand, gib=8, now=1e6) == {"a": "awake"}


def test_a_model_that_starts_as_fast_as_it_wakes_is_not_kept() -> None:
    demand = Demand()
    demand.add("a", 0.0, 100)
    assert states([model("a", wake_s=30.0)], demand, gib=8, now=10.0) == {"a": "stopped"}


@pytest.mark.parametrize("seed", range(50))
def test_random_pools_fit_and_wake_what_is_needed(seed: int) -> None:
    chance, demand = random.Random(seed), Demand()
    models = {}
    for index in range(chance.randint(1, 12)):
        asleep = chance.randint(1, 40)
        name = f"m{index}"
        models[name] = model(
            name,
            chance.choice(["awake", "asleep", "stopped"]),
            asleep_bytes=asleep,
            awake_bytes=asleep + chance.randint(0, 40),
            num_pending=chance.choice([0, 0, 3]),
        )
        demand.add(name, chance.uniform(0, 1000), chance.randint(0, 50))
    memory = chance.randint(40, 300)
    config = WarmPoolConfig(memory_bytes=memory)
    decisions = plan(models, demand, config=config, now=1000.0)
    assert decisions.keys() == models.keys()
    used = 0
    for name, decision in decisions.items():
        used += {"awake": models[name].awake_bytes, "asleep": models[name].asleep_bytes}.get(
            decision.state, 0
        )
        assert decision.reason
        assert not (models[name].state == "stopped" and decision.state == "asleep")
    assert used <= memory
    awake = sum(models[n].awake_bytes for n, d in decisions.items() if d.state == "awake")
    for name, decision in decisions.items():
        if models[name].num_pending and decision.state != "awake":
            assert models[name].awake_bytes > memory - awake


def test_start_times_are_medians_by_phase() -> None:
    times = StartTimes()
    assert times.seconds("a", "cold", default=60.0) == 60.0
    assert times.phases("a", "cold") == {}
    for load_s in (1.0, 9.0, 2.0):
        times.add("a", "cold", {"import": 1.0, "load": load_s})
    assert times.seconds("a", "cold", default=60.0) == 3.0
    assert times.phases("a", "cold") == {"import": 1.0, "load": 2.0}


def test_bad_limits_are_refused() -> None:
    with pytest.raises(ConfigError, match="memory_bytes"):
        WarmPoolConfig(memory_bytes=0)
    with pytest.raises(ConfigError, match="half-life"):
        Demand(0.0)


def memory(num_requests: float = 0, is_asleep: bool = True, num_bytes: int = 100) -> ReplicaMemory:
    return ReplicaMemory(
        num_requests=num_requests,
        is_asleep=is_asleep,
        awake_bytes=3 * num_bytes,
        asleep_bytes=num_bytes,
        start_s=60.0,
        wake_s=1.0,
    )


def idle(at: float) -> ModelLoad:
    return ModelLoad(at=at, replicas=())


NONE = Scaling(0, "no request")


def test_an_idle_model_sleeps_as_long_as_there_is_room() -> None:
    pool = FleetPool(WarmPoolConfig(memory_bytes=250, min_saved_s=0.0))
    for number, name in enumerate(("a", "b")):
        decision = pool.decide(name, {"r": memory(5 + number)}, idle(0.0), NONE)
        assert (decision.num_replicas, decision.reason[:7]) == (1, "asleep:")
    # A third one without requests is stopped, and "a" is stopped for one with more requests.
    assert pool.decide("c", {"r": memory()}, idle(1.0), NONE).num_replicas == 0
    assert pool.decide("c", {}, idle(2.0), NONE) == NONE
    assert pool.decide("d", {"r": memory(50)}, idle(3.0), NONE).num_replicas == 1
    assert pool.decide("a", {"r": memory(5)}, idle(4.0), NONE).num_replicas == 0
    assert pool.decide("b", {"r": memory(6)}, idle(4.0), NONE).num_replicas == 1


def test_demand_is_counted_from_means() -> None:
    """Serve passes means of the last seconds: a request arrives in parts."""
    pool = FleetPool(WarmPoolConfig(memory_bytes=150, min_saved_s=0.0))
    for tick in range(6):
        pool.decide("z", {"r": memory(min(1.0, 0.3 * tick))}, idle(float(tick)), NONE)
        pool.decide("a", {"r": memory()}, idle(float(tick)), NONE)
    assert pool.decide("z", {"r": memory(1.0)}, idle(6.0), NONE).num_replicas == 1
    assert pool.decide("a", {"r": memory()}, idle(6.0), NONE).num_replicas == 0


def test_a_model_that_left_the_fleet_needs_no_room() -> None:
    pool = FleetPool(WarmPoolConfig(memory_bytes=150, min_saved_s=0.0))
    assert pool.decide("a", {"r": memory(9)}, idle(0.0), NONE).num_replicas == 1
    assert pool.decide("b", {"r": memory(1)}, idle(1.0), NONE).num_replicas == 0
    assert pool.decide("b", {"r": memory(1)}, idle(100.0), NONE).num_replicas == 1


def test_a_model_stays_awake_after_a_request_that_the_scaling_has_not_seen() -> None:
    pool = FleetPool(WarmPoolConfig(memory_bytes=1000, idle_s=5.0, min_saved_s=0.0))
    decision = pool.decide("a", {"r": memory(1, is_asleep=False)}, idle(0.0), NONE)
    assert (decision.num_replicas, decision.reason[:6]) == (1, "awake:")


def test_the_pool_does_not_stop_a_model_with_requests() -> None:
    pool = FleetPool(WarmPoolConfig(memory_bytes=1, min_saved_s=0.0))
    for wanted in (Scaling(1, "busy"), Scaling(2, "busy")):
        assert pool.decide("a", {"r": memory(1, is_asleep=False)}, idle(0.0), wanted) == wanted
