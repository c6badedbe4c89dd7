"""Measures one variant: builds its engine, runs both loads, and judges its quality once per format.

A small engine of the base stays for as long as others are measured. It does the same short work
before and after each run: how fast the machine was just then, so that ratios hold on a shared one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from windlass.build import Built, build_engine, open_model
from windlass.config import EngineConfig
from windlass.engine import Engine
from windlass.runner.assemble import Loaded
from windlass.tools.common.device import forget_peak, memory_bytes, release_memory
from windlass.tools.common.drive import EngineRun, OnTokens, run_all
from windlass.tools.common.judge import Judge, held_as
from windlass.tools.common.price import Price
from windlass.tools.common.requests import Request
from windlass.tools.common.summary import summarise
from windlass.tools.eval.data import Corpus
from windlass.tools.eval.windows import Cut
from windlass.tools.ladder.forms import Forms
from windlass.tools.ladder.rungs import BARE, PLAIN, Variant
from windlass.tools.ladder.work import Work

_MIB = 2**20
_SPARE_BLOCKS = 64
_YARD_ROWS, _YARD_PROMPT, _YARD_BLOCKS = 4, 8, 32
_YARD_TOKENS = {"cpu": 10, "cuda": 40}  # a step of a GPU is some ten times as short
_WARM_ROWS, _WARM_TOKENS = 16, 16

Row = dict[str, Any]
Watch = Callable[[str], None]


class Bench:
    """Owns the weights in use, the base's small engine, and the judge of quality."""

    def __init__(
        self,
        forms: Forms,
        works: Mapping[str, Work],
        naive_requests: int | None,
        price: Price,
        corpus: Corpus | None,
        cut: Cut,
    ) -> None:
        """Works by load. `corpus` None: the weights are random, and have no quality."""
        self._forms = forms
        self._works = works
        self._largest = max(works.values(), key=lambda work: len(work.requests))
        self._naive_requests = naive_requests
        self._price = price
        self._corpus = corpus
        self._cut = cut
        self._length = max(cut.context, *(work.longest for work in works.values()))
        self._own = _without_speculation(forms)
        self._loaded: dict[str, Loaded] = {}
        self._yard: Engine | None = None
        self._judge: Judge | None = None
        self.qualities: dict[str, Row] = {}

    def measure(self, variant: Variant, watch: Watch, on_tokens: OnTokens) -> Row:
        """All figures of a variant; raises an EngineError where it cannot be."""
        watch("loading")
        config = self._config(variant)
        built = self._build(config, variant.weights)
        row = self._weights_row(built, variant)
        device = built.weights.parts.device
        works = self._works
        if variant.options["batching"] == "none":
            works = {name: work.first(self._naive_requests) for name, work in works.items()}
        self._warm_up(built, works)
        forget_peak(device)
        for name, work in works.items():
            watch(work.name)
            before = self._yardstick()
            built.engine.reset_prefix_cache()
            run = run_all(
                built.engine,
                work.requests,
                max_concurrency=work.at_once,
                on_tokens=on_tokens,
            )
            yard = (before + self._yardstick()) / 2
            row |= {f"{name}_{key}": value for key, value in self._figures(run, built).items()}
            row[f"{name}_yard_tok_s"] = round(yard, 2)
        row["kv_mib"] = max(row[f"{name}_kv_mib"] for name in works)
        row["memory_mib"] = round(row["weights_mib"] + row["kv_mib"], 1)
        row["process_mib"] = round(memory_bytes(device) / _MIB, 1)
        weights = built.weights
        del built
        release_memory()
        watch("quality")
        return row | self._quality(variant, config, weights)

    # ---- engines -----------------------------------------------------------------------------

    def _config(self, variant: Variant) -> EngineConfig:
        full = self._largest
        own = self._sized(variant.options, variant.weights)
        plain = EngineConfig.of(**own)
        rows = plain.limits(self._forms.device.type).max_num_seqs
        together = min(full.num_tokens, rows * full.longest)
        blocks = -(-together // plain.cache.block_size) + len(full.requests) + _SPARE_BLOCKS
        return EngineConfig.of(**own, num_blocks=blocks)

    def _sized(self, options: Mapping[str, Any], form: str) -> dict[str, Any]:
        """The options of an engine with the length that all have, since they share weights."""
        own = {**self._own, **options, **self._forms.options_of(form)}
        own["max_model_len"] = self._length
        if not own["enable_chunked_prefill"]:  # then a whole prompt must fit a step
            usual = EngineConfig.of(**own).limits(self._forms.device.type).max_num_batched_tokens
            own["max_num_batched_tokens"] = max(self._length, usual)
        return own

    def _build(self, config: EngineConfig, form: str) -> Built:
        """Weights of the base are kept, and the last others that were used."""
        if form not in self._loaded:
            self._loaded = {name: it for name, it in self._loaded.items() if name == PLAIN}
        release_memory()
        built = build_engine(config, open_model(config).source, self._loaded.get(form))
        self._loaded[form] = built.weights
        return built

    def prepare(self) -> None:
        """Load the base: its small engine, and the judge, share its weights."""
        options = self._sized(BARE, PLAIN)
        few = {"max_num_seqs": _YARD_ROWS, "num_blocks": _YARD_BLOCKS}
        config = EngineConfig.of(**{**options, **few})
        opened = open_model(config)
        built = build_engine(config, opened.source)
        self._loaded[PLAIN] = built.weights
        self._yard = built.engine
        self._yardstick()
        if self._corpus is not None:
            plain = EngineConfig.of(**options)
            self._judge = Judge(plain, opened, self._corpus, self._cut, built.weights)

    def _yardstick(self) -> float:
        """Tokens a second of the base at the same short work."""
        assert self._yard is not None
        count = _YARD_TOKENS[self._forms.device.type]
        requests = [Request([1 + row] * _YARD_PROMPT, count) for row in range(_YARD_ROWS)]
        run = run_all(self._yard, requests)
        return run.num_output / run.duration

    def _warm_up(self, built: Built, works: Mapping[str, Work]) -> None:
        """Every number of rows comes once, since a step is recorded for each.

        A GPU's kernels are made for the shapes that come, so that it gets full steps of prompts too.
        """
        largest = max(works.values(), key=lambda work: len(work.requests))
        count = min(len(largest.requests), _WARM_ROWS)
        requests = [Request([1 + row % 7] * _YARD_PROMPT, 1 + row) for row in range(count)]
        run_all(built.engine, requests)
        if self._forms.device.type == "cuda":
            longest = sum(len(request.prompt) for request in largest.requests) / len(
                largest.requests
            )
            enough = math.ceil(2 * built.report.max_num_batched_tokens / longest)
            requests = [
                replace(request, num_output=min(request.num_output, _WARM_TOKENS))
                for request in largest.first(enough).requests
            ]
            run_all(built.engine, requests, max_concurrency=largest.at_once)

    # ---- figures -----------------------------------------------------------------------------

    def _weights_row(self, built: Built, variant: Variant) -> Row:
        return {
            "weights": variant.weights,
            "weights_is": self._forms.about(variant.weights),
            "weights_mib": round(built.weights.weight_bytes / _MIB, 1),
            "held": held_as(built.weights.network),
            "kv_token_bytes": built.report.capacity.bytes_per_block
            // built.report.capacity.block_size,
            "context": self._forms.source.hparams.max_positions,
            "max_num_seqs": built.report.max_num_seqs,
            "max_num_batched_tokens": built.report.max_num_batched_tokens,
        }

    def _figures(self, run: EngineRun, built: Built) -> Row:
        found = summarise(run.timings, run.duration, percentiles=(99.0,))
        ttft, e2el = found.spreads["ttft"], found.spreads["e2el"]
        tpot = found.spreads.get("tpot")
        block_mib = built.report.capacity.bytes_per_block / _MIB
        dollars = self._price.per_million(found.output_throughput)
        return {
            "seconds": round(run.duration, 3),
            "req_s": round(found.request_throughput, 3),
            "tok_s": round(found.output_throughput, 2),
            "ttft_p50_ms": round(ttft.median, 1),
            "ttft_p99_ms": round(ttft.percentiles[99.0], 1),
            "tpot_p50_ms": round(tpot.median, 2) if tpot else None,
            "tpot_p99_ms": round(tpot.percentiles[99.0], 2) if tpot else None,
            "e2e_p50_s": round(e2el.median / 1e3, 3),
            "usd_per_million": None if dollars is None else float(f"{dollars:.3g}"),
            "steps": run.num_steps,
            "rows_a_step": round(run.num_output / max(1, run.num_steps), 2),
            "cached_share": round(run.num_cached / run.num_prompt, 4),
            "prompt_share": round(
                run.prompt_tokens_computed / (run.prompt_tokens_computed + run.num_output), 4
            ),
            "drafted": run.num_drafted,
            "accepted": run.num_accepted,
            "preemptions": run.num_preemptions,
            "requests": len(run.timings),
            "cut": run.num_chunked,
            "kv_mib": round(run.peak_blocks * block_mib, 1),
            "kv_mean_mib": round(run.mean_blocks * block_mib, 2),
        }

    def _quality(self, variant: Variant, config: EngineConfig, weights: Loaded) -> Row:
        if self._judge is None:
            return {"format": variant.format, "perplexity": None, "agreement": None}
        if variant.format not in self.qualities:
            made = self._judge.build(config, weights)
            quality = self._judge.compare(made)
            assert quality.against is not None
            self.qualities[variant.format] = {
                "perplexity": float(f"{quality.perplexity:.4g}"),
                "agreement": round(quality.against.agreement, 4),
                "kl_mean": float(f"{quality.against.kl_mean:.3g}"),
                "tokens": quality.tokens,
            }
        return {"format": variant.format, **self.qualities[variant.format]}


def _without_speculation(forms: Forms) -> Mapping[str, Any]:
    return {k: v for k, v in forms.options.items() if not k.startswith("spec")}
