"""Digests of the tokens that the default model generates on a CPU, in every mode of the engine.

    python benchmarks/scripts/token_digests.py --work FOLDER -o OLD.json
    python benchmarks/scripts/token_digests.py --work FOLDER -o NEW.json --compare OLD.json

Only the public API is used, so that the script runs with any version of the package: set PYTHONPATH
to a checkout. Results are comparable on one machine, with the same files in FOLDER. The exit status
is 1 if a mode differs from OLD.json or from the mode whose tokens it must have, or covers nothing.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from digest_files import ModelFiles
from digest_prompts import PROMPTS

from windlass import LLM, SamplingParams
from windlass.tools.common.record import Record, read_record

Log = Callable[[str], None]
Params = Sequence[SamplingParams]
Counter = Literal["num_cached", "num_preemptions", "num_accepted"]

_NOTES = (
    "A digest covers the token ids, text and finish reason of all completions of a prompt, and the log "
    "probabilities rounded to four digits. The counters are not compared: they depend on timing."
)
_MAX_TOKENS = 24
_ENGINE = {"device": "cpu", "max_model_len": 768, "num_blocks": 320, "max_num_seqs": 8}
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "count", "tags"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Mode:
    """Requests of one kind on one engine. `params` and `adapters` are repeated over the prompts."""

    name: str
    engine: str
    params: Params
    adapters: Sequence[str] = ("",)
    same_as: str | None = None  # the mode with the same tokens
    covers: Counter | None = None  # counter of the requests that must not stay 0


@dataclass(frozen=True, slots=True)
class DigestConfig:
    """What to run."""

    work: Path  # folder of the adapters, heads and models
    max_tokens: int = _MAX_TOKENS
    prompts: Sequence[str] = PROMPTS
    modes: Sequence[str] = ()  # names; empty: all
    output: Path | None = None  # the record, written after every engine


def token_digests(config: DigestConfig, log: Log) -> Record:
    """Run all modes, engine by engine."""
    files, modes = ModelFiles(config.work), choose_modes(config)
    rows: list[dict[str, Any]] = []
    for name in dict.fromkeys(mode.engine for mode in modes):
        start = time.perf_counter()
        llm = LLM(**{**_ENGINE, **ENGINES[name](files)})
        log(f"engine {name}: {time.perf_counter() - start:.1f} s")
        for mode in modes:
            if mode.engine == name:
                rows.append(_run(llm, mode, config.prompts))
                log(_line(rows[-1]))
        del llm
        gc.collect()  # an engine holds its weights and KV cache in a reference cycle
        record = Record("token_digests", rows, _NOTES, _settings(config, files))
        if config.output is not None:
            record.save(config.output)
    return record


def _settings(config: DigestConfig, files: ModelFiles) -> dict[str, Any]:
    return {
        "max_tokens": config.max_tokens,
        "prompts": digest(list(config.prompts)),
        "files": files.digests(),
    }


def choose_modes(config: DigestConfig) -> list[Mode]:
    """The modes that were asked for, or all."""
    every = all_modes(config.max_tokens)
    unknown = set(config.modes) - {mode.name for mode in every}
    if unknown:
        known = ", ".join(mode.name for mode in every)
        raise SystemExit(f"--modes: no mode {', '.join(sorted(unknown))}. Known: {known}.")
    return [mode for mode in every if not config.modes or mode.name in config.modes]


def _lora(files: ModelFiles) -> dict[str, Any]:
    modules = tuple(f"{name}={files.adapter(name)}" for name in ("a", "b"))
    return {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "lora_modules": modules}


def _spec(kind: str, path: Path, **options: Any) -> dict[str, Any]:
    return {"spec": kind, "spec_model": str(path), **_FEW, **options}


def _pair(files: ModelFiles, **options: Any) -> dict[str, Any]:
    return {"model": str(files.target()), **options}


# Few requests at a time: the governor then verifies more draft tokens.
_FEW = {"max_num_seqs": 2}
# Options of each engine.
ENGINES: dict[str, Callable[[ModelFiles], dict[str, Any]]] = {
    "plain": lambda _: {},
    "chunks": lambda _: {"max_num_batched_tokens": 40, "prefix_caching": False},
    "eager": lambda _: {"enforce_eager": True},
    "int8 KV": lambda _: {"kv_cache_dtype": "int8"},
    "few blocks": lambda _: {"num_blocks": 48},
    "few blocks, ngram": lambda _: {"num_blocks": 48, "spec": "ngram", "max_num_seqs": 4},
    "ngram": lambda _: {"spec": "ngram", **_FEW},
    "lookahead": lambda _: {"spec": "lookahead", **_FEW},
    # Steps with heads run eagerly on a CPU: drafts pay only if the others do, too.
    "medusa": lambda files: _spec("medusa", files.medusa(), enforce_eager=True),
    "eagle": lambda files: _spec("eagle", files.eagle(), enforce_eager=True),
    "medusa, program": lambda files: _spec("medusa", files.medusa()),
    "eagle, program": lambda files: _spec("eagle", files.eagle()),
    "pair": _pair,
    "draft": lambda files: _pair(files, **_spec("draft", files.draft())),
    "self": lambda files: _pair(files, spec="self", spec_exit_layer=files.exit_layer, **_FEW),
    "adapters": _lora,
    "adapters, ngram": lambda files: {**_lora(files), "spec": "ngram", **_FEW},
}


def all_modes(max_tokens: int) -> list[Mode]:
    """Every mode; a mode comes after the mode whose tokens it must have."""
    kinds = sampling_kinds(max_tokens)
    greedy, mixed = kinds["greedy"], [params for kind in kinds.values() for params in kind]
    modes = [Mode(name, "plain", params) for name, params in kinds.items()]
    modes += [
        Mode("prefix hits", "plain", greedy, same_as="greedy", covers="num_cached"),
        Mode("mixed", "plain", mixed),
        Mode("chunks", "chunks", greedy, same_as="greedy"),
        Mode("eager", "eager", mixed, same_as="mixed"),
        Mode("int8 KV", "int8 KV", mixed),
    ]
    modes += [
        Mode("few blocks", "few blocks", greedy, same_as="greedy", covers="num_preemptions"),
        Mode("few blocks, ngram", "few blocks, ngram", greedy, same_as="greedy"),
    ]
    # The best drafts first: proposers that draft badly at first are rarely asked later.
    given = {"few words": kinds["few words"], "mixed": mixed, "greedy": greedy}
    for engine in ("medusa, program", "eagle, program"):
        modes.append(Mode(engine, engine, mixed, same_as="mixed"))
    for engine in ("medusa", "eagle"):
        modes += _speculation(engine, {"few words": given["few words"], "mixed": mixed}, "")
    for engine in ("ngram", "lookahead"):
        modes += _speculation(engine, given, "")
    given = dict(reversed(given.items()))
    modes += [Mode(f"pair, {name}", "pair", params) for name, params in given.items()]
    for engine in ("draft", "self"):
        modes += _speculation(engine, given, "pair, ")
    return modes + _adapter_modes(kinds)


def _adapter_modes(kinds: Mapping[str, Params]) -> list[Mode]:
    given = {
        "few words": kinds["few words"],
        "mixed": [params for kind in kinds.values() for params in kind],
        "greedy": kinds["greedy"],
        "deterministic": kinds["deterministic"],
    }
    names = ("a", "", "b")
    modes = [Mode(f"adapters, {name}", "adapters", given[name], names) for name in given]
    return modes + [
        replace(mode, adapters=names)
        for mode in _speculation("adapters, ngram", given, "adapters, ")
    ]


def _speculation(engine: str, given: Mapping[str, Params], target: str) -> list[Mode]:
    """Modes of one engine that speculates. `target`: prefix of the modes without speculation."""
    return [
        Mode(
            name=f"{engine}, {name}",
            engine=engine,
            params=params,
            same_as=target + name,
            covers="num_accepted" if index == 0 else None,
        )
        for index, (name, params) in enumerate(given.items())
    ]


def sampling_kinds(max_tokens: int) -> dict[str, Params]:
    """Sampling parameters by what they exercise."""

    def params(**options: Any) -> SamplingParams:
        return SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, **options})

    def grammar(**constraint: Any) -> dict[str, Any]:
        return {"structured_outputs": constraint}

    few = {"allowed_token_ids": range(260, 264), "ignore_eos": True}
    rules = {
        "logit_bias": {260: 2.0, 28: -3.0},
        "bad_words": [" the", "is"],
        "min_tokens": max_tokens // 2,
    }
    return {
        "greedy": [params()],
        "sampled": [
            params(temperature=0.7, top_p=0.9, seed=1),
            params(temperature=1.0, top_k=40, seed=2, n=2),
            params(temperature=1.3, min_p=0.05, seed=3),
            params(temperature=0.9, top_p=0.8, top_k=20, min_p=0.02, seed=4),
        ],
        "stops": [
            params(stop=[".", "\n\n"], include_stop_str_in_output=True),
            params(ignore_eos=True, stop_token_ids=[28, 30]),
            params(temperature=0.8, seed=5, allowed_token_ids=range(200, 1200)),
        ],
        # Few words are soon repeated, so that all proposers draft well.
        "few words": [
            params(**few),
            params(**few, temperature=0.4, seed=10),
            params(**few, logprobs=3, frequency_penalty=0.1),
            params(**grammar(regex=r"( no| yes){400}")),
            params(**few, deterministic=True),
        ],
        "logprobs": [params(logprobs=5), params(logprobs=0, temperature=1.0, seed=6)],
        "prompt logprobs": [params(prompt_logprobs=2, logprobs=2)],
        "penalties": [
            params(repetition_penalty=1.2),
            params(presence_penalty=0.6, frequency_penalty=0.4, temperature=0.8, seed=7),
            params(**rules),
            params(repetition_penalty=1.1, frequency_penalty=0.2, logprobs=3, **rules),
        ],
        "grammar": [
            params(**grammar(json=_SCHEMA)),
            params(
                **grammar(regex=r"[A-Z][a-z]{2,8}( [a-z]{1,9}){3,12}\."), temperature=0.9, seed=8
            ),
            params(**grammar(choice=["yes, certainly", "no, never", "perhaps later"])),
            params(
                **grammar(json_object=True),
                repetition_penalty=1.2,
                min_tokens=max_tokens // 4,
                logprobs=1,
            ),
        ],
        "deterministic": [
            params(deterministic=True),
            params(deterministic=True, temperature=0.8, top_p=0.9, seed=9, logprobs=2),
        ],
    }


def _run(llm: LLM, mode: Mode, prompts: Sequence[str]) -> dict[str, Any]:
    count = len(prompts)
    params = [mode.params[i % len(mode.params)] for i in range(count)]
    adapters = [mode.adapters[i % len(mode.adapters)] for i in range(count)]
    start = time.perf_counter()
    results = llm.generate(list(prompts), params, adapter=adapters)
    seconds = time.perf_counter() - start
    digests = [digest(_content(result)) for result in results]
    timelines = [result.timeline for result in results if result.timeline is not None]
    counters = ("num_cached", "num_preemptions", "num_drafted", "num_accepted")
    return {
        "mode": mode.name,
        "total": digest(digests),
        "prompts": digests,
        "tokens": sum(len(each.token_ids) for result in results for each in result.outputs),
        **{name: sum(getattr(times, name) for times in timelines) for name in counters},
        "seconds": round(seconds, 1),
        "same_as": mode.same_as,
        "covers": mode.covers,
    }


def _content(result: Any) -> list[Any]:
    """All of a result that must be reproduced."""
    completions = [
        [each.token_ids, each.text, each.finish_reason, _rounded(each.logprobs)]
        for each in result.outputs
    ]
    return [completions, _rounded(result.prompt_logprobs)]


def _rounded(logprobs: Any) -> list[Any] | None:
    if logprobs is None:
        return None
    return [
        [each.token, round(each.logprob, 4), each.rank, [[t, round(p, 4)] for t, p in each.top]]
        for each in logprobs
    ]


def digest(content: Any) -> str:
    """A short digest of a JSON value."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def problems(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Modes that covered nothing, or that do not have the tokens of another mode."""
    totals, found = {row["mode"]: row["total"] for row in rows}, []
    for row in rows:
        name, other = row["mode"], row["same_as"]
        if other in totals and totals[other] != row["total"]:
            found.append(f"{name}: the tokens are not those of mode {other!r}.")
        if row["covers"] and not row[row["covers"]]:
            found.append(f"{name}: {row['covers']} is 0, so that the mode covers nothing.")
    return found


