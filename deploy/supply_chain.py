"""What Windlass is installed with: a bill of materials (SBOM), and a check for known vulnerabilities.

`python deploy/supply_chain.py sbom` prints CycloneDX JSON of the installed dependency closure.
`... audit PIP_AUDIT` runs pip-audit on it; see `audit` for the exit codes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from tempfile import NamedTemporaryFile
from typing import Any
from uuid import uuid4

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = "windlass-llm"
CLEAN, VULNERABLE, NOT_AUDITED = 0, 1, 3


def closure(root: str = ROOT) -> dict[str, tuple[Distribution, list[str]]]:
    """Every installed distribution that `root` needs, by name, with the names of what it needs itself."""
    distribution(root)  # raises PackageNotFoundError
    found: dict[str, tuple[Distribution, list[str]]] = {}
    waiting = [(canonicalize_name(root), frozenset[str]())]
    seen = set(waiting)
    while waiting:
        name, extras = waiting.pop()
        try:
            each = distribution(name)
        except PackageNotFoundError:  # optional on this system
            continue
        needed = [(canonicalize_name(r.name), frozenset(r.extras)) for r in _needs(each, extras)]
        others = found.get(name, (each, []))[1]
        found[name] = each, sorted({*others, *(other for other, _ in needed)})
        waiting += [other for other in dict.fromkeys(needed) if other not in seen]
        seen |= set(needed)
    return {
        name: (each, [other for other in needs if other in found])
        for name, (each, needs) in sorted(found.items())
    }


def _needs(each: Distribution, extras: frozenset[str]) -> Iterator[Requirement]:
    for line in each.requires or ():
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield requirement


def sbom(root: str = ROOT) -> dict[str, Any]:
    """A CycloneDX 1.5 document of the installed dependency closure."""
    parts = closure(root)
    components = {name: _component(name, each) for name, (each, _) in parts.items()}
    main = components.pop(canonicalize_name(root))
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.5.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{uuid4()}",
        "version": 1,
        "metadata": {
            "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
            "component": {**main, "type": "application"},
        },
        "components": list(components.values()),
        "dependencies": [
            {"ref": _purl(name, each), "dependsOn": [_purl(o, parts[o][0]) for o in needs]}
            for name, (each, needs) in parts.items()
        ],
    }


def _purl(name: str, each: Distribution) -> str:
    return f"pkg:pypi/{name}@{each.version}"


def _component(name: str, each: Distribution) -> dict[str, Any]:
    fields = each.metadata.json
    licence = str(fields.get("license_expression") or fields.get("license") or "")
    named = {"licenses": [{"license": {"name": licence.splitlines()[0]}}]} if licence else {}
    purl = _purl(name, each)
    return {
        "type": "library",
        "bom-ref": purl,
        "name": name,
        "version": each.version,
        "purl": purl,
        **named,
    }


def audit(pip_audit: str, root: str = ROOT) -> int:
    """Run pip-audit on the closure: 0: no known vulnerability; 1: some; 3: not all could be checked."""
    pinned = [
        f"{n}=={e.version.partition('+')[0]}\n" for n, (e, _) in closure(root).items() if n != ROOT
    ]
    with NamedTemporaryFile("w", suffix=".txt") as file:
        file.writelines(pinned)
        file.flush()
        command = [pip_audit, "--no-deps", "--disable-pip", "--format", "json", "-r", file.name]
        why = ""
        try:
            done = subprocess.run(command, capture_output=True, text=True)
            why = done.stderr.strip()
            report = json.loads(done.stdout)["dependencies"]
        except (OSError, ValueError, KeyError) as error:  # it is missing, or has no network
            print(f"NOT AUDITED: {(why or str(error))[-500:]}", file=sys.stderr)
            return NOT_AUDITED
    found = [(each, bug) for each in report for bug in each.get("vulns", ())]
    for each, bug in found:
        print(f"{each['name']} {each['version']}: {bug['id']}, fixed in {bug['fix_versions']}")
    skipped = [each["name"] for each in report if "skip_reason" in each]
    print(f"{len(report)} packages, {len(found)} known vulnerabilities")
    if skipped:  # also without a network: pip-audit then skips all, and reports success
        print(f"NOT AUDITED: {', '.join(skipped)}", file=sys.stderr)
    return VULNERABLE if found else NOT_AUDITED if skipped else CLEAN


def main(arguments: list[str]) -> int:
    try:
        match arguments:
            case ["sbom"]:
                print(json.dumps(sbom(), indent=2))
                return CLEAN
            case ["audit", pip_audit]:
                return audit(pip_audit)
    except PackageNotFoundError:
        print(f"{ROOT} is not installed here: pip install -e .", file=sys.stderr)
        return NOT_AUDITED
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
