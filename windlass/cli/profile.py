"""`windlass profile`: where a step's time goes, as a table and as a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from windlass.cli.command import Options
from windlass.errors import ConfigError


def profile(
    options: Options,
    workload: Annotated[
        str, typer.Option(metavar="NAME", help="As for windlass bench throughput.")
    ] = "decode_b1",
    steps: Annotated[int, typer.Option(metavar="N", help="Decode steps to look at.")] = 8,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="Write a trace for Chrome or Perfetto; the prompt step's lies beside it.",
        ),
    ] = None,
) -> int:
    """Show where a step's time goes.

    The workload's first step, and some steps that only decode, through torch's profiler: attention,
    every matrix product, norms, positions and KV writes, activation, sampling, and the host.
    """
    if steps < 1:
        raise ConfigError(f"--steps must be at least 1, got {steps}.")
    config = options.engine()
    from windlass.tools.bench.throughput import with_rows
    from windlass.tools.bench.workloads import find
    from windlass.tools.profile import profile as run
    from windlass.tools.profile import show

    wanted = find(workload)
    phases = run(with_rows(config, [wanted], _say), wanted, steps, output, _say)
    if output is not None:
        _say(f"written to {output}")
    show(phases)
    return 0


def _say(text: str) -> None:
    typer.echo(text, err=True)
