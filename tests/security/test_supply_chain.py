"""The bill of materials names the dependency closure, and an audit that cannot run is not green."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
import supply_chain
from supply_chain import CLEAN, NOT_AUDITED, VULNERABLE, audit, closure, sbom

ROOT = "fastapi"  # installed wherever the tests run, with dependencies of dependencies


def test_the_closure_has_dependencies_of_dependencies() -> None:
    found = closure(ROOT)
    assert {"fastapi", "starlette", "pydantic", "pydantic-core", "anyio"} <= set(found)
    assert "pydantic-core" in found["pydantic"][1]
    assert all(set(needs) <= set(found) for _, needs in found.values())


def test_the_document_is_complete() -> None:
    document = json.loads(json.dumps(sbom(ROOT)))
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.5")
    assert document["metadata"]["component"]["name"] == ROOT
    refs = [each["bom-ref"] for each in document["components"]]
    assert len(refs) == len(set(refs))
    assert all(each["purl"].startswith("pkg:pypi/") for each in document["components"])
    known = {*refs, document["metadata"]["component"]["bom-ref"]}
    assert {each["ref"] for each in document["dependencies"]} == known
    assert all(set(each["dependsOn"]) <= known for each in document["dependencies"])


@pytest.mark.parametrize(
    ("output", "code"),
    [
        ('{"dependencies": [{"name": "a", "version": "1", "vulns": []}]}', CLEAN),
        (
            '{"dependencies": [{"name": "a", "version": "1", "vulns": '
            '[{"id": "CVE-1", "fix_versions": ["2"]}]}]}',
            VULNERABLE,
        ),
        ('{"dependencies": [{"name": "a", "skip_reason": "no network"}]}', NOT_AUDITED),
        ("", NOT_AUDITED),
        ("{}", NOT_AUDITED),
    ],
)
def test_an_audit_that_cannot_run_is_not_green(tmp_path: Path, output: str, code: int) -> None:
    program = tmp_path / "pip-audit"
    program.write_text(f"#!/bin/sh\necho no network >&2\necho '{output}'\n")
    program.chmod(stat.S_IRWXU)
    assert audit(str(program), ROOT) == code


def test_a_missing_program_is_not_green(capsys: pytest.CaptureFixture[str]) -> None:
    assert audit("/no/such/pip-audit", ROOT) == NOT_AUDITED
    assert "NOT AUDITED" in capsys.readouterr().err
    assert supply_chain.main(["audit"]) == 2
