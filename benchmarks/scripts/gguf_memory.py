"""Measures the memory and the decode speed of one GGUF file in several engines.

Each engine runs its benchmark in a separate process. The engines alternate, so the ratio of two
speeds holds when the machine's speed drifts. The peak is the maximum resident set of the process,
including loading and pages of the mapped file.

    python benchmarks/scripts/gguf_memory.py model.gguf --before OLD_CHECKOUT \
        --llama-cpp xllamacpp.abi3.so -o benchmarks/iq2_xxs.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass.tools.common.record import Record

_HERE = Path(__file__).resolve().parents[2]
_MAIN = "import sys; from windlass.cli.entry import main; sys.exit(main())"
_WINDLASS = ("-c", _MAIN, "bench", "throughput")
_LLAMA_CPP = (str(Path(__file__).with_name("llama_cpp_throughput.py")),)


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine to measure: its checkout, its benchmark program, and options."""

    name: str
    checkout: Path
    program: tuple[str, ...] = _WINDLASS
    options: tuple[str, ...] = ()


def measure(engine: Engine, model: Path, workload: str) -> tuple[float, float]:
    """Return the peak resident set in MiB and decode tokens per second."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        options = ["--workload", workload, "--repeat", "3", "-o", str(result)]
        command = [*engine.program, str(model.resolve()), *engine.options, *options]
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=engine.checkout,
            env={**os.environ, "PYTHONPATH": str(engine.checkout)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{engine.name}: {' '.join(command)} failed ({process.returncode}).")
        (row,) = json.loads(result.read_text())["rows"]
    return usage.ru_maxrss / 1024, row["decode_tok_s"]


def row_of(engine: Engine, runs: list[tuple[float, float]], first: list[float]) -> dict[str, Any]:
    """Summarise the rounds of one engine; `first` are the speeds of the first engine."""
    speeds = [speed for _, speed in runs]
    return {
        "engine": engine.name,
        "peak_mib": round(max(peak for peak, _ in runs)),
        "decode_tok_s": round(statistics.median(speeds), 2),
        "all_decode_tok_s": speeds,
        "decode_ratio": round(
            statistics.median(own / base for own, base in zip(speeds, first, strict=True)), 2
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, help="the GGUF file")
    parser.add_argument("--before", type=Path, help="a checkout of an earlier version")
    parser.add_argument("--llama-cpp", type=Path, help="the shared library of llama.cpp")
    parser.add_argument("--workload", default="io16x48x1")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    engines = [Engine("windlass", _HERE)]
    if options.before:
        engines.append(Engine("windlass, --before", options.before))
    if options.llama_cpp:
        library = ("--engine", "llama.cpp", "--llama-cpp", str(options.llama_cpp.resolve()))
        engines.append(Engine("llama.cpp", _HERE, _LLAMA_CPP, library))
    runs: dict[str, list[tuple[float, float]]] = {engine.name: [] for engine in engines}
    for turn in range(options.turns):
        for engine in engines:
            runs[engine.name].append(measure(engine, options.model, options.workload))
            print(f"turn {turn}, {engine.name}: {runs[engine.name][-1]}", flush=True)
    first = [speed for _, speed in runs[engines[0].name]]
    Record(
        "gguf_memory",
        [row_of(engine, runs[engine.name], first) for engine in engines],
        notes=(
            f"Workload {options.workload}, {options.turns} rounds, medians. Peak: maximum resident "
            f"set of the process. Ratio: decode speed relative to the first row in the same round."
        ),
        settings={
            "model": options.model.name,
            "file_mib": round(options.model.stat().st_size / 2**20, 1),
        },
    ).save(options.output)


if __name__ == "__main__":
    main()
