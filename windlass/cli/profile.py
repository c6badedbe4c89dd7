"""`windlass profile`: where a step's time goes, as a table and as a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from windlass.cli.command import Options
from windlass.cli.flags import log, option
from windlass.errors import ConfigError


def profile(
    options: Options,
    workload: Annotated[str, option("NAME", "As for windlass bench throughput.")] = "decode_b1",
    steps: Annotated[int, option("N", "Decode steps to look at.")] = 8,
    output: Annotated[
        Path | None,
        option(
            "FILE",
            "Write a trace for Chrome or Perfetto; the prompt step's lies beside it.",
            "-o",
            "--output",
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
    from windlass.tools.common.workload import find
    from windlass.tools.profile import profile as run
    from windlass.tools.profile import show

    wanted = find(workload)
    phases = run(with_rows(config, [wanted], log), wanted, steps, output, log)
    if output is not None:
        log(f"written to {output}")
    show(phases)
    return 0
