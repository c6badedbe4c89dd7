"""Drives the updates of a fleet: starts and stops replicas, and shifts requests, as rollout.py decides.

An actor of Ray does it, so that an update ends also if the command that began it does not wait. All
that it remembers is in the fleet's state, so an actor that is restarted goes on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ReplicaState

from windlass.cluster.application import DEPLOY_FAILED, INGRESS, apply, details, read_state
from windlass.cluster.quality import Probe, read_probes
from windlass.cluster.rollout import Rollout, Samples, VersionView
from windlass.cluster.versions import FleetState, ModelState, Version
from windlass.errors import EngineError

_log = logging.getLogger("windlass.cluster")

_STEP_S = 1.0
_CALL_TIMEOUT_S = 10.0
_SCORE_TIMEOUT_S = 600.0
_START_TIMEOUT_S = 120.0
_NAMESPACE = "windlass"
_READY = ("RUNNING",)
_DRAINING = ("STOPPING",)
# The controller or the ingress is being restarted: its state comes back with it.
RESTARTING = (RayError, RayServeException, TimeoutError)
Scores = tuple[float, ...]


class FleetUpdate:
    """Updates all models of one fleet whose state has a next version."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._scores: dict[tuple[str, int], Scores] = {}  # by model and version

    def run(self) -> None:
        """Step until no update is under way."""
        while True:
            try:
                state = read_state(self._name)
                if state is None or not state.is_updating:
                    return
                self._step(state)
            except RESTARTING as error:
                _log.warning("the update of %s goes on: %s", self._name, error)
            time.sleep(_STEP_S)

    def _step(self, state: FleetState) -> None:
        """Apply what the policy decides from the replicas and requests of now."""
        found = details(self._name)
        if found is None:
            return
        deployments = found["deployments"]
        if deployments[INGRESS]["status"] == "UPDATING":
            return  # it has not learnt the last shares yet
        samples = self._samples()
        after = state
        for name, model in state.models.items():
            if model.next is not None:
                after = after.with_model(name, self._follow(model, deployments, samples[name]))
        if after != state and read_state(self._name) == state:  # else a command has changed it
            apply(after)

    def _follow(
        self, model: ModelState, deployments: dict[str, Any], samples: dict[int, Samples]
    ) -> ModelState:
        assert model.next is not None
        updates = model.next.model.rollout
        probes = [] if updates.quality is None else read_probes(updates.quality)
        rollout = Rollout(updates.config(len(probes)), model.rollout)
        old = _view(deployments.get(model.stable.deployment), samples.get(model.stable.number))
        new = _view(deployments.get(model.next.deployment), samples.get(model.next.number))
        if probes and new.num_ready and old.num_ready and rollout.state.phase == "canary":
            old, new = (
                replace(view, samples=replace(view.samples, scores=self._scored(version, probes)))
                for view, version in ((old, model.stable), (new, model.next))
            )
        num_needed = model.num_needed
        if num_needed is None:
            stable = deployments.get(model.stable.deployment, {})
            num_needed = max(1, stable.get("target_num_replicas", 1))
        target = rollout.step(old, new, num_needed=num_needed, now=time.time())
        if rollout.is_over:
            return model.end(rollout.state.phase, rollout.state.reason)
        return model.follow(target, rollout.state, num_needed)

    def _ingress(self) -> Any:
        return serve.get_deployment_handle(INGRESS, self._name)

    def _samples(self) -> dict[str, dict[int, Samples]]:
        """Those of all ingresses together."""
        found: dict[str, dict[int, Samples]] = {}
        for one in self._ingress().broadcast("samples").results(timeout_s=_CALL_TIMEOUT_S):
            for name, versions in one.items():
                for number, samples in versions.items():
                    of_model = found.setdefault(name, {})
                    of_model[number] = of_model.get(number, Samples()) + samples
        return found

    def _scored(self, version: Version, probes: Sequence[Probe]) -> Scores:
        """The scores of all answers with a version; computed once."""
        name, number = version.model.name, version.number
        if (name, number) not in self._scores:
            score = self._ingress().score
            calls = [score.remote(name, number, each.prompt, each.answer) for each in probes]
            self._scores[name, number] = tuple(
                each.result(timeout_s=_SCORE_TIMEOUT_S) for each in calls
            )
        return self._scores[name, number]


def _view(deployment: dict[str, Any] | None, samples: Samples | None) -> VersionView:
    """The replicas of a version as Serve sees them; `deployment`: None: there are none."""
    if deployment is None:
        return VersionView(samples=samples or Samples())
    states = Counter(ReplicaState(each["state"]).value for each in deployment["replicas"])
    num_ready = sum(states[each] for each in _READY)
    num_draining = sum(states[each] for each in _DRAINING)
    is_failed = deployment["status"] == DEPLOY_FAILED
    return VersionView(
        num_ready=num_ready,
        num_starting=states.total() - num_ready - num_draining,
        num_draining=num_draining,
        num_failures=len(deployment["recent_dead_replicas"]),
        failure=_cause(deployment["message"]) if is_failed else "",
        samples=samples or Samples(),
    )


def _cause(message: str) -> str:
    """The last line of Serve's message about a failure, which has the exception."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return f"its replicas do not start: {lines[-1]}" if lines else "its replicas do not start"


class UpdateDriver:
    """Runs the updates of one fleet in a thread, and ends with them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        FleetUpdate(self._name).run()
        ray.kill(ray.get_runtime_context().current_actor)

    def is_running(self) -> bool:
        return self._thread.is_alive()


def follow_update(state: FleetState, on_progress: Callable[[str], None]) -> None:
    """Start the driver of an update, unless there is one, and wait for the end of the update."""
    name = state.fleet.name
    driver_class = ray.remote(num_cpus=0, max_restarts=-1)(UpdateDriver)
    driver = driver_class.options(
        name=f"update-{name}", namespace=_NAMESPACE, lifetime="detached", get_if_exists=True
    ).remote(name)
    ray.get(driver.is_running.remote(), timeout=_START_TIMEOUT_S)
    said = {each: progress(model) for each, model in state.models.items()}
    now = state
    while now.is_updating:
        time.sleep(_STEP_S)
        try:
            found = read_state(name)
        except RESTARTING:
            continue
        if found is None:
            raise EngineError(f"the fleet {name} was ended while it was updated.")
        now = found
        for each, model in now.models.items():
            line = progress(model)
            if line and said.get(each) != line:
                on_progress(f"{each}: {line}")
            said[each] = line
    names = [each for each, model in state.models.items() if model.next is not None]
    failed = [
        f"{each}: {now.models[each].last}" for each in names if now.models[each].is_rolled_back
    ]
    if failed:
        raise EngineError(
            f"the fleet {name} was not updated: {'; '.join(failed)}. The old version answers."
        )


def progress(model: ModelState) -> str:
    """One line about an update; "": there was none."""
    if model.next is None:
        return model.last
    if model.rollout is None:
        return f"version {model.next.number} starts"
    share = f"{model.share:.0%} of the requests"
    return f"version {model.next.number}: {model.rollout.phase}, {share}: {model.rollout.reason}"
