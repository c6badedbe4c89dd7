"""A load and settings in, figures out: through the real scheduler with measured costs of steps.

With `check` the same load is run for real too, on an engine in this process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from windlass.build import Built, OpenModel, build_engine, open_model
from windlass.config import AUTO, EngineConfig, Limits
from windlass.core.card import Capacity
from windlass.errors import ConfigError
from windlass.tools.common.drive import EngineRun, replay
from windlass.tools.common.load import Load
from windlass.tools.common.record import Record
from windlass.tools.common.requests import Request
from windlass.tools.common.slo import Slo
from windlass.tools.common.summary import Summary
from windlass.tools.plan.simulate import simulate
from windlass.tools.plan.steps import Steps, context_of, find_steps

Log = Callable[[str], None]
_WARM_UP = (Request([1] * 32, 4),) * 2
# The same short work before and after each run: what the machine gives just then.
_PACE = [Request([1 + row] * 8, 24) for row in range(4)]
_STEADY = 0.15
_FIGURES = (
    "output_throughput",
    "request_throughput",
    "median_ttft_ms",
    "p99_ttft_ms",
    "median_tpot_ms",
    "p99_tpot_ms",
)
_NOTES = (
    "Predicted: the requests go through the real scheduler, and each step takes what the costs that "
    "were measured beforehand say. Measured: the same requests on an engine in the same process. "
    "difference_pct: predicted output tokens a second against measured ones; of all turns in "
    "all_difference_pct, fastest first; the turn of the median duration is shown. pace: what the "
    "machine gave before and after the run, by a short piece of work, against the costs; "
    "paced_difference_pct: the difference with that taken into account."
)
Predict = Callable[[Sequence[Request]], EngineRun]


@dataclass(frozen=True, slots=True)
class Prediction:
    """What an engine of some settings would do with a load."""

    load: str
    limits: Limits
    capacity: Capacity
    steps: Steps
    run: EngineRun
    summary: Summary
    slo: Slo
    fleets: list[Fleet]  # numbers of devices that were tried; empty: nobody asked

    def row(self) -> dict[str, Any]:
        """All figures in one level."""
        return {"workload": self.load, **self.summary.row(), **engine_figures(self.run)}


def engine_figures(run: EngineRun) -> dict[str, Any]:
    return {
        "kv_peak_pct": round(100 * run.peak_kv, 2),
        "kv_mean_pct": round(100 * run.mean_kv, 2),
        "peak_waiting": run.peak_waiting,
        "preemptions": run.num_preemptions,
        "steps": run.num_steps,
        "prompt_tokens_computed": run.prompt_tokens_computed,
    }


class WhatIf:
    """One model on this machine, whose steps were measured. Loads nothing when that is known."""

    def __init__(
        self,
        config: EngineConfig,
        costs: Path | None = None,
        log: Log = lambda _: None,
        loads: Sequence[Load] = (),
    ) -> None:
        """`loads`: those to come, of which one that cannot be is refused before anything is measured."""
        if config.speculation.spec != "none":
            raise ConfigError(
                f"--spec {config.speculation.spec}: guesses depend on what is said, and cannot be "
                "predicted. Leave it out, or measure with windlass tune or windlass bench serve."
            )
        self.config = config
        self.opened: OpenModel = open_model(config)
        for load in loads:
            load.requests(self.opened.card, lambda _: None)
        self.steps = find_steps(config, self.opened, costs, log)
        self.limits = config.limits(self.steps.device)
        self.capacity = self.steps.capacity(config, self.opened, self.limits)
        self._log = log

    def requests(self, load: Load, draw: int = 0) -> list[Request]:
        return load.requests(self.opened.card, self._log, draw)

    def predict(self, load: Load, slo: Slo, most_devices: int = 0, draw: int = 0) -> Prediction:
        """`most_devices`: how many may be tried until the SLO is met; 0: only this one."""
        requests = self.requests(load, draw)
        predict = partial(self._simulate, max_concurrency=load.max_concurrency)
        run = predict(requests)
        fleets = devices_needed(predict, requests, slo, most_devices) if most_devices else []
        return Prediction(
            load.title,
            self.limits,
            self.capacity,
            self.steps,
            run,
            slo.summarise(run),
            slo,
            fleets,
        )

    def _simulate(self, requests: Sequence[Request], max_concurrency: int | None) -> EngineRun:
        return simulate(
            self.config,
            self.limits,
            self.capacity,
            self._max_model_len(),
            self.steps.costs,
            requests,
            max_concurrency,
            overlap=self.steps.device == "cuda",
        )

    def _max_model_len(self) -> int:
        longest = context_of(self.config, self.opened)
        is_auto = self.config.model.max_model_len == AUTO
        return min(longest, self.capacity.num_tokens) if is_auto else longest

    def check(self, loads: Sequence[Load], slo: Slo, repeat: int = 1) -> Record:
        """Predict each load, run it for real, and say how far apart they are.

        Loads take turns, and every turn has texts of its own; a load's turn of the median duration counts.
        """
        built = build_engine(self.config, self.opened.source)
        replay(built.engine, _WARM_UP)
        pairs: dict[int, list[dict[str, Any]]] = {}
        for draw in range(repeat):
            for index, load in enumerate(loads):
                pairs.setdefault(index, []).append(self._pair(built, load, slo, draw))
        rows = []
        for turns in pairs.values():
            turns.sort(key=lambda row: row["measured_duration"])
            taken = turns[(len(turns) - 1) // 2]
            taken["all_difference_pct"] = [row["difference_pct"] for row in turns]
            taken["all_pace"] = [row["pace"] for row in turns]
            rows.append(taken)
        settings = {
            "model": self.opened.files.name,
            "max_num_seqs": self.limits.max_num_seqs,
            "max_num_batched_tokens": self.limits.max_num_batched_tokens,
            "capacity": asdict(self.capacity),
            "costs": self.steps.to_json(),
            "repeat": repeat,
        }
        return Record("plan-accuracy", rows, _NOTES, settings)

    def _pair(self, built: Built, load: Load, slo: Slo, draw: int) -> dict[str, Any]:
        predicted = self.predict(load, slo, draw=draw)
        before = self._pace(built)
        built.engine.reset_prefix_cache()
        run = replay(built.engine, self.requests(load, draw), max_concurrency=load.max_concurrency)
        pace = (before + self._pace(built)) / 2
        measured = slo.summarise(run)
        told, seen = predicted.summary.row(), measured.row()
        row: dict[str, Any] = {"workload": load.title, "requests": len(run.timings)}
        for name in ("duration", *_FIGURES):
            row |= {f"predicted_{name}": told.get(name), f"measured_{name}": seen.get(name)}
        row["difference_pct"] = _apart(told["output_throughput"], seen["output_throughput"])
        row["pace"] = round(pace, 3)
        row["paced_difference_pct"] = _apart(
            told["output_throughput"] * pace, seen["output_throughput"]
        )
        row["ttft_difference_pct"] = _apart(told["median_ttft_ms"], seen["median_ttft_ms"])
        row |= {f"predicted_{name}": value for name, value in engine_figures(predicted.run).items()}
        row |= {f"measured_{name}": value for name, value in engine_figures(run).items()}
        self._log(
            f"{load.title}: predicted {told['output_throughput']:,.1f} tok/s, measured "
            f"{seen['output_throughput']:,.1f}: {row['difference_pct']:+.1f} %"
        )
        if abs(pace - 1) > _STEADY:
            self._log(
                f"{load.title}: just then the machine gave {pace:.2f} times what it gave when the "
                "costs were measured, which a prediction cannot know; with that it is "
                f"{row['paced_difference_pct']:+.1f} % off"
            )
        return row

    def _pace(self, built: Built) -> float:
        """How fast the machine is now, against the costs: 0.5, half as fast."""
        told = self._simulate(_PACE, None)
        built.engine.reset_prefix_cache()
        return told.duration / replay(built.engine, _PACE).duration


def _apart(predicted: float, measured: float) -> float:
    return round(100 * (predicted / measured - 1), 2)


@dataclass(frozen=True, slots=True)
class Fleet:
    """The load on so many devices."""

    num_devices: int
    summary: Summary
    misses: list[str]  # empty: the promise is kept


def split(requests: Sequence[Request], count: int) -> list[list[Request]]:
    """Conversations in turn to each device; all turns of one stay where their prefix is."""
    home: list[tuple[int, int]] = []  # device, and number there
    parts: list[list[Request]] = [[] for _ in range(count)]
    num_conversations = 0
    for request in requests:
        if request.follows is None:
            device = num_conversations % count
            num_conversations += 1
            placed = request
        else:
            device, number = home[request.follows]
            placed = replace(request, follows=number)
        home.append((device, len(parts[device])))
        parts[device].append(placed)
    return [part for part in parts if part]


def merged(runs: Sequence[EngineRun]) -> EngineRun:
    """Of runs beside each other, all from the same moment."""
    return EngineRun(
        timings=[timing for run in runs for timing in run.timings],
        duration=max(run.duration for run in runs),
        num_steps=sum(run.num_steps for run in runs),
        prompt_tokens_computed=sum(run.prompt_tokens_computed for run in runs),
        num_preemptions=sum(run.num_preemptions for run in runs),
        num_blocks=sum(run.num_blocks for run in runs),
        peak_blocks=sum(run.peak_blocks for run in runs),
        mean_blocks=sum(run.mean_blocks for run in runs),
        peak_waiting=sum(run.peak_waiting for run in runs),
    )


def devices_needed(
    predict: Predict, requests: Sequence[Request], slo: Slo, most: int
) -> list[Fleet]:
    """What was tried, in order; the first that keeps the promise is the least, if there is one.

    The number is doubled until the promise is kept, then the gap is halved: more devices are taken
    to be no worse.
    """
    most = min(most, sum(request.follows is None for request in requests))
    tried: dict[int, Fleet] = {}

    def keeps(count: int) -> bool:
        summary = slo.summarise(merged([predict(part) for part in split(requests, count)]))
        tried[count] = Fleet(count, summary, slo.misses(summary))
        return not tried[count].misses

    below, count = 0, 1
    while not keeps(count) and count < most:
        below, count = count, min(2 * count, most)
    if not tried[count].misses:
        while count - below > 1:
            middle = (below + count) // 2
            if keeps(middle):
                count = middle
            else:
                below = middle
    return [tried[number] for number in sorted(tried)]
