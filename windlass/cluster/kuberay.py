"""Builds a fleet's application where Ray Serve asks for an import path: KubeRay's RayService."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ray.serve.deployment import Application

from windlass.cluster.application import make_application
from windlass.cluster.fleet import read_fleet
from windlass.cluster.versions import first_state
from windlass.errors import ConfigError


def build(args: Mapping[str, str]) -> Application:
    """The application of the fleet file `args["fleet"]`; Serve's config has host and port."""
    if set(args) != {"fleet"}:
        raise ConfigError(
            f"the application's args are {', '.join(sorted(args)) or 'empty'}; expected fleet: FILE."
        )
    return make_application(first_state(read_fleet(Path(args["fleet"]))))
