"""Compares the CPU time of Windlass and llama.cpp, with one thread each, in alternation.

    python benchmarks/scripts/llama_cpp_cpu_time.py MODEL --gguf FILE.gguf --llama-cpp LIBRARY.so -o FILE

CPU time of one thread is comparable on a machine that other programs use, where the barriers of several
threads are not. Cases: pN is a prompt of N tokens, dN a decode step of N rows, and `cached` a prompt of 129
tokens that is cached except for its last one, against a decode step of llama.cpp.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from llama_library import LlamaCpp

from windlass.build import build_engine, open_model
from windlass.config import EngineConfig
from windlass.tools.common.drive import run_all
from windlass.tools.common.record import Record
from windlass.tools.common.requests import Request

_STEP_TOKENS = 512
_STEPS = 8  # decode steps per turn
_PROMPT = 16  # tokens before decode steps
_CACHED = 129


class Windlass:
    def __init__(self, model: str) -> None:
        config = EngineConfig.of(model=model, num_threads=1)
        built = build_engine(config, open_model(config).source)
        self._engine, self.vocab_size = built.engine, built.report.vocab_size

    def run(self, prompts: Sequence[list[int]], num_output: int) -> float:
        """Return the CPU seconds of requests."""
        start = time.process_time()
        run_all(self._engine, [Request(prompt, num_output) for prompt in prompts])
        return time.process_time() - start


class Llama:
    """Rows of one context of llama.cpp."""

    def __init__(self, library: LlamaCpp, model: int, rows: int) -> None:
        self._library = library
        max_len = _STEP_TOKENS + _CACHED
        self._context = library.context(
            model, rows=rows, max_len=max_len, step_tokens=_STEP_TOKENS, threads=1
        )
        self._batch = library.batch(_STEP_TOKENS)

    def decode(self, tokens: Sequence[tuple[int, int, int, bool]]) -> float:
        """Compute (row, position, token, sample) tuples; returns CPU seconds."""
        batch = self._batch
        batch.num_tokens = len(tokens)
        for i, (row, position, token, sample) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0] = row
            batch.logits[i] = sample
        start = time.process_time()
        failed = self._library.decode(self._context, batch)
        if failed:
            raise SystemExit(f"llama_decode failed: it returned {failed}.")
        return time.process_time() - start

    def prompt(self, row: int, tokens: list[int]) -> float:
        last = len(tokens) - 1
        return self.decode([(row, at, token, at == last) for at, token in enumerate(tokens)])

    def close(self) -> None:
        self._library.free(self._context, self._batch)


def measure(case: str, windlass: Windlass, library: LlamaCpp, model: int, turns: int) -> Any:
    """Return the row of one case: medians of the turns after the first."""
    count = 1 if case == "cached" else int(case[1:])
    rows = count if case.startswith("d") else 1
    random, own, other = Random(case), [], []

    def drawn(num_tokens: int) -> list[int]:
        return random.choices(range(windlass.vocab_size), k=num_tokens)

    cached, position = drawn(_CACHED), _PROMPT
    llama = Llama(library, model, rows)
    if not case.startswith("p"):
        for row in range(rows):
            llama.prompt(row, drawn(_PROMPT))
    for _ in range(turns + 1):
        if case.startswith("p"):
            own.append(windlass.run([drawn(count)], 1))
            llama.close()
            llama = Llama(library, model, 1)
            other.append(llama.prompt(0, drawn(count)))
            continue
        if case == "cached":
            own.append(windlass.run([cached], 1))
        else:
            prompts = [drawn(_PROMPT) for _ in range(rows)]
            windlass.run(prompts, 1)
            first = windlass.run(prompts, 1)
            own.append((windlass.run(prompts, 1 + _STEPS) - first) / _STEPS)
        steps = [
            llama.decode([(row, position + step, 77, True) for row in range(rows)])
            for step in range(_STEPS)
        ]
        position += _STEPS
        other.append(sum(steps) / _STEPS)
    llama.close()
    ratio = median(theirs / ours for ours, theirs in zip(own[1:], other[1:], strict=True))
    times = {"windlass_ms": median(own[1:]), "llama_cpp_ms": median(other[1:])}
    return {
        "case": case,
        **{key: round(1e3 * value, 2) for key, value in times.items()},
        "ratio": round(ratio, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--llama-cpp", type=Path, required=True, help="llama.cpp shared library")
    parser.add_argument("--cases", default="d1,d8,d16,p16,cached,p512")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE")
    args = parser.parse_args()
    windlass, library = Windlass(args.model), LlamaCpp(args.llama_cpp)
    model = library.load(args.gguf)
    notes = (
        "CPU time of one thread, in ms: a prompt of N tokens (pN), a decode step of N rows (dN), or a "
        "prompt that is cached except for its last token, against a decode step of llama.cpp. Medians "
        "of the turns; ratio: the median of the turns' ratios."
    )
    settings = {"model": args.model, "gguf": args.gguf.name, "threads": 1, "turns": args.turns}
    record = Record("cpu_time", [], notes=notes, settings=settings)
    for case in args.cases.split(","):
        record.rows.append(measure(case, windlass, library, model, args.turns))
        print(record.rows[-1], flush=True)
        record.save(args.output)


if __name__ == "__main__":
    main()
