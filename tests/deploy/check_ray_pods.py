"""Checks the pods and ConfigMaps of RayServices against the schemas of Kubernetes: check_ray_pods.py FILE...

`make lint-deploy` runs it where kubernetes-validate is installed. KubeRay's own fields have no schema in
any package of PyPI or npm: test_manifests.py has one of the fields that the file uses.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml


def plain_objects(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The objects that Kubernetes itself has a schema for: of a RayService, its pods."""
    if document["kind"] != "RayService":
        yield document
        return
    cluster = document["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster.get("workerGroupSpecs", ())]
    for group in groups:
        metadata = {"name": group.get("groupName", "head"), **group["template"].get("metadata", {})}
        yield {"apiVersion": "v1", "kind": "Pod", **group["template"], "metadata": metadata}


def main(paths: list[str]) -> int:
    num_bad = 0
    version = kubernetes_validate.latest_version()
    for path in paths:
        for document in yaml.safe_load_all(Path(path).read_text()):
            for each in plain_objects(document):
                name = f"{path}: {each['kind']} {each['metadata']['name']}"
                try:
                    kubernetes_validate.validate(each, version, strict=True)
                except kubernetes_validate.ValidationError as error:
                    num_bad += 1
                    print(f"{name}: {error.message} at {'.'.join(map(str, error.path))}")
                else:
                    print(f"{name}: ok with Kubernetes {version}")
    return int(num_bad > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
