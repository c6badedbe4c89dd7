"""`windlass profile`: step time by kind of work, as a table and as a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from windlass.cli.command import Options
from windlass.cli.flags import log, option
from windlass.errors import ConfigError


def profile(
    options: Options,
    workload: Annotated[
        str, option("NAME", "Workload of windlass bench throughput.")
    ] = "decode_b1",
    steps: Annotated[int, option("N", "Decode steps to profile.")] = 8,
    output: Annotated[
        Path | None,
        option(
            "FILE",
            "Write a trace for Chrome or Perfetto; the prefill step gets a file of its own beside it.",
            "-o",
            "--output",
        ),
    ] = None,
) -> int:
    """Show step time by kind of work.

    Profiles the first step of the workload and some decode steps: attention, each GEMM, norms, RoPE
    and KV writes, activation, sampling, and the host. On a CPU, the commands of the recorded step are
    timed one by one; other steps are measured with torch's profiler.
    """
    if steps < 1:
        raise ConfigError(f"--steps must be at least 1, got {steps}.")
    config = options.engine()
    from windlass.tools.bench.throughput import with_rows
    from windlass.tools.common.workload import find
    from windlass.tools.profile import profile as run
    from windlass.tools.profile import show

    chosen = find(workload)
    phases = run(with_rows(config, [chosen], log), chosen, steps, output, log)
    if output is not None:
        log(f"written to {output}")
    show(phases)
    return 0
