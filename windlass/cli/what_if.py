"""`windlass plan --workload NAME` and `--trace FILE`: what an engine of these settings would do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from windlass.cli.command import Options
from windlass.cli.results import finish
from windlass.errors import ConfigError

if TYPE_CHECKING:
    from windlass.tools.plan.jobs import Load
    from windlass.tools.plan.slo import Slo
    from windlass.tools.plan.what_if import WhatIf


def what_if(options: Options, given: Mapping[str, Any]) -> int:
    """Predict, and with --check measure too; `given` are the flags of `plan`."""
    from windlass.tools.plan.slo import parse_slo
    from windlass.tools.plan.what_if import WhatIf

    loads, slo = make_loads(given), parse_slo(given["slo"] or [])
    if given["max_devices"] < 1 or given["repeat"] < 1:
        raise ConfigError("--max-devices and --repeat must be at least 1.")
    if given["repeat"] > 1 and not given["check"]:
        raise ConfigError("--repeat means something only with --check.")
    config = options.engine()
    if given["kv_cache_dtype"] is not None:
        config = replace(
            config, cache=replace(config.cache, kv_cache_dtype=given["kv_cache_dtype"])
        )
    about = WhatIf(config, given["step_costs"], partial(typer.echo, err=True), loads)
    if given["check"]:
        finish(about.check(loads, slo, given["repeat"]), given["output"])
        return 0
    return _predicted(about, loads, slo, given)


def _predicted(about: WhatIf, loads: list[Load], slo: Slo, given: Mapping[str, Any]) -> int:
    from windlass.tools.bench.record import Record
    from windlass.tools.plan.tell import lines

    rows, good = [], True
    for load in loads:
        most = given["max_devices"] if slo.targets else 0
        found = about.predict(load, slo, most)
        if len(loads) > 1:
            typer.echo(f"\n{load.title}")
        for line in lines(found, load.max_concurrency, load.arrivals.rate):
            typer.echo(line)
        needed = next((fleet.num_devices for fleet in found.fleets if not fleet.misses), None)
        rows.append(found.row() | {"slo": str(slo), "devices_needed": needed})
        good = good and slo.is_met(found.summary)
    if given["output"] is not None:
        settings = {"model": about.opened.files.name, "costs": about.steps.to_json()}
        Record("plan", rows, settings=settings).save(given["output"])
        typer.echo(f"written to {given['output']}", err=True)
    return 0 if good else 1


def make_loads(given: Mapping[str, Any]) -> list[Load]:
    """The loads that the flags name; `plan` and `tune` have the same ones."""
    from windlass.tools.load.arrivals import Arrivals
    from windlass.tools.plan.jobs import Load

    trace: Path | None = given["trace"]
    if trace is not None and given["workload"] is not None:
        raise ConfigError("--trace and --workload exclude each other.")
    if trace is not None and given["request_rate"] is not None:
        raise ConfigError("--request-rate means nothing for --trace, which has its own times.")
    rate = math.inf if given["request_rate"] is None else given["request_rate"]
    arrivals = Arrivals("trace") if trace is not None else Arrivals(rate=rate)
    names = ["trace"] if trace is not None else _words(given["workload"] or "chat")
    sizes = {name: given[name] for name in ("num_prompts", "input_len", "output_len")}
    return [
        Load(
            name,
            trace,
            **sizes,
            arrivals=arrivals,
            max_concurrency=given["max_concurrency"],
            skip_bad_lines=given["skip_bad_lines"],
        )
        for name in names
    ]


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]
