"""Measures embeddings on this CPU against the same prompts with one generated token, in turns.

    python benchmarks/scripts/embeddings.py -o benchmarks/cpu-embeddings.json

Both compute the same prompts. An embedding adds the pooling, and for mean pooling the last layer's MLP of all
positions. Times are CPU seconds of one thread, which other processes of the machine change little.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Any

from windlass import LLM, SamplingParams
from windlass.tools.common.record import Record

KINDS = ("one token", "last", "mean")
SHAPES = ((64, 16), (16, 128), (4, 512))  # prompts, tokens of each


def seconds(llm: LLM, kind: str, prompts: list[list[int]]) -> float:
    start = time.process_time()
    if kind == "one token":
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1))
    else:
        llm.embed(prompts)
    return time.process_time() - start


def prompts_of(count: int, length: int, turn: int) -> list[list[int]]:
    """Prompts that are new to the prefix cache in every turn and shape."""
    return [
        [5 + (length + 31 * turn + 7 * row + 13 * at * at) % 9973 for at in range(length)]
        for row in range(count)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="default")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    common: dict[str, Any] = {"num_threads": 1, "max_model_len": 1024}
    engines = {kind: LLM(options.model, **common) for kind in KINDS[:1]}
    engines |= {kind: LLM(options.model, pooling_type=kind, **common) for kind in KINDS[1:]}
    rows = []
    for count, length in SHAPES:
        turns = []
        for turn in range(1 + options.turns):  # the first one warms up
            prompts = prompts_of(count, length, turn)
            turns.append({kind: seconds(llm, kind, prompts) for kind, llm in engines.items()})
        for kind in KINDS:
            found = [turn[kind] for turn in turns[1:]]
            ratios = [turn[KINDS[0]] / turn[kind] for turn in turns[1:]]
            row: dict[str, Any] = {"prompts": count, "tokens_each": length, "result": kind}
            row |= {"prompts_s": round(count / median(found), 2)}
            row |= {"tok_s": round(count * length / median(found), 1)}
            rows.append(row | {"ratio": round(median(ratios), 3)})
            print(rows[-1])
    notes = (
        "Medians of turns, CPU seconds of one thread; ratio: speed relative to the same prompts with one "
        "generated token, within each turn."
    )
    if options.output is not None:
        Record("embeddings", rows, notes).save(options.output)


if __name__ == "__main__":
    main()
