"""The state of a fleet: the versions of each model that run, and the update between them.

Plain values that Ray Serve's controller keeps as the ingress's user_config. So the state survives the
death of the ingress, of the controller and of the process that drives an update. No Ray here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ConfigDict

from windlass.cluster.fleet import Fleet, Model
from windlass.cluster.rollout import RolloutState, Target
from windlass.errors import ConfigError
from windlass.version import __version__

# Changes of these fields are applied to the running replicas.
_IN_PLACE = {"replicas", "autoscaling", "rollout", "fallbacks"}


class _State(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Version(_State):
    """A model as the fleet file had it at one time; its replicas are one Serve deployment."""

    number: int
    model: Model
    key: str  # versions with equal keys have equal replicas

    @property
    def deployment(self) -> str:
        return f"{self.model.name}@{self.number}"


class ModelState(_State):
    """The version of a model that answers, and the one that may replace it."""

    stable: Version
    next: Version | None = None  # None: no update is under way
    rollout: RolloutState | None = None
    num_needed: int | None = None  # replicas of both versions while they are exchanged
    num_stable: int | None = None  # replicas; None: as the fleet file says
    num_next: int = 0
    share: float = 0.0  # of the requests that `next` answers
    num_versions: int = 1  # so far: the number of the newest version
    last: str = ""  # how the last update ended
    is_rolled_back: bool = False  # the last update

    @property
    def versions(self) -> list[Version]:
        """The versions that answer requests; `next` only if a request may go to it."""
        return [self.stable, *([self.next] if self.next is not None and self.num_next else [])]

    def numbers(self) -> dict[str, int | None]:
        """The replicas of each deployment; None: as the fleet file says. Serve has none with 0."""
        found: dict[str, int | None] = {self.stable.deployment: self.num_stable}
        if self.next is not None:
            found[self.next.deployment] = self.num_next
        return {name: number for name, number in found.items() if number != 0}

    def begin(self, version: Version) -> ModelState:
        fields = {"next": version, "num_versions": version.number}
        return self.model_copy(update={**fields, "last": "", "is_rolled_back": False})

    def follow(self, target: Target, rollout: RolloutState, num_needed: int) -> ModelState:
        """The state that `target` asks for.

        A version without a share may still have requests on their way to it, and so its last replica is
        stopped one step after the ingress has learnt the share. With a new replica, Serve holds requests
        until it has started; without any, it would refuse them.
        """
        share, num_old, num_new = target.new_share, target.num_old, target.num_new
        if not num_old and target.phase == "rolling":
            share, num_old, num_new = 1.0, 0 if self.share == 1.0 else 1, max(1, num_new)
        elif not num_new and self.num_next:
            share, num_new = 0.0, 0 if self.share == 0.0 else 1
        return self.model_copy(
            update={
                "rollout": rollout,
                "share": share,
                "num_next": num_new,
                # The autoscaling goes on while a canary is compared.
                **(
                    {"num_stable": None, "num_needed": None}
                    if target.phase == "canary"
                    else {"num_stable": num_old, "num_needed": num_needed}
                ),
            }
        )

    def end(self, phase: str, reason: str) -> ModelState:
        """The state after an update: with the new version, or with the old one."""
        assert self.next is not None
        is_updated = phase == "updated"
        return ModelState(
            stable=self.next if is_updated else self.stable,
            num_versions=self.num_versions,
            last=f"version {self.next.number} {'runs' if is_updated else 'was rolled back'}: {reason}",
            is_rolled_back=not is_updated,
        )


class FleetState(_State):
    """All models of a fleet."""

    fleet: Fleet
    models: dict[str, ModelState]

    @property
    def ingress_key(self) -> str:
        """Ingresses with equal keys differ in nothing but their models."""
        return _key(self.fleet.model_dump(mode="json", exclude={"models", "warm_pool"}))

    @property
    def is_updating(self) -> bool:
        return any(each.next is not None for each in self.models.values())

    def with_model(self, name: str, model: ModelState) -> FleetState:
        return self.model_copy(update={"models": {**self.models, name: model}})


def first_state(fleet: Fleet) -> FleetState:
    """The state of a fleet that starts."""
    models = {
        model.name: ModelState(stable=make_version(fleet, model, 1)) for model in fleet.models
    }
    return FleetState(fleet=fleet, models=models)


def next_state(state: FleetState, fleet: Fleet, failed: Collection[str] = ()) -> FleetState:
    """The state that leads from a running fleet to a changed file.

    Models of `failed` have no replica that answers: their new version replaces them at once. Raises
    ConfigError for a second update of a model before the first one has ended.
    """
    models: dict[str, ModelState] = {}
    for model in fleet.models:
        now = state.models.get(model.name)
        if now is None:
            models[model.name] = ModelState(stable=make_version(fleet, model, 1))
        else:
            made = make_version(fleet, model, now.num_versions + 1)
            models[model.name] = _changed(now, made, is_failed=model.name in failed)
    return FleetState(fleet=fleet, models=models)


def _changed(now: ModelState, made: Version, *, is_failed: bool) -> ModelState:
    if now.next is not None:
        if made.key == now.next.key:
            return now.model_copy(update={"next": _renewed(now.next, made)})
        if made.key != now.stable.key:
            raise ConfigError(
                f"model {made.model.name!r}: the update to version {now.next.number} has not ended. Wait "
                "for it, or run `windlass cluster up` with the file of the old version to roll back."
            )
        rollout = replace(
            now.rollout or RolloutState(), phase="rollback", reason="the file has the old version"
        )
        return now.model_copy(update={"stable": _renewed(now.stable, made), "rollout": rollout})
    if made.key == now.stable.key:
        return now.model_copy(update={"stable": _renewed(now.stable, made)})
    if is_failed:
        return ModelState(stable=made, num_versions=made.number)
    return now.begin(made)


def _renewed(version: Version, made: Version) -> Version:
    """The same version with the fields that change in place."""
    return version.model_copy(update={"model": made.model})


def make_version(fleet: Fleet, model: Model, number: int) -> Version:
    fields: Mapping[str, Any] = model.model_dump(mode="json", exclude=_IN_PLACE)
    config = fleet.serve_config(model)
    key = _key({**fields, "hang_timeout": config.hang_timeout})
    return Version(number=number, model=model, key=key)


def _key(fields: Mapping[str, Any]) -> str:
    text = json.dumps({**fields, "windlass": __version__}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
