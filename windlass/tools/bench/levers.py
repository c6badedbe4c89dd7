"""Measures single optimisations: the same workload with each on and off, in one process.

Absolute times of two runs on a shared CPU are not comparable; ratios within one run are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from windlass.build import open_model
from windlass.config import EngineConfig
from windlass.tools.bench.adapters import adapters
from windlass.tools.bench.scheduler import measure as measure_scheduler
from windlass.tools.bench.speculation import speculation
from windlass.tools.bench.throughput import WindlassEngine, run_draw
from windlass.tools.common.device import release_memory
from windlass.tools.common.drive import median_run
from windlass.tools.common.record import Record
from windlass.tools.common.requests import Request
from windlass.tools.common.workload import Sizes, Workload, find

Log = Callable[[str], None]

_BATCHING_REQUESTS = 32
_PREFIX_REQUESTS = 16


def batching(options: dict[str, Any], num_requests: int | None, repeat: int, log: Log) -> Record:
    """Compare continuous batching with static batches of 8 and with no batching."""
    variants: dict[str, dict[str, Any]] = {
        "continuous": {"batching": "continuous"},
        "static": {"batching": "static", "max_batch_size": 8},
        "none": {"batching": "none"},
    }
    workload = find("ragged", Sizes(num_requests=num_requests or _BATCHING_REQUESTS))
    rows = _compare(options, variants, workload, repeat, log)
    notes = (
        "Outputs of 8 to 256 tokens, all requests sent at once. A finished row of a static batch "
        "costs no more time here, but its slot stays empty until the whole batch has finished."
    )
    return Record("batching", _with_speedup(rows, "none"), notes, settings=options)


def prefix(options: dict[str, Any], num_requests: int | None, repeat: int, log: Log) -> Record:
    """Compare prefix caching on and off, for prompts that share their first 1,000 tokens."""
    variants = {"on": {"prefix_caching": True}, "off": {"prefix_caching": False}}
    workload = find("shared", Sizes(num_requests=num_requests or _PREFIX_REQUESTS))
    rows = _compare(options, variants, workload, repeat, log)
    notes = "1,000 shared and 32 own prompt tokens, 16 out. The first prompt is computed in full."
    return Record("prefix", _with_speedup(rows, "off"), notes, settings=options)


def scheduler(log: Log, counts: Sequence[int] = (1, 16, 64, 256)) -> Record:
    """Measure plan and commit by number of running requests."""
    rows = []
    for count in counts:
        log(f"{count} running requests")
        rows.append(measure_scheduler(count))
    return Record("scheduler", rows, "Decode steps, one token per request, no model.")


WITH_MODEL = {"batching": batching, "prefix": prefix}
LEVERS = tuple(sorted((*WITH_MODEL, "adapters", "scheduler", "speculation")))
__all__ = ["LEVERS", "WITH_MODEL", "adapters", "batching", "prefix", "scheduler", "speculation"]


def _compare(
    options: dict[str, Any],
    variants: dict[str, dict[str, Any]],
    workload: Workload,
    repeat: int,
    log: Log,
) -> list[dict[str, Any]]:
    """Run the same requests on one engine per variant, with shared weights; take the median runs."""
    opened = open_model(EngineConfig.of(**options))
    rows, weights = [], None
    for name, changes in variants.items():
        engine = WindlassEngine(EngineConfig.of(**{**options, **changes}), opened, weights)
        weights = engine.weights
        log(f"{name}: warming up, then {len(workload.shapes)} requests")
        few = workload.requests(engine.vocab_size)[:8]
        engine.run([Request(request.prompt[-8:], 4) for request in few])
        run = median_run([run_draw(engine, workload, draw) for draw in range(1, repeat + 1)])
        rows.append({"variant": name, **run.row()})
        log(f"{name}: {rows[-1]['output_tok_s']} tok/s")
        del engine
        release_memory()
    return rows


def _with_speedup(rows: list[dict[str, Any]], base: str) -> list[dict[str, Any]]:
    base_tok_s = next(row["output_tok_s"] for row in rows if row["variant"] == base)
    return [{**row, "speedup": round(row["output_tok_s"] / base_tok_s, 2)} for row in rows]
