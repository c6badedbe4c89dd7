"""Measures one and two threads on this CPU, in turns, and models more with Amdahl's law and bandwidth.

    python benchmarks/scripts/thread_scaling.py benchmarks/models/llama-3.2-1b -o cpu-threads.json

A step has a serial part and a part that n threads divide: T(n) = T(1) * (s + (1 - s) / n), with s from T(1) and
T(2). It is never shorter than the time to read the weights, at n times the bandwidth of one thread and at most
--max-bandwidth, which is an assumption: two threads do not reach the limit of a server's memory. Equal cores of
one NUMA node are assumed, with the same frequency for any number of them.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tp_cpu import rates

from windlass import LLM
from windlass.tools.common.device import read_bandwidth
from windlass.tools.common.record import Record

THREADS = (1, 2)
MODELLED = (4, 8, 16, 32)
GB = 1e9


@dataclass(frozen=True, slots=True)
class Scaling:
    """Seconds per step with one and two threads, and what bounds them."""

    one_s: float
    two_s: float
    step_bytes: float
    thread_bandwidth: float  # bytes per second of one thread
    max_bandwidth: float  # of the memory: assumed

    @property
    def serial(self) -> float:
        """The share of a step that threads do not divide."""
        return min(1.0, max(0.0, 2 * self.two_s / self.one_s - 1))

    def seconds(self, threads: int) -> float:
        """The modelled time of a step."""
        amdahl = self.one_s * (self.serial + (1 - self.serial) / threads)
        return max(amdahl, self.reading(threads))

    def reading(self, threads: int) -> float:
        """The time to read the weights."""
        return self.step_bytes / min(threads * self.thread_bandwidth, self.max_bandwidth)

    def limit(self, threads: int) -> str:
        return "memory" if self.seconds(threads) <= self.reading(threads) else "serial part"


def load(model: str, threads: int) -> LLM:
    options: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": 8, "num_threads": threads}
    folder = Path(model)
    if folder.is_dir() and not list(folder.glob("*.safetensors")):
        options |= {"load_format": "dummy", "quantization": "int4"}
    return LLM(model, **options)


def bandwidth(threads: int) -> float:
    torch.set_num_threads(threads)
    return read_bandwidth(torch.device("cpu"))


def rows_of(workload: str, scaling: Scaling, tokens: int) -> list[dict[str, Any]]:
    """The measured and the modelled rates of a workload; `tokens`: of a step."""
    rows = []
    for threads in (*THREADS, *MODELLED):
        measured = threads in THREADS
        seconds = {1: scaling.one_s, 2: scaling.two_s}.get(threads) or scaling.seconds(threads)
        rows.append(
            {
                "workload": workload,
                "threads": threads,
                "kind": "measured" if measured else "modelled",
                "tok_s": round(tokens / seconds, 1),
                "speedup": round(scaling.one_s / seconds, 2),
                "limit": "" if measured else scaling.limit(threads),
                "serial": round(scaling.serial, 3),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--max-bandwidth", type=float, default=100.0, metavar="GB/S")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    engines = {threads: load(options.model, threads) for threads in THREADS}
    step_bytes = engines[1].report.memory["weights"]
    turns = []
    for turn in range(1 + options.turns):
        found = {}
        for threads, llm in engines.items():
            found[threads] = {"bandwidth": bandwidth(threads), **rates(llm, turn)}
        turns.append(found)
    turns = turns[1:]  # the first one warms up
    rows = []
    one_bandwidth = median(turn[1]["bandwidth"] for turn in turns)
    for workload, tokens in (("decode of 1", 1), ("decode of 8", 8), ("prompt of 512", 512)):
        one_s = median(tokens / turn[1][workload] for turn in turns)
        # Turns differ more than the two engines of a turn do.
        ratio = median(turn[1][workload] / turn[2][workload] for turn in turns)
        scaling = Scaling(
            one_s=one_s,
            two_s=one_s * ratio,
            step_bytes=step_bytes,
            thread_bandwidth=one_bandwidth,
            max_bandwidth=options.max_bandwidth * GB,
        )
        rows += rows_of(workload, scaling, tokens)
    for row in rows:
        print(row)
    two_bandwidth = median(turn[2]["bandwidth"] for turn in turns)
    notes = (
        f"Reading memory: {one_bandwidth / GB:.1f} GB/s with one thread, {two_bandwidth / GB:.1f} with two; "
        f"at most {options.max_bandwidth:g} are assumed for more. The weights have {step_bytes / GB:.2f} GB. "
        "Equal cores of one NUMA node at a constant frequency are assumed. Medians of turns."
    )
    if options.output is not None:
        Record("thread_scaling", rows, notes).save(options.output)


if __name__ == "__main__":
    main()
