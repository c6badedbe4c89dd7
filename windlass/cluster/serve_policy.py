"""The request routers and the autoscaling policy as Ray Serve calls them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ray.serve.config import AutoscalingContext
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from windlass.cluster.autoscaling import ModelLoad, ReplicaLoad, Scaler, ScalingTargets
from windlass.cluster.pool_scaling import ReplicaMemory, pool_of
from windlass.cluster.routing import Call, FleetRouting, routing_of
from windlass.cluster.warm_pool import WarmPoolConfig

METRICS = ("prompt_tokens", "decode_tokens", "prompt_rate", "decode_rate")
POOL_METRICS = (
    *("num_requests", "is_asleep", "awake_bytes", "asleep_bytes"),
    *("start_s", "wake_s"),
)


class PrefixRequestRouter(RequestRouter):
    """Sends a request to the replica that has most of its prefix, unless it is too far behind."""

    _routing: FleetRouting

    def initialize_state(self, **_kwargs: Any) -> None:
        self._routing = routing_of(self._deployment_id.name)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._routing.set_replicas([each.replica_id.unique_id for each in replicas])

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        call = _call_of(pending_request)
        if call is None or not candidate_replicas:
            return [candidate_replicas]
        by_id = {each.replica_id.unique_id: each for each in candidate_replicas}
        if call.replica:
            return [[by_id[call.replica]]] if call.replica in by_id else []
        return [[by_id[each]] for each in self._routing.choose(call, list(by_id))]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, _result: Any
    ) -> None:
        call = _call_of(pending_request)
        if call is not None:
            self._routing.routed(call.request, replica_id.unique_id)


class RoundRobinRequestRouter(RequestRouter):
    """Sends requests to the replicas in turn."""

    def initialize_state(self, **_kwargs: Any) -> None:
        self._turn = 0

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,  # noqa: ARG002
    ) -> list[list[RunningReplica]]:
        if not candidate_replicas:
            return []
        self._turn = (self._turn + 1) % len(candidate_replicas)
        ordered = sorted(candidate_replicas, key=lambda each: each.replica_id.unique_id)
        return [[each] for each in ordered[self._turn :] + ordered[: self._turn]]


def _call_of(pending: PendingRequest | None) -> Call | None:
    """The call of a request to `generate`; other methods go to any replica."""
    if pending is None or not pending.args or not isinstance(pending.args[0], Call):
        return None
    return pending.args[0]


class TokenScaling:
    """Ray Serve's policy of one model; `targets` are the fields of ScalingTargets.

    With `pool`, the fields of WarmPoolConfig, an idle model's last replica sleeps instead of stopping as
    long as the pool has room for it.
    """

    def __init__(
        self,
        targets: Mapping[str, Any],
        pool: Mapping[str, Any] | None = None,
        fleet: str = "",
        model: str = "",
    ) -> None:
        self._scaler = Scaler(ScalingTargets(**targets))
        self._model = model
        self._pool = None if pool is None else pool_of(fleet, WarmPoolConfig(**pool))

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        found = context.aggregated_metrics or {}
        replicas = [ReplicaLoad(**each) for each in _by_replica(found, METRICS).values()]
        load = ModelLoad(
            at=context.current_time, replicas=replicas, num_queued=context.total_queued_requests
        )
        decision = self._scaler.decide(load, context.target_num_replicas)
        if self._pool is not None:
            states = _by_replica(found, POOL_METRICS)
            held = {str(each): ReplicaMemory(**values) for each, values in states.items()}
            decision = self._pool.decide(self._model, held, load, decision)
        return decision.num_replicas, {"reason": decision.reason}


def _by_replica(
    found: Mapping[str, Mapping[Any, float]], names: Sequence[str]
) -> dict[Any, dict[str, float]]:
    """The metrics of each replica that has reported all of them."""
    values = [found.get(name) or {} for name in names]
    return {
        each: {name: by_id[each] for name, by_id in zip(names, values, strict=True)}
        for each in values[0]
        if all(each in by_id for by_id in values)
    }
