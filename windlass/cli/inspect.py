"""`windlass inspect`: what a model is and how it would be computed, without reading its weights."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from windlass.cli.command import Options
from windlass.cli.flags import switch


def inspect(
    options: Options,
    as_json: Annotated[bool, switch("Print JSON.", "--json")] = False,
    tensors: Annotated[bool, switch("List every stored tensor.", "--tensors")] = False,
) -> int:
    """Show what a model is and how it would be computed.

    What was detected, which kernel each kind of layer gets, and why others refused. No weight is
    read.
    """
    config = options.engine()
    from windlass.cli.model_report import examine

    findings = examine(config, tensors)
    if as_json:
        typer.echo(json.dumps(findings, indent=2))
    else:
        from windlass.cli.report import print_findings

        print_findings(findings)
    return 0
