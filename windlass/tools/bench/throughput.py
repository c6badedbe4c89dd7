"""Measures workloads on one or several engines. Each engine is built once and runs all workloads.

On a CPU the engines alternate run by run, since the machine's speed drifts. On a GPU they run one
after another, since its memory holds one engine at a time.
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
from windlass.runner.load import Loaded
from windlass.tools.bench.transformers_engine import TransformersEngine
from windlass.tools.common.device import (
    Traffic,
    device_of,
    int8_rate,
    memory_bytes,
    prompt_macs,
    read_bandwidth,
    release_memory,
    reset_peak_memory,
    traffic_of,
)
from windlass.tools.common.drive import EngineRun, median_run, run_all
from windlass.tools.common.record import Record
from windlass.tools.common.requests import Request
from windlass.tools.common.workload import Workload

Log = Callable[[str], None]

_NOTES = (
    "decode_*: steps in which all requests decode. read_gb: weights and KV cache that such a step "
    "must read; bandwidth_pct: relative to the device's measured read bandwidth. int8_pct, of prompts without "
    "decode steps on a CPU: operations of the layers' GEMMs, relative to the measured rate of int8 dot "
    "products (int8_tops). memory_gib: peak allocation on a GPU, resident set on a CPU. Medians of the repeats."
)
_ALTERNATING_NOTES = (
    " The engines alternated run by run in one process, so their memory is not known separately. "
    "first_ratio: speed of the first engine relative to this one in the same round, median of the "
    "rounds; first_decode_ratio: the same for the steps in which all requests decode."
)
_RATIOS = ("first_ratio", "first_decode_ratio")
_WARM_UP_OUTPUT = 4
_WARM_UP_PROMPT_ON_CPU = 32


class BenchEngine(Protocol):
    name: str
    vocab_size: int
    device: torch.device
    traffic: Traffic

    def run(self, requests: Sequence[Request]) -> EngineRun: ...

    def reset(self) -> None:
        """Drop the cached state of earlier requests."""


class WindlassEngine:
    name = "windlass"

    def __init__(
        self, config: EngineConfig, opened: OpenModel, weights: Loaded | None = None
    ) -> None:
        """`weights`: those of another engine, to share."""
        built = build_engine(config, opened.source, weights)
        self._engine = built.engine
        self.weights = built.weights
        self.vocab_size = built.report.vocab_size
        network, capacity = built.weights.network, built.report.capacity
        self.device = device_of(network)
        self.traffic = traffic_of(network, capacity.token_bytes)
        self.prompt_macs = prompt_macs(network)
        self.choices = {choice.what: choice.value for choice in built.report.choices}

    def run(self, requests: Sequence[Request]) -> EngineRun:
        return run_all(self._engine, requests)

    def reset(self) -> None:
        self._engine.reset_prefix_cache()


MakeEngine = Callable[[EngineConfig, OpenModel], BenchEngine]


@dataclass(frozen=True, slots=True)
class Peaks:
    """Measured peak rates of a device, and the work of a model per prompt token."""

    bandwidth: float  # bytes read per second
    int8_rate: float | None  # operations per second; None: unknown
    prompt_macs: int | None  # multiply-adds per prompt token; None: unknown


@dataclass(frozen=True, slots=True)
class ThroughputConfig:
    workloads: Sequence[Workload]
    engines: Sequence[str] = ("windlass",)
    repeat: int = 1
    batch: int | None = None  # max rows of a static batch of transformers

    def __post_init__(self) -> None:
        if self.repeat < 1:
            raise ConfigError(f"--repeat must be at least 1, got {self.repeat}.")


def measure(
    options: dict[str, Any],
    bench: ThroughputConfig,
    log: Log,
    name: str = "throughput",
    engines: Mapping[str, MakeEngine] | None = None,
) -> Record:
    """Run all workloads on all engines. `engines` adds constructors of further engines."""
    makers: dict[str, MakeEngine] = {
        "windlass": WindlassEngine,
        "transformers": lambda config, opened: TransformersEngine(config, opened, bench.batch),
        **(engines or {}),
    }
    if not bench.engines or any(name not in makers for name in bench.engines):
        raise ConfigError(
            f"--engine must be one or more of {', '.join(makers)}; got {','.join(bench.engines)!r}."
        )
    config = with_rows(EngineConfig.of(**options), bench.workloads, log)
    opened = open_model(config)
    rows: list[dict[str, Any]] = []
    settings: dict[str, Any] = dict(options)
    on_gpu = choose_device(config.model).type == "cuda"
    groups = [[engine] for engine in bench.engines] if on_gpu else [bench.engines]
    for group in groups:
        built: list[BenchEngine] = []
        for engine in group:
            log(f"{engine}: loading {opened.files.name}")
            built.append(makers[engine](config, opened))
            if isinstance(built[-1], WindlassEngine):
                settings["choices"] = built[-1].choices
        device = built[0].device
        bandwidth = read_bandwidth(device)
        settings["read_gb_s"] = round(bandwidth / 1e9, 1)
        log(f"{device.type} reads {bandwidth / 1e9:,.1f} GB/s")
        rate = int8_rate(device)
        if rate is not None:
            settings["int8_tops"] = round(rate / 1e12, 3)
            log(f"{device.type} computes {rate / 1e12:,.2f} int8 TOPS")
        macs = [each.prompt_macs for each in built if isinstance(each, WindlassEngine)]
        peaks = Peaks(bandwidth, rate, prompt_macs=macs[0] if macs else None)
        for workload in bench.workloads:
            rows += _rows(built, workload, repeat=bench.repeat, peaks=peaks, log=log)
        built.clear()
        release_memory()
    notes = _NOTES
    if len(bench.engines) > 1 and not on_gpu:
        notes += _ALTERNATING_NOTES
    return Record(name=name, rows=rows, notes=notes, settings=settings)


def with_rows(config: EngineConfig, workloads: Sequence[Workload], log: Log) -> EngineConfig:
    """Raise max_num_seqs to the number of concurrent rows that the workloads need."""
    largest = max(workloads, key=lambda workload: workload.num_rows)
    scheduler = config.scheduler
    allowed = config.limits(choose_device(config.model).type).max_num_seqs
    if allowed >= largest.num_rows or scheduler.batching != "continuous":
        return config
    if scheduler.max_num_seqs is not None:
        raise ConfigError(
            f"{largest.name} needs {largest.num_rows} concurrent rows, --max-num-seqs allows "
            f"{allowed}. Raise it, or remove it."
        )
    log(f"--max-num-seqs {largest.num_rows} instead of {allowed}, as {largest.name} needs it")
    return replace(config, scheduler=replace(scheduler, max_num_seqs=largest.num_rows))


def _rows(
    engines: Sequence[BenchEngine],
    workload: Workload,
    *,
    repeat: int,
    peaks: Peaks,
    log: Log,
) -> list[dict[str, Any]]:
    """Warm up, run `repeat` rounds with new ids each, and take each engine's median run."""
    for engine in engines:
        log(f"{engine.name}, {workload.name}: warming up")
        engine.run(_warm_up(workload.requests(engine.vocab_size), engine.device.type))
        reset_peak_memory(engine.device)
    all_runs: list[list[EngineRun]] = [[] for _ in engines]
    for draw in range(1, repeat + 1):
        for engine, runs in zip(engines, all_runs, strict=True):
            runs.append(run_draw(engine, workload, draw))
            log(f"{engine.name}, {workload.name}: {runs[-1].row()['output_tok_s']:,} tok/s")
    rows = []
    for engine, runs in zip(engines, all_runs, strict=True):
        run = median_run(runs)
        row = {"workload": workload.name, "engine": engine.name, **run.row()}
        if repeat > 1:
            row["all_seconds"] = [round(each.duration, 3) for each in runs]
        row |= _limits(engine, run, peaks, is_only=len(engines) == 1)
        if runs is not all_runs[0]:
            row |= _ratios(all_runs[0], runs)
            ratios = " and ".join(f"{row[key]}x ({key})" for key in _RATIOS if row[key])
            log(f"{workload.name}: speed of {engines[0].name} over {engine.name}: {ratios}")
        rows.append(row)
    return rows


