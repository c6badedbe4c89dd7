"""Benchmarks speculation: texts to repeat and free answers, one request at a time and concurrent.

The engines share the weights and alternate in one run, since two runs on a CPU cannot be compared.
"""

from __future__ import annotations

import gc
import itertools
import math
import statistics
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from windlass.build import build_engine, open_model
from windlass.config import EngineConfig
from windlass.core.sampling import SamplingParams
from windlass.errors import EngineError
from windlass.llm import LLM
from windlass.outputs import RequestOutput
from windlass.tools.common.record import Record
from windlass.tools.eval.short_texts import QUESTIONS, TEXTS

Messages = list[dict[str, Any]]

_CHOICE = "speculation"
_EQUALITY = {
    True: "The program checks that the tokens with and without speculation are identical.",
    False: "Steps of other sizes round sums differently, so near ties can differ: identical tokens "
    "is the share of tokens before the first difference.",
}
_CONTROL = (
    " With many requests, two engines without speculation alternate with the speculating one, since "
    "no two are equally fast: off is both, and control is the speed of the second relative to the "
    "first. ± is the standard error of the median."
)
_OUTPUT_TOKENS = 96
_MIN_CONCURRENT_S = 30.0  # of concurrent requests on a GPU: single runs are short and vary
_MIN_RUNS_FOR_ERROR = 5
_CONCURRENCY = 32


@dataclass(frozen=True, slots=True)
class _Workload:
    name: str
    prompts: list[Messages]
    concurrency: int
    min_seconds: float = 0.0  # minimum time of the runs of all engines


@dataclass(frozen=True, slots=True)
class _Run:
    """The time and the output of one run over all prompts."""

    seconds: float
    tokens: list[array[int]]  # arrays, which the garbage collector does not traverse
    decode_tok_s: float  # per request, from its first token on
    num_drafts: int  # rows with draft tokens
    num_drafted: int
    num_accepted: int

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))


def speculation(
    options: dict[str, Any],
    num_requests: int | None,
    repeat: int,
    log: Callable[[str], None],
    specs: Sequence[str] = ("ngram",),
    free: list[Messages] | None = None,
) -> Record:
    """Compare methods, as NAME or NAME=MODEL, with no speculation; on a CPU outputs must be equal.

    `free`: prompts of the free answers instead of the built-in ones.
    """
    plain = {name: value for name, value in options.items() if not name.startswith("spec")}
    config = EngineConfig.of(**plain)
    opened = open_model(config)
    built = build_engine(config, opened.source)
    exact = built.weights.parts.device.type == "cpu"
    off = [LLM.over(opened.card, built)]
    if not exact:
        again = build_engine(config, opened.source, built.weights)
        off.append(LLM.over(opened.card, again))
    rows = []
    for spec in specs:
        name, _, model = spec.partition("=")
        own = {**options, "spec": name} | ({"spec_model": model} if model else {})
        speculating = build_engine(EngineConfig.of(**own), opened.source, built.weights)
        log(next(f"{c.value}: {c.reason}" for c in speculating.report.choices if c.what == _CHOICE))
        on = LLM.over(opened.card, speculating)
        for llm in (*off, on):
            _run(llm, _Workload("", [_messages("Hello")] * 2, 2))
        for workload in _workloads(num_requests or _CONCURRENCY, free, exact):
            llms = [*(off if workload.min_seconds else off[:1]), on]
            if not exact:  # warm-up: kernels are compiled at first use
                for llm in llms:
                    _run(llm, workload)
            *without, using = _alternate(llms, workload, repeat)
            rows.append({"spec": name, **_row(workload, without, using, exact=exact)})
            log(f"{name}, {workload.name}: {rows[-1]['decode_speedup']} times the decode speed")
    notes = (
        f"Greedy, up to {_OUTPUT_TOKENS} output tokens. tok/s includes the prefill; decode tok/s of one "
        f"request starts at its first token. Medians of the runs; speedup is the median ratio of "
        f"consecutive runs. {_EQUALITY[exact]}"
        f"{'' if exact else _CONTROL}"
    )
    return Record("speculation", rows, notes, settings=options)


def _workloads(concurrency: int, free: list[Messages] | None, on_cpu: bool) -> list[_Workload]:
    min_seconds = 0.0 if on_cpu else _MIN_CONCURRENT_S
    editing = [_messages(f"Repeat the following text exactly: {text}") for text in TEXTS]
    free = free or [_messages(question) for question in QUESTIONS]
    return [
        _Workload("editing, one at a time", editing, 1),
        _Workload("free answers, one at a time", free, 1),
        *(
            _Workload(
                name=f"{kind}, {concurrency} at once",
                prompts=_cycle(prompts, concurrency),
                concurrency=concurrency,
                min_seconds=min_seconds,
            )
            for kind, prompts in (("editing", editing), ("free answers", free))
        ),
    ]


def _cycle(prompts: list[Messages], count: int) -> list[Messages]:
    return [prompts[i % len(prompts)] for i in range(count)]


