"""Workloads on one engine or more: each is built once, warmed up, and runs all of them.

On a CPU engines take turns, run by run, since how fast a machine is changes while it is measured. A
GPU's memory holds one engine at a time, so they run one after another there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Protocol

import torch

from windlass.build import OpenModel, build_engine, open_model
from windlass.config import EngineConfig
from windlass.errors import ConfigError
from windlass.runner.device import choose_device
from windlass.tools.bench.naive import Naive
from windlass.tools.common.device import (
    Traffic,
    device_of,
    forget_peak,
    memory_bytes,
    read_bandwidth,
    release_memory,
    traffic_of,
)
from windlass.tools.common.drive import EngineRun, median_run, run_all
from windlass.tools.common.record import Record
from windlass.tools.common.requests import Request
from windlass.tools.common.workload import Workload

Log = Callable[[str], None]

_RATIOS = ("first_ratio", "first_decode_ratio")
_WARM_OUTPUT = 4
_WARM_PROMPT_ON_CPU = 32


class Subject(Protocol):
    """Something that answers requests and can be measured at it."""

    name: str
    vocab_size: int
    device: torch.device
    traffic: Traffic

    def run(self, requests: Sequence[Request]) -> EngineRun: ...

    def reset(self) -> None:
        """Forget what was computed for earlier requests."""


class Own:
    """Our engine."""

    name = "windlass"

    def __init__(self, config: EngineConfig, opened: OpenModel) -> None:
        built = build_engine(config, opened.source)
        self._engine = built.engine
        self.vocab_size = built.report.vocab_size
        network, capacity = built.weights.network, built.report.capacity
        self.device = device_of(network)
        self.traffic = traffic_of(network, capacity.bytes_per_block / capacity.block_size)
        self.choices = {choice.what: choice.value for choice in built.report.choices}

    def run(self, requests: Sequence[Request]) -> EngineRun:
        return run_all(self._engine, requests)

    def reset(self) -> None:
        self._engine.reset_prefix_cache()


MakeSubject = Callable[[EngineConfig, OpenModel], Subject]


@dataclass(frozen=True, slots=True)
class Order:
    """What to measure."""

    workloads: Sequence[Workload]
    engines: Sequence[str] = ("windlass",)
    repeat: int = 1
    batch: int | None = None  # the most rows of one static batch of transformers

    def __post_init__(self) -> None:
        if self.repeat < 1:
            raise ConfigError(f"--repeat must be at least 1, got {self.repeat}.")


def measure(
    options: dict[str, Any],
    order: Order,
    log: Log,
    name: str = "throughput",
    engines: Mapping[str, MakeSubject] | None = None,
) -> Record:
    """Run all workloads on all engines of the order. `engines`: further ones that it may name."""
    makers: dict[str, MakeSubject] = {
        "windlass": Own,
        "transformers": lambda config, opened: Naive(config, opened, order.batch),
        **(engines or {}),
    }
    if not order.engines or any(name not in makers for name in order.engines):
        raise ConfigError(
            f"--engine must name some of {', '.join(makers)}; got {','.join(order.engines)!r}."
        )
    config = with_rows(EngineConfig.of(**options), order.workloads, log)
    opened = open_model(config)
    rows: list[dict[str, Any]] = []
    settings: dict[str, Any] = dict(options)
    on_gpu = choose_device(config.model).type == "cuda"
    groups = [[engine] for engine in order.engines] if on_gpu else [order.engines]
    for together in groups:
        subjects: list[Subject] = []
        for engine in together:
            log(f"{engine}: loading {opened.files.name}")
            subjects.append(makers[engine](config, opened))
            if isinstance(subjects[-1], Own):
                settings["choices"] = subjects[-1].choices
        device = subjects[0].device
        bandwidth = read_bandwidth(device)
        settings["read_gb_s"] = round(bandwidth / 1e9, 1)
        log(f"{device.type} reads {bandwidth / 1e9:,.1f} GB/s")
        for workload in order.workloads:
            rows += _rows(subjects, workload, order.repeat, bandwidth, log)
        subjects.clear()
        release_memory()
    notes = (
        "decode_*: the steps in which all requests decode. read_gb: weights and keys and values "
        "that such a step must read; bandwidth_pct: that, against what the device was measured to "
        "read. memory_gib: most allocated on a GPU, resident on a CPU. Median of the repeats."
    )
    if len(order.engines) > 1 and not on_gpu:
        notes += (
            " Engines took turns, run by run, in one process, so that there is no memory of each. "
            "first_ratio: how many times as fast the first engine was in the same turn, the median "
            "of the turns; first_decode_ratio: the same of the steps in which all decode."
        )
    return Record(name, rows, notes, settings)


def with_rows(config: EngineConfig, workloads: Sequence[Workload], log: Log) -> EngineConfig:
    """The config with room for as many rows at once as the workloads are about."""
    largest = max(workloads, key=lambda workload: workload.num_rows)
    wish = config.scheduler
    allowed = config.limits(choose_device(config.model).type).max_num_seqs
    if allowed >= largest.num_rows or wish.batching != "continuous":
        return config
    if wish.max_num_seqs is not None:
        raise ConfigError(
            f"{largest.name} needs {largest.num_rows} rows at once, --max-num-seqs allows "
            f"{allowed}. Raise it, or leave it out."
        )
    log(f"--max-num-seqs {largest.num_rows} instead of {allowed}: {largest.name} needs so many")
    return replace(config, scheduler=replace(wish, max_num_seqs=largest.num_rows))


def _rows(
    subjects: Sequence[Subject], workload: Workload, repeat: int, bandwidth: float, log: Log
) -> list[dict[str, Any]]:
    """Warm up, run `repeat` times in turn with other ids each, and take each one's median run."""
    for subject in subjects:
        log(f"{subject.name}, {workload.name}: warming up")
        subject.run(_warm_up(workload.requests(subject.vocab_size), subject.device.type))
        forget_peak(subject.device)
    runs: list[list[EngineRun]] = [[] for _ in subjects]
    for draw in range(1, repeat + 1):
        for subject, own in zip(subjects, runs, strict=True):
            subject.reset()
            own.append(subject.run(workload.requests(subject.vocab_size, draw)))
            log(f"{subject.name}, {workload.name}: {own[-1].row()['output_tok_s']:,} tok/s")
    rows = []
    for subject, own in zip(subjects, runs, strict=True):
        taken = median_run(own)
        row = {"workload": workload.name, "engine": subject.name, **taken.row()}
        if repeat > 1:
            row["all_seconds"] = [round(each.duration, 3) for each in own]
        row |= _limits(subject, taken, bandwidth, alone=len(subjects) == 1)
        if own is not runs[0]:
            row |= _ratios(runs[0], own)
            times = " and ".join(f"{row[key]} ({key})" for key in _RATIOS if row[key])
            log(f"{workload.name}: {subjects[0].name} is {times} times as fast as {subject.name}")
        rows.append(row)
    return rows


