"""The deployments of a fleet as Ray Serve gets them, and the state that Serve keeps of it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ray import serve
from ray.serve.api import RunTarget
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.context import _get_global_client
from ray.serve.deployment import Application

from windlass.cluster.fleet import Fleet, Model, Routing
from windlass.cluster.ingress import FleetIngress
from windlass.cluster.replica import ModelReplica
from windlass.cluster.versions import FleetState, Version

INGRESS = "ingress"
DEPLOY_FAILED = "DEPLOY_FAILED"  # Serve's status after several starts
_POLICY = "windlass.cluster.serve_policy"
_ROUTERS: dict[Routing, str] = {
    "prefix": f"{_POLICY}:PrefixRequestRouter",
    "round-robin": f"{_POLICY}:RoundRobinRequestRouter",
    "power-of-two": "ray.serve._private.request_router:PowerOfTwoChoicesRequestRouter",
}
# The engine queues requests itself, and its queue is bounded where the API admits them.
_MAX_ONGOING = 100_000
_NEVER_S = 1e12  # infinity is not JSON
_METRICS_S = 1.0  # between two reports of a replica's load
_HEALTH_S = 2.0


def make_application(state: FleetState) -> Application:
    """The deployments of a fleet: one per version of a model, and the ingress."""
    fleet = state.fleet
    deployments = [
        _deployment(fleet, version, model.numbers()[version.deployment])
        for model in state.models.values()
        for version in (model.stable, model.next)
        if version is not None and version.deployment in model.numbers()
    ]
    drain_s = max(fleet.serve_config(model).shutdown_timeout for model in fleet.models)
    ingress = serve.deployment(FleetIngress).options(
        name=INGRESS,
        num_replicas=fleet.ingress.replicas,
        ray_actor_options={"num_cpus": fleet.ingress.cpus},
        max_ongoing_requests=_MAX_ONGOING,
        health_check_period_s=_HEALTH_S,
        graceful_shutdown_timeout_s=drain_s,
        user_config=state.model_dump(mode="json"),
        **_keyed(state.ingress_key),
    )
    return ingress.bind(deployments)


def _keyed(key: str) -> dict[str, Any]:
    """Serve replaces the replicas of a deployment when the key changes; else at every deployment."""
    return {"version": key, "_internal": True}


def _deployment(fleet: Fleet, version: Version, num_replicas: int | None) -> Application:
    """The replicas of a version. `num_replicas`: None: as the fleet file says."""
    model, config = version.model, fleet.serve_config(version.model)
    options: dict[str, Any] = {
        "name": version.deployment,
        "ray_actor_options": {"num_cpus": model.cpus, "num_gpus": model.gpus},
        "placement_group_bundles": model.bundles(),
        "placement_group_strategy": "STRICT_PACK",
        "max_ongoing_requests": _MAX_ONGOING,
        "health_check_period_s": _HEALTH_S,
        "graceful_shutdown_timeout_s": config.shutdown_timeout,
        "user_config": {"sleep_after_s": _sleep_after_s(fleet, model)},
        "request_router_config": RequestRouterConfig(request_router_class=_ROUTERS[model.routing]),
    }
    if num_replicas is not None:
        options["num_replicas"] = num_replicas
    elif model.replicas.min == model.replicas.max:
        options["num_replicas"] = model.replicas.max
    else:
        options["autoscaling_config"] = _autoscaling(fleet, model)
    made: Application = (
        serve.deployment(ModelReplica)
        .options(**options, **_keyed(version.key))
        .bind(model, config.hang_timeout)
    )
    return made


def _sleep_after_s(fleet: Fleet, model: Model) -> float:
    return fleet.warm_pool.idle_s if fleet.warm_pool and fleet.pools(model) else _NEVER_S


def _autoscaling(fleet: Fleet, model: Model) -> AutoscalingConfig:
    """Serve applies the policy's decisions at once: the delays are the policy's own."""
    values: dict[str, Any] = {"targets": asdict(model.targets())}
    if fleet.pools(model):
        assert fleet.warm_pool is not None
        pool = asdict(fleet.warm_pool.config())
        values |= {"fleet": fleet.name, "model": model.name, "pool": pool}
    policy = AutoscalingPolicy(policy_function=f"{_POLICY}:TokenScaling", policy_kwargs=values)
    return AutoscalingConfig(
        min_replicas=model.replicas.min,
        # One replica shows at once that the model can be loaded, and what its limits are.
        initial_replicas=max(1, model.replicas.min),
        max_replicas=model.replicas.max,
        metrics_interval_s=_METRICS_S,
        look_back_period_s=2 * _METRICS_S,
        upscale_delay_s=0.0,
        downscale_delay_s=0.0,
        downscale_to_zero_delay_s=0.0,
        policy=policy,
    )


def apply(state: FleetState, *, wait: bool = False) -> None:
    """Give Serve the state; it starts, stops and reconfigures what differs."""
    target = RunTarget(make_application(state), name=state.fleet.name, route_prefix="/")
    serve.run_many([target], wait_for_applications_running=wait)


def details(name: str) -> dict[str, Any] | None:
    """What Serve's controller knows of a fleet; None: it does not run."""
    found: dict[str, Any] = _get_global_client().get_serve_details()["applications"]
    return found.get(name)


def read_state(name: str) -> FleetState | None:
    """The state of a running fleet; None: it does not run."""
    found = details(name)
    if found is None or INGRESS not in found["deployments"]:
        return None
    config = found["deployments"][INGRESS]["deployment_config"].get("user_config")
    return None if not config else FleetState.model_validate(config)
