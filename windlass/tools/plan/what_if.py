"""Predicts the figures of a load: the real scheduler with measured step costs.

`check` also runs the load on an engine in this process, and compares.
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
from windlass.tools.plan.step_costs import MeasuredSteps, get_step_costs, max_context

Log = Callable[[str], None]
WARM_UP = (Request([1] * 32, 4),) * 2
# A short load before and after each run, which shows how fast the machine is at that time.
_PACE = [Request([1 + row] * 8, 24) for row in range(4)]
_MAX_PACE_CHANGE = 0.15
_FIGURES = (
    "output_throughput",
    "request_throughput",
    "median_ttft_ms",
    "p99_ttft_ms",
    "median_tpot_ms",
    "p99_tpot_ms",
)
_NOTES = (
    "Predicted: the requests go through the real scheduler, with step times from costs measured "
    "beforehand. Measured: the same requests on an engine in the same process. difference_pct: "
    "predicted output tokens per second relative to measured; all_difference_pct has all turns, "
    "fastest first, and the table shows the turn with the median duration. pace: speed of the machine "
    "before and after the run, from a short load, relative to the costs; paced_difference_pct: the "
    "difference corrected by it."
)
Predict = Callable[[Sequence[Request]], EngineRun]


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted figures of a load with given settings."""

    load: str
    limits: Limits
    capacity: Capacity
    steps: MeasuredSteps
    run: EngineRun
    summary: Summary
    slo: Slo
    fleets: list[Fleet]  # by number of devices; empty: not requested

    def row(self) -> dict[str, Any]:
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
    """Predicts loads for one model on this machine. Loads weights only if costs are not cached."""

    def __init__(
        self,
        config: EngineConfig,
        costs: Path | None = None,
        log: Log = lambda _: None,
        loads: Sequence[Load] = (),
    ) -> None:
        """Read or measure the step costs. Invalid `loads` are refused before anything is measured."""
        if config.speculation.spec != "none":
            raise ConfigError(
                f"--spec {config.speculation.spec}: the acceptance of draft tokens depends on the "
                "text and cannot be predicted. Leave it out, or measure with windlass tune or "
                "windlass bench serve."
            )
        self.config = config
        self.opened: OpenModel = open_model(config)
        for load in loads:
            load.requests(self.opened.card, lambda _: None)
        self.steps = get_step_costs(config, self.opened, path=costs, log=log)
        self.limits = config.limits(self.steps.device)
        self.capacity = self.steps.capacity(config, self.opened, self.limits)
        self._log = log

    def requests(self, load: Load, draw: int = 0) -> list[Request]:
        return load.requests(self.opened.card, self._log, draw)

    def predict(self, load: Load, slo: Slo, max_devices: int = 0, draw: int = 0) -> Prediction:
        """Simulate the load. `max_devices`: also search for the number that meets the SLO."""
        requests = self.requests(load, draw)
        predict = partial(self._simulate, max_concurrency=load.max_concurrency)
        run = predict(requests)
        fleets = (
            devices_needed(predict, requests, slo=slo, max_devices=max_devices)
            if max_devices
            else []
        )
        return Prediction(
            load=load.title,
            limits=self.limits,
            capacity=self.capacity,
            steps=self.steps,
            run=run,
            summary=slo.summarise(run),
            slo=slo,
            fleets=fleets,
        )

    def _simulate(self, requests: Sequence[Request], max_concurrency: int | None) -> EngineRun:
        return simulate(
            requests,
            self.steps.costs,
            config=self.config,
            limits=self.limits,
            capacity=self.capacity,
            max_model_len=self._max_model_len(),
            max_concurrency=max_concurrency,
            overlap=self.steps.device == "cuda",
        )

    def _max_model_len(self) -> int:
        context = max_context(self.config, self.opened)
        is_auto = self.config.model.max_model_len == AUTO
        if not is_auto:
            return context
        layout, in_flight = self.capacity.layout, 2 * self.limits.max_num_batched_tokens
        return layout.max_tokens(self.capacity.num_blocks, in_flight, context)

    def check(self, loads: Sequence[Load], slo: Slo, repeat: int = 1) -> Record:
        """Predict each load, run it, and report the difference.

        Loads take turns, and every turn has its own texts; each load's turn with the median duration
        counts.
        """
        built = build_engine(self.config, self.opened.source)
        replay(built.engine, WARM_UP)
        pairs = [[self._pair(built, load, slo, draw) for load in loads] for draw in range(repeat)]
        rows = []
        for turns in map(list, zip(*pairs, strict=True)):
            turns.sort(key=lambda row: row["measured_duration"])
            median = turns[(len(turns) - 1) // 2]
            median["all_difference_pct"] = [row["difference_pct"] for row in turns]
            median["all_pace"] = [row["pace"] for row in turns]
            rows.append(median)
        settings = {
            "model": self.opened.files.name,
            "max_num_seqs": self.limits.max_num_seqs,
            "max_num_batched_tokens": self.limits.max_num_batched_tokens,
            "capacity": asdict(self.capacity) | {"block_size": self.capacity.block_size},
            "costs": self.steps.to_json(),
            "repeat": repeat,
        }
        return Record(name="plan-accuracy", rows=rows, notes=_NOTES, settings=settings)

    def _pair(self, built: Built, load: Load, slo: Slo, draw: int) -> dict[str, Any]:
        """Predict and measure one turn of a load."""
        prediction = self.predict(load, slo, draw=draw)
        before = self._pace(built)
        built.engine.reset_prefix_cache()
        run = replay(built.engine, self.requests(load, draw), max_concurrency=load.max_concurrency)
        pace = (before + self._pace(built)) / 2
        predicted, measured = prediction.summary.row(), slo.summarise(run).row()
        throughput = predicted["output_throughput"], measured["output_throughput"]
        row: dict[str, Any] = {"workload": load.title, "requests": len(run.timings)}
        for name in ("duration", *_FIGURES):
            row |= {
                f"predicted_{name}": predicted.get(name),
                f"measured_{name}": measured.get(name),
            }
        row["difference_pct"] = _difference_pct(*throughput)
        row["pace"] = round(pace, 3)
        row["paced_difference_pct"] = _difference_pct(throughput[0] * pace, throughput[1])
        row["ttft_difference_pct"] = _difference_pct(
            predicted["median_ttft_ms"], measured["median_ttft_ms"]
        )
        for name, value in engine_figures(prediction.run).items():
            row[f"predicted_{name}"] = value
        row |= {f"measured_{name}": value for name, value in engine_figures(run).items()}
        self._log(
            f"{load.title}: predicted {throughput[0]:,.1f} tok/s, measured {throughput[1]:,.1f}: "
            f"{row['difference_pct']:+.1f} %"
        )
        if abs(pace - 1) > _MAX_PACE_CHANGE:
            self._log(
                f"{load.title}: the machine ran at {pace:.2f} times the speed at which the costs "
                f"were measured; corrected by that, the prediction is "
                f"{row['paced_difference_pct']:+.1f} % off"
            )
        return row

    def _pace(self, built: Built) -> float:
        """Return the speed of the machine now relative to the costs; 0.5: half as fast."""
        predicted = self._simulate(_PACE, None)
        built.engine.reset_prefix_cache()
        return predicted.duration / replay(built.engine, _PACE).duration


def _difference_pct(predicted: float, measured: float) -> float:
    return round(100 * (predicted / measured - 1), 2)


@dataclass(frozen=True, slots=True)
class Fleet:
    """Predicted figures of a load on several devices."""

    num_devices: int
    summary: Summary
    misses: list[str]  # empty: the SLO is met


def split(requests: Sequence[Request], count: int) -> list[list[Request]]:
    """Deal conversations to devices in turn; a conversation stays on the device with its prefix."""
    home: list[tuple[int, int]] = []  # device, and index there
    parts: list[list[Request]] = [[] for _ in range(count)]
    num_conversations = 0
    for request in requests:
        if request.follows is None:
            device = num_conversations % count
            num_conversations += 1
            placed = request
        else:
            device, index = home[request.follows]
            placed = replace(request, follows=index)
        home.append((device, len(parts[device])))
        parts[device].append(placed)
    return [part for part in parts if part]


def merged(runs: Sequence[EngineRun]) -> EngineRun:
    """Merge runs that started at the same time on several devices."""
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
    predict: Predict, requests: Sequence[Request], slo: Slo, max_devices: int
) -> list[Fleet]:
    """Search for the smallest number of devices that meets the SLO; return all that were tried.

    The number doubles until the SLO is met, then a binary search follows: more devices are assumed
    to be no worse.
    """
    max_devices = min(max_devices, sum(request.follows is None for request in requests))
    tried: dict[int, Fleet] = {}

    def meets(count: int) -> bool:
        summary = slo.summarise(merged([predict(part) for part in split(requests, count)]))
        tried[count] = Fleet(count, summary, slo.misses(summary))
        return not tried[count].misses

    below, count = 0, 1
    while not meets(count) and count < max_devices:
        below, count = count, min(2 * count, max_devices)
    if not tried[count].misses:
        while count - below > 1:
            middle = (below + count) // 2
            if meets(middle):
                count = middle
            else:
                below = middle
    return [tried[number] for number in sorted(tried)]
