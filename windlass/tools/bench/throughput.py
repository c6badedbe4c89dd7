"""Workloads on one engine or more: each is built once, warmed up, and runs all of them.

On a CPU engines take turns, run by run, since how fast a machine is changes while it is measured. A
GPU's memory holds one engine at a time, so they run one after another there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch

from windlass.build import OpenModel, build_engine, open_model
from windlass.config import EngineConfig
from windlass.errors import ConfigError
from windlass.runner.device import choose_device
from windlass.tools.bench.device import (
    Traffic,
    device_of,
    forget_peak,
    memory_bytes,
    read_bandwidth,
    release_memory,
    traffic_of,
)
from windlass.tools.bench.measure import Measured, run
from windlass.tools.bench.naive import Naive
from windlass.tools.bench.record import Record
from windlass.tools.bench.workloads import Job, Workload

Say = Callable[[str], None]

ENGINES = ("windlass", "transformers", "llama.cpp")
_RATIOS = ("first_ratio", "first_decode_ratio")
_WARM_OUTPUT = 4
_WARM_PROMPT_ON_CPU = 32


class Subject(Protocol):
    """Something that answers jobs and can be measured at it."""

    name: str
    vocab_size: int
    device: torch.device
    traffic: Traffic

    def run(self, jobs: Sequence[Job]) -> Measured: ...

    def reset(self) -> None:
        """Forget what was computed for earlier jobs."""


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

    def run(self, jobs: Sequence[Job]) -> Measured:
        return run(self._engine, jobs)

    def reset(self) -> None:
        self._engine.reset_prefix_cache()


@dataclass(frozen=True, slots=True)
class Order:
    """What to measure."""

    workloads: Sequence[Workload]
    engines: Sequence[str] = ("windlass",)
    repeat: int = 1
    batch: int | None = None  # the most rows of one static batch of transformers
    llama_cpp: Path | None = None  # its library; None: that of an installed package
    gguf: Path | None = None  # what llama.cpp reads; None: the same file

    def __post_init__(self) -> None:
        unknown = [name for name in self.engines if name not in ENGINES]
        if unknown or not self.engines:
            raise ConfigError(
                f"--engine must name some of {', '.join(ENGINES)}; got {','.join(self.engines)!r}."
            )
        if self.repeat < 1:
            raise ConfigError(f"--repeat must be at least 1, got {self.repeat}.")


def measure(options: dict[str, Any], order: Order, say: Say, name: str = "throughput") -> Record:
    """Run all workloads on all engines, and say what each took."""
    config = with_rows(EngineConfig.of(**options), order.workloads, say)
    opened = open_model(config)
    rows: list[dict[str, Any]] = []
    settings: dict[str, Any] = dict(options)
    on_gpu = choose_device(config.model).type == "cuda"
    groups = [[engine] for engine in order.engines] if on_gpu else [order.engines]
    for together in groups:
        subjects: list[Subject] = []
        for engine in together:
            say(f"{engine}: loading {opened.files.name}")
            subjects.append(_subject(engine, config, opened, order, settings))
        device = subjects[0].device
        bandwidth = read_bandwidth(device)
        settings["read_gb_s"] = round(bandwidth / 1e9, 1)
        say(f"{device.type} reads {bandwidth / 1e9:,.1f} GB/s")
        for workload in order.workloads:
            rows += _rows(subjects, workload, order.repeat, bandwidth, say)
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


def _subject(
    engine: str, config: EngineConfig, opened: OpenModel, order: Order, settings: dict[str, Any]
) -> Subject:
    """Build an engine, and note down what it is."""
    if engine == "windlass":
        own = Own(config, opened)
        settings["choices"] = own.choices
        return own
    if engine == "llama.cpp":
        from windlass.tools.bench.llama_engine import LlamaEngine, find_library  # needs gguf

        library, file = order.llama_cpp or find_library(), order.gguf or opened.files.path
        settings["llama.cpp"] = {"library": library.name, "gguf": file.name}
        return LlamaEngine(config, opened, library, file)
    return Naive(config, opened, order.batch)


def with_rows(config: EngineConfig, workloads: Sequence[Workload], say: Say) -> EngineConfig:
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
    say(f"--max-num-seqs {largest.num_rows} instead of {allowed}: {largest.name} needs so many")
    return replace(config, scheduler=replace(wish, max_num_seqs=largest.num_rows))


def _rows(
    subjects: Sequence[Subject], workload: Workload, repeat: int, bandwidth: float, say: Say
) -> list[dict[str, Any]]:
    """Warm up, run `repeat` times in turn with other ids each, and take each one's median run."""
    for subject in subjects:
        say(f"{subject.name}, {workload.name}: warming up")
        subject.run(_warm_up(workload.jobs(subject.vocab_size), subject.device.type))
        forget_peak(subject.device)
    runs: list[list[Measured]] = [[] for _ in subjects]
    for draw in range(1, repeat + 1):
        for subject, own in zip(subjects, runs, strict=True):
            subject.reset()
            own.append(subject.run(workload.jobs(subject.vocab_size, draw)))
            say(f"{subject.name}, {workload.name}: {own[-1].row()['output_tok_s']:,} tok/s")
    rows = []
    for subject, own in zip(subjects, runs, strict=True):
        taken = sorted(own, key=lambda each: each.seconds)[(repeat - 1) // 2]
        row = {"workload": workload.name, "engine": subject.name, **taken.row()}
        if repeat > 1:
            row["all_seconds"] = [round(each.seconds, 3) for each in own]
        row |= _limits(subject, taken, bandwidth, alone=len(subjects) == 1)
        if own is not runs[0]:
            row |= _ratios(runs[0], own)
            times = " and ".join(f"{row[key]} ({key})" for key in _RATIOS if row[key])
            say(f"{workload.name}: {subjects[0].name} is {times} times as fast as {subject.name}")
        rows.append(row)
    return rows


def _ratios(first: Sequence[Measured], own: Sequence[Measured]) -> dict[str, float | None]:
    """How many times as fast the first engine was, turn by turn: whole runs, and decode steps."""
    pairs = list(zip(first, own, strict=True))
    steps = [(a.window.step_s, b.window.step_s) for a, b in pairs if a.window and b.window]
    whole = median(b.seconds / a.seconds for a, b in pairs)
    decode = round(median(b / a for a, b in steps), 3) if steps else None
    return dict(zip(_RATIOS, (round(whole, 3), decode), strict=True))


def _limits(subject: Subject, taken: Measured, bandwidth: float, alone: bool) -> dict[str, Any]:
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


def _warm_up(jobs: list[Job], device: str) -> list[Job]:
    """The same rows with few outputs: kernels are made for the shapes that come.

    A GPU's kernels are chosen by the number of tokens too, so it gets the whole prompts; a CPU would
    compute them for as long as the run itself.
    """
    longest = None if device == "cuda" else _WARM_PROMPT_ON_CPU
    return [
        replace(job, prompt=job.prompt[:longest], num_output=min(job.num_output, _WARM_OUTPUT))
        for job in jobs
    ]
