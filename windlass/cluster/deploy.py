"""Starts, shows and ends a fleet on Ray Serve."""

from __future__ import annotations

import math
import threading
import urllib.request
from dataclasses import asdict
from typing import Any

import ray
from ray import serve
from ray.serve.config import (
    AutoscalingConfig,
    AutoscalingPolicy,
    HTTPOptions,
    RequestRouterConfig,
)
from ray.serve.deployment import Application

from windlass.cluster.fleet import Fleet, Model, Routing
from windlass.cluster.ingress import FleetIngress
from windlass.cluster.replica import ModelReplica
from windlass.errors import ConfigError, EngineError

_POLICY = "windlass.cluster.serve_policy"
_ROUTERS: dict[Routing, str] = {
    "prefix": f"{_POLICY}:PrefixRequestRouter",
    "round-robin": f"{_POLICY}:RoundRobinRequestRouter",
    "power-of-two": "ray.serve._private.request_router:PowerOfTwoChoicesRequestRouter",
}
# The engine queues requests itself, and its queue is bounded where the API admits them.
_MAX_ONGOING = 100_000
_METRICS_S = 1.0  # between two reports of a replica's load
_HEALTH_S = 2.0
_HEALTH_TIMEOUT_S = 10.0


def make_application(fleet: Fleet) -> Application:
    """The deployments of a fleet: one per model, and the ingress."""
    replicas = {model.name: _deployment(fleet, model) for model in fleet.models}
    ingress = serve.deployment(FleetIngress).options(
        name="ingress",
        num_replicas=fleet.ingress.replicas,
        ray_actor_options={"num_cpus": fleet.ingress.cpus},
        max_ongoing_requests=_MAX_ONGOING,
        health_check_period_s=_HEALTH_S,
    )
    return ingress.bind(fleet, replicas)


def _deployment(fleet: Fleet, model: Model) -> Application:
    config = fleet.serve_config(model)
    options: dict[str, Any] = {
        "name": model.name,
        "ray_actor_options": {"num_cpus": model.cpus, "num_gpus": model.gpus},
        "placement_group_bundles": model.bundles(),
        "placement_group_strategy": "STRICT_PACK",
        "max_ongoing_requests": _MAX_ONGOING,
        "health_check_period_s": _HEALTH_S,
        "graceful_shutdown_timeout_s": config.shutdown_timeout,
        "request_router_config": RequestRouterConfig(request_router_class=_ROUTERS[model.routing]),
    }
    if model.replicas.min == model.replicas.max:
        options["num_replicas"] = model.replicas.max
    else:
        options["autoscaling_config"] = _autoscaling(model)
    made: Application = (
        serve.deployment(ModelReplica).options(**options).bind(model, config.hang_timeout)
    )
    return made


def _autoscaling(model: Model) -> AutoscalingConfig:
    """Serve applies the policy's decisions at once: the delays are the policy's own."""
    policy = AutoscalingPolicy(
        policy_function=f"{_POLICY}:TokenScaling", policy_kwargs=asdict(model.targets())
    )
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


def connect(address: str) -> None:
    """Connect to a running Ray cluster; raises ConfigError if there is none."""
    try:
        ray.init(address=address, ignore_reinit_error=True, log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"no Ray cluster answers at {address!r}: {error} Start one with `ray start --head`, or run "
            "`windlass cluster up --local`."
        ) from error


def up(fleet: Fleet) -> str:
    """Start or update a fleet, and wait until it answers; returns its URL."""
    serve.start(http_options=HTTPOptions(host=fleet.host, port=fleet.port))
    try:
        serve.run(make_application(fleet), name=fleet.name, route_prefix="/")
    except RuntimeError as error:
        raise EngineError(f"the fleet {fleet.name} did not start: {error}") from error
    url = f"http://{'127.0.0.1' if fleet.host == '0.0.0.0' else fleet.host}:{fleet.port}"
    try:
        urllib.request.urlopen(f"{url}/-/healthz", timeout=_HEALTH_TIMEOUT_S).close()
    except OSError as error:
        raise EngineError(
            f"the fleet {fleet.name} runs, but nothing answers at {url}: {error}. Ray Serve keeps the "
            "address of its first start: `serve shutdown` ends it with all fleets."
        ) from error
    return url


def status() -> dict[str, Any]:
    """Each fleet with its deployments: state, replicas by state, and the reason of a failure."""
    found = serve.status()
    return {
        name: {
            "status": str(app.status.value),
            "message": app.message,
            "deployments": {
                each: {
                    "status": str(item.status.value),
                    "replicas": {str(state): count for state, count in item.replica_states.items()},
                    "message": item.message,
                }
                for each, item in app.deployments.items()
            },
        }
        for name, app in found.applications.items()
    }


def down(name: str) -> None:
    """End a fleet: its requests get the time of `shutdown_timeout` to finish."""
    if name not in serve.status().applications:
        raise ConfigError(f"no fleet {name!r} runs here: {', '.join(status()) or 'there is none'}.")
    serve.delete(name)


def start_local(fleet: Fleet) -> None:
    """Run Ray in this process with enough CPUs for all replicas; ends with the process."""
    models = sum(model.replicas.max * model.cpus for model in fleet.models)
    num_cpus = math.ceil(models + fleet.ingress.replicas * fleet.ingress.cpus)
    ray.init(num_cpus=num_cpus, include_dashboard=False, log_to_driver=False)


def wait_for_interrupt() -> None:
    """Wait for Ctrl-C, then end the fleet and Ray."""
    try:
        threading.Event().wait()
    finally:
        serve.shutdown()
        ray.shutdown()
