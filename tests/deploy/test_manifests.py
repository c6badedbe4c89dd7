"""The files in deploy/: their parts fit together, and they fit the server. `make lint-deploy` checks schemas."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
import yaml
from pydantic import BaseModel, ConfigDict, Field

from windlass.cli.command import Options
from windlass.cli.main import app
from windlass.cluster.fleet import read_fleet
from windlass.config import ServeConfig
from windlass.serve.launch import _EXIT_GRACE_S

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILES = sorted((DEPLOY / "docker").glob("Dockerfile.*"))
BASE = DEPLOY / "kubernetes" / "base"
UID = 10001


def documents(path: Path) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(path.read_text()) if each is not None]


def base(kind: str) -> dict[str, Any]:
    kustomization = documents(BASE / "kustomization.yaml")[0]
    found = [each for name in kustomization["resources"] for each in documents(BASE / name)]
    (one,) = [each for each in found if each["kind"] == kind]
    return one


def serve_options(words: list[str]) -> ServeConfig:
    """The options of `windlass serve`, as its own parser reads them."""
    command, *rest = words
    assert command == "serve"
    group = typer.main.get_command(app)
    parsed = group.get_command(None, command).make_context(command, list(rest))  # type: ignore[attr-defined,arg-type]
    values = {name: value for name, value in parsed.params.items() if value not in (None, ())}
    return Options(values).serve()


# ---- images --------------------------------------------------------------------------------------


def instructions(path: Path) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile and their arguments, with lines joined."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    pairs = (line.split(maxsplit=1) for line in joined.splitlines() if line.strip())
    return [(name, argument) for name, argument in pairs]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.suffix[1:])
def test_an_image_runs_as_its_own_user_and_writes_only_to_its_cache(path: Path) -> None:
    found = instructions(path)
    last = max(index for index, (name, _) in enumerate(found) if name == "FROM")
    stage = found[last:]
    values = dict(stage)
    assert values["USER"] == f"{UID}:{UID}"
    assert values["VOLUME"] == "/cache"
    (environment,) = [argument for name, argument in stage if name == "ENV"]
    variables = dict(word.split("=", 1) for word in shlex.split(environment))
    # A subfolder: the server makes it private, which a mounted volume is not.
    assert variables["WINDLASS_CACHE"].startswith("/cache/")
    for name in ("HOME", "HF_HOME", "WINDLASS_CACHE"):
        assert variables[name].startswith("/cache")
    run, *compiling = [argument for name, argument in stage if name == "RUN"]
    assert f"--uid {UID}" in run
    if path.suffix == ".cuda":
        # As the image's user, into a cache that a new volume is filled from. Without --device, a build that
        # does not reach a GPU would compile CPU kernels.
        assert compiling == [
            'if [ -n "$COMPILE" ]; then windlass compile --device cuda $COMPILE; fi'
        ]
        names = [name for name, _ in stage]
        assert names.index("USER") < names.index("ARG") < names.index("VOLUME")
    else:  # the package has the kernels: windlass compile would find them there, and a compiler is missing
        assert not compiling
        assert "WINDLASS_BUILD_KERNELS=1" in path.read_text()
    assert "/health/live" in values["HEALTHCHECK"]
    # Exec form: signals reach the server.
    entry, command = (yaml.safe_load(values[name]) for name in ("ENTRYPOINT", "CMD"))
    assert entry == ["windlass"]
    config = serve_options(command)
    assert config.host == "0.0.0.0"
    assert values["EXPOSE"] == str(config.port)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.suffix[1:])
def test_an_image_copies_files_that_exist_and_are_sent_to_the_builder(path: Path) -> None:
    sent = {
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"
    }
    for name, argument in instructions(path):
        if name == "COPY" and not argument.startswith("--from"):
            for source in argument.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert source in sent


# ---- manifests -----------------------------------------------------------------------------------


def test_selectors_ports_and_volumes_fit_together() -> None:
    deployment, service = base("Deployment"), base("Service")
    spec = deployment["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    for selector in (
        deployment["spec"]["selector"]["matchLabels"],
        service["spec"]["selector"],
        base("NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert [port["targetPort"] for port in service["spec"]["ports"]] == list(ports)
    (rule,) = base("NetworkPolicy")["spec"]["ingress"]
    assert [port["port"] for port in rule["ports"]] == list(ports)
    mounts = {each["name"] for each in container["volumeMounts"]}
    assert mounts == {each["name"] for each in spec["volumes"]}
    claim = base("PersistentVolumeClaim")["metadata"]["name"]
    claims = [each.get("persistentVolumeClaim") for each in spec["volumes"]]
    assert {"claimName": claim} in claims


def test_the_pod_has_no_rights_that_it_does_not_need() -> None:
    spec = base("Deployment")["spec"]["template"]["spec"]
    pod, (container,) = spec["securityContext"], spec["containers"]
    assert pod["runAsNonRoot"]
    assert {pod["runAsUser"], pod["runAsGroup"], pod["fsGroup"]} == {UID}
    own = container["securityContext"]
    assert own["readOnlyRootFilesystem"]
    assert not own["allowPrivilegeEscalation"]
    assert own["capabilities"] == {"drop": ["ALL"]}
    assert not spec["automountServiceAccountToken"]
    for variable in container["env"]:  # keys come from a secret
        assert "value" not in variable
    writable = {"/cache", "/tmp", "/dev/shm"}
    assert {each["mountPath"] for each in container["volumeMounts"]} == writable


@pytest.mark.parametrize("name", ["base/deployment.yaml", "cuda/gpu.yaml"])
def test_the_arguments_are_those_of_the_server(name: str) -> None:
    (deployment,) = documents(DEPLOY / "kubernetes" / name)
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    config = serve_options(container["args"])
    assert config.host == "0.0.0.0"
    spec = base("Deployment")["spec"]["template"]["spec"]
    assert config.port == spec["containers"][0]["ports"][0]["containerPort"]
    grace_s = spec["terminationGracePeriodSeconds"]
    assert grace_s > config.shutdown_timeout + _EXIT_GRACE_S


def test_probes_ask_existing_endpoints() -> None:
    routes = (ROOT / "windlass" / "serve" / "routes.py").read_text()
    (container,) = base("Deployment")["spec"]["template"]["spec"]["containers"]
    paths = {
        container[f"{name}Probe"]["httpGet"]["path"]
        for name in ("startup", "readiness", "liveness")
    }
    paths.add(
        base("Deployment")["spec"]["template"]["metadata"]["annotations"]["prometheus.io/path"]
    )
    for path in paths:
        assert f'"{path}"' in routes


class _Ray(BaseModel):
    """The fields of KubeRay's CRD (ray.io/v1) that the file uses: an unknown one is an error.

    Kubernetes drops unknown fields without a word. The CRD is in no package of PyPI or npm.
    """

    model_config = ConfigDict(strict=True, extra="forbid")


class _RayGroup(_Ray):
    rayStartParams: dict[str, str]
    template: dict[str, Any]  # check_ray_pods.py checks it with the schema of Kubernetes


class _RayWorkers(_RayGroup):
    groupName: str
    replicas: Annotated[int, Field(ge=0)] = 0
    minReplicas: Annotated[int, Field(ge=0)]
    maxReplicas: Annotated[int, Field(ge=0)]


class _RayCluster(_Ray):
    headGroupSpec: _RayGroup
    workerGroupSpecs: list[_RayWorkers] = []
    enableInTreeAutoscaling: bool | None = None


class _RaySpec(_Ray):
    serveConfigV2: str
    rayClusterConfig: _RayCluster


class _RayService(_Ray):
    apiVersion: Literal["ray.io/v1"]
    kind: Literal["RayService"]
    metadata: dict[str, Any]
    spec: _RaySpec


def test_the_ray_service_has_only_fields_of_kuberay() -> None:
    _, service = documents(DEPLOY / "kuberay" / "rayservice.yaml")
    cluster = _RayService.model_validate(service).spec.rayClusterConfig
    for group in cluster.workerGroupSpecs:
        assert group.minReplicas <= group.replicas <= group.maxReplicas
    # KubeRay's names: its probes, services and autoscaler look for them.
    names = [each.template["spec"]["containers"][0]["name"] for each in cluster.workerGroupSpecs]
    head = cluster.headGroupSpec.template["spec"]["containers"][0]
    assert (head["name"], *names) == ("ray-head", *["ray-worker"] * len(names))
    assert {each["name"] for each in head["ports"]} >= {"gcs-server", "dashboard", "serve"}


def test_ray_serve_accepts_the_config_of_the_ray_service() -> None:
    schema = pytest.importorskip("ray.serve.schema", reason="make test-cluster installs Ray")
    _, service = documents(DEPLOY / "kuberay" / "rayservice.yaml")
    config = schema.ServeDeploySchema.model_validate(
        yaml.safe_load(service["spec"]["serveConfigV2"])
    )
    head = service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]
    ports = {each["name"]: each["containerPort"] for each in head["spec"]["containers"][0]["ports"]}
    assert config.http_options.port == ports["serve"]


def test_the_ray_service_runs_a_valid_fleet(tmp_path: Path) -> None:
    config_map, service = documents(DEPLOY / "kuberay" / "rayservice.yaml")
    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    applications = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    (application,) = applications
    module, _, function = application["import_path"].partition(":")
    source = (ROOT / Path(*module.split("."))).with_suffix(".py").read_text()
    assert f"def {function}(" in source
    cluster = service["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    (file,) = config_map["data"]
    (tmp_path / file).write_text(config_map["data"][file])
    fleet = read_fleet(tmp_path / file)
    largest = 0
    for group in groups:
        spec = group["template"]["spec"]
        (container,) = spec["containers"]
        assert spec["securityContext"]["runAsUser"] == UID
        assert container["securityContext"]["readOnlyRootFilesystem"]
        mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
        assert mounts.keys() == {each["name"] for each in spec["volumes"]}
        assert application["args"]["fleet"] == f"{mounts['fleet']}/{file}"
        largest = max(largest, int(container["resources"]["requests"]["cpu"]))
    # A replica and the ingress have room on one worker.
    assert max(model.cpus for model in fleet.models) + fleet.ingress.cpus <= largest


def test_overlays_change_what_the_base_has() -> None:
    (overlay,) = documents(DEPLOY / "kubernetes" / "cuda" / "kustomization.yaml")
    folder = DEPLOY / "kubernetes" / "cuda"
    assert [(folder / each).resolve() for each in overlay["resources"]] == [BASE]
    for patch in overlay["patches"]:
        (change,) = documents(folder / patch["path"])
        found = base(change["kind"])
        assert change["metadata"]["name"] == found["metadata"]["name"] == patch["target"]["name"]
        names = [each["name"] for each in found["spec"]["template"]["spec"]["containers"]]
        changed = [each["name"] for each in change["spec"]["template"]["spec"]["containers"]]
        assert changed == names
    image = base("Deployment")["spec"]["template"]["spec"]["containers"][0]["image"]
    assert image.split(":")[0] == overlay["images"][0]["name"]
    tags = {path.suffix[1:] for path in DOCKERFILES}
    assert {image.split(":")[1], overlay["images"][0]["newTag"]} == tags
