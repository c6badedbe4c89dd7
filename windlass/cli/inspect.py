"""`windlass inspect`: describes a model and its kernels without reading weights."""

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
    """Describe a model and the kernels that would run it.

    Shows the detected formats, the kernel of each kind of layer, and why other kernels refused. No
    weights are read.
    """
    config = options.engine()
    from windlass.cli.model_report import examine

    report = examine(config, tensors)
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        from windlass.cli.report import print_model_report

        print_model_report(report)
    return 0
