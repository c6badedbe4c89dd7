"""Measures one variant: builds its engine, runs both loads, and its quality once per format.

A small engine of the base stays loaded. It runs the same short baseline workload before and after
each run, which measures the machine's speed at that time: ratios then hold on a shared machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any

from windlass.build import Built, build_engine, open_model
from windlass.config import EngineConfig
from windlass.engine import Engine
from windlass.models.network import block_size_of
from windlass.runner.load import Loaded
from windlass.tools.common.device import (
    memory_bytes,
    release_memory,
    reset_peak_memory,
    traffic_of,
    weight_kernels,
)
from windlass.tools.common.drive import EngineRun, OnTokens, run_all
from windlass.tools.common.price import Price
from windlass.tools.common.requests import Request
from windlass.tools.common.summary import summarise
from windlass.tools.eval.compare import QualityComparison
from windlass.tools.eval.data import Corpus
from windlass.tools.eval.windows import Cut
from windlass.tools.ladder.rungs import BASE_OPTIONS, BASE_WEIGHTS, Variant
from windlass.tools.ladder.weights import LadderWeights
from windlass.tools.ladder.workload import LadderLoad

_MIB = 2**20
_SPARE_BLOCKS = 64
_BASELINE_ROWS, _BASELINE_PROMPT, _BASELINE_BLOCKS = 4, 8, 32
_BASELINE_TOKENS = {"cpu": 10, "cuda": 40}  # a GPU's step is about ten times shorter
_WARM_UP_ROWS, _WARM_UP_TOKENS = 16, 16

Row = dict[str, Any]
OnPhase = Callable[[str], None]


class Bench:
    """Owns the loaded weights, the base's small engine, and the quality comparison."""

    def __init__(
        self,
        weights: LadderWeights,
        loads: Mapping[str, LadderLoad],
        *,
        naive_requests: int | None,
        price: Price,
        corpus: Corpus | None,
        cut: Cut,
    ) -> None:
        """`corpus` None: the weights are random, so quality is not measured."""
        self._weights = weights
        self._loads = loads
        self._largest = max(loads.values(), key=lambda load: len(load.requests))
        self._naive_requests = naive_requests
        self._price = price
        self._corpus = corpus
        self._cut = cut
        self._max_len = max(cut.context, *(load.max_request_len for load in loads.values()))
        self._options = {k: v for k, v in weights.options.items() if not k.startswith("spec")}
        self._loaded: dict[str, Loaded] = {}
        self._baseline: Engine | None = None
        self._comparison: QualityComparison | None = None
        self.qualities: dict[str, Row] = {}

    def measure(self, variant: Variant, on_phase: OnPhase, on_tokens: OnTokens) -> Row:
        """All figures of a variant; raises EngineError if it cannot run."""
        on_phase("loading")
        config = self._config(variant)
        built = self._build(config, variant.weights)
        row = self._weights_row(built, variant)
        device = built.weights.parts.device
        loads = self._loads
        if variant.options["batching"] == "none":
            loads = {name: load.first(self._naive_requests) for name, load in loads.items()}
        self._warm_up(built, loads)
        reset_peak_memory(device)
        for name, load in loads.items():
            on_phase(load.name)
            before = self._baseline_tok_s()
            built.engine.reset_prefix_cache()
            run = run_all(
                built.engine,
                load.requests,
                max_concurrency=load.max_concurrency,
                on_tokens=on_tokens,
            )
            baseline = (before + self._baseline_tok_s()) / 2
            row |= {f"{name}_{key}": value for key, value in self._figures(run, built).items()}
            row[f"{name}_baseline_tok_s"] = round(baseline, 2)
        row["kv_mib"] = max(row[f"{name}_kv_mib"] for name in loads)
        row["memory_mib"] = round(row["weights_mib"] + row["kv_mib"], 1)
        row["process_mib"] = round(memory_bytes(device) / _MIB, 1)
        weights = built.weights
        del built
        release_memory()
        on_phase("quality")
        return row | self._quality(variant, config, weights)

    # ---- engines -----------------------------------------------------------------------------

    def _config(self, variant: Variant) -> EngineConfig:
        load = self._largest
        options = self._sized(variant.options, variant.weights)
        config = EngineConfig.of(**options)
        max_rows = config.limits(self._weights.device.type).max_num_seqs
        num_tokens = min(load.num_tokens, max_rows * load.max_request_len)
        size = block_size_of(config.cache.block_size, self._weights.source.hparams)
        blocks = -(-num_tokens // size) + len(load.requests) + _SPARE_BLOCKS
        return EngineConfig.of(**options, num_blocks=blocks)

    def _sized(self, options: Mapping[str, Any], weights: str) -> dict[str, Any]:
        """Engine options with a common max_model_len, since engines share weights."""
        own = {**self._options, **options, **self._weights.options_of(weights)}
        own["max_model_len"] = self._max_len
        if not own["enable_chunked_prefill"]:  # then a whole prompt must fit in one step
            default = EngineConfig.of(**own).limits(self._weights.device.type)
            own["max_num_batched_tokens"] = max(self._max_len, default.max_num_batched_tokens)
        return own

    def _build(self, config: EngineConfig, weights: str) -> Built:
        """Build an engine. The base's weights stay loaded, and the last other weights."""
        if weights not in self._loaded:
            self._loaded = {name: it for name, it in self._loaded.items() if name == BASE_WEIGHTS}
        release_memory()
        built = build_engine(config, open_model(config).source, self._loaded.get(weights))
        self._loaded[weights] = built.weights
        return built

    def prepare(self) -> None:
        """Load the base; its small engine and the quality comparison share its weights."""
        options = self._sized(BASE_OPTIONS, BASE_WEIGHTS)
        small = {"max_num_seqs": _BASELINE_ROWS, "num_blocks": _BASELINE_BLOCKS}
        config = EngineConfig.of(**{**options, **small})
        opened = open_model(config)
        built = build_engine(config, opened.source)
        self._loaded[BASE_WEIGHTS] = built.weights
        self._baseline = built.engine
        self._baseline_tok_s()
        if self._corpus is not None:
            self._comparison = QualityComparison(
                reference=EngineConfig.of(**options),
                opened=opened,
                corpus=self._corpus,
                cut=self._cut,
                weights=built.weights,
            )

    def _baseline_tok_s(self) -> float:
        """Tokens per second of the base in the baseline workload."""
        assert self._baseline is not None
        count = _BASELINE_TOKENS[self._weights.device.type]
        requests = [Request([1 + row] * _BASELINE_PROMPT, count) for row in range(_BASELINE_ROWS)]
        return run_all(self._baseline, requests).tok_s

    def _warm_up(self, built: Built, loads: Mapping[str, LadderLoad]) -> None:
        """Run every batch size once, since a step is captured for each.

        A GPU's kernels compile for their shapes, so it also gets full prefill steps.
        """
        largest = max(loads.values(), key=lambda load: len(load.requests))
        count = min(len(largest.requests), _WARM_UP_ROWS)
        requests = [Request([1 + row % 7] * _BASELINE_PROMPT, 1 + row) for row in range(count)]
        run_all(built.engine, requests)
        if self._weights.device.type == "cuda":
            mean_prompt = fmean(len(request.prompt) for request in largest.requests)
            enough = math.ceil(2 * built.report.max_num_batched_tokens / mean_prompt)
            requests = [
                replace(request, num_output=min(request.num_output, _WARM_UP_TOKENS))
                for request in largest.first(enough).requests
            ]
            run_all(built.engine, requests, max_concurrency=largest.max_concurrency)

    # ---- figures -----------------------------------------------------------------------------

    def _weights_row(self, built: Built, variant: Variant) -> Row:
        return {
            "weights": variant.weights,
            "weights_source": self._weights.about(variant.weights),
            "weights_mib": round(built.weights.weight_bytes / _MIB, 1),
            "kernels": weight_kernels(built.weights.network),
            "kv_token_bytes": built.report.capacity.token_bytes,
            "context": self._weights.source.hparams.max_positions,
            "max_num_seqs": built.report.max_num_seqs,
            "max_num_batched_tokens": built.report.max_num_batched_tokens,
        }

    def _figures(self, run: EngineRun, built: Built) -> Row:
        summary = summarise(run.timings, run.duration, percentiles=(99.0,))
        ttft, e2el = summary.spreads["ttft"], summary.spreads["e2el"]
        tpot = summary.spreads.get("tpot")
        block_mib = built.report.capacity.bytes_per_block / _MIB
        tokens_per_step = run.num_output / max(1, run.num_steps)
        weights = traffic_of(built.weights.network, kv_bytes_per_token=0)
        read_bytes = weights.step_bytes(mean_kv=0, num_rows=max(1, round(tokens_per_step)))
        dollars = self._price.per_million(summary.output_throughput)
        return {
            "seconds": round(run.duration, 3),
            "req_s": round(summary.request_throughput, 3),
            "tok_s": round(summary.output_throughput, 2),
            "ttft_p50_ms": round(ttft.median, 1),
            "ttft_p99_ms": round(ttft.percentiles[99.0], 1),
            "tpot_p50_ms": round(tpot.median, 2) if tpot else None,
            "tpot_p99_ms": round(tpot.percentiles[99.0], 2) if tpot else None,
            "e2e_p50_s": round(e2el.median / 1e3, 3),
            "usd_per_million": None if dollars is None else float(f"{dollars:.3g}"),
            "steps": run.num_steps,
            "tokens_per_step": round(tokens_per_step, 2),
            "read_mib": round(read_bytes / _MIB, 1),
            "cached_share": round(run.num_cached / run.num_prompt, 4),
            "prompt_share": round(
                run.prompt_tokens_computed / (run.prompt_tokens_computed + run.num_output), 4
            ),
            "drafted": run.num_drafted,
            "accepted": run.num_accepted,
            "preemptions": run.num_preemptions,
            "requests": len(run.timings),
            "chunked_prompts": run.num_chunked,
            "kv_mib": round(run.peak_blocks * block_mib, 1),
            "kv_mean_mib": round(run.mean_blocks * block_mib, 2),
        }

    def _quality(self, variant: Variant, config: EngineConfig, weights: Loaded) -> Row:
        if self._comparison is None:
            return {"format": variant.format, "perplexity": None, "agreement": None}
        if variant.format not in self.qualities:
            quality = self._comparison.compare(self._comparison.build(config, weights))
            assert quality.against is not None
            self.qualities[variant.format] = {
                "perplexity": float(f"{quality.perplexity:.4g}"),
                "agreement": round(quality.against.agreement, 4),
                "kl_mean": float(f"{quality.against.kl_mean:.3g}"),
                "tokens": quality.tokens,
            }
        return {"format": variant.format, **self.qualities[variant.format]}
