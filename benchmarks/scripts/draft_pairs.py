"""Measures draft models on a CPU: one that predicts most of the target's tokens, and one that predicts none.

    python benchmarks/scripts/draft_pairs.py benchmarks/models/llama-3.2-1b -o FILE

The target's layers behind the draft model's add next to nothing to the residual stream, so the first
layers with the same embeddings and head predict most of its tokens. Engines with and without
speculation share the target's weights and take turns in one process.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from docs_tables import COLUMNS
from random_gguf import StorageTypes, Weights, write_gguf

from windlass.build import build_engine, open_model
from windlass.config import EngineConfig
from windlass.core.sampling import SamplingParams
from windlass.errors import ConfigError, EngineError
from windlass.folders import cache_dir
from windlass.llm import LLM
from windlass.tools.common.record import Record
from windlass.tools.common.report import show

Log = Callable[[str], None]

_KIND = "Q4_0"
_QUIET = 0.0005  # scale of the outputs of the target's other layers
_PROMPT_IDS = (1000, 40000)  # ordinary tokens of the default model's vocabulary


@dataclass(frozen=True, slots=True)
class PairConfig:
    """The models and the workload."""

    shape: str  # a folder with a config.json
    work: Path  # folder for the models
    draft_layers: int
    num_requests: int  # per run, one at a time
    prompt_tokens: int
    output_tokens: int
    repeat: int


@dataclass(frozen=True, slots=True)
class _Run:
    """One run over all prompts."""

    seconds: float
    decode_s: float  # without the time to the first token
    tokens: list[list[int]]
    num_drafts: int
    num_drafted: int
    num_accepted: int


def draft_pairs(config: PairConfig, log: Log) -> Record:
    """Compare each draft model with no speculation; differing tokens are an error."""
    if min(config.draft_layers, config.num_requests, config.output_tokens, config.repeat) < 1:
        raise ConfigError("the numbers of layers, requests, tokens and runs must be at least 1.")
    target, drafts = _models(config, log)
    # Longer than a request, so that the start can measure costs.
    max_model_len = config.prompt_tokens + config.output_tokens + 64
    options = {
        "model": str(target),
        "device": "cpu",
        "max_model_len": max_model_len,
        "num_blocks": 256,
    }
    plain = EngineConfig.of(**options)
    opened = open_model(plain)
    built = build_engine(plain, opened.source)
    off, rows = LLM.over(opened.card, built), []
    for name, path in drafts.items():
        own = EngineConfig.of(**options, spec="draft", spec_model=str(path))
        speculating = build_engine(own, opened.source, built.weights)
        (choice,) = [each for each in speculating.report.choices if each.what == "speculation"]
        log(f"{name}: {choice.reason}")
        on = LLM.over(opened.card, speculating)
        row = {"draft": name, **_compare(off, on, config, log), "costs": choice.reason}
        rows.append(row)
        log(f"{name}: {row['speedup']} times the speed")
    notes = (
        f"{config.num_requests} requests per run, one at a time, {config.prompt_tokens} prompt tokens and "
        f"{config.output_tokens} greedy output tokens, identical with and without speculation; on and off alternate, "
        f"{config.repeat} times each. Speedup: median, min and max of the ratios of consecutive runs. "
        f"Each run has new prompts; the first run includes measuring the costs."
    )
    return Record("draft_pairs", rows, notes, settings={"shape": config.shape, "type": _KIND})


def _models(config: PairConfig, log: Log) -> tuple[Path, dict[str, Path]]:
    """Write the target and the draft models; files of an earlier run are reused."""
    count = config.draft_layers
    stem = f"{Path(config.shape).name}-{_KIND}"
    weights_of = {
        "target": Weights(quiet_from=count, quiet=_QUIET),
        "agreeing": Weights(num_layers=count),
        "unrelated": Weights(num_layers=count, seed=1),
    }
    config.work.mkdir(parents=True, exist_ok=True)
    paths = {}
    for name, weights in weights_of.items():
        path = paths[name] = config.work / f"{stem}-{count}-{name}.gguf"
        if not path.is_file():
            part = path.with_suffix(".part")
            size = write_gguf(config.shape, StorageTypes(_KIND, "Q8_0"), part, weights)
            part.replace(path)
            log(f"wrote {path}: {size / 2**20:,.0f} MiB")
    return paths.pop("target"), paths


def _compare(off: LLM, on: LLM, config: PairConfig, log: Log) -> dict[str, Any]:
    for llm in (off, on):
        _run(llm, config, seed=-1)
    runs: list[tuple[_Run, _Run]] = []
    for turn in range(config.repeat):
        pair = (off, on) if turn % 2 == 0 else (on, off)
        first, second = (_run(llm, config, turn) for llm in pair)
        without, using = (first, second) if turn % 2 == 0 else (second, first)
        if without.tokens != using.tokens:
            raise EngineError(f"run {turn}: the tokens differ with speculation and without.")
        runs.append((without, using))
        log(f"run {turn}: {without.seconds / using.seconds:.3f} times the speed")
    ratios = [without.seconds / using.seconds for without, using in runs]
    decode = [without.decode_s / using.decode_s for without, using in runs]
    drafted = sum(using.num_drafted for _, using in runs)
    accepted = sum(using.num_accepted for _, using in runs)
    drafts = sum(using.num_drafts for _, using in runs)
    return {
        "off_seconds": [round(without.seconds, 3) for without, _ in runs],
        "on_seconds": [round(using.seconds, 3) for _, using in runs],
        "speedup": round(statistics.median(ratios), 3),
        "speedup_min": round(min(ratios), 3),
        "speedup_max": round(max(ratios), 3),
        "decode_speedup": round(statistics.median(decode), 3),
        "drafted": drafted,
        "accepted": accepted,
        "acceptance_length": round(1 + accepted / max(1, drafts), 2),
    }


def _run(llm: LLM, config: PairConfig, seed: int) -> _Run:
    random = Random(seed)
    llm.engine.reset_prefix_cache()
    params = SamplingParams(temperature=0.0, max_tokens=config.output_tokens, ignore_eos=True)
    before, tokens, decode_s = llm.engine.stats(), [], 0.0
    start = time.perf_counter()
    for _ in range(config.num_requests):
        prompt = [random.randrange(*_PROMPT_IDS) for _ in range(config.prompt_tokens)]
        result = llm.generate([prompt], params)[0]
        tokens.append(list(result.outputs[0].token_ids))
        times = result.timeline
        if times is not None and times.first_token is not None and times.last_token is not None:
            decode_s += times.last_token - times.first_token
    seconds, after = time.perf_counter() - start, llm.engine.stats()
    return _Run(
        seconds=seconds,
        decode_s=decode_s,
        tokens=tokens,
        num_drafts=after.num_drafts - before.num_drafts,
        num_drafted=after.num_draft_tokens - before.num_draft_tokens,
        num_accepted=after.num_accepted_tokens - before.num_accepted_tokens,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="with a config.json, as in benchmarks/models")
    parser.add_argument("--draft-layers", type=int, default=2, help="layers of the draft models")
    parser.add_argument("--num-requests", type=int, default=2, help="requests per run")
    parser.add_argument("--input-len", type=int, default=32, help="prompt tokens per request")
    parser.add_argument("--output-len", type=int, default=64, help="output tokens per request")
    parser.add_argument("--repeat", type=int, default=7, help="runs of each; the median counts")
    parser.add_argument("--work", type=Path, help="folder for the models; default: the cache")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write JSON here")
    args = parser.parse_args()
    config = PairConfig(
        shape=args.folder,
        work=args.work or cache_dir() / "pairs",
        draft_layers=args.draft_layers,
        num_requests=args.num_requests,
        prompt_tokens=args.input_len,
        output_tokens=args.output_len,
        repeat=args.repeat,
    )
    record = draft_pairs(config, print)
    show(record, COLUMNS["draft_pairs"])
    if args.output:
        record.save(args.output)


if __name__ == "__main__":
    main()
