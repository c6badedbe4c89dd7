"""The warm pool of a fleet, as the autoscaling policies of its models ask it.

Serve's controller runs the policies of all models in one process, so they share a pool. What it has
learnt about demand is lost when the controller is restarted. No I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from windlass.cluster.autoscaling import Decision, ModelLoad
from windlass.cluster.warm_pool import Demand, PooledModel, State, WarmPoolConfig, plan

_FORGET_S = 60.0  # without a call of its policy, a model is not part of the fleet any more


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaMemory:
    """What a replica reports for the pool; Serve passes means of the last seconds."""

    num_requests: float  # since its start
    is_asleep: float
    awake_bytes: float
    asleep_bytes: float
    start_s: float
    wake_s: float


class FleetPool:
    """Owns what is known of the models in one fleet's warm pool."""

    def __init__(self, config: WarmPoolConfig) -> None:
        self.config = config
        self._demand = Demand()
        self._models: dict[str, PooledModel] = {}
        self._seen_at: dict[str, float] = {}
        self._num_requests: dict[str, dict[str, float]] = {}  # by model and replica

    def decide(
        self, model: str, replicas: Mapping[str, ReplicaMemory], load: ModelLoad, wanted: Decision
    ) -> Decision:
        """The replicas of `model` to have, where its load alone asks for `wanted`."""
        self._observe(model, replicas, load)
        if not replicas or wanted.num_replicas > 1:
            return wanted
        models = {
            name: each
            for name, each in self._models.items()
            if load.at - self._seen_at[name] < _FORGET_S
        }
        planned = plan(models, self._demand, config=self.config, now=load.at)[model]
        if planned.state != "stopped":
            return (
                wanted if wanted.num_replicas else Decision(1, f"{planned.state}: {planned.reason}")
            )
        if self._models[model].state == "asleep":
            return Decision(0, planned.reason)
        return wanted

    def _observe(self, model: str, replicas: Mapping[str, ReplicaMemory], load: ModelLoad) -> None:
        self._seen_at[model] = load.at
        before = self._num_requests.get(model, {})
        arrived = sum(
            max(0.0, each.num_requests - before.get(name, 0.0)) for name, each in replicas.items()
        )
        self._num_requests[model] = {name: each.num_requests for name, each in replicas.items()}
        if arrived:
            self._demand.add(model, load.at, arrived)
        num_pending = int(load.num_queued) + sum(
            bool(each.prompt_tokens or each.decode_tokens) for each in load.replicas
        )
        if not replicas:
            if model in self._models:
                stopped = replace(self._models[model], state="stopped", num_pending=num_pending)
                self._models[model] = stopped
            return
        are_asleep = all(each.is_asleep for each in replicas.values())
        state: State = "asleep" if are_asleep else "awake"
        self._models[model] = PooledModel(
            name=model,
            state=state,
            awake_bytes=int(sum(each.awake_bytes for each in replicas.values())),
            asleep_bytes=max(1, int(sum(each.asleep_bytes for each in replicas.values()))),
            start_s=max(each.start_s for each in replicas.values()),
            wake_s=max(each.wake_s for each in replicas.values()),
            num_pending=num_pending,
        )


# Serve makes the policies itself, one per deployment: those of one fleet find their pool here.
_POOLS: dict[str, FleetPool] = {}


def pool_of(fleet: str, config: WarmPoolConfig) -> FleetPool:
    """The pool of a fleet in this process, with the settings of the last caller."""
    pool = _POOLS.setdefault(fleet, FleetPool(config))
    pool.config = config
    return pool