def _ratios(first: Sequence[EngineRun], own: Sequence[EngineRun]) -> dict[str, float | None]:
    """How many times as fast the first engine was, turn by turn: whole runs, and decode steps."""
    pairs = list(zip(first, own, strict=True))
    steps = [(a.window.step_s, b.window.step_s) for a, b in pairs if a.window and b.window]
    whole = median(b.duration / a.duration for a, b in pairs)
    decode = round(median(b / a for a, b in steps), 3) if steps else None
    return dict(zip(_RATIOS, (round(whole, 3), decode), strict=True))


def _limits(subject: Subject, taken: EngineRun, bandwidth: float, alone: bool) -> dict[str, Any]:
    """How near the run came to what the memory gives, and what it held if nobody else did."""
    memory = round(memory_bytes(subject.device) / 2**30, 3) if alone else None
    if taken.window is None:
        return {"read_gb": None, "bandwidth_pct": None, "memory_gib": memory}
    step_bytes = subject.traffic.step_bytes(taken.window.mean_kv)
    share = 100 * step_bytes / (taken.window.step_s * bandwidth)
    return {
        "read_gb": round(step_bytes / 1e9, 4),
        "bandwidth_pct": round(share, 1),
        "memory_gib": memory,
    }


def _warm_up(requests: list[Request], device: str) -> list[Request]:
    """The same rows with few outputs: kernels are made for the shapes that come.

    A GPU's kernels are chosen by the number of tokens too, so it gets the whole prompts; a CPU would
    compute them for as long as the run itself.
    """
    longest = None if device == "cuda" else _WARM_PROMPT_ON_CPU
    return [
        replace(
            request,
            prompt=request.prompt[:longest],
            num_output=min(request.num_output, _WARM_OUTPUT),
        )
        for request in requests
    ]