def differences(old: Record, new: Record) -> list[str]:
    """What differs from an earlier record."""
    changed = [
        name for name in ("max_tokens", "prompts") if old.settings[name] != new.settings[name]
    ]
    files = new.settings["files"]
    changed += [name for name, own in old.settings["files"].items() if files.get(name, own) != own]
    if changed:
        return [f"the records are not comparable: {', '.join(changed)} differ."]
    before, after = ({row["mode"]: row for row in record.rows} for record in (old, new))
    found = [f"{name}: is in one record only." for name in before.keys() ^ after.keys()]
    for name in before.keys() & after.keys():
        pairs = zip(before[name]["prompts"], after[name]["prompts"], strict=True)
        wrong = [index for index, (one, other) in enumerate(pairs) if one != other]
        if wrong:
            found.append(f"{name}: prompts {', '.join(map(str, wrong))} differ.")
    return sorted(found)


def _line(row: Mapping[str, Any]) -> str:
    counted = [f"{name[4:]} {row[name]}" for name in row if name.startswith("num_") and row[name]]
    return (
        f"{row['mode']:26} {row['total']}  {row['tokens']:5} tokens  {row['seconds']:5.1f} s  "
        f"{', '.join(counted)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder for adapters and models")
    parser.add_argument("--max-tokens", type=int, default=_MAX_TOKENS)
    parser.add_argument("--modes", default="", help="names, separated by semicolons; default: all")
    parser.add_argument("--compare", type=Path, metavar="OLD.json", help="an earlier record")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write JSON here")
    args = parser.parse_args()
    modes = tuple(name.strip() for name in args.modes.split(";") if name.strip())
    old = read_record(args.compare) if args.compare else None
    config = DigestConfig(
        work=args.work, max_tokens=args.max_tokens, modes=modes, output=args.output
    )
    record = token_digests(config, lambda line: print(line, flush=True))
    wrong = problems(record.rows)
    if old is not None:
        if modes:
            old = replace(old, rows=[row for row in old.rows if row["mode"] in modes])
        wrong += differences(old, record)
        print(f"{args.compare}: {old.commit}; this run: {record.commit}")
    print("\n".join(wrong) or "no differences")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
