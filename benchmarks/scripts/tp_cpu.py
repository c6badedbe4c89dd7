"""Compares two ranks of one thread with one process of two threads, on this CPU, in turns.

    python benchmarks/scripts/tp_cpu.py benchmarks/models/llama-3.2-1b -o benchmarks/cpu-tensor-parallel.json

Models without weights get random ones in int4. The ranks of one machine read the same memory at the same
bandwidth, so this measures what sharing layers costs: collectives, and layers that every rank computes.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Any

from windlass import LLM, SamplingParams
from windlass.tools.common.record import Record

LAYOUTS: dict[str, dict[str, Any]] = {
    "1 process, 2 threads": {"num_threads": 2},
    "2 ranks, 1 thread each": {"num_threads": 1, "tensor_parallel_size": 2},
}
OUTPUT = 48


def load(model: str, layout: str) -> LLM:
    options: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": 8, **LAYOUTS[layout]}
    folder = Path(model)
    if folder.is_dir() and not list(folder.glob("*.safetensors")):
        options |= {"load_format": "dummy", "quantization": "int4"}
    return LLM(model, **options)


def seconds(llm: LLM, rows: int, length: int, output: int, turn: int) -> float:
    """The time of a batch; the turn makes its prompts new to the prefix cache."""
    prompts = [
        [5 + (turn + 7 * row + 13 * at) % 200 for at in range(length)] for row in range(rows)
    ]
    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
    start = time.perf_counter()
    llm.generate(prompts, params)
    return time.perf_counter() - start


def rates(llm: LLM, turn: int) -> dict[str, float]:
    """Tokens per second: decoding 1 and 8 rows, and computing a prompt."""
    found = {}
    for rows in (1, 8):
        first = seconds(llm, rows, 16, 1, 3 * turn)
        rest = seconds(llm, rows, 16, OUTPUT + 1, 3 * turn + 1) - first
        found[f"decode of {rows}"] = rows * OUTPUT / rest
    found["prompt of 512"] = 512 / seconds(llm, 1, 512, 1, 3 * turn + 2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("models", nargs="+")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    rows = []
    for model in options.models:
        engines = {layout: load(model, layout) for layout in LAYOUTS}
        turns = [
            {layout: rates(llm, turn) for layout, llm in engines.items()}
            for turn in range(1 + options.turns)
        ][1:]  # the first one warms up
        one, two = LAYOUTS
        for workload in turns[0][one]:
            speeds = {name: median(turn[name][workload] for turn in turns) for name in LAYOUTS}
            ratios = [turn[two][workload] / turn[one][workload] for turn in turns]
            row: dict[str, Any] = {"model": Path(model).name, "workload": workload}
            row |= {"one_tok_s": round(speeds[one], 1), "two_tok_s": round(speeds[two], 1)}
            rows.append(row | {"ratio": round(median(ratios), 3)})
            print(rows[-1])
    notes = "Medians of turns in one run; ratio: two ranks over one process, within each turn."
    if options.output is not None:
        Record("tensor_parallel", rows, notes).save(options.output)


if __name__ == "__main__":
    main()
