"""Measures the TTFT of a long system prompt after a restart, with and without --prefix-cache-dir.

    python benchmarks/scripts/warm_restart.py -o benchmarks/cpu-warm-restart.json

Every start is a new process. A turn is a cold start and a warm one, whose directory the first start has
filled; both must give the same tokens. The first request after a start has a short prompt.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from windlass.tools.common.record import Record


def start(model: str, num_tokens: int, directory: str | None) -> None:
    """In a new process: print the seconds to the first token of the prompt, and the tokens."""
    from windlass import LLM, SamplingParams

    options: dict[str, Any] = {} if directory is None else {"prefix_cache_dir": directory}
    llm = LLM(model, max_model_len=num_tokens + 64, **options)
    llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=2))
    prompt = [5 + 7 * at * at % 9973 for at in range(num_tokens)]
    began = time.perf_counter()
    first = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    seconds = time.perf_counter() - began
    whole = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    loaded = sum(tier.num_hit_tokens for tier in llm.engine.stats().tiers)
    tokens = [*first[0].outputs[0].token_ids, *whole[0].outputs[0].token_ids]
    print(json.dumps({"seconds": seconds, "tokens": tokens, "loaded": loaded}))


def measure(options: argparse.Namespace, directory: str | None) -> dict[str, Any]:
    command = [sys.executable, __file__, "--model", options.model, "--tokens", str(options.tokens)]
    command += ["--start", directory or "-"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="default")
    parser.add_argument("--tokens", type=int, default=2000, help="tokens of the prompt")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--start", help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    if options.start is not None:
        start(options.model, options.tokens, None if options.start == "-" else options.start)
        return
    with tempfile.TemporaryDirectory() as directory:
        filling = measure(options, directory)
        turns = [
            (measure(options, None), measure(options, directory)) for _ in range(options.turns)
        ]
    for turn in turns:
        if not turn[0]["tokens"] == turn[1]["tokens"] == filling["tokens"]:
            raise SystemExit("a warm start gave other tokens than a cold one.")
    row = {
        "prompt_tokens": options.tokens,
        "loaded_tokens": min(warm["loaded"] for _, warm in turns),
        "cold_ttft_s": round(median(cold["seconds"] for cold, _ in turns), 3),
        "filling_ttft_s": round(filling["seconds"], 3),
        "warm_ttft_s": round(median(warm["seconds"] for _, warm in turns), 3),
        "ratio": round(median(warm["seconds"] / cold["seconds"] for cold, warm in turns), 3),
    }
    print(row)
    notes = (
        "Medians of turns; ratio: TTFT of a warm start over that of a cold one, within each turn."
    )
    if options.output is not None:
        Record("warm restart", [row], notes).save(options.output)


if __name__ == "__main__":
    main()
