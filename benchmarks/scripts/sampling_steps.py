"""Measures decoding with each kind of sampling parameters, and digests deterministic outputs.

    python benchmarks/scripts/sampling_steps.py benchmarks/models/llama-3.1-8b -o OLD.json
    python benchmarks/scripts/sampling_steps.py benchmarks/models/llama-3.1-8b -o NEW.json --compare OLD.json

Weights are random. The vocabulary is made up, too: bytes and words of letters and digits, so that
masks of grammars cost about what they cost with a real one. Only the public API is used, so that the
script runs with any version of the package: set PYTHONPATH to a checkout. The exit status is 1 if
deterministic outputs differ from OLD.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from windlass import LLM, SamplingParams
from windlass.tools.common.record import Record, read_record

Log = Callable[[str], None]

_NOTES = (
    "Prompts of random tokens, all sent at once; a run has new prompts. tok_s: output tokens per second "
    "of a whole run, prompts included. step_ms: time per output token after the first, median of the "
    "requests. Medians of the runs; min and max are those of tok_s."
)
_EOS = "<eos>"
_LETTERS = "etaoinshrdlucmfwypvbgkjqxz"
_SCHEMA = {
    "type": "array",
    "minItems": 4096,  # more than fit into an output
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[a-z0-9 ]{8,40}$"},
            "count": {"type": "integer", "minimum": 0},
        },
        "required": ["name", "count"],
        "additionalProperties": False,
    },
}
_NUM_DIGESTS = 20


@dataclass(frozen=True, slots=True)
class StepsConfig:
    """The model and the workload."""

    model: str  # a folder with a config.json
    num_requests: int = 64
    prompt_tokens: int = 128
    output_tokens: int = 128
    repeat: int = 3
    kinds: Sequence[str] = ()  # empty: all
    device: str = "auto"


def sampling_steps(config: StepsConfig, log: Log) -> Record:
    """Run every kind of sampling parameters, then digest deterministic outputs."""
    with TemporaryDirectory() as folder:
        vocab_size = _write_tokenizer(config.model, Path(folder))
        kinds = _chosen_kinds(config)
        start = time.perf_counter()
        llm = LLM(
            config.model,
            load_format="dummy",
            tokenizer=folder,
            device=config.device,
            max_model_len=config.prompt_tokens + config.output_tokens + 64,
            max_num_seqs=config.num_requests,
        )
        log(f"engine: {time.perf_counter() - start:.1f} s")
        rows = []
        for name, params in kinds.items():
            measured = _measure(llm, config, name, params, vocab_size=vocab_size)
            rows.append({"kind": name, **measured})
            log(f"{name}: {rows[-1]['tok_s']:,.0f} tok/s")
        settings = {
            "model": config.model,
            "num_requests": config.num_requests,
            "prompt_tokens": config.prompt_tokens,
            "output_tokens": config.output_tokens,
            "deterministic": _deterministic(llm, config, vocab_size),
        }
    return Record("sampling_steps", rows, _NOTES, settings)


def sampling_kinds(num_tokens: int) -> dict[str, list[SamplingParams]]:
    """Sampling parameters by kind; a list is repeated over the requests of a run."""

    def params(**options: Any) -> SamplingParams:
        fixed = {"max_tokens": num_tokens, "temperature": 0.0}
        if "structured_outputs" not in options:
            fixed["ignore_eos"] = True
        return SamplingParams(**{**fixed, **options})

    sampled = {"temperature": 0.8, "top_p": 0.95}
    regex = rf"[0-9 ]{{{16 * num_tokens},}}"  # longer than an output
    kinds = {
        "greedy": [params()],
        "sampled": [params(**sampled, seed=seed) for seed in range(8)],
        "top-k": [params(temperature=0.8, top_k=40, min_p=0.01, seed=seed) for seed in range(8)],
        "logprobs": [params(logprobs=5)],
        "penalties": [params(repetition_penalty=1.1, frequency_penalty=0.2)],
        "logit bias": [params(logit_bias=dict.fromkeys(range(300, 320), 1.5))],
        "regex": [params(structured_outputs={"regex": regex})],
        "JSON schema": [params(structured_outputs={"json": _SCHEMA})],
        "deterministic": [params(deterministic=True)],
    }
    mixed = [params[0] for name, params in kinds.items() if name != "deterministic"]
    return {**kinds, "mixed": mixed}


def _chosen_kinds(config: StepsConfig) -> dict[str, list[SamplingParams]]:
    kinds = sampling_kinds(config.output_tokens)
    unknown = set(config.kinds) - set(kinds)
    if unknown:
        raise SystemExit(f"--kinds: no {', '.join(sorted(unknown))}. Known: {', '.join(kinds)}.")
    return {name: kinds[name] for name in config.kinds or kinds}


def _measure(
    llm: LLM, config: StepsConfig, kind: str, params: Sequence[SamplingParams], *, vocab_size: int
) -> dict[str, Any]:
    repeated = [params[i % len(params)] for i in range(config.num_requests)]
    speeds, step_times = [], []
    # The first run captures graphs, compiles kernels and grammars; it is not counted.
    for turn in range(config.repeat + 1):
        random = Random(f"{kind} {turn}")  # new prompts, which the prefix cache does not have
        prompts = random_prompts(random, [config.prompt_tokens] * config.num_requests, vocab_size)
        start = time.perf_counter()
        results = llm.generate(prompts, repeated)
        seconds = time.perf_counter() - start
        lengths = {len(result.outputs[0].token_ids) for result in results}
        if lengths != {config.output_tokens}:
            raise SystemExit(f"outputs have {sorted(lengths)} tokens, not {config.output_tokens}.")
        if turn:
            speeds.append(config.num_requests * config.output_tokens / seconds)
            step_times.append(median(map(_step_ms, results)))
    return {
        "tok_s": round(median(speeds), 1),
        "tok_s_min": round(min(speeds), 1),
        "tok_s_max": round(max(speeds), 1),
        "step_ms": round(median(step_times), 3),
    }


def _step_ms(result: Any) -> float:
    times = result.timeline
    return 1e3 * (times.last_token - times.first_token) / max(1, times.num_output - 1)


def _deterministic(llm: LLM, config: StepsConfig, vocab_size: int) -> list[str]:
    """Digests of deterministic outputs, of prompts of different lengths in one batch."""
    random = Random("deterministic")
    lengths = [random.randint(1, config.prompt_tokens) for _ in range(_NUM_DIGESTS)]
    common: dict[str, Any] = {
        "max_tokens": config.output_tokens,
        "ignore_eos": True,
        "deterministic": True,
    }
    params = [
        SamplingParams(**common, temperature=0.8 * (index % 2), top_p=0.9, seed=index)
        for index in range(_NUM_DIGESTS)
    ]
    results = llm.generate(random_prompts(random, lengths, vocab_size), params)
    return [
        hashlib.sha256(json.dumps(result.outputs[0].token_ids).encode()).hexdigest()[:16]
        for result in results
    ]


def random_prompts(random: Random, lengths: Sequence[int], vocab_size: int) -> list[list[int]]:
    return [[random.randrange(256, vocab_size - 1) for _ in range(count)] for count in lengths]


def _write_tokenizer(model: str, folder: Path) -> int:
    """Write a byte-level tokenizer of the model's vocabulary size; returns that size."""
    vocab_size = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    random = Random(0)
    tokens = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    while len(tokens) < vocab_size - 1:
        size = random.randint(2, 9)
        letters = _LETTERS if random.random() < 0.9 else "0123456789"
        tokens.setdefault(random.choice(("", "Ġ")) + "".join(random.choices(letters, k=size)))
    vocabulary = {token: index for index, token in enumerate([*tokens, _EOS])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([_EOS])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": _EOS}))
    return int(vocab_size)


def differences(old: Record, new: Record) -> list[str]:
    """Reasons why the records are not comparable, or the digests that differ."""
    shapes = [key for key in new.settings if key != "deterministic"]
    changed = [key for key in shapes if old.settings.get(key) != new.settings[key]]
    if changed:
        return [f"the records are not comparable: {', '.join(changed)} differ."]
    pairs = zip(old.settings["deterministic"], new.settings["deterministic"], strict=True)
    wrong = [str(index) for index, (one, other) in enumerate(pairs) if one != other]
    return [f"deterministic outputs differ: {', '.join(wrong)}."] if wrong else []


def table(rows: Sequence[Mapping[str, Any]], old: Record | None) -> str:
    """The figures as text, with those of an earlier record and the ratio of the speeds."""
    before = {row["kind"]: row for row in old.rows} if old else {}
    heading = f"{'kind':14} {'tok/s':>9} {'min':>9} {'max':>9} {'step ms':>8}"
    lines = [heading + (f" {'old tok/s':>10} {'new/old':>8} {'step':>6}" if old else "")]
    for row in rows:
        line = f"{row['kind']:14} {row['tok_s']:9,.0f} {row['tok_s_min']:9,.0f} {row['tok_s_max']:9,.0f} {row['step_ms']:8.3f}"
        if row["kind"] in before:
            own = before[row["kind"]]
            line += f" {own['tok_s']:10,.0f} {row['tok_s'] / own['tok_s']:8.3f} {row['step_ms'] / own['step_ms']:6.3f}"
        lines.append(line)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="folder with a config.json, as in benchmarks/models")
    parser.add_argument("--num-requests", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=128, help="prompt tokens per request")
    parser.add_argument("--output-len", type=int, default=128, help="output tokens per request")
    parser.add_argument(
        "--repeat", type=int, default=3, help="runs of each kind; the median counts"
    )
    parser.add_argument("--kinds", default="", help="names, separated by commas; default: all")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--compare", type=Path, metavar="OLD.json", help="an earlier record")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write JSON here")
    args = parser.parse_args()
    old = read_record(args.compare) if args.compare else None
    config = StepsConfig(
        model=args.model,
        num_requests=args.num_requests,
        prompt_tokens=args.input_len,
        output_tokens=args.output_len,
        repeat=args.repeat,
        kinds=tuple(name.strip() for name in args.kinds.split(",") if name.strip()),
        device=args.device,
    )
    record = sampling_steps(config, lambda line: print(line, flush=True))
    if args.output:
        record.save(args.output)
    wrong = differences(old, record) if old else []
    print("\n".join(wrong) or f"deterministic: {' '.join(record.settings['deterministic'])}")
    print(table(record.rows, old))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