def run_draw(engine: BenchEngine, workload: Workload, draw: int) -> EngineRun:
    """Run the workload with the ids of this draw, without cached prefixes."""
    engine.reset()
    return engine.run(workload.requests(engine.vocab_size, draw))


def _ratios(first: Sequence[EngineRun], own: Sequence[EngineRun]) -> dict[str, float | None]:
    """Speed of the first engine relative to another in the same rounds: runs and decode steps."""
    pairs = list(zip(first, own, strict=True))
    steps = [(a.window.step_s, b.window.step_s) for a, b in pairs if a.window and b.window]
    whole = median(b.duration / a.duration for a, b in pairs)
    decode = round(median(b / a for a, b in steps), 3) if steps else None
    return dict(zip(_RATIOS, (round(whole, 3), decode), strict=True))


def _limits(engine: BenchEngine, run: EngineRun, peaks: Peaks, *, is_only: bool) -> dict[str, Any]:
    """Share of the memory bandwidth or of the int8 rate, and the memory in use if this is the only engine."""
    memory = round(memory_bytes(engine.device) / 2**30, 3) if is_only else None
    if run.window is None:
        limits = {"read_gb": None, "bandwidth_pct": None, "memory_gib": memory}
        if peaks.int8_rate is None or peaks.prompt_macs is None:
            return limits
        rate = 2 * peaks.prompt_macs * run.prompt_tokens_computed / run.duration
        return {**limits, "int8_pct": round(100 * rate / peaks.int8_rate, 1)}
    step_bytes = engine.traffic.step_bytes(run.window.mean_kv, len(run.timings))
    share = 100 * step_bytes / (run.window.step_s * peaks.bandwidth)
    return {
        "read_gb": round(step_bytes / 1e9, 4),
        "bandwidth_pct": round(share, 1),
        "memory_gib": memory,
    }


def _warm_up(requests: list[Request], device: str) -> list[Request]:
    """The same requests with few output tokens, so that kernels compile for their shapes.

    Kernels of a GPU also depend on the number of tokens, so the warm-up has the whole prompts. On a
    CPU, whole prompts would take as long as the run itself.
    """
    max_prompt = None if device == "cuda" else _WARM_UP_PROMPT_ON_CPU
    return [
        replace(
            request,
            prompt=request.prompt[:max_prompt],
            num_output=min(request.num_output, _WARM_UP_OUTPUT),
        )
        for request in requests
    ]
