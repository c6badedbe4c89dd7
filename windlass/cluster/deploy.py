"""Starts, shows and ends a fleet on Ray Serve."""

from __future__ import annotations

import math
import threading
import urllib.request
from collections.abc import Callable
from typing import Any

import ray
from ray import serve
from ray.serve.config import HTTPOptions
from ray.serve.exceptions import DeploymentUnavailableError

from windlass.cluster.application import DEPLOY_FAILED, apply, details, read_state
from windlass.cluster.fleet import Fleet
from windlass.cluster.quality import read_probes
from windlass.cluster.update import follow_update
from windlass.cluster.versions import FleetState, ModelState, Version, first_state, next_state
from windlass.errors import ConfigError, EngineError

_HEALTH_TIMEOUT_S = 10.0
_CALL_TIMEOUT_S = 5.0


def connect(address: str) -> None:
    """Connect to a running Ray cluster; raises ConfigError if there is none."""
    try:
        ray.init(address=address, ignore_reinit_error=True, log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"no Ray cluster answers at {address!r}: {error} Start one with `ray start --head`, or run "
            "`windlass cluster up --local`."
        ) from error


def up(fleet: Fleet, on_progress: Callable[[str], None] = lambda _: None) -> str:
    """Start a fleet, or update a running one, and wait until it answers; returns its URL.

    `on_progress` gets a line for each phase of the update of a model. Raises EngineError if a model was
    rolled back.
    """
    serve.start(http_options=HTTPOptions(host=fleet.host, port=fleet.port))
    running = read_state(fleet.name)
    if running is None:
        state = first_state(fleet)
    else:
        state = next_state(running, fleet, failed_models(running))
    for model in state.models.values():
        if model.next is not None and model.next.model.rollout.quality is not None:
            read_probes(model.next.model.rollout.quality)
    try:
        # A version that is being updated to may have failed; the update sees to it.
        apply(state, wait=not any(model.num_next for model in state.models.values()))
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
    if state.is_updating:
        follow_update(state, on_progress)
    return url


def failed_models(state: FleetState) -> set[str]:
    """The models whose stable version has failed to start and has no replica."""
    found = details(state.fleet.name)
    deployments = {} if found is None else found["deployments"]
    failed = set()
    for name, model in state.models.items():
        deployment = deployments.get(model.stable.deployment, {})
        is_up = any(each["state"] == "RUNNING" for each in deployment.get("replicas", ()))
        if deployment.get("status") == DEPLOY_FAILED and not is_up:
            failed.add(name)
    return failed


def status() -> dict[str, Any]:
    """Each fleet: state, its models with their versions, and its deployments with their replicas."""
    found = serve.status()
    fleets = {}
    for name, app in found.applications.items():
        state = read_state(name)
        fleets[name] = {
            "status": str(app.status.value),
            "message": app.message,
            "models": {} if state is None else _models_status(state),
            "deployments": {
                each: {
                    "status": str(item.status.value),
                    "replicas": {str(state): count for state, count in item.replica_states.items()},
                    "message": item.message,
                }
                for each, item in app.deployments.items()
            },
        }
    return fleets


def _models_status(state: FleetState) -> dict[str, Any]:
    return {
        name: {**model_status(model), "asleep": _num_asleep(state.fleet, model.stable)}
        for name, model in state.models.items()
    }


def _num_asleep(fleet: Fleet, version: Version) -> int:
    """The sleeping replicas of a model; 0 where there is no warm pool for it."""
    if not fleet.pools(version.model):
        return 0
    handle = serve.get_deployment_handle(version.deployment, fleet.name)
    try:
        found = handle.broadcast("snapshot").results(
            timeout_s=_CALL_TIMEOUT_S, return_exceptions=True
        )
    except (DeploymentUnavailableError, TimeoutError):
        return 0
    return sum(not isinstance(each, Exception) and each.is_asleep for each in found)


def model_status(model: ModelState) -> dict[str, Any]:
    """The versions of a model, and the phase of its update."""
    rollout = model.rollout
    return {
        "version": model.stable.number,
        "deployment": model.stable.deployment,
        "next": None if model.next is None else model.next.number,
        "phase": None if model.next is None else "starting" if rollout is None else rollout.phase,
        "reason": model.last if model.next is None or rollout is None else rollout.reason,
        "share": model.share,
    }


def down(name: str) -> None:
    """End a fleet: its requests get the time of `shutdown_timeout` to finish."""
    if name not in serve.status().applications:
        raise ConfigError(f"no fleet {name!r} runs here: {', '.join(status()) or 'there is none'}.")
    serve.delete(name)


def start_local(fleet: Fleet) -> None:
    """Run Ray in this process with enough CPUs for all replicas; ends with the process."""
    models = sum(
        (model.replicas.max + model.rollout.max_surge) * model.cpus for model in fleet.models
    )
    num_cpus = math.ceil(models + fleet.ingress.replicas * fleet.ingress.cpus)
    ray.init(num_cpus=num_cpus, include_dashboard=False, log_to_driver=False)


def wait_for_interrupt() -> None:
    """Wait for Ctrl-C, then end the fleet and Ray."""
    try:
        threading.Event().wait()
    finally:
        serve.shutdown()
        ray.shutdown()