def _messages(text: str) -> Messages:
    return [{"role": "user", "content": text}]


def _alternate(llms: Sequence[LLM], workload: _Workload, count: int) -> list[list[_Run]]:
    """Run all engines at least `count` times, in every order, since the machine's speed varies."""
    runs: list[list[_Run]] = [[] for _ in llms]
    orders = itertools.cycle(itertools.permutations(range(len(llms))))
    end = time.perf_counter() + count * workload.min_seconds
    while len(runs[0]) < count or time.perf_counter() < end:
        for each in next(orders):
            runs[each].append(_run(llms[each], workload))
    return runs


def _run(llm: LLM, workload: _Workload) -> _Run:
    llm.engine.reset_prefix_cache()
    before = llm.engine.stats()
    params = SamplingParams(temperature=0.0, max_tokens=_OUTPUT_TOKENS)
    gc.collect()  # so that earlier runs' garbage is not collected in this run
    start = time.perf_counter()
    results: list[RequestOutput] = []
    for at in range(0, len(workload.prompts), workload.concurrency):
        results += llm.chat(workload.prompts[at : at + workload.concurrency], params)
    seconds = time.perf_counter() - start
    after = llm.engine.stats()
    return _Run(
        seconds=seconds,
        tokens=[array("i", result.outputs[0].token_ids) for result in results],
        decode_tok_s=_decode_speed(results),
        num_drafts=after.num_drafts - before.num_drafts,
        num_drafted=after.num_draft_tokens - before.num_draft_tokens,
        num_accepted=after.num_accepted_tokens - before.num_accepted_tokens,
    )


def _decode_speed(results: list[RequestOutput]) -> float:
    num_tokens, seconds = 0, 0.0
    for result in results:
        times = result.timeline
        if times is not None and times.first_token is not None and times.last_token is not None:
            num_tokens += times.num_output - 1
            seconds += times.last_token - times.first_token
    return num_tokens / max(seconds, 1e-9)


def _equal_share(off: _Run, on: _Run) -> float:
    """The share of tokens that are equal up to the first difference of each answer."""
    same = 0
    for ours, theirs in zip(off.tokens, on.tokens, strict=True):
        pairs = zip(ours, theirs, strict=False)
        same += next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
    return same / max(1, off.num_tokens)


def _median_and_error(ratios: list[float]) -> tuple[float, float | None]:
    """The median, which ignores a briefly busy host, and its standard error.

    The error is half of the distance between the ratios at ranks sqrt(n) / 2 below and above.
    """
    median = statistics.median(ratios)
    if len(ratios) < _MIN_RUNS_FOR_ERROR:
        return median, None
    ranks, ratios = math.sqrt(len(ratios)) / 2, sorted(ratios)
    center = (len(ratios) - 1) / 2
    low, high = ratios[round(center - ranks)], ratios[round(center + ranks)]
    return median, (high - low) / 2


def _row(
    workload: _Workload, without: list[list[_Run]], on: list[_Run], *, exact: bool = True
) -> dict[str, Any]:
    off = list(itertools.chain(*without))
    if exact and any(run.tokens != off[0].tokens for run in (*off, *on)):
        raise EngineError(f"{workload.name}: the tokens differ with speculation and without.")
    slow = statistics.median(run.seconds for run in off)
    fast = statistics.median(run.seconds for run in on)
    seconds = [[run.seconds for run in runs] for runs in without]
    # Ratios of consecutive runs: other load of the machine changes slowly.
    turns = zip(*seconds, (run.seconds for run in on), strict=True)
    ratios = [statistics.geometric_mean(others) / own for *others, own in turns]
    control = None
    if len(seconds) > 1:
        first, second = seconds[:2]
        control = round(
            _median_and_error([a / b for a, b in zip(first, second, strict=True)])[0], 3
        )
    speedup, error = _median_and_error(ratios)
    decode_off = statistics.median(run.decode_tok_s for run in off)
    decode_on = statistics.median(run.decode_tok_s for run in on)
    drafted = sum(run.num_drafted for run in on)
    accepted = sum(run.num_accepted for run in on)
    drafts = sum(run.num_drafts for run in on)
    return {
        "workload": workload.name,
        "output_tokens": off[0].num_tokens,
        "runs": len(on),
        "off_seconds": [[round(each, 3) for each in runs] for runs in seconds],
        "on_seconds": [round(run.seconds, 3) for run in on],
        "off_tok_s": round(off[0].num_tokens / slow, 2),
        "on_tok_s": round(on[0].num_tokens / fast, 2),
        "speedup": round(speedup, 3),
        "speedup_error": error and round(error, 3),
        "decode_off_tok_s": round(decode_off, 2),
        "decode_on_tok_s": round(decode_on, 2),
        "decode_speedup": round(decode_on / decode_off, 3),
        "drafted": drafted // len(on),
        "accepted": accepted // len(on),
        "acceptance_length": round(1 + accepted / max(1, drafts), 2),
        "alike": round(min(_equal_share(off[0], run) for run in on), 4),
        "control": control,
    }
